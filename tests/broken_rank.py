"""What starts in place of train/__main__.py: a rank whose trainer ends in an unplanned way after
some steps.
"""

import os
import sys

import torch

from energynn.host import launchers

launchers.buffer_output_by_line()

from energynn.train import rank  # noqa: E402
from energynn.train.session import Session  # noqa: E402

original, how = Session.step_done, os.environ["HOW_IT_ENDS"]


def step_done(self, loss):
    rank, _ = launchers.rank_and_size()
    epoch = self.optimizer_steps // self.steps_per_epoch
    print("rank", rank, "in epoch", epoch)
    if rank == 0 and epoch == 4:
        if how == "exit":
            sys.exit(0)
        try:
            open("/not/there")
        except OSError as error:  # it is no full disk
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 20.00 GiB.\nGPU 0 has 39.39 GiB"
            ) from error
    original(self, loss)


Session.step_done = step_done
rank.run_rank(sys.argv[1])
