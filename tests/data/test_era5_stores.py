"""ERA5 from every layout that it is published in, through the training store, to normalized
sequences; a small grid.
"""

import dataclasses
import os

import h5py
import numpy as np
import pytest
import xarray as xr

from energynn.data import era5, era5_sources, era5_store, manifests
from energynn.data.era5_values import (
    ALIASES_BY_CHANNEL,
    CHANNELS,
    hours_of_year,
    relative_humidity_percent,
    utc,
)
from energynn.experiment import config
from energynn.host.reading import read_json
from energynn.launch import start
from energynn.measure.samples import events_of_kind, read_events
from tests.processes import answer, refused
from tests.run_files import edit

ROWS, COLUMNS = 9, 16
LATITUDE_DEG = np.linspace(90, -90, ROWS)
LEVELS_HPA = [50, 500, 850, 925, 1000]
SURFACE = ("u10", "v10", "t2m", "sp", "mslp", "tcwv")


def plane(name, hour):
    """(9, 16): another value for each channel, time and place; humidities are possible ones at
    220 to 300 K, pressures and geopotentials some of a made-up atmosphere.
    """
    generator = np.random.default_rng([sum(name.encode()), len(name), int(hour)])
    values = generator.uniform(220, 300, (ROWS, COLUMNS)).astype(np.float32)
    if name in ("sp", "mslp", "z500"):
        return values * 256
    return values / 30_000 if name[0] == "q" else values


def state(hour):
    """(20, 8, 16): what a source must give for this time."""
    return np.stack([plane(channel, hour)[:-1] for channel in CHANNELS])


def write_hdf5(folder, year, times=None):
    hours = hours_of_year(year)[:times]
    folder.mkdir(parents=True, exist_ok=True)
    with h5py.File(folder / f"{year}.h5", "w") as file:
        file["fields"] = np.stack(
            [[plane(name, hour) for name in (*CHANNELS, "sst")] for hour in hours]
        )
    return hours


def dataset(hours, names=ALIASES_BY_CHANNEL, which=0):
    """A store as WeatherBench2 (``which`` 0) or the Climate Data Store (1) names and arranges
    it.
    """
    variables = {}
    for name in names:
        if name in SURFACE:
            dims = ("time",)
            values = [plane(name, hour) for hour in hours]
        else:
            dims = ("time", "level")
            values = [
                [plane(f"{name}{hPa}", hour) for hPa in LEVELS_HPA] for hour in hours
            ]
        dims = (*dims, "latitude", "longitude")
        variables[ALIASES_BY_CHANNEL[name][which]] = dims, np.array(values)
    coordinates = {
        "time": np.array(hours, dtype="datetime64[h]").astype("datetime64[ns]"),
        "level": LEVELS_HPA,
        "latitude": LATITUDE_DEG,
        "longitude": np.arange(COLUMNS) * 360 / COLUMNS,
    }
    found = xr.Dataset(variables, coordinates)
    if "r" in found:
        found.r.attrs["units"] = "%"
    return found


def prepared(folder, **times_by_year):
    """A store prepared from yearly HDF5 files in a subfolder of its source."""
    for year, times in times_by_year.items():
        write_hdf5(folder / "source" / "train", int(year[1:]), times)
    years = [int(year[1:]) for year in times_by_year]
    era5_store.write_store(str(folder / "source"), folder / "store", years)
    return folder / "store"


# ---------------------------------------------------------------------------------- the sources


@pytest.mark.parametrize(
    "years, count",
    [("1979-2015", 54_056), ("2016-2017", 2_924)],
)
def test_leap_years_and_the_papers_counts(years, count):
    assert sum(map(len, map(hours_of_year, config.parse_years(years)))) == count


@pytest.mark.parametrize("kind", ["nc", "zarr"])
# ARCO has no relative humidity, WeatherBench2 a fraction
@pytest.mark.parametrize("without", ["", "r"])
def test_weatherbench_and_arco_with_humidity_computed(tmp_path, without, kind):
    hours = hours_of_year(2019)[0] + np.arange(8)
    found = dataset(hours, [name for name in ALIASES_BY_CHANNEL if name != without])
    store = tmp_path / f"arco.{kind}"
    if kind == "zarr":
        pytest.importorskip("zarr", reason="needs the extra era5")
        found.to_zarr(store, zarr_format=2)
    else:
        found.to_netcdf(store, engine="scipy")
    source = era5_sources.open_year(str(store), 2019)
    assert source.hours.tolist() == hours[[0, 6]].tolist()
    expected = state(hours[6])
    for level in (500, 850):
        t, q = (plane(f"{name}{level}", hours[6])[:-1].astype(float) for name in "tq")
        humidity_percent = relative_humidity_percent(t, q, 100.0 * level)
        expected[CHANNELS.index(f"r{level}")] = humidity_percent
    assert np.allclose(source.read(1), expected, rtol=1e-5)


def test_relative_humidity_against_tables():
    """Saturation vapour pressures in Pa as measured: over water at 20 C, over ice at -30 C (WMO
    tables).
    """
    for temperature_K, saturation_Pa in ((293.15, 2339.0), (243.15, 38.0)):
        vapour_Pa, pressure_Pa = saturation_Pa / 2, 85000.0
        specific = 0.622 * vapour_Pa / (pressure_Pa - 0.378 * vapour_Pa)
        found = relative_humidity_percent(temperature_K, specific, pressure_Pa)
        assert found == pytest.approx(50, rel=5e-3)


# ------------------------------------------------------------------------------------ the store


def test_the_store_holds_the_states_and_their_statistics(tmp_path):
    store = prepared(tmp_path, y2015=11, y2016=9)
    hours = {2015: hours_of_year(2015)[:11], 2016: hours_of_year(2016)[:9]}
    states = {year: [state(hour) for hour in hours[year]] for year in hours}
    for year, expected in states.items():
        assert np.array_equal(np.load(store / f"{year}.npy"), expected)
        note = read_json(store / f"{year}.json")
        assert note["hours_since_1970"] == hours[year].tolist()
    # never of other years than the training's
    for years in ([2015, 2016], [2015]):
        values = np.concatenate([states[year] for year in years], dtype=np.float64)
        mean, std = era5_store.channel_mean_and_std(store, years)
        assert mean == pytest.approx(values.mean(axis=(0, 2, 3)), rel=1e-12)
        assert std == pytest.approx(values.std(axis=(0, 2, 3)), rel=1e-10)
        # 2015 has more times, so it counts more
        mean_state = era5_store.mean_state(store, years)
        assert mean_state == pytest.approx(values.mean(axis=0), rel=1e-6, abs=1e-5)


def test_an_interrupted_year_is_made_anew_and_ends_with_the_same_bytes(
    tmp_path, monkeypatch
):
    whole, out = prepared(tmp_path, y2015=12, y2016=13), tmp_path / "interrupted"
    opened, years = era5_sources.open_year, [2015, 2016]

    def interrupted(place, year):
        source = opened(place, year)

        def read(index):
            if year == 2016 and index == 9:
                raise KeyboardInterrupt
            return source.read(index)

        return dataclasses.replace(source, read=read)

    with monkeypatch.context() as patched:
        patched.setattr(era5_sources, "open_year", interrupted)
        with pytest.raises(KeyboardInterrupt):
            era5_store.write_store(str(tmp_path / "source"), out, years)
    assert list(out.glob("2016.*.part")) and not (out / "2016.npy").exists()
    first_year = (out / "2015.npy").stat().st_mtime_ns
    era5_store.write_store(str(tmp_path / "source"), out, years)
    assert (out / "2015.npy").stat().st_mtime_ns == first_year
    for path in whole.iterdir():  # statistics to the last bit, too
        assert (out / path.name).read_bytes() == path.read_bytes()
    assert not list(out.glob("*.part"))


# -------------------------------------------------------------------------------- the sequences


@pytest.mark.parametrize("steps", [1, 2])
def test_sequences_cross_the_years_end_but_no_gap(tmp_path, steps):
    # 2015 is whole; 2016 ends early, 2017 is missing
    store = prepared(tmp_path, y2015=None, y2016=10, y2018=4)
    hours = {2015: 1460, 2016: 10, 2018: 4}
    hours = np.concatenate([hours_of_year(year)[:n] for year, n in hours.items()])
    mean, std = era5_store.channel_mean_and_std(store, [2015])
    sequences = era5_store.StateSequences(store, [2015, 2016, 2018], steps, mean, std)
    following = 6 * np.arange(1, steps + 1)
    expected = [hour for hour in hours if np.isin(hour + following, hours).all()]
    assert sequences.hours[sequences.rows[:, 0]].tolist() == expected
    assert len(sequences) == 1470 - steps + 4 - steps
    assert sequences.shape == (len(sequences), steps + 1, 20, 8, 16)
    for index in (0, 1460 - 1, 1469 - steps, 1470 - steps):
        # 1459: 31 December 18 UTC and what follows
        assert sequences[index].dtype == np.float32
        found = sequences[index] * std[:, None, None] + mean[:, None, None]
        states = [state(expected[index] + 6 * step) for step in range(steps + 1)]
        assert np.allclose(found, states, rtol=1e-5, atol=0.1)


@pytest.mark.parametrize("size_B", [0, 100, 9000])
def test_a_year_that_was_cut_is_named_before_a_training(tmp_path, size_B):
    store = prepared(tmp_path, y2015=10, y2016=10)
    os.truncate(store / "2016.npy", size_B)
    with pytest.raises(ValueError, match="^copy .*2016.npy again: "):
        era5_store.StateSequences(store, [2015, 2016], 1, np.zeros(20), np.ones(20))


def test_splits_by_year_and_the_36_initial_conditions(tmp_path):
    store = prepared(tmp_path, y2015=30, y2016=20, y2019=None)
    for steps in (2, 1):
        *splits, test = era5_store.load_splits(store, steps, "2015", "2016", "2019")
        # trained on one step, tested on two
        assert [split.shape[:2] for split in (*splits, test.sequences)] == [
            (30 - steps, steps + 1),
            (20 - steps, steps + 1),
            (36, 3),
        ]
    assert test.scored_steps == (1, 2) and test.climatology.dtype == np.float32
    mean, std = era5_store.channel_mean_and_std(store, [2015])
    states = [state(hour) for hour in hours_of_year(2015)[:30]]
    known = np.mean(states, axis=0, dtype=float) - mean[:, None, None]
    assert np.allclose(test.climatology, known / std[:, None, None], atol=1e-5)
    starts = [utc(test.sequences.hours[row]) for row in test.sequences.rows[:, 0]]
    assert starts[:3] == ["2019-01-01T00 UTC", "2019-01-10T00 UTC", "2019-01-19T00 UTC"]
    # 35 x 9 days later: the published code's number 1260
    assert starts[-1] == "2019-11-12T00 UTC"
    assert test.lead_h == 6 and CHANNELS[test.z500] == "z500"
    weights = era5.latitude_weights(LATITUDE_DEG[:-1])
    assert test.latitude_weights == pytest.approx(weights)
    for training, validation, says in (
        ("2015-2016", "2016", "overlap"),
        ("2015", "2016-2017", "has no year 2017; `energynn data era5 --years 2017`"),
        ("2015", "2016", "the grids of 2015, 2016, 2019 differ"),
    ):
        refused(says, era5_store.load_splits, store, 1, training, validation, "2019")
        edit(store / "2019.json", longitude_deg=[])  # as from another source


# ----------------------------------------------------------------- the manifest and the trainer


@pytest.fixture
def described(tmp_path, monkeypatch):
    """A store with its manifest, both of this test alone."""
    store = prepared(tmp_path, y2015=9, y2016=8, y2019=39)
    monkeypatch.setattr(manifests, "DATA_MANIFESTS", tmp_path / "data_manifests")
    monkeypatch.setenv("ENERGYNN_ERA5", str(store))
    answer("data describe era5 --root", store)
    return store


def test_manifest_counts_verifies_and_goes_on(described, tmp_path, monkeypatch):
    manifest = read_json(tmp_path / "data_manifests/era5/manifest.json")
    assert manifest["energynn:files"] == 3 * 3
    verify = f"data verify era5 --root {described}"
    answer(verify)
    content = bytearray((described / "2016.npy").read_bytes())
    content[1000] ^= 1
    (described / "2016.npy").write_bytes(content)
    assert "2016.npy differs from its sha256" in answer(verify, status=2)
    # a run's start compares what takes seconds
    assert manifests.verify("era5") == described
    (described / "2017.json").touch()
    refused("2017.json is not in the manifest; `energynn", manifests.verify, "era5")
    (described / "2017.json").unlink()
    monkeypatch.delenv("ENERGYNN_ERA5")
    refused(
        "era5: does not ship; set ENERGYNN_ERA5",
        start.prepare_intent,
        config.make("fourcastnet", dataset="era5"),
        tmp_path / "runs" / "local" / "run",
    )
    (described / "2016.npy").unlink()
    assert "2016.npy is missing" in answer(verify, status=2)
    (described / "2016.7.part").touch()
    refusal = answer("data describe era5 --root", described, status=2)
    assert "a year of" in refusal


SMALL = dict(
    workload="fourcastnet",
    dataset="era5",
    training_years="2015",
    validation_years="2016",
    test_years="2019",
    patch_size=4,
    embed_dim=16,
    depth=1,
    num_blocks=2,
    epochs=1,
    device="cpu",
)


def trained(train, folder, name, **changes):
    """Train in ranks of their own, which find the manifest of this test."""
    place = str(folder / "data_manifests")
    patch = "import pathlib\nfrom energynn.data import manifests\n"
    patch += f"manifests.DATA_MANIFESTS = pathlib.Path({place!r})"
    return train(folder / name, patch=patch, **SMALL | changes)


def test_fourcastnet_trains_on_the_store(described, tmp_path, train):
    years = dict(training_years=2015, save_weights=True)
    first = trained(train, tmp_path, "first", **years)
    stage = dict(stage="finetune", initial_run="first", loader_workers=1)
    tuned = trained(train, tmp_path, "tuned", **stage)
    for run, steps in ((first, 8), (tuned, 7)):
        assert len(run.losses) == steps and np.isfinite(run.losses).all()
        (end,) = run.of_kind("training_end")
        # 39 times of the test year: the initial conditions of 1 and 10 January; 8 of the
        # validation's.
        assert end["samples_evaluated"] == 2 + steps - 1
        assert {
            "z500_rmse_6h_m",
            "z500_rmse_12h_m",
            "z500_acc_6h",
            "acc_12h",
            "validation_loss",
        } < end["metrics"].keys()


def test_any_number_of_ranks_scores_every_sample_once(described, tmp_path, train):
    """Nothing is learned, so that seven validation and two test samples on one, two and three
    ranks give the same.
    """
    found = []
    for devices in (1, 2, 3):
        sizes = dict(devices=devices, learning_rate=0, local_batch_size=2)
        run = trained(train, tmp_path, f"run-{devices}", **sizes)
        ends = events_of_kind(read_events(run.run_dir), "training_end")
        assert len(ends) == devices
        found += [end["metrics"] for end in ends]
    for metrics in found:
        assert metrics == pytest.approx(found[0], rel=1e-6)
    assert found[0]["validation_loss"] > 0
