"""Studies as code: a function that returns the runs of an experiment; series are selections of runs."""

from __future__ import annotations

from functools import partial

from energynn import config
from energynn.config import RunConfig


def smoke() -> list[RunConfig]:
    """The default study: every path of the compendium once, on one and two devices, with real but small data.

    Figures: own points in the ResNet50 and FourCastNet figures. Hardware: any two cores. Command: `make reproduce`.
    Cost: about 8 minutes on two cores. Expected: ResNet50 with constant local batch size takes half as many steps
    on two devices, with constant global batch size as many; FourCastNet comes near persistence; all energies on a
    machine without sensors are estimates. It runs on CPU cores also where there are GPUs, so that it is the same
    study everywhere.
    """
    make = partial(config.make, device="cpu")
    runs = []
    for repeat in range(3):  # the same seed each time: their spread is the machine's noise
        runs.append(make("resnet50", devices=1, local_batch_size=16, repeat=repeat))
        runs.append(make("resnet50", devices=2, local_batch_size=16, repeat=repeat))  # constant LBS
    runs.append(make("resnet50", devices=2, global_batch_size=16))  # constant GBS
    for devices in (1, 2):
        pretraining = make("fourcastnet", devices=devices, local_batch_size=1)  # constant LBS
        runs.append(pretraining)
        runs.append(
            make(
                "fourcastnet",
                devices=devices,
                local_batch_size=1,
                stage="finetune",
                initial_run=config.run_id(pretraining),
            )
        )
    runs.append(make("fourcastnet", devices=1, global_batch_size=2))  # constant GBS with the run on two devices
    return runs


def kick_the_tires() -> list[RunConfig]:
    """Two runs of the default study, one of each workload on two devices, to see in minutes whether all is well."""
    chosen = [run for run in smoke() if run.devices == 2 and run.repeat == 0]
    return [chosen[0], next(run for run in chosen if run.workload == "fourcastnet")]


STUDIES = {"smoke": smoke, "kick-the-tires": kick_the_tires}
