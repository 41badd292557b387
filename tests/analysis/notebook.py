"""Execute a notebook in the test's own process: no kernel has to start, and what is imported is
shared.
"""

from __future__ import annotations

import ast
import os
from pathlib import Path
from types import SimpleNamespace

import altair as alt

from energynn.host.files import REPOSITORY
from energynn.host.reading import read_json


def execute(name: str, build_dir: Path, **parameters) -> dict:
    """Execute the code cells of a notebook with its parameters replaced as papermill does;
    returns its globals, and as ``told`` the numbers that it leaves, if any.

    What a cell shows at its end is asked for its ``repr``. Charts are not drawn for that:
    ``theme.save_chart`` draws them.
    """
    parameters["build_dir"] = str(build_dir)
    cells = read_json(REPOSITORY / "notebooks" / f"{name}.ipynb")["cells"]
    namespace = {"__name__": "__main__", "display": _display}
    where = os.getcwd()
    theme = alt.theme.active
    os.chdir(REPOSITORY)
    try:
        for cell in cells:
            if cell["cell_type"] == "code":
                _execute_cell(
                    "".join(cell["source"]),
                    f"{name}.ipynb, cell {cell['id']}",
                    namespace,
                )
            if "parameters" in cell["metadata"].get("tags", []):
                assert parameters.keys() <= namespace.keys(), name
                namespace |= parameters
    finally:
        os.chdir(where)
        alt.theme.enable(theme)
    left = build_dir / "numbers" / f"{name}.json"
    return namespace | ({"told": read_json(left)} if left.exists() else {})


def _display(shown, display_id: str = "") -> SimpleNamespace:
    repr(shown)
    return SimpleNamespace(update=repr)


def _execute_cell(source: str, place: str, namespace: dict) -> None:
    tree = ast.parse(source)
    if not tree.body or not isinstance(tree.body[-1], ast.Expr):
        exec(compile(tree, place, "exec"), namespace)
        return
    shown = ast.Expression(tree.body.pop().value)
    exec(compile(tree, place, "exec"), namespace)
    repr(eval(compile(shown, place, "eval"), namespace))
