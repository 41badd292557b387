# perun executes this file with exec in place of the command to be measured. It must stay this small: there, new
# functions see no globals.
import sys

from energynn.launch import command

command.run_under_perun(sys.argv[-1])
