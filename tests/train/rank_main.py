"""One rank of a short training: rank_main.py RUN_DIR CONFIGURATION DTYPE; prints the rank's
losses as JSON.
"""

import importlib
import json
import sys
from pathlib import Path

import torch

from energynn.experiment import config as configuration
from energynn.host import launchers
from energynn.train.distributed import Interrupted, LostRank, end_all_ranks

config = configuration.config_from_dict(json.loads(sys.argv[2]))
run_dir = Path(sys.argv[1])
torch.set_default_dtype(getattr(torch, sys.argv[3]))
try:
    losses = importlib.import_module(f"energynn.train.{config.workload}").main(
        config, run_dir
    )
except Interrupted as stop:
    assert not torch.distributed.is_initialized(), (
        "gloo's threads may abort this process while it ends"
    )
    print(f"interrupted: {stop}", flush=True)
    sys.exit(75)
except ValueError as error:
    sys.exit(f"ValueError: {error}")
except LostRank as error:
    print(f"LostRank: {error}", flush=True)
    end_all_ranks()
said = f"losses of rank {launchers.rank_and_size()[0]} {json.dumps(losses)}\n"
print(said, end="", flush=True)  # at once: ranks share a pipe
