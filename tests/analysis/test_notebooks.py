"""Notebooks are well-formed; the analysis ones run without and with own runs, and the paper compiles from either."""

import ast
import csv
import json
import re
import subprocess
import sys
import tomllib

import pytest

from energynn.analysis import numbers, paper
from energynn.files import REPOSITORY
from tests.analysis.conftest import ANALYSIS
from tests.analysis.notebook import execute

ALL = sorted((REPOSITORY / "notebooks").glob("*.ipynb"))
MINE = [path for path in ALL if path.stem in ("00_start_here", *ANALYSIS)]
pytestmark = pytest.mark.timeout(900)  # a first test waits until all notebooks are executed


@pytest.mark.parametrize("path", MINE, ids=lambda path: path.stem)
def test_notebook_is_plain(path):
    notebook = json.loads(path.read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert set(notebook["metadata"]) == {"kernelspec", "language_info"}
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    cells = notebook["cells"]
    assert len({cell["id"] for cell in cells}) == len(cells)
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    for cell in code:
        assert cell["outputs"] == [] and cell["execution_count"] is None, cell["id"]
        assert len(cell["source"]) <= 30, cell["id"]
        assert max(len(line.rstrip("\n")) for line in cell["source"]) <= 120, cell["id"]
        for node in ast.walk(ast.parse("".join(cell["source"]))):
            assert not isinstance(node, ast.ClassDef), cell["id"]
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno <= 15, cell["id"]
    parameters = [cell for cell in code if "parameters" in cell["metadata"].get("tags", [])]
    assert len(parameters) == 1
    for statement in ast.parse("".join(parameters[0]["source"])).body:
        ast.literal_eval(statement.value)


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_no_cell_depends_on_a_name_that_a_later_one_binds_again(path):
    """A cell that is executed once more, as one does in Jupyter, finds what it found the first time."""
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    names = [names_of(ast.parse("".join(cell["source"])).body) for cell in cells]
    for i, cell in enumerate(cells):
        needs, _ = names[i]
        for later, (_, binds) in zip(cells[i:], names[i:], strict=True):
            assert not needs & binds, f"{cell['id']} needs {needs & binds}, which {later['id']} binds again"


def names_of(statements: list[ast.stmt]) -> tuple[set[str], set[str]]:
    """What statements need of the cells before theirs, and what they bind at the top level."""
    needs, binds = set(), set()
    for statement in statements:
        needed, bound = names_of_one(statement)
        needs |= needed - binds
        binds |= bound
    return needs, binds


def names_of_one(statement: ast.stmt) -> tuple[set[str], set[str]]:
    if isinstance(statement, ast.FunctionDef):
        arguments = {argument.arg for argument in ast.walk(statement.args) if isinstance(argument, ast.arg)}
        loads, stores = loads_and_stores(ast.Module(statement.body, []))
        return loads - stores - arguments, {statement.name}
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return set(), {(name.asname or name.name).split(".")[0] for name in statement.names}
    blocks = [getattr(statement, field, []) for field in ("body", "orelse", "finalbody")]
    heads = [value for value in ast.iter_child_nodes(statement) if not isinstance(value, ast.stmt)]
    needs, binds = set(), set()
    for head in heads:
        loads, stores = loads_and_stores(head)
        needs |= loads
        binds |= stores
    for block in blocks:
        needed, bound = names_of(block)
        needs |= needed - binds
        binds |= bound
    if isinstance(statement, ast.AugAssign):
        needs |= binds
    return needs, binds


def loads_and_stores(tree: ast.AST) -> tuple[set[str], set[str]]:
    """Names that are read, less those of comprehensions and lambdas, and names that are bound."""
    loads, stores, inner = set(), set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            (loads if isinstance(node.ctx, ast.Load) else stores).add(node.id)
        if isinstance(node, ast.comprehension):
            inner |= {name.id for name in ast.walk(node.target) if isinstance(name, ast.Name)}
        if isinstance(node, ast.Lambda):
            inner |= {argument.arg for argument in ast.walk(node.args) if isinstance(argument, ast.arg)}
    return loads - inner, stores - inner


def test_a_name_that_is_bound_again_would_be_found():
    cells = ["x = 1", "def panel():\n    return x", "x = 2", "y = [x for x in range(3)]", "z = 0\nz += 1"]
    names = [names_of(ast.parse(cell).body) for cell in cells]
    assert names[1] == ({"x"}, {"panel"}) and names[2] == (set(), {"x"})
    assert names[3] == ({"range"}, {"y"}) and names[4] == (set(), {"z"})


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_cells_are_plain(path):
    for cell in json.loads(path.read_text())["cells"]:
        if cell["cell_type"] != "code":
            continue
        for node in ast.walk(ast.parse("".join(cell["source"]))):
            assert not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Lambda)), cell["id"]
            generators = getattr(node, "generators", [])
            assert len(generators) < 2, f"{cell['id']}: two loops in one comprehension"
            if generators:
                within = [inner for part in ast.iter_child_nodes(node) for inner in ast.walk(part)]
                assert not any(isinstance(inner, ast.ListComp | ast.DictComp | ast.SetComp) for inner in within), (
                    f"{cell['id']}: a comprehension within another"
                )


@pytest.fixture(scope="module", params=["without own runs", "with own runs"])
def built(request, synthetic, executed):
    """Build folder after all analysis notebooks ran, and the numbers in it."""
    folder = executed(request.param, synthetic.write_study if request.param == "with own runs" else None)
    return request.param, folder, json.loads((folder / "numbers.json").read_text())


def test_papermill_executes_a_notebook(tmp_path):
    """As `make paper` does, with a kernel of its own; tests/test_launch.py executes run_training so."""
    name = "10_scaling_schemes"
    command = [sys.executable, "-m", "papermill", f"notebooks/{name}.ipynb", str(tmp_path / f"{name}.ipynb")]
    command += ["-p", "build_dir", str(tmp_path), "--no-progress-bar"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (tmp_path / "here").mkdir()
    execute(name, build_dir=str(tmp_path / "here"))
    for made in (f"numbers/{name}.json", "figures/scaling_schemes.svg"):
        assert (tmp_path / made).read_bytes() == (tmp_path / "here" / made).read_bytes()


def test_a_parameter_that_a_notebook_lacks_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="10_scaling_schemes: has no parameter build_folder"):
        execute("10_scaling_schemes", build_folder=str(tmp_path))


def test_all_notebooks_leave_figures_numbers_and_a_paper(built):
    case, folder, merged = built
    figures = {path.name for path in (folder / "figures").iterdir()}
    for name in paper.figures((paper.PAPER / "energynn.typ").read_text()):
        assert {f"{name}.svg", f"{name}.png", f"{name}.pdf"} <= figures
    pdf, supplement = paper.compile(folder)
    assert supplement.name == "supplement.pdf" and supplement.stat().st_size > 20_000
    assert pdf.read_bytes().startswith(b"%PDF")
    # The slope of all published ResNet50 rows, computed here once more by its closed form.
    with open(REPOSITORY / "runs/published/values.csv") as file:
        rows = [row for row in csv.DictReader(file) if row["workload"] == "resnet50" and row["kind"] == "measurement"]
    energies = [float(row["value"]) for row in rows if row["quantity"] == "energy_total"]
    hours = [float(row["value"]) for row in rows if row["quantity"] == "gpu_hours"]
    assert len(hours) == len(energies) == 17  # in the same order, each run once
    slope = sum(h * e for h, e in zip(hours, energies, strict=True)) / sum(h * h for h in hours)
    assert merged["slope_ResNet50"]["value"] == pytest.approx(slope, rel=1e-9)
    assert merged["slope_ResNet50"]["provenance"] == "published"
    own_runs = 9 if case == "with own runs" else 0
    assert merged["own_runs"]["value"] == own_runs
    assert merged["own_runs_measured"]["value"] == 0
    if own_runs:
        assert merged["own_energy"]["provenance"] == "simulated"
        assert merged["resnet50_speed_up_gbs"]["value"] == pytest.approx(60.6 / 45.0, rel=1e-6)
        assert merged["fourcastnet_finetune_lead"]["value"] == 24
        for name in ("resnet50_speed_up_gbs", "resnet50_error_low", "fourcastnet_pretrain_rmse_low", "coverage_least"):
            assert merged[name]["provenance"] == "simulated", name
    else:
        assert merged["own_energy"]["value"] is None and merged["own_energy"]["reason"]
    svg = (folder / "figures" / "power_profiles.svg").read_text()
    assert ("fall-backs/h" in svg) == bool(own_runs)


def test_the_readmes_results_are_those_of_the_notebooks(built):
    """Each number of the README's table is followed by its name in numbers.json, as in 0.284<!--slope_ResNet50-->."""
    _, _, merged = built
    table = (REPOSITORY / "README.md").read_text().split("## Main results\n")[1].split("\n## ")[0]
    answers = "\n".join(row.split("|")[2] for row in table.splitlines() if row.startswith("|"))
    shown = re.findall(r"([^\s|]+)<!--(\w+)-->", answers)
    assert len(shown) >= 15
    for text, name in shown:
        assert merged[name]["text"] == text, f"README.md says {text} for {name}"
        is_forecast = merged[name]["notebook"] == "65_what_limits_scaling"
        assert is_forecast or merged[name]["provenance"] in ("published", "exact")  # own runs do not move it
    # Every other digit belongs to a name, or is the level of the intervals.
    rest = re.sub(r"[^\s|]+<!--\w+-->|ResNet50|[AH]100|95 % interval", "", answers)
    assert not re.search(r"\d", rest), rest


def test_numbers_name_the_rows_they_rest_on(built):
    _, _, merged = built
    assert all(entry["source"] for entry in merged.values())
    derived = r"(slope|affine|intercept|exponent|deviation|joint|partial|published_(rows|known)|one_gpu|four_gpus)_"
    derived += "|socket_"
    names = [name for name in merged if re.match(derived, name) and merged[name]["value"] is not None]
    names = [name for name in names if merged[name]["notebook"] != "45_one_gpu"]  # which is about own runs
    assert len(names) > 100
    unnamed = [name for name in names if not re.search(r"\b[RFT]\d n=\d", merged[name]["source"])]
    assert not unnamed


def test_every_statement_has_commands_minutes_and_an_expected_range(built):
    _, folder, _ = built
    ledger = json.loads((folder / "claims.json").read_text())["claims"]
    artifact = json.loads((folder / "artifact.json").read_text())
    commands = {one["series"]: one["command"] for one in artifact["series"]}
    assert [one["id"] for one in artifact["claims"]] == [one["id"] for one in ledger]
    for one, judged in zip(artifact["claims"], ledger, strict=True):
        assert set(one["series"]) <= set(commands)
        assert bool(one["series"]) == ("allowed" in one) == (judged["test"] != "none"), one["id"]
        if "allowed" in judged["published"]:
            assert one["allowed"] == judged["published"]["allowed"]
    (table,) = [one for one in artifact["claims"] if one["id"] == "scaled-lbs-energy-per-sample"]
    assert (table["series"], table["gpus"], table["complete"]) == (["R4"], [4, 256], True)


def test_own_measured_pairs_and_fits_get_rows_of_their_own(synthetic, tmp_path):
    synthetic.write_replica(tmp_path / "runs", series="F1 F4")
    for name in ("30_fourcastnet_scaling", "60_energy_against_gpu_hours"):
        execute(name, runs_dir=str(tmp_path / "runs"), build_dir=str(tmp_path))
    merged = numbers.merge(tmp_path)
    assert merged["table1_rows"]["value"] == "4 16 32 own_1"
    names = ("energy_A100", "energy_H100", "energy_difference", "devices")
    pair = {name: merged[f"table1_{name}_own_1"] for name in names}
    assert {one["provenance"] for one in pair.values()} == {"measured"} and pair["devices"]["value"] == 16
    moved = 100 * (pair["energy_H100"]["value"] / pair["energy_A100"]["value"] - 1)
    assert pair["energy_difference"]["value"] == pytest.approx(moved)
    keys = merged["fits_keys"]["value"].split()
    assert keys[:7] == ["R4", "R5", "R6", "ResNet50", "F1", "A100", "H100"]
    assert len(keys) == 7 + merged["own_fits"]["value"]
    assert merged["slope_own_0"]["provenance"] == "measured" and "replica-F1-n4" in merged["slope_own_0"]["source"]


def test_what_the_model_says_is_drawn_as_such_and_is_no_published_number(built):
    case, folder, merged = built
    for name in ("resnet50_constant_data", "fourcastnet_scaling", "resnet50_power_draw", "fourcastnet_power_draw"):
        assert "model, fitted to the published values [90 %]" in (folder / "figures" / f"{name}.svg").read_text()
    assert "model, fitted" not in (folder / "figures" / "resnet50_scaled_data.svg").read_text()  # all is published
    if case == "without own runs":
        simulated = [name for name, entry in merged.items() if entry["provenance"] == "simulated"]
        assert simulated and all(name.startswith("forecast_") for name in simulated)


def panels_of(figure: dict) -> list[dict]:
    """The panels of a figure, each with the rows that its marks are drawn from, words apart."""
    parts = [*figure.get("hconcat", []), *figure.get("vconcat", []), *figure.get("concat", [])]
    if not parts:
        return [figure]
    found = []
    for part in parts:
        found += panels_of({"data": figure.get("data"), **part})
    return found


def rows_of(panel: dict, datasets: dict) -> list[dict]:
    """The rows that the marks of a panel are drawn from; words are no marks."""
    if "layer" in panel:
        rows = []
        for layer in panel["layer"]:
            rows += rows_of({"data": panel.get("data"), **layer}, datasets)
        return rows
    is_word = panel["mark"]["type"] == "text"
    return [] if is_word else datasets.get((panel.get("data") or {}).get("name"), [])


OF_STUDY = ("resnet50_constant_data", "resnet50_scaled_data", "fourcastnet_scaling", "resnet50_power_draw")
OF_STUDY += ("fourcastnet_power_draw", "energy_against_gpu_hours", "power_partial_effects")


def test_no_own_run_stands_on_an_axis_of_the_studys_and_no_panel_is_empty(built):
    case, folder, _ = built
    for name in OF_STUDY:
        figure = json.loads((folder / "figures" / f"{name}.json").read_text())
        for panel in panels_of(figure):
            rows = rows_of(panel, figure["datasets"])
            assert rows and not any(row.get("origin") == "own" for row in rows), (name, panel.get("title"))
    for name in ("resnet50_own", "fourcastnet_own", "energy_own"):
        figure = json.loads((folder / "figures" / f"{name}.json").read_text())
        has_rows = [any(rows_of(panel, figure["datasets"])) for panel in panels_of(figure)]
        assert all(has_rows) if case == "with own runs" else not any(has_rows)


def test_first_cells_give_the_answers(built):
    """Each number is followed by its name in numbers.json, as in 0.284<!--slope_ResNet50-->."""
    _, _, merged = built
    marked = {name: f"{entry['text']}<!--{name}-->" for name, entry in merged.items()}
    answers = tomllib.loads((paper.PAPER / "results.toml").read_text())
    for one in answers["result"] + answers["answer"]:
        first = json.loads((REPOSITORY / f"notebooks/{one['notebook']}.ipynb").read_text())["cells"][0]
        answer = f"**{one['question']}** {one['answer'].format_map(marked)}"
        assert answer in "".join(first["source"]), f"the first cell of {one['notebook']} should say: {answer}"


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_first_cells_ask_a_question(path):
    first = json.loads(path.read_text())["cells"][0]
    assert re.search(r"\*\*[^*]+\?\*\* \w", "".join(first["source"]))


def test_the_readmes_picture_is_the_figure(built):
    """`make paper` copies it; a machine with another drawing library may round a pixel otherwise."""
    image = pytest.importorskip("PIL.Image")
    _, folder, _ = built
    pictures = (paper.PAPER / "example.png", folder / "figures" / "energy_against_gpu_hours.png")
    committed, drawn = (image.open(path).convert("L").reduce(4) for path in pictures)
    assert committed.size == drawn.size, "run `make paper` and commit paper/example.png"
    differences = [abs(a - b) for a, b in zip(committed.tobytes(), drawn.tobytes(), strict=True)]
    assert max(differences) < 64, "run `make paper` and commit paper/example.png"
