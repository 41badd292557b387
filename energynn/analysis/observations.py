"""Published and own runs in one table with common names and units; each row says which it is, and how good."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from energynn.analysis import published, results

STAGES = {"pretrain": "pre-training, ", "finetune": "fine-tuning, "}
COUNTED = ["devices", "local_batch_size", "global_batch_size", "dataset_samples", "epochs", "seed"]
ENERGIES = [f"energy_{component}_kWh" for component in results.COMPONENTS]
# What both origins have, beside provenance; NaN where a run has no such value.
QUANTITIES = [*ENERGIES, "gpu_hours", "training_time_h", "top1_error_percent", "z500_rmse_m", "lead_time_h"]
QUANTITIES += ["persistence_m", "samples_per_gpu_hour", "passes_per_gpu_hour", "sockets_per_gpu", "mean_power_gpu_W"]
QUANTITIES += ["mean_power_cpu_socket_W", "energy_per_gpu_hour_kW", "energy_per_dataset_sample_Wh", "speed_up"]
QUANTITIES += ["share_cpu_percent", "share_ram_percent"]
WHAT = ["origin", "series", "name", "workload", "stage", "dataset", "data", "system", "device_kind", "device_name"]
WHAT += ["hardware", "recipe", "provenance", "base_devices", *COUNTED]


def load(runs_dir: str | Path = "runs") -> pd.DataFrame:
    """Published and own runs, one row per run and series; ``origin`` is "published" or "own".

    ``series`` is the study's (R1 to F5, runs/published/series.toml) where a run belongs to one, else a name made of
    what is constant, else "". Energies in kWh, times in h, powers per GPU or per CPU socket in W. Published means have
    standard deviations ``<quantity>_std`` (made to have the divisor repeats - 1) and rounding ``<quantity>_half``.
    ``speed_up`` relates to the mean training time on ``base_devices``. Records left out stand with the reason in
    ``attrs["excluded"]``.
    """
    runs = results.load(runs_dir, only_the_studys=True)
    table = pd.concat([_published(), _own(runs)], ignore_index=True)
    first = [*WHAT, "repeats", "run", *QUANTITIES]
    table = table[[*first, *(name for name in table if name not in first)]].copy()
    table.attrs["excluded"] = runs.attrs["excluded"]
    return table


def means(table: pd.DataFrame) -> pd.DataFrame:
    """One row per configuration and series: means over own repeats with one seed; published rows are means already.

    ``<quantity>_std`` is the standard deviation over ``repeats`` runs (divisor repeats - 1), NaN for a single run: its
    scatter is unknown, not zero. ``low`` and ``high`` of a quantity are for error bars, see ``bounds``.
    """
    own = table[table["origin"] == "own"]
    groups = own.groupby(WHAT, dropna=False, sort=False)
    rows = groups[QUANTITIES].mean()
    spreads = groups[QUANTITIES].std().add_suffix("_std")
    runs = groups.agg(repeats=("run", "size"), run=("run", ", ".join), run_dir=("run_dir", "first"))
    joined = pd.concat([rows, spreads, runs], axis=1).reset_index().sort_values(["series", "devices"])
    return pd.concat([table[table["origin"] == "published"], joined], ignore_index=True).copy()


def bounds(table: pd.DataFrame, quantity: str) -> pd.DataFrame:
    """The rows that have a quantity: its ``value``, and ``low`` and ``high``, one standard deviation to each side.

    ``provenance`` is then the quantity's: times and metrics of a run whose energy is estimated are measured.
    """
    known = table[table[quantity].notna()]
    spread = known.get(f"{quantity}_std", pd.Series(np.nan, known.index)).fillna(0.0)
    rows = known.assign(value=known[quantity], low=known[quantity] - spread, high=known[quantity] + spread)
    if not quantity.startswith(("energy_", "mean_power_", "share_", "power_")):
        rows["provenance"] = rows["provenance"].replace("estimated", "measured")
    return rows


def distinct(table: pd.DataFrame) -> pd.DataFrame:
    """Each run once, whatever series it belongs to: its first row."""
    return table.drop_duplicates(["origin", "run"])


def _published() -> pd.DataFrame:
    table = published.measurements()
    known = published.series()
    sample = np.sqrt(table["repeats"] / (table["repeats"] - (table["std_ddof"] == "0")))  # from the population's
    for name in [name for name in table if name.endswith("_std")]:
        table[name] *= sample
    table["run"] = [f"published {i}" for i in range(len(table))]
    hours = table["gpu_hours"]
    table["training_time_h"] = table["training_time_h"].where(hours.isna(), hours / table["devices"])
    table["dataset_samples"] = table["dataset_samples"].fillna(table["dataset"].map(published.data_set_samples))
    samples = table["dataset_samples"] * table["epochs"]
    # A node has four GPUs and two sockets, and counts in full (section 3.1).
    sockets = 2 * np.ceil(table["devices"] / 4)
    table = table.assign(origin="published", system="HoreKa", device_kind="gpu", seed=0, recipe="published")
    table = table.assign(sockets_per_gpu=sockets / table["devices"], samples_per_gpu_hour=samples / table["gpu_hours"])
    table["passes_per_gpu_hour"] = table["samples_per_gpu_hour"] / table["local_batch_size"]
    table = table.assign(series=table["series"].str.split()).explode("series", ignore_index=True)
    table["name"] = [f"{one}: {known[one]['label']}" if one in known else one for one in table["series"]]
    table["data"] = [known.get(name, {"data": "fixed"})["data"] for name in table["series"]]
    table = table.assign(lead_time_h=np.nan, persistence_m=np.nan, z500_rmse_m=np.nan)
    table = _derived(table, ["series", "device_name"])
    parts = {"energy_per_gpu_hour_kW": ["energy_total_kWh", "gpu_hours"], "training_time_h": ["gpu_hours"]}
    parts |= {"energy_per_dataset_sample_Wh": ["energy_total_kWh"]}
    parts |= dict.fromkeys(("samples_per_gpu_hour", "passes_per_gpu_hour"), ["gpu_hours"])
    for name, sources in parts.items():  # relative errors, as if independent
        for end in ("_std", "_half"):
            relative = np.sqrt(sum((table[f"{one}{end}"] / table[one]) ** 2 for one in sources))
            table[f"{name}{end}"] = table[name] * relative
    return table


def _own(runs) -> pd.DataFrame:
    table = runs.to_dataframe().reset_index(drop=True).dropna(subset=["training_time_s"])
    hours, per_device = table["training_time_s"] / 3600, table["devices"].replace(0, np.nan)
    # Published energies are perun's; own ones are taken in the same way where all is measured.
    by_perun = (table["energy_total_provenance"] == "measured") & table["energy_perun_total_kWh"].notna()
    for name in ENERGIES:
        table[name] = table[name.replace("energy_", "energy_perun_")].where(by_perun, table[name])
    table = table.assign(
        origin="own", run=table["run_id"], repeats=1, training_time_h=hours,
        provenance=table["energy_total_provenance"],
        gpu_hours=table["device_hours_perun"].where(by_perun, table["device_hours_training"]),
        sockets_per_gpu=table["sockets"] / per_device, top1_error_percent=100 * table["top1_error"],
        samples_per_gpu_hour=table["samples_trained"] / table["device_hours_training"],
        passes_per_gpu_hour=table["forward_backward_passes"] / hours,
    )  # fmt: skip
    table = _with_forecast_error(table)
    selected = results.scaling_series(table)
    selected["series"] = selected["stage"].map(STAGES).fillna("") + selected["series"]
    selected["name"] = selected["series"]
    for name, one in published.series().items():
        constant = "local_batch_size" if "local_batch_size" in one else "global_batch_size"
        same = [selected["constant"] == constant, selected["device_name"].str.contains(one["hardware"])]
        same += [selected[key] == one[key] for key in ("workload", "dataset", "data", "epochs", constant)]
        same.append(selected["stage"] == one.get("stage", ""))
        samples = selected["dataset_samples"] / (selected["devices"] if one["data"] == "scaled" else 1)
        whole = one.get("samples", published.data_set_samples(one["dataset"]))
        same.append((samples / whole - 1).abs() < 0.01)  # shares are rounded, and the years' states are an assumption
        selected.loc[np.logical_and.reduce(same), ["series", "name"]] = name, f"{name}: {one['label']}"
    alone = table[~table["run"].isin(selected["run"])]
    alone = alone.assign(series="", name="no series", data="", base_devices=alone["devices"])
    return _derived(pd.concat([selected, alone], ignore_index=True), ["system", "device_name", "recipe", "name"])


def _with_forecast_error(table: pd.DataFrame) -> pd.DataFrame:
    """Z500 RMSE at the lead time that a stage was trained for: pre-training's shortest, fine-tuning's longest."""
    table = table.assign(z500_rmse_m=np.nan, persistence_m=np.nan, lead_time_h=np.nan)
    names = [name for name in table if name.startswith("z500_rmse_") and name.endswith("h_m")]
    for name in sorted(names, key=results.lead_time_h):
        chosen = table[name].notna() & ((table["stage"] == "finetune") | table["z500_rmse_m"].isna())
        table.loc[chosen, "z500_rmse_m"] = table[name]
        table.loc[chosen, "persistence_m"] = table.get(f"{name.removesuffix('_m')}_persistence_m", np.nan)
        table.loc[chosen, "lead_time_h"] = results.lead_time_h(name)
    return table


def _derived(table: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """Add what follows from energies and times, and the speed-up within the groups ``by``."""
    hardware = table["device_name"].str.extract(r"\b([ABHV]\d{2,3}[A-Z]?)\b")[0]
    energy_kWh, hours = table["energy_total_kWh"], table["gpu_hours"]
    table = table.assign(
        hardware=hardware.fillna(table["device_kind"]), energy_per_gpu_hour_kW=energy_kWh / hours,
        energy_per_dataset_sample_Wh=1000 * energy_kWh / table["dataset_samples"],
        mean_power_gpu_W=1000 * table["energy_gpu_kWh"] / hours,
        mean_power_cpu_socket_W=1000 * table["energy_cpu_kWh"] / hours / table["sockets_per_gpu"],
    )  # fmt: skip
    for part in ("cpu", "ram"):
        share = 100 * table[f"energy_{part}_kWh"] / energy_kWh if f"energy_{part}_kWh" in table else np.nan
        table[f"share_{part}_percent"] = table.get(f"share_{part}_percent", share)
    known = table[table["training_time_h"].notna()]
    smallest = known.groupby(by)["devices"].min()
    keys = pd.MultiIndex.from_frame(table[by])
    table["base_devices"] = smallest.reindex(keys).to_numpy()
    at_base = table[table["devices"] == table["base_devices"]].groupby(by)["training_time_h"].mean()
    return table.assign(speed_up=at_base.reindex(keys).to_numpy() / table["training_time_h"])
