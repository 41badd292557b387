"""One price: what a run costs is one answer, whichever command is asked."""

import json
import math
import re

import pytest

from energynn import cli, config, studies
from energynn.cluster import costs, submit, systems
from energynn.forecast import fit as fits
from energynn.forecast import predict
from tests.cluster.conftest import TWO_NODES

SYSTEMS = {
    "R1": "horeka-a100",
    "R5": "horeka-a100",
    "F1": "horeka-a100",
    "F5": "horeka-h100",
}


def said(capsys, words: str) -> str:
    assert cli.main(words.split()) == 0
    return capsys.readouterr().out


def column(text: str, heading: str) -> list[float]:
    """The numbers of a column of a table of costs, its sum last."""
    head, _, rest = text.partition("\ntraining  ")
    headings = [
        "runs",
        *predict.PRICE.values(),
        "published runs",
        "published GPU hours",
    ]
    assert re.search(" +".join([*headings, "published kWh"]), head)
    body, _, rest = rest.partition("\ntotal ")
    rows = [*body.splitlines()[1:], rest.splitlines()[0]]
    place = headings.index(heading) - len(headings) - 1
    return [float(row.split()[place].replace(",", "")) for row in rows]


@pytest.fixture(scope="module")
def fit_files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fits")
    for workload, system in (
        ("resnet50", "horeka-a100"),
        ("fourcastnet", "horeka-a100"),
        ("fourcastnet", "horeka-h100"),
    ):
        path = folder / f"{workload}-{system}.json"
        fits.write(path, fits.published(workload, system))
    return folder


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_command_names_one_price(capsys, tmp_path, fit_files, name):
    system = SYSTEMS[name]
    (runs,) = studies.find([name], system).values()
    fit = fit_files / f"{runs[0].workload}-{system}.json"
    rows = json.loads(said(capsys, f"forecast predict {name} --fit {fit} --json"))[
        "rows"
    ]
    words = f"submit {name} --system {system} --dry-run --runs-dir {tmp_path}"
    texts = [said(capsys, words), said(capsys, f"study show {name}")]
    repeats = len(runs) // len(rows)
    for field, heading in predict.PRICE.items():
        values = [repeats * row[field]["value"] for row in rows]
        for text in texts:
            shown = column(text, heading)
            assert shown == pytest.approx([*values, sum(values)], abs=0.051)
    site = systems.site(system)
    for row, run in zip(rows, runs[::repeats], strict=True):
        longest_h = submit.MARGIN * row["time_h"]["high"] + submit.SPARE_H
        (job,) = submit.plan([run], site, tmp_path, set())
        assert job.minutes == math.ceil(60 * min(longest_h, site.max_hours))


def test_whole_nodes_are_charged_and_devices_counted(capsys):
    text = said(capsys, "study show R1")
    hours, charged = (column(text, name) for name in ("GPU hours", "charged hours"))
    ratios = [whole / part for whole, part in zip(charged, hours, strict=True)]
    assert ratios[:4] == pytest.approx([4, 2, 1, 1], rel=1e-3)
    six = config.make("fourcastnet", preset="paper", devices=6, local_batch_size=1)
    cost = costs.expect(six, systems.site("horeka-a100"))
    assert cost["charged hours"] == pytest.approx(cost["GPU hours"] * 8 / 6)


def test_a_published_value_stands_beside_its_forecast():
    a100, h100 = (systems.site(f"horeka-{gpu}") for gpu in ("a100", "h100"))
    one = next(run for run in studies.find(["R5"])["R5"] if run.devices == 8)
    cost = costs.expect(one, a100)
    assert cost["published GPU hours"] == pytest.approx(47.94, abs=0.005)
    assert cost["published kWh"] == pytest.approx(15.01, abs=0.005)
    four = next(run for run in studies.find(["T1"])["T1"] if run.devices == 4)
    for site, hours, energy_kWh in ((h100, 421.26, 115.6), (a100, 559.7, 120.70)):
        cost = costs.expect(four, site)
        assert cost["published GPU hours"] == pytest.approx(hours, abs=0.05)
        assert cost["published kWh"] == pytest.approx(energy_kWh, abs=0.05)
        assert cost["GPU hours"] != cost["published GPU hours"]
        tuned = config.replace(four, stage="finetune", initial_run="x")
        assert 1.8 < costs.expect(tuned, site)["GPU hours"] / cost["GPU hours"] <= 2
        assert costs.expect(tuned, site)["published runs"] == 0
    full = next(run for run in studies.find(["R1"])["R1"] if run.devices == 1)
    assert costs.expect(full, a100)["published runs"] == 0
    # the paper: 17.6 + 18.9 kWh and RAM
    assert 36 < costs.expect(full, a100)["kWh"] < 41


@pytest.mark.parametrize(
    "system, changed",
    [
        ("horeka-h100", {}),  # nothing is published of ResNet50 on it
        ("slurm", {}),
        (TWO_NODES, {}),
        ("horeka-a100", {"image_size": 32}),
        ("horeka-a100", {"devices": 512}),
    ],
)
def test_no_other_price_stands_in_for_an_unknown_one(capsys, tmp_path, system, changed):
    site = systems.site(system)
    usual = dict(preset="paper", device="gpu", system=site.name, devices=4)
    run = config.make("resnet50", **usual | changed)
    assert costs.expect(run, site) == {}
    (job,) = submit.plan([run], site, tmp_path, set())
    assert job.minutes == math.ceil(60 * site.default_hours)
    parameters = [f"-p {name}={value}" for name, value in (usual | changed).items()]
    words = f"submit --system {system} --dry-run --runs-dir {tmp_path} {' '.join(parameters)}"
    text = said(capsys, words)
    assert "1 runs, of unknown cost" in text and "kWh" not in text
    known = config.make("resnet50", **usual)
    assert costs.expect(known, systems.site("horeka-a100"))


def test_a_sum_with_an_unknown_cost_is_unknown():
    site = systems.site("horeka-a100")
    known = config.make("resnet50", preset="paper", devices=4)
    unknown = config.make("resnet50", devices=8)
    table = costs.table([known, unknown], site)
    assert table["kWh"].isna().tolist() == [False, True, True]
    assert table["runs"].tolist() == [1, 1, 2]


def test_the_list_of_studies_has_prices_only_where_they_are_asked_for(capsys):
    assert "GPU hours" not in said(capsys, "study list")
    lines = said(capsys, "study list --costs").splitlines()
    (line,) = [line for line in lines if re.match(r"F1 .*\d\.\d", line)]
    shown = said(capsys, "study show F1")
    assert line.split()[2] == f"{column(shown, 'GPU hours')[-1]:,.1f}"
