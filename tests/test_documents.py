"""README.md and docs/*.md: their links lead somewhere, and their commands, studies and paths exist."""

import argparse
import ast
import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest

from energynn import cli, config, studies
from energynn.files import REPOSITORY

README = REPOSITORY / "README.md"
DOCS = sorted((REPOSITORY / "docs").glob("*.md"))
GUIDES = [path for path in DOCS if path.stem not in ("architecture", "parameters")]  # these two are no guides
OTHERS = [REPOSITORY / "runs/README.md", *sorted((REPOSITORY / "data_manifests").glob("*/README.md"))]
LINES = (
    "make ",
    "energynn ",
    ".venv/bin/",
    "export ",
    "eval ",
    "#!/",
    "#SBATCH ",
)  # how a line of a block may begin that is no Python
OWN_STUDIES = ("my_study.py",)  # named in commands; the block with `def study` is this file
OWN_SYSTEMS = ("my_cluster.toml",)
COMMITTED = ("energynn/", "notebooks/", "docs/", "runs/", "data_manifests/", "systems/", "paper/", "tests/")
COMMITTED += ("examples/",)

guides = pytest.mark.parametrize("path", [README, *GUIDES], ids=lambda path: path.name)
documents = pytest.mark.parametrize(
    "path", [README, *DOCS, *OTHERS], ids=lambda path: str(path.relative_to(REPOSITORY))
)


def blocks(text: str) -> list[str]:
    """Code blocks: what is indented by four spaces, blank lines within it included."""
    found = re.findall(r"(?<=\n\n)(?: {4}.*\n|\n(?= {4}))+", text)
    return [textwrap.dedent(block).strip("\n") for block in found]


def command_lines(text: str) -> list[str]:
    lines = []
    for block in blocks(text):
        if "def study" not in block and not is_python(block):
            lines += block.splitlines()
    return lines


def is_python(block: str) -> bool:
    try:
        compile(block, "block", "exec")
    except SyntaxError:
        return False
    return True


def code_spans(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", text)


def commands(text: str, program: str) -> list[list[str]]:
    """Words after a program's name, in blocks and in sentences that give more than the name of a command."""
    found = []
    for line in command_lines(text) + code_spans(text):
        words = shlex.split(line.removeprefix(".venv/bin/"), comments=True)
        if program in words:
            found.append(words[words.index(program) + 1 :])
    return found


def parsed(words: list[str], monkeypatch) -> argparse.Namespace:
    """What the command line makes of these words; nothing is done."""

    class Parsed(Exception):
        pass

    parse = argparse.ArgumentParser.parse_args

    def stop(parser, arguments=None, namespace=None):
        raise Parsed(parse(parser, arguments, namespace))

    with monkeypatch.context() as patch, pytest.raises(Parsed) as stopped:
        patch.setattr(argparse.ArgumentParser, "parse_args", stop)
        cli.main(words)
    return stopped.value.args[0]


def anchors(path: Path) -> set[str]:
    """GitHub's names of a document's headings."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def own_studies(text: str) -> list[str]:
    return [block for block in blocks(text) if "def study" in block]


def test_the_readme_opens_with_the_two_commands():
    text = README.read_text()
    assert blocks(text)[0].splitlines() == ["make reproduce", "make test"]
    assert text.index("    make reproduce") < 40


def test_the_readme_is_read_in_five_minutes():
    assert len(README.read_text().split()) <= 1000


def test_the_readme_links_every_document():
    text = README.read_text()
    for path in DOCS:
        assert f"](docs/{path.name})" in text, f"README.md does not link docs/{path.name}"


@documents
def test_links_lead_somewhere(path):
    for link, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", path.read_text()):
        target = path.parent / link if link else path
        assert target.exists(), f"{path.name} links {link}"
        assert not anchor or anchor in anchors(target), f"{path.name} links {link}#{anchor}"


@documents
def test_paths_in_sentences_exist(path):
    for span in code_spans(path.read_text()):
        if (
            not span.startswith(COMMITTED)
            or re.search(r"[<\s]", span)
            or span.startswith(("runs/local", "runs/measured"))
        ):
            continue
        assert list(REPOSITORY.glob(span.rstrip("/"))), f"{path.name} names {span}"


@guides
def test_a_guide_answers_first(path):
    """A command stands before the first section."""
    head = path.read_text().split("\n## ")[0]
    assert command_lines(head), f"{path.name} begins without a command"


@guides
def test_python_stands_where_it_is_executed(path):
    """Studies here, and what tests/test_interface.py executes."""
    found = [block for block in blocks(path.read_text()) if is_python(block) and "def study" not in block]
    assert not found or path.name == "python.md", found


@guides
def test_every_line_of_a_block_is_a_command_that_is_tested(path):
    for line in command_lines(path.read_text()):
        assert line.startswith(LINES), f"{path.name}: {line!r} is tested by nothing"


@guides
def test_make_targets_exist(path):
    targets = set(re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), flags=re.MULTILINE))
    for words in commands(path.read_text(), "make"):
        named = [word for word in words if "=" not in word]
        assert set(named) <= targets, f"{path.name} names make {' '.join(words)}"


@guides
def test_commands_are_parsed(path, monkeypatch):
    for words in commands(path.read_text(), "energynn"):
        options = parsed(words, monkeypatch)
        if options.command == "run":
            config.make(**{name: cli._literal(value) for name, value in options.parameters})
        named = list(getattr(options, "studies", []))
        if options.command == "study":
            named.append(options.name)
        studies.find([name for name in named if name not in OWN_STUDIES])


@guides
def test_systems_are_known(path, monkeypatch):
    for words in commands(path.read_text(), "energynn"):
        if "--system" in words:
            system = parsed(words, monkeypatch).system
            assert system in OWN_SYSTEMS or (REPOSITORY / "systems" / f"{system}.toml").exists()


@guides
def test_papermill_commands_are_runs_that_can_be_made(path):
    for words in commands(path.read_text(), "papermill"):
        assert (REPOSITORY / words[0]).exists() and words[0] == "notebooks/run_training.ipynb"
        assert all(flag == "-p" for flag in words[2::3])
        given = {name: cli._literal(value) for name, value in zip(words[3::3], words[4::3], strict=True)}
        assert config.make(**given).devices == given["devices"]


@guides
def test_extras_that_pip_installs_exist(path):
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for words in commands(path.read_text(), "pip"):
        for extra in re.findall(r"^\.\[(.*)\]$", words[-1]):
            assert extra in extras, f"{path.name} installs the extra {extra}"


@guides
def test_notebooks_exist(path):
    for notebook in re.findall(r"notebooks/(\w+)\.ipynb", path.read_text()):
        assert (REPOSITORY / "notebooks" / f"{notebook}.ipynb").exists()


@guides
def test_an_own_study_gives_runs(path, tmp_path):
    """tests/cluster/test_slurm.py makes its runs, where there is a Slurm."""
    for number, program in enumerate(own_studies(path.read_text())):
        file = tmp_path / f"my_study_{number}.py"
        file.write_text(program + "\n")
        (runs,) = studies.find([str(file)]).values()
        assert len({config.run_id(run) for run in runs}) == len(runs) > 1


def test_the_guide_to_clusters_has_a_study_of_ones_own():
    assert len(own_studies((REPOSITORY / "docs/cluster.md").read_text())) == 1


def test_the_architecture_has_a_line_for_each_file():
    """The line is the first sentence of the module's docstring."""
    text = (REPOSITORY / "docs" / "architecture.md").read_text()
    for path in sorted((REPOSITORY / "energynn").rglob("*.py")):
        docstring = ast.get_docstring(ast.parse(path.read_text()))
        if docstring and path.parent.name + path.stem != "energynn__init__":
            sentence = " ".join(docstring.split("\n\n")[0].split())
            line = f"- `{path.relative_to(REPOSITORY)}`: {sentence}"
            assert line in text.splitlines(), f"docs/architecture.md lacks this line: {line}"


def test_the_site_has_every_document_in_a_chapter():
    program = (REPOSITORY / "docs" / "make_site.py").read_text()
    for path in DOCS:
        assert f'"{path.stem}"' in program or f'"docs/{path.stem}"' in program, f"make_site.py lacks {path.stem}"


@pytest.mark.slow
def test_the_site_is_made_without_a_warning_and_needs_no_network():
    """Where `make docs` has installed what it needs."""
    pytest.importorskip("myst_parser")
    program = [sys.executable, REPOSITORY / "docs" / "make_site.py"]
    done = subprocess.run(program, cwd=REPOSITORY, env=os.environ | {"PYTHONPATH": "."}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    site = REPOSITORY / "build" / "site"
    for page in ("index", "commands", "interface", "docs/run", "docs/own", "CONTRIBUTING"):
        text = (site / f"{page}.html").read_text()
        assert not re.findall(r'<(?:script|link|img)[^>]*(?:src|href)="(?:https?:)?//', text), page
        assert "custom.css" in text, f"{page}: wide tables would scroll the page on a phone"
    assert "energynn merge" in (site / "commands.html").read_text()
    assert "One Dataset" in (words := (site / "interface.html").read_text()) or "one Dataset" in words


def test_contributors_see_the_picture_of_the_architecture():
    picture = re.search(r"```\nnotebooks/.*?```", (REPOSITORY / "docs/architecture.md").read_text(), flags=re.DOTALL)[0]
    assert picture in (REPOSITORY / "CONTRIBUTING.md").read_text()


def test_docker_and_apptainer_have_the_same_files():
    apptainer = re.findall(
        r"^    (\S+) /opt/energynn/", (REPOSITORY / "systems/energynn.def").read_text(), re.MULTILINE
    )
    docker = []
    for line in (REPOSITORY / "systems/Dockerfile").read_text().splitlines():
        if line.startswith("COPY "):
            docker += line.split()[1:-1]
    assert docker == apptainer and all((REPOSITORY / name).exists() for name in docker)


def test_the_devcontainer_makes_the_environment_without_torch():
    words = json.loads((REPOSITORY / ".devcontainer/devcontainer.json").read_text())["postCreateCommand"].split()
    assert words[:2] == ["make", "env"] and "-e '.[lab]'" in " ".join(words)
