# The script that perun runs in each rank. perun executes it with exec, so it defines nothing and only calls.
import gc
import sys

from energynn import launchers, processes

gc.disable()  # until the training: the collector would look again and again through torch's million objects

launchers.label_lines()
processes.end_with_parent()
processes.end_forks_with_this()

from energynn.train import rank  # noqa: E402 - takes seconds: torch

rank.run(sys.argv[1])
