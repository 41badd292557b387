"""The values that the study published, as tables; each row says where it stands and that it is ``published``."""

from __future__ import annotations

import pandas as pd

from energynn.config import REPOSITORY

PUBLISHED = REPOSITORY / "runs" / "published"
MEASUREMENTS = ("resnet50_scaled_dataset", "fourcastnet_table1", "fourcastnet_text")


def read(name: str) -> pd.DataFrame:
    """One file of runs/published, as it stands there.

    Raises ValueError if there is no such file.
    """
    path = PUBLISHED / f"{name}.csv"
    if not path.is_file():
        known = sorted(path.stem for path in PUBLISHED.glob("*.csv"))
        raise ValueError(f"{name}: not a published table; choose one of {', '.join(known)}")
    return pd.read_csv(path)


def measurements() -> pd.DataFrame:
    """All published energies: one row per configuration, energies in kWh, times in h, spreads as standard deviations.

    A run that belongs to two series stands twice; ``distinct`` leaves one.
    """
    return pd.concat([read(name) for name in MEASUREMENTS], ignore_index=True)


def distinct(table: pd.DataFrame) -> pd.DataFrame:
    """The rows without the second mention of one and the same run (R4 and R6 share the one at 32 GPUs)."""
    same = ["workload", "device_name", "devices", "local_batch_size", "global_batch_size", "dataset_samples", "epochs"]
    again = table["same_run_as"].isin(set(table["series"])) & table.duplicated(same)
    return table[~again]


def stated_intervals() -> pd.DataFrame:
    """The intervals of energy per GPU hour that the paper states, in kW, with the place of each."""
    return read("stated_intervals")
