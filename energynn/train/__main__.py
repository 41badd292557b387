# The script that perun runs in each rank. perun executes it with exec, so it defines nothing and
# only calls.
import sys

from energynn.host import processes

processes.end_with_parent()
processes.end_forks_with_this()

from energynn.host import launchers  # noqa: E402

launchers.buffer_output_by_line()

from energynn.train import rank  # noqa: E402 - takes seconds: torch

rank.run_rank(sys.argv[1])
