"""The shape of the project: who may import whom, how large it is, clean notebooks."""

import ast
import graphlib
import json
import re
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

from energynn import cli
from energynn.files import REPOSITORY

PACKAGE = REPOSITORY / "energynn"
MODULES = sorted(PACKAGE.rglob("*.py"))
NOTEBOOKS = sorted((REPOSITORY / "notebooks").glob("*.ipynb"))
# From the bottom: a module imports only from its own layer and from those before it.
LAYERS = (
    ("__init__", "files", "launchers", "names", "processes", "progress", "published_values", "reading"),
    ("measure",),
    ("config", "studies"),
    ("data",),
    ("records",),
    ("models",),
    ("train",),
    ("launch",),
    ("cluster",),
    ("forecast",),
    ("analysis",),
    ("interface",),
    ("cli",),
)
TRAINING = ("train", "models", "data")
ANALYSIS_LIBRARIES = {"pandas", "altair", "statsmodels"}
TRAINING_LIBRARIES = {"torch", "torchvision", "perun", "mpi4py"}


def imports(path: Path, at_top_only: bool = False) -> set[str]:
    """Full names of what a module imports; relative imports do not occur."""
    tree = ast.parse(path.read_text())
    nodes = tree.body if at_top_only else list(ast.walk(tree))
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def tops(names: set[str]) -> set[str]:
    return {name.split(".")[0] for name in names}


def part(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0]


def module_name(path: Path) -> str:
    names = path.relative_to(REPOSITORY).with_suffix("").parts
    return ".".join(names[:-1] if names[-1] == "__init__" else names)


def layer(module: str) -> int:
    """Place of a module in LAYERS, from the bottom: what a module imports must not stand above it."""
    second = (module.split(".") + ["__init__"])[1]
    return next(height for height, members in enumerate(LAYERS) if second in members)


def imported_modules(path: Path) -> set[str]:
    """Our own modules that a module imports, at its top or within a function."""
    found = set()
    for name in imports(path):
        owner = name if name in NAMES else name.rpartition(".")[0]
        if owner in NAMES and owner != "energynn":
            found.add(owner)
    return found


NAMES = {module_name(path): path for path in MODULES}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_run_downwards(path):
    here = layer(module_name(path))
    upwards = [name for name in imported_modules(path) if layer(name) > here]
    assert not upwards, f"{path} imports {upwards}, which stand above it in LAYERS"


def test_no_module_imports_itself_in_a_circle():
    graph = {name: imported_modules(path) for name, path in NAMES.items()}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_training_and_analysis_meet_on_disk_only(path):
    names = imports(path)
    if part(path) in TRAINING:
        assert not tops(names) & ANALYSIS_LIBRARIES
    else:  # what trains is imported by the trainers, and found by name in train/rank.py
        assert not tops(names) & {"torch", "torchvision"}
        assert not any(name.startswith(("energynn.train", "energynn.models")) for name in names)
    if part(path) == "analysis":
        assert not tops(names) & TRAINING_LIBRARIES
    if part(path) == "cli":
        at_top = [name for name in imports(path, at_top_only=True) if name.startswith("energynn")]
        assert all(name.startswith("energynn.cli") for name in at_top), "cli imports lazily"
    if "perun" in tops(names):
        assert path.name in ("perun_adapter.py",), "one adapter knows perun"


def test_nothing_heavy_is_loaded_by_the_analysis(tmp_path):
    """In a process of its own: the whole analysis, the launcher and the command line, without torch."""
    names = [
        "energynn." + str(path.relative_to(PACKAGE).with_suffix("")).replace("/", ".")
        for path in MODULES
        if part(path) not in TRAINING
        and path.name not in ("__init__.py", "__main__.py", "perun_hook.py", "under_perun.py")
    ]
    program = f"import importlib, sys\nfor name in {names!r}: importlib.import_module(name)\n"
    program += f"print(sorted(set(sys.modules) & {TRAINING_LIBRARIES!r}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def lines_of_code(path: Path) -> int:
    """Lines that hold code: no blank ones, no comments, no docstrings."""
    nothing = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines: set[int] = set()
    with open(path, "rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type not in nothing | {tokenize.ENCODING}:
                lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= set(range(node.lineno, node.end_lineno + 1))
    return len(lines)


def test_the_package_stays_small():
    code = {path: lines_of_code(path) for path in MODULES}
    # 8,877 after the rebuild; since then reading.py and the anchor, plausible.py, processes.py and waiting samples.
    # 1,562 lines forecast time and energy (energynn/forecast/ and its commands), 53 tell it of workloads and systems.
    # 120 lines build a record host by host, from blocks of samples.
    # 1,070: published values of another kind, the ledger's model, a Python interface. 740: a GPU's first contact,
    # merge, ignore, footprint and completion, figures on a screen.
    # 620: colleagues, refusals, set-up on clusters (260), 80 columns, measured commands in explorer and report (110),
    # two probes for a whole study (110), several GPUs (80), files of perun and samples read faster (60).
    # 670: budgets, PBS, Slurm's own energy and facts of every host (480), votes without a mesh and containers (140),
    # limits of memory and the rest.
    # 420: suspended jobs (185), stage-in of what a run reads (130), words on clusters (30), faster records (75).
    # 38: what perun read stays text, phases are read at once, scalar products in parts, small HDF5 files at once.
    # 43: the AFNO's two layers as one function (20), events read at once, changed files of perun stay unread.
    # 18: perun's files of others are read by a process of its own first.
    # 179, what a review found: counters (30), held powers (31), damaged files (30), forecasts (55), starts, GPUs (33).
    # 5: copies count once, wherever records are read.
    # 132, what a second review found: a keeper of measured commands (39), files of jobs and staging (25), foreign input
    # of forecasts and ERA5 (25), late ends and interrupted studies (19), marks of forecasts (15), GPU grid, AFNO (9).
    # 252, what a third review found: fits checked when they are read (52), files of jobs, copies and staging (53),
    # labels of lines (41), places and counts before a study (22), intervals of what is renewed as often as read (34),
    # parts of a GPU (18), ends of commands (24), points of a lent GPU (8).
    # Less 159, what was written twice or never needed. 62: the AFNO's layers in parts (17), runs that hang and cold
    # machines (29), gVisor's kernel (13), archives without checkpoints (3).
    bound = 9950 + 1562 + 53 + 130 + 400 + 1070 + 740 + 620 + 670 + 420 + 38 + 43 + 18 + 179 + 5 + 132 + 252 - 159 + 62
    assert sum(code.values()) <= bound, f"{sum(code.values())} lines of code"
    assert max(len(path.read_text().splitlines()) for path in MODULES if part(path) == "train") <= 400
    assert not [path for path in MODULES if path.stem in ("utils", "helpers", "common", "misc")]


COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_code_is_calm(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno - node.lineno < 70, f"{node.name} has more than 70 lines"
        if isinstance(node, COMPREHENSIONS):
            within = [part for child in ast.iter_child_nodes(node) for part in ast.walk(child)]
            nested = [part for part in within if isinstance(part, COMPREHENSIONS)]
            assert not nested, f"line {node.lineno}: a comprehension within another"
        if isinstance(node, ast.IfExp):
            assert not isinstance(node.orelse, ast.IfExp), f"line {node.lineno}: an if within an if"
        if isinstance(node, ast.Assign):
            assert not isinstance(node.value, ast.Lambda), f"line {node.lineno}: a lambda that has a name"


def test_the_formatter_wins():
    """Except for tables of data, which are read more easily as one writes them."""
    everything = [path for folder in ("energynn", "tests", "notebooks") for path in (REPOSITORY / folder).rglob("*.*")]
    skips = [path.read_text().count("# fmt: " + "skip") for path in everything if path.suffix in (".py", ".ipynb")]
    assert sum(skips) <= 30


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_thin_and_clean(path):
    notebook = json.loads(path.read_text())
    assert set(notebook["metadata"]) <= {"kernelspec", "language_info"}
    parameters = 0
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] != "code":
            continue
        assert not cell["outputs"] and cell["execution_count"] is None, "strip it: nbstripout notebooks/*.ipynb"
        assert set(cell["metadata"]) <= {"tags"}
        assert len(source.splitlines()) <= 30, f"a cell of more than 30 lines: {source[:60]}"
        tree = ast.parse(source)
        assert not [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        if "parameters" in cell["metadata"].get("tags", []):
            parameters += 1
            assert all(isinstance(node, ast.Assign) for node in tree.body)
            for node in tree.body:
                ast.literal_eval(node.value)
    assert parameters == 1


def is_a_set(node: ast.expr) -> bool:
    """Whether an expression is a set as it stands there, or is made of one."""
    if isinstance(node, ast.BinOp):
        return is_a_set(node.left) or is_a_set(node.right)
    is_made = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "set"
    return is_made or isinstance(node, ast.Set | ast.SetComp)


@pytest.mark.parametrize("code, is_one", [("set(a) & b", True), ("{x for x in a}", True), ("sorted({1} - a)", False)])
def test_sets_are_known(code, is_one):
    assert is_a_set(ast.parse(code, mode="eval").body) == is_one


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_no_notebook_goes_through_a_set_in_whatever_order_it_has(path):
    """Figures must be the same bytes each time: the order of a set of texts differs from process to process."""
    for cell in json.loads(path.read_text())["cells"]:
        if cell["cell_type"] == "code":
            nodes = ast.walk(ast.parse("".join(cell["source"])))
            loops = [node for node in nodes if isinstance(node, ast.For | ast.comprehension)]
            unordered = [ast.unparse(loop.iter) for loop in loops if is_a_set(loop.iter)]
            assert not unordered, f"{cell['id']}: sort {unordered}"


def test_nothing_imports_a_notebook():
    for path in [*MODULES, *sorted((REPOSITORY / "tests").rglob("*.py"))]:
        assert not {"nbformat.read", "import_ipynb", "importnb"} & imports(path) or "test_notebooks" in path.name


def test_make_help_lists_the_targets():
    done = subprocess.run(["make", "help"], capture_output=True, text=True, cwd=REPOSITORY)
    for target in (
        "reproduce",
        "paper",
        "kick-the-tires",
        "test",
        "test-all",
        "test-nightly",
        "lab",
        "check",
        "bench",
        "lock",
        "clean",
    ):
        assert f"make {target} " in done.stdout


def test_ci_calls_the_tests_that_contain_the_readmes():
    assert "make test-all" in (REPOSITORY / ".ci" / "run").read_text()
    makefile = (REPOSITORY / "Makefile").read_text()
    (recipe,) = re.findall(r"^test-all:.*\n((?:\t.*\n)+)", makefile, flags=re.MULTILINE)
    assert "\t$(MAKE) --no-print-directory test || $(ONCE_MORE)\n" in recipe


def test_the_lock_has_exact_versions_only():
    lines = [line for line in (REPOSITORY / "requirements.lock").read_text().splitlines() if not line.startswith("#")]
    assert len(lines) > 100 and all(re.fullmatch(r"[A-Za-z0-9_.-]+==[A-Za-z0-9_.+-]+", line) for line in lines)


def test_a_mistake_on_the_command_line_is_one_line_and_exit_status_2(capsys):
    assert cli.main(["study", "run", "no-such-study"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("energynn: study: 'no-such-study' is not known") and error.count("\n") == 1
    assert cli.main(["check", "/no/such/folder"]) == 2


def test_pytest_options_of_our_own_are_known_before_conftest_is_read():
    """`--ran-twice FILE` breaks once the file exists: pytest takes it for the folder of the tests."""
    assert not re.search(r"--ran-twice\s+[^\s-]", (REPOSITORY / "Makefile").read_text())
