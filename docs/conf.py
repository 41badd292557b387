"""`sphinx-build docs build/site`: README, guides, executed notebooks, commands, Python interface.

It needs no network. What the site is made of is copied to build/site-source under the same names,
so that the links of the documents hold; Sphinx reads it there.
"""

import json
import shutil
from pathlib import Path

import msgspec
import nbformat
import typer
from nbconvert import HTMLExporter

import energynn
from energynn import cli, records
from energynn.experiment import config
from energynn.host.files import REPOSITORY

SOURCE = REPOSITORY / "build" / "site-source"

project, release = "energynn", energynn.__version__
author = "the energynn developers"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
myst_heading_anchors = 3
suppress_warnings = ["toc.not_included"]
highlight_language = "none"
html_theme = "alabaster"
html_theme_options = {
    "description": "energy of data-parallel training",
    "page_width": "1100px",
}
html_extra_path = [str(SOURCE / "extra")]
html_static_path = ["custom.css"]
html_show_sourcelink = False
add_module_names = False

COPIED = (
    "*.md",
    "LICENSE",
    "CITATION.cff",
    "docs/*.md",
    "runs/README.md",
    "runs/published/README.md",
)
COPIED += ("data_manifests/*/README.md", "notebooks/*.ipynb", "systems/*")
COPIED += ("paper/*.png", "paper/*.svg")
GUIDES = ("run", "measure", "own", "forecast", "cluster", "gpu", "data", "paper")
GUIDES += ("questions",)
REFERENCE = ("commands", "interface", "parameters", "runs/README", "docs/worth")
REFERENCE += ("docs/verdicts",)
CHAPTERS = {
    "Guides": [f"docs/{name}" for name in GUIDES],
    "Reference": REFERENCE,
    "Work on it": ["CONTRIBUTING", "docs/architecture", "CHANGELOG"],
}
INTERFACE = """
# Python interface

```{eval-rst}
.. automodule:: energynn.analysis.interface
   :members: load, table, trace, epochs, compare

.. autoclass:: energynn.measure.window.Window
   :members: time_s, energies, energy_J

.. autoclass:: energynn.measure.window.Phases
   :members: rows, energies
```
"""


def setup(app) -> None:
    """Write what the site is made of, and let Sphinx read it instead of this folder."""
    shutil.rmtree(SOURCE, ignore_errors=True)
    for pattern in COPIED:
        for path in REPOSITORY.glob(pattern):
            target = SOURCE / path.relative_to(REPOSITORY)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
    notebooks = executed_notebooks(SOURCE / "extra" / "notebooks")
    (SOURCE / "README.md").rename(SOURCE / "index.md")
    with (SOURCE / "index.md").open("a") as index:
        index.write("\n".join([*map(contents, CHAPTERS), notebooks]))
    (SOURCE / "commands.md").write_text(commands())
    (SOURCE / "parameters.md").write_text(
        f"# Parameters\n\n```text\n{config.parameters_help_text()}\n```\n"
    )
    configurations = {
        "$defs": msgspec.json.schema_components(config.CONFIGS.values())[1]
    }
    schemas = {
        "record": msgspec.json.schema(records.Record),
        "configuration": configurations,
    }
    for name, schema in schemas.items():
        (SOURCE / "extra" / f"{name}.schema.json").write_text(
            json.dumps(schema, indent=1)
        )
    (SOURCE / "interface.md").write_text(INTERFACE)
    app.srcdir = type(app.srcdir)(SOURCE)


def contents(chapter: str) -> str:
    pages = "\n".join(CHAPTERS[chapter])
    return f"```{{toctree}}\n:hidden:\n:caption: {chapter}\n\n{pages}\n```\n"


def executed_notebooks(folder: Path) -> str:
    """Write those of `make paper` as pages, and return a list of links to them.

    A sentence where there are none.
    """
    folder.mkdir(parents=True)
    links = []
    for path in sorted((REPOSITORY / "build" / "notebooks").glob("*.ipynb")):
        page, _ = HTMLExporter(mathjax_url="", require_js_url="").from_notebook_node(
            nbformat.read(path, 4)
        )
        (folder / f"{path.stem}.html").write_text(page)
        links.append(f'<li><a href="notebooks/{path.stem}.html">{path.stem}</a></li>')
    if not links:
        return "\n## Notebooks\n\nThey become pages here once `make paper` has executed them.\n"
    return "\n## Notebooks, executed\n\n<ul>\n" + "\n".join(links) + "\n</ul>\n"


def commands() -> str:
    """Write the --help of every command on one page."""
    return "# Commands\n\n" + "\n".join(sections(typer.main.get_command(cli.app), None))


def sections(command, parent) -> list[str]:
    name = command.name if parent else "energynn"
    context = command.context_class(command, info_name=name, parent=parent)
    pages = [
        f"## {context.command_path}\n\n```text\n{command.get_help(context)}\n```\n"
    ]
    for child in getattr(command, "commands", {}).values():
        pages += sections(child, context)
    return pages
