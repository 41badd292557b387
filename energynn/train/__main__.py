# The script that perun runs in each rank. perun executes it with exec, so it defines nothing and only calls.
import sys

from energynn.train import rank

rank.run(sys.argv[1])
