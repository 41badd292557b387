"""README.md and docs/*.md: their links lead somewhere; their commands and paths exist."""

import re
import shlex
import sys
import tomllib

import pytest
import typer

from energynn import cli
from energynn.cli.options import parse_parameters
from energynn.experiment import studies
from energynn.host.files import REPOSITORY
from tests.launch.test_guides import steps
from tests.processes import printed
from tests.run_files import text_of

README = REPOSITORY / "README.md"
DOCS = sorted((REPOSITORY / "docs").glob("*.md"))
GUIDES = [README, *DOCS]
OTHERS = [
    REPOSITORY / "CONTRIBUTING.md",
    REPOSITORY / "runs/README.md",
    *sorted((REPOSITORY / "data_manifests").glob("*/README.md")),
]
OWN = ("my_study.py", "my_cluster.toml")  # named in commands
COMMITTED = (
    "energynn/",
    "notebooks/",
    "docs/",
    "runs/",
    "data_manifests/",
    "systems/",
    "paper/",
)
COMMITTED += ("examples/", "tests/")

guides = pytest.mark.parametrize("path", GUIDES, ids=lambda path: path.name)
documents = pytest.mark.parametrize(
    "path", [*GUIDES, *OTHERS], ids=lambda path: str(path.relative_to(REPOSITORY))
)


def commands(path, program: str) -> list[list[str]]:
    """Words after a program's name, in blocks and in code spans."""
    lists = [shlex.split(step) for step in steps(path) if step.startswith(program)]
    return [words[1:] for words in lists if words[2:]]


def parsed(words: list[str]) -> dict:
    """Parse a command line to the parameters of its function; nothing is done."""
    command = typer.main.get_command(cli.app)
    context = command.make_context("energynn", list(words), resilient_parsing=False)
    while hasattr(command, "resolve_command"):
        rest = [*context._protected_args, *context.args]
        if not rest:
            break
        name, command, rest = command.resolve_command(context, rest)
        context = command.make_context(name, rest, parent=context)
    return context.params


def test_the_readme_opens_with_the_two_commands():
    assert steps(README)[:2] == ["make reproduce", "make test"]


def test_documents_are_read_in_minutes():
    assert len(README.read_text().split()) <= 700
    words = sum(
        len(path.read_text().split())
        for path in [*DOCS, REPOSITORY / "CONTRIBUTING.md"]
    )
    assert words <= 15_000
    assert len(text_of("docs/architecture.md").split()) <= 1200
    assert len(text_of("CHANGELOG.md").split()) <= 600


def test_the_readme_links_every_document():
    text = README.read_text()
    assert all(f"](docs/{path.name})" in text for path in DOCS)
    assert "<!--" not in text


@documents
def test_links_lead_somewhere(path):
    for link in re.findall(r"\]\((?!https?:)([^)#]+)", path.read_text()):
        assert (path.parent / link).exists(), f"{path.name} links {link}"


@documents
def test_paths_in_sentences_exist(path):
    for span in re.findall(r"`([^`\n]+)`", path.read_text()):
        names_a_file = span.startswith(COMMITTED) and not re.search(
            r"[<\s]|SYSTEM|_\Z", span
        )
        if names_a_file and not span.startswith(("runs/local", "runs/measured")):
            assert list(REPOSITORY.glob(span.rstrip("/"))), f"{path.name} names {span}"


@guides
def test_a_guide_answers_first(path):
    beginning = path.read_text().split("\n## ")[0]
    assert re.search(r"\n( {4}|\$ )(energynn|make|papermill) ", beginning)


@documents
def test_make_targets_exist(path):
    targets = re.findall(r"^([a-z-]+):", text_of("Makefile"), flags=re.MULTILINE)
    for words in commands(path, "make"):
        assert {word for word in words if "=" not in word} <= set(targets), words


@documents
def test_commands_are_parsed(path, monkeypatch):
    # whose workload docs/own.md makes
    monkeypatch.syspath_prepend(REPOSITORY / "examples")
    for words in commands(path, "energynn"):
        options = parsed(cli.join_parameter_words(words))
        if words[0] in ("run", "submit"):
            given = [*(options.get("assigned") or []), *(options["p"] or [])]
            assert studies.make_sweep(parse_parameters(given))
        if words[0] in ("study", "submit"):
            names = (
                [options["name"]]
                if words[0] == "study" and "name" in options
                else options.get("studies") or []
            )
            studies.find_studies(
                [name for name in names if name not in OWN and name[0] != "-"]
            )
        system = options.get("system")
        assert (
            system in (None, "", "NAME", "local", *OWN)
            or (REPOSITORY / "systems" / f"{system}.toml").exists()
        )


@guides
def test_extras_that_pip_installs_exist(path):
    project = tomllib.loads(text_of("pyproject.toml"))["project"]
    for words in commands(path, "pip"):
        for extra in re.findall(r"^\.\[(.*)\]$", words[-1]):
            assert extra in project["optional-dependencies"], extra


def test_the_architecture_names_what_there_is():
    text = text_of("docs/architecture.md")
    rooms = "cli|analysis|launch|forecast|train|data|experiment|measure|host"
    named = re.findall(rf"`((?:{rooms})/\w+\.\w+)`", text)
    assert len(set(named)) >= 25
    for name in named:
        assert (REPOSITORY / "energynn" / name).exists(), name


# as `make docs`
SPHINX = sys.executable, *"-m sphinx -q -W --keep-going".split()


@pytest.mark.slow
def test_the_site_is_made_without_a_warning_and_needs_no_network():
    """Where `make docs` has installed what it needs."""
    pytest.importorskip("myst_parser")
    printed(*SPHINX, "docs", "build/site", cwd=REPOSITORY)
    site = REPOSITORY / "build" / "site"
    for page in (
        "index",
        "commands",
        "interface",
        "docs/run",
        "docs/own",
        "CONTRIBUTING",
    ):
        text = (site / f"{page}.html").read_text()
        outside = r'<(?:script|link|img)[^>]*(?:src|href)="(?:https?:)?//'
        assert not re.findall(outside, text), page
    assert "energynn measure" in (site / "commands.html").read_text()
