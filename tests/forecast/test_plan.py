"""Planning: nothing beats what it shows, limits hold, and what cannot be had is said."""

import re
from functools import partial

import numpy as np
import pandas as pd
import pytest

from energynn import records
from energynn.data import manifests
from energynn.experiment import config, studies, systems
from energynn.forecast import (
    fits,
    plan,
    power_limit,
    predict,
    runs,
    scaling_cost,
    wording,
)
from energynn.host.files import REPOSITORY
from tests.forecast import clusters, worlds
from tests.forecast.conftest import grid, holds, study_run
from tests.processes import answer, refusal, refused, told


def keeping(table, limits):
    return table[(table[[*limits]] <= [*limits.values()]).all(axis="columns")]


def check_plan(found, able):
    """Compare a plan and its sentence with every pair of what keeps the limits."""
    costs = able[[*plan.UNITS]].to_numpy()
    beats = [(costs <= row).all(axis=1) & (costs < row).any(axis=1) for row in costs]
    assert {*found.pareto} == {*able.index[~np.any(beats, axis=1)]}
    fastest, frugal = (able.loc[able[of].idxmin()] for of in ("time_h", "energy_kWh"))
    way = np.log(able.loc[found.pareto, ["time_h", "energy_kWh"]])
    way = (way - way.min()) / (way.max() - way.min() + 1e-9)
    balanced = np.hypot(way.time_h, way.energy_kWh).idxmin()
    assert [*found.choices.values()] == [frugal.name, fastest.name, balanced]
    words = [f": {frugal.devices:.0f} GPU"]
    for name in found.limits.keys() & plan.UNITS.keys():
        of = f" of {found.limits[name]:g} {plan.UNITS[name]}"
        words.append(wording.number_text(frugal[name]) + of)
    if frugal.name != fastest.name:
        spared = 100 - 100 * frugal.energy_kWh / fastest.energy_kWh
        words.append(f"{spared:.0f} % of the kWh of {fastest.devices:.0f} GPUs, the")
    line = wording.plan_text(found).splitlines()[0]
    assert all(word in line for word in words), line


def check_remedies(error, make, limits, table):
    """Each remedy helps, a little less does not, and none is missing."""
    options, told = {option: name for name, option in plan.LIMIT_OPTIONS.items()}, set()
    for remedy in str(error).partition("kept: ")[2].split(" or "):
        typed = re.findall(r"(--[a-z-]+) ([\d.]+)", remedy)
        changed = {options[option]: float(value) for option, value in typed}
        told |= changed.keys()
        make(limits | changed)
        less = {name: 0.995 * most - 1e-3 for name, most in changed.items()}
        assert keeping(table, limits | less).empty
    for name in limits.keys() - told:
        assert keeping(table, {of: limits[of] for of in limits if of != name}).empty


OFFERS = [("resnet50", "horeka-a100"), ("fourcastnet", "horeka-h100")]


@pytest.mark.parametrize("seed", range(4))
def test_random_requests_are_answered_as_by_every_pair(seed):
    """No wrong set or choice, no plan of the impossible, no refusal of the possible."""
    chance, fit = np.random.default_rng(seed), fits.published(*OFFERS[seed % 2])
    asked = grid(fit)
    table = pd.DataFrame(map(config.asdict, asked))[["devices", "global_batch_size"]]
    told = predict.forecast_quantities(fit, fit.runs.work_of(asked))
    table = table.assign(**{name: told[name][:, 0] for name in plan.UNITS})
    drawn = table.quantile(chance.uniform(0, 0.5)).round(2)
    limits = drawn.sample(chance.integers(1, 5), random_state=seed).to_dict()
    make, able = partial(plan.make_plan, fit, asked), keeping(table, limits)
    if len(able):
        check_plan(make(limits), able)
    else:
        with pytest.raises(ValueError, match="nothing keeps") as error:
            make(limits)
        check_remedies(error.value, make, limits, table)


def test_rows_are_configurations_with_their_marks_and_chances(fitted):
    found = plan.make_plan(fitted, grid(fitted), {"time_h": 3.0, "energy_kWh": 29.0})
    shown = plan.plan_as_json(found)
    for row, index in zip(shown["pareto"], found.pareto, strict=True):
        assert row["time_h"]["value"] == pytest.approx(found.values["time_h"][index, 0])
        sizes = {name: row[name] for name in ("devices", "local_batch_size")}
        run = study_run(device="gpu", system="horeka-a100", **sizes)
        assert row["run_id"] == config.run_id(run)
        assert any("accuracy" in words for words in row["outside"]) == (
            row["global_batch_size"] > 8192
        )
        for name, most in found.limits.items():
            assert (row["chance_percent"][name] < 95) == (row[name]["high"] > most)
    table = wording.plan_text(found).split("\n\n")[1].splitlines()
    devices = [int(re.search(r" (\d+) ", line)[1]) for line in table[1:]]
    assert table[1].strip().startswith("most frugal") and "GBS" in table[0]
    assert {number.bit_count() for number in devices[3:]} == {1}
    paper = config.make("fourcastnet", preset="paper")
    assert list(studies.large_batch_thresholds(paper)) == [4, 32, 64]
    # the study tells nothing of other data
    assert not studies.large_batch_thresholds(config.make("fourcastnet"))


def test_a_chance_is_that_of_the_interval_and_at_most_that_of_the_truth():
    """In worlds what is told as likely is kept as often at least; as unlikely, not."""
    told, kept = [], []
    for seed in range(10):
        world = clusters.draw(clusters.nothing, seed, 1)
        fit, asked = fits.fit_runs(world["fitted"]), world["L"]
        times = fits.forecast_outcomes(fit, asked.work)["time_s"]
        for ends, time_s in zip(times, asked.time_s, strict=True):
            limits = np.append(ends[1:], [ends[:2].mean(), ends[::2].mean()])
            told.append([fits.chance_percent(fit, ends, most) for most in limits])
            kept.append(100 * (time_s <= limits))
    told, kept = np.mean(told, axis=0), np.mean(kept, axis=0)
    assert told[:2] == pytest.approx([5, 95])
    assert kept[0] <= 5 and kept[2] <= told[2] < 50 < told[3] <= kept[3] <= kept[1]


def test_the_headline_and_the_model_stand_in_one_line_with_the_reason(fitted):
    """What README and paper say by the study's text, and what the planner says."""
    added = scaling_cost.added_energy_percent(fitted)
    asked = [study_run(devices=4), study_run(devices=256, global_batch_size=8192)]
    few, many = (row["energy_kWh"] for row in predict.forecasts(fitted, asked))
    assert added["by_model"] == pytest.approx(100 * (many["value"] / few["value"] - 1))
    text_kWh = np.array([6.75 / 0.265, 6.65 / 0.275])  # section 3.2.2, both rounded
    assert added["by_text"] == pytest.approx(100 * (33.2573 / text_kWh - 1), rel=1e-4)
    assert text_kWh.max() < few["low"]  # they disagree, and the line says why
    words = r"31 to 38 % .* 21 % by this model, 24 % \(19-29\).* of 27 %, of a list"
    assert re.search(words, added["in_words"])


PLAN = "forecast plan --workload resnet50 --system horeka-a100"
PREDICT = "forecast predict -p devices=4 -p local_batch_size=256 --fit"
HOURS = r"--deadline-h [\d.]+"
KEPT = "possible, with the others kept: "
STUDYS = "that batch is the study's, whose errors rise beyond"


@pytest.mark.parametrize(
    "words, message",
    [
        ("--deadline-h 0.1", f"8192 .{STUDYS}.; {KEPT}{HOURS}$"),
        ("--deadline-h 0.43", f"{KEPT}{HOURS} or --max-global-batch-size 16384$"),
        ("--deadline-h 5 --devices 8", f"{KEPT}{HOURS} or --devices 20$"),
        ("--deadline-h 0.1 --gpu-hours 1", f"{KEPT}none; leave one out$"),
        (
            "--devices 512",
            "devices: 512 asked; on horeka-a100 choose at most 256; a fit with another "
            "--system FILE has",
        ),
        ("-p devices=64", "devices: a plan chooses it; use --devices, --local"),
    ],
)
def test_what_cannot_be_had_is_refused_with_what_can(words, message):
    errors = refusal(f"{PLAN} {words}")
    assert re.search(message, errors.strip())


def test_one_local_batch(fitted):
    chosen = grid(fitted, size=512)
    found = plan.make_plan(fitted, chosen, {"devices": 8})
    assert {run.local_batch_size for run in chosen} == {512}
    assert {chosen[at].devices for at in found.pareto} <= {1, 2, 3, 4, 8}
    marks = plan.forecast_rows(found, [0])[0]["outside"]
    assert marks == ["local_batch_size beyond 16 to 256: nothing measured"]
    refused("choose at most the 1281167 samples", grid, fitted, size=2_000_000)


def test_what_is_said_is_of_the_question(tmp_path, fitted):
    """The cost of scaling only of the study's training; a base case of the study has no mark."""
    fits.write_fit(tmp_path / "fit.json", fitted)
    plain = answer(PLAN)
    assert "by the study's text" in plain and "note" not in plain
    others = "-p epochs=50", "--power-limit 0.6", "--devices 64", "--deadline-h 3"
    for words in others:
        assert "by the study's text" not in answer(f"{PLAN} {words}")
    factors = " --price-per-kwh 0.3 --price-per-gpu-hour 1.5 "
    factors += "--gco2-per-kwh 400 --pue 1.3"
    (row,) = told(f"{PREDICT} {tmp_path}/fit.json {factors}")["rows"]
    shown = told(PLAN + factors)
    (same,) = (of for of in shown["pareto"] if of["devices"] == 4)
    prices = [of["price"]["value"] for of in shown["pareto"]]
    assert shown["choices"]["cheapest"]["price"]["value"] == min(prices)
    for end in predict.INTERVAL_FIELDS:
        kWh, hours = row["energy_kWh"][end], row["charged_hours"][end]
        assert row["CO2_g"][end] == pytest.approx(400 * 1.3 * kWh)
        assert row["price"][end] == pytest.approx(0.3 * 1.3 * kWh + 1.5 * hours)
    assert same["price"] == pytest.approx(row["price"])


def test_own_runs_that_add_up_gradients_are_forecast_from_those_that_do_not():
    """Measured on a core: each local batch takes as long, whether or not the weights change.

    A global batch that no fitted run had is marked, as its epochs are assumed.
    """
    own = records.read_all(REPOSITORY / "runs/large-batch")
    found = runs.own_runs(own, "resnet50", systems.read_site("local"))
    accumulates = np.array([run.accumulation_steps > 1 for run in found.configs])
    fit, asked = fits.fit_runs(found.subset(~accumulates)), found.subset(accumulates)
    value, low, high = fits.forecast_outcomes(fit, asked.work)["time_s"].T
    assert len(asked) == 6 and np.allclose(value, asked.time_s, rtol=0.25)
    assert ((low < asked.time_s) & (asked.time_s < high)).sum() >= 4
    marks = predict.extrapolation_remarks(fit, asked.configs[0], asked.work[:1])
    assert "no fitted run had this global batch: same epochs assumed" in marks
    assert "accumulation" not in str(marks)


def test_a_power_limit_changes_what_the_curves_say(fitted):
    """GPUs take half of the energy here: they change, the rest of the node draws on."""
    plain = dict(time_h=2, gpu_hours=8, energy_kWh=8)
    plain |= dict(energy_gpu_kWh=4, energy_cpu_kWh=3, energy_ram_kWh=1)
    time, energy = power_limit.limit_factors(0.6)
    values = {name: np.full((1, 3), float(each)) for name, each in plain.items()}
    limited = power_limit.apply_power_limit(values, 0.6)
    assert limited["gpu_hours"][0] == pytest.approx(8 * time)
    assert limited["energy_kWh"][0] == pytest.approx(4 * energy + 4 * time)
    values["energy_gpu_kWh"] = np.full((1, 3), np.nan)
    refused(
        "power_limit: .* not known; fit runs",
        power_limit.apply_power_limit,
        values,
        0.6,
    )
    asked = grid(fitted)
    usual, less = (plan.make_plan(fitted, asked, {}, share) for share in (1.0, 0.6))
    row = plan.forecast_rows(less, [0])[0]
    assert row["time_h"]["value"] == usual.values["time_h"][0, 0] * time[0]
    assert "published by others" in row["provenance"]


def test_factors_are_those_of_the_curves():
    """At half to 0.6 of the limit ResNet50 needs 20 to 27 % less energy, as facts of others say."""
    table = pd.read_csv(manifests.root("others") / "zeus_power.csv")
    of = table.query("gpu == 'v100' and network == 'resnet50'")
    at = {W: rows.set_index("batch_size") for W, rows in of.groupby("power_limit_W")}
    told = power_limit.measured_ratios(0.6).loc[("v100", "resnet50")]
    for name, ratio in zip(power_limit.MEASURED_COLUMNS, told, strict=True):
        assert ratio == pytest.approx((at[150][name] / at[250][name]).median())
    shares = np.arange(0.5, 0.601, 0.02)
    of = pd.concat(
        power_limit.measured_ratios(of).xs("resnet50", level=1) for of in shares
    )
    assert of.iloc[:, 1].groupby(level=0).min().between(0.73, 0.80).all()
    assert power_limit.limit_factors(1.0) == pytest.approx(np.ones((2, 3)))
    for share in (0.49, 1.01, float("nan")):
        refused("power_limit: .* give 0.5 to 1", power_limit.measured_ratios, share)


def test_a_plan_is_right_where_the_truth_is_known(a100):
    """Fitted to up to 8 GPUs of a world, it chooses on 64 what is best there in truth."""
    truth = worlds.CLUSTER | {"efficiency": 0.7}
    make = partial(study_run, validation_samples=2000)
    made = [
        make(devices=n, local_batch_size=size, training_samples=n * images)
        for n in (1, 4, 8)
        for size in (32, 256)
        for images in (5004, 80064)
    ]
    fit = fits.fit_runs(worlds.taken("resnet50", a100, made, truth))
    asked = [run for run in grid(fit) if run.devices <= 64]
    taken = worlds.taken("resnet50", a100, asked, truth)
    hours = taken.time_s / 3600
    kWh = hours * taken.work["devices"] * taken.power_W / 1000
    deadline_h = float(np.quantile(hours, 0.4))
    found = plan.make_plan(fit, asked, {"time_h": deadline_h})
    fastest, frugal = (found.choices[name] for name in ("fastest", "most frugal"))
    assert hours[fastest] <= 1.02 * hours.min()
    assert kWh[frugal] <= 1.02 * kWh[hours <= deadline_h].min()
    for at in found.pareto:
        row = plan.forecast_rows(found, [at])[at]
        assert holds(row["time_h"], hours[at]) and holds(row["energy_kWh"], kWh[at])
        assert hours[at] <= deadline_h or row["chance_percent"]["time_h"] < 95
