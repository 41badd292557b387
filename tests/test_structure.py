"""The shape of the project: who may import whom, how large it is, clean notebooks."""

import ast
import graphlib
import re
import sys
from pathlib import Path

import pytest

from energynn.host.files import REPOSITORY
from energynn.host.reading import read_json
from tests.processes import printed
from tests.run_files import text_of
from tests.size import floors, imported, module_imports, room_imports, sizes

PACKAGE = REPOSITORY / "energynn"
MODULES = sorted(PACKAGE.rglob("*.py"))
modules = pytest.mark.parametrize(
    "path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE))
)
NOTEBOOKS = sorted((REPOSITORY / "notebooks").glob("*.ipynb"))
TRAINING = ("train", "data")
ANALYSIS_LIBRARIES = {"pandas", "altair", "statsmodels"}
TRAINING_LIBRARIES = {"torch", "torchvision", "perun", "mpi4py"}


def tops(names: set[str]) -> set[str]:
    return {name.split(".")[0] for name in names}


def part(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0]


def test_rooms_import_downwards_and_the_picture_shows_their_floors():
    arrows = room_imports()
    stack = floors(arrows)  # raises CycleError where an import runs upwards
    assert len(arrows) <= 16 and len(stack) <= 8
    assert sum(map(len, arrows.values())) <= 60
    page = text_of("docs/architecture.md")
    picture = re.search(r"```\nnotebooks/.*?```", page, re.DOTALL)[0]
    rows = re.findall(r"^  (\w.{24})", picture, re.MULTILINE)
    shown = [set(row.replace("/", "").split()) for row in rows]
    assert shown[::-1] == stack


def test_no_module_imports_itself_in_a_circle():
    # raises CycleError, which names the circle
    graphlib.TopologicalSorter(module_imports()).prepare()


@modules
def test_training_and_analysis_meet_on_disk_only(path):
    names, at_top = imported(path), imported(path, at_top_only=True)
    if part(path) in TRAINING:
        assert not tops(names) & ANALYSIS_LIBRARIES
    else:  # what trains is imported by the trainers, and found by name in train/rank.py
        assert not tops(names) & {"torch", "torchvision"}
        assert not tops(at_top) & TRAINING_LIBRARIES
        assert not any(name.startswith("energynn.train") for name in names)
    if part(path) == "analysis":
        assert not tops(names) & TRAINING_LIBRARIES
    if part(path) == "cli":
        own = [name for name in at_top if name.startswith("energynn")]
        assert all(name.startswith("energynn.cli") for name in own), (
            "cli imports lazily"
        )
    if "perun" in tops(names):
        assert path.name == "perun_adapter.py", "one module knows perun"


# Code tokens (`make size`). They become fewer, or a whole idea goes for one that comes.
MAX_TOKENS = 114_800
MAX_TEST_TOKENS = 137_600
MAX_TOKENS_A_LINE = 8.75


def test_the_package_stays_small():
    tokens, lines = sizes("energynn")["energynn"]
    assert tokens <= MAX_TOKENS, f"{tokens} code tokens"
    assert sizes("tests")["tests"][0] <= MAX_TEST_TOKENS
    assert tokens <= MAX_TOKENS_A_LINE * lines, "one thought a line"
    vague = ("utils", "helpers", "common", "misc")
    assert not [path for path in MODULES if path.stem in vague]


COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@modules
def test_code_is_calm(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno - node.lineno < 70, (
                f"{node.name} has more than 70 lines"
            )
        if isinstance(node, COMPREHENSIONS):
            within = [
                part for child in ast.iter_child_nodes(node) for part in ast.walk(child)
            ]
            nested = [part for part in within if isinstance(part, COMPREHENSIONS)]
            assert not nested, f"line {node.lineno}: a comprehension within another"
        if isinstance(node, ast.IfExp):
            assert not isinstance(node.orelse, ast.IfExp), (
                f"line {node.lineno}: an if within an if"
            )


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_thin_and_clean(path):
    notebook = read_json(path)
    assert set(notebook["metadata"]) <= {"kernelspec", "language_info"}
    parameters = 0
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] != "code":
            continue
        assert not cell["outputs"] and cell["execution_count"] is None, (
            "strip it: nbstripout notebooks/*.ipynb"
        )
        assert set(cell["metadata"]) <= {"tags", "jupyter"}
        assert cell["metadata"].get("jupyter", {}).keys() <= {"source_hidden"}
        assert len(source.splitlines()) <= 20, (
            f"a cell of more than 20 lines: {source[:60]}"
        )
        tree = ast.parse(source)
        assert not [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        if "parameters" in cell["metadata"].get("tags", []):
            parameters += 1
            assert all(isinstance(node, ast.Assign) for node in tree.body)
            for node in tree.body:
                ast.literal_eval(node.value)
    assert parameters == 1


def test_ruff_finds_nothing():
    """Format, width of lines, unused names, notebooks too: pyproject.toml has the rules."""
    for words in (["format", "--check"], ["check"]):
        printed(sys.executable, "-m", "ruff", *words, ".", cwd=REPOSITORY)
