"""One rank's life: find the trainer of the workload, run it, and say how it ended, whatever
happens.
"""

import errno
import importlib
import os
import signal
import sys
import traceback
from pathlib import Path

from energynn.experiment import config as configuration
from energynn.host import launchers
from energynn.host.reading import read_json
from energynn.measure.sampler_process import start_sampler
from energynn.measure.samples import Events, has_samples, run_dir_of
from energynn.train.distributed import Interrupted, LostRank, end_all_ranks


def run_rank(folder: str | Path) -> None:
    """Train as run.json says; write raw files to a folder, that of the run or of a later segment.

    Ends all ranks if this one cannot go on, so that none waits for ever.
    """
    folder = Path(folder)
    run_dir = run_dir_of(folder)
    signal.signal(signal.SIGTERM, _stop_on_signal)
    status = "finished"
    reason = ""
    rank, _ = launchers.rank_and_size()
    try:
        # blocked until now, see perun_adapter.PERUN_PROGRAM
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        intent = read_json(run_dir / "run.json")
        # "auto" is what the launcher found; a torch that sees no GPU does not train on a core then
        found = {"device": intent["device_kind"].split()[0]}
        named = intent["workload"]  # by who started the run
        config = configuration.config_from_dict(intent["config"] | found, named)
        _train_between_idle_times(config, folder, run_dir, intent.get("launcher"), rank)
    except Interrupted as stop:
        # all ranks stop at the same step, so none waits for this one
        status = "interrupted"
        reason = str(stop)
    except BaseException as error:
        # SystemExit, too: perun would wait a minute and lose its data
        status = "failed"
        # of a full disk torch has words of its own
        if getattr(error.__context__, "errno", 0) in (errno.ENOSPC, errno.EDQUOT):
            error = error.__context__
        reason = " ".join(str(error).split()) or type(error).__name__
        if "out of memory" in reason:
            reason = f"choose a smaller local_batch_size: {reason}"
        # these explain themselves
        if not isinstance(error, ValueError | LostRank | KeyboardInterrupt):
            traceback.print_exc()
    try:
        Events(folder, rank).mark("rank_end", status=status, reason=reason)
    except OSError as error:
        status = "failed"
        reason = f"cannot write its end: {error}"
    if status == "failed":
        print(f"energynn: rank {rank}: {reason}", file=sys.stderr, flush=True)
        end_all_ranks()


def _train_between_idle_times(
    config: configuration.RunConfig,
    folder: Path,
    run_dir: Path,
    launcher: str,
    rank: int,
) -> None:
    """Train between two idle times; without perun the sampler is started here."""
    stop_sampler = None
    if launcher in launchers.LAUNCHERS_WITHOUT_PERUN:
        stop_sampler, _ = start_sampler(folder, config.devices, [])
    if not has_samples(folder, os.uname().nodename):
        # perun goes on without its sampler; we do not
        raise ValueError(
            "perun's sampler did not start: nothing would be measured; see `energynn doctor`"
        )
    events = Events(folder, rank)
    events.be_idle("before", config.idle_baseline_s)
    name = config.workload
    if name in configuration.CONFIGS:
        name = f"energynn.train.{name}"
    importlib.import_module(name).main(config, run_dir, folder)
    # so that there are samples beyond the end
    events.be_idle("after", config.idle_baseline_s)
    if stop_sampler:
        stop_sampler()


def _stop_on_signal(number: int, _frame) -> None:
    raise KeyboardInterrupt(f"stopped by {signal.Signals(number).name}")
