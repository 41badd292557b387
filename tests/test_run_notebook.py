"""The parameters of notebooks/run_training.ipynb: by papermill, and by who executes it again."""

import os
import shlex
from pathlib import Path
from unittest.mock import MagicMock

import nbformat
import pytest
from click.testing import CliRunner
from papermill.cli import papermill

from energynn.experiment import config
from energynn.host.files import REPOSITORY
from tests.processes import refused

NOTEBOOK = REPOSITORY / "notebooks" / "run_training.ipynb"


class Kernel:
    """Execute a notebook's cells as IPython does, up to the one that collects parameters."""

    def __init__(self):
        self.namespace = {"In": [""], "_": 1, "Out": {}}

    def cell(self, source):
        self.namespace["In"].append(source)
        exec(source, self.namespace)

    def parameters(self, path=NOTEBOOK, old="", new=""):
        for cell in nbformat.read(path, as_version=4).cells:
            if "notebook_parameters" in cell.source:
                self.namespace["In"].append(cell.source)
                return config.notebook_parameters(self.namespace)
            if cell.cell_type == "code":
                self.cell(cell.source.replace(old, new))


@pytest.fixture
def prepared(tmp_path):
    """The notebook as papermill's command line changes it; nothing is executed."""

    def prepare(*options):
        path = tmp_path / "out.ipynb"
        words = ["--prepare-only", *options, str(NOTEBOOK), str(path)]
        done = CliRunner().invoke(papermill, words)
        assert done.exit_code == 0, done.output
        return path

    return prepare


@pytest.mark.parametrize(
    "options, made",
    [
        ("-p name 007", "7"),
        ("-p name 1e3", "1000.0"),
        ("-p name None", "None"),
        ("-p name True", "True"),
        ("-y 'note: 12:30:00'", "45000"),
        ("-p note 0", "0"),
        ("-y 'note: [a,b]'", "['a', 'b']"),
        ("-p runs_dir 20251126", "20251126"),
        ("-p system 2025", "2025"),
        ("-p dataset None", "None"),
        ("-p workload fourcastnet -p initial_run 1", "1"),
        ("-p workload fourcastnet -p test_years 2019.0", "2019.0"),
    ],
)
def test_a_text_that_papermill_changed_is_refused_and_the_remedy_helps(
    prepared, options, made
):
    words = shlex.split(options)
    with pytest.raises(ValueError) as refusal:
        Kernel().parameters(prepared(*words))
    name, _, said = str(refusal.value).partition(": ")
    begin = f"papermill made {made} of it; give it with "
    assert name in options and said == f"{begin}-r {name} WORD, or in quotes"
    found = Kernel().parameters(prepared(*words[:-3], "-r", name, "007"))
    assert found[name] == "007"


def made(parameters):
    """The run of a notebook's parameters, as its further cells make it."""
    own = parameters.keys() - {"name", "note", "runs_dir"}
    return config.make(**{name: parameters[name] for name in own})


def test_opened_in_jupyterlab_it_writes_where_the_others_read(monkeypatch):
    monkeypatch.chdir(NOTEBOOK.parent)
    monkeypatch.setenv("ENERGYNN_RUNS", "/somewhere/runs")
    kernel = Kernel()
    kernel.parameters()
    kernel.namespace["get_ipython"] = MagicMock()
    kernel.cell(kernel.namespace["In"][-1])
    assert os.getcwd() == str(REPOSITORY)
    assert str(kernel.namespace["runs_dir"]) == "/somewhere/runs"


def test_what_papermill_gives_is_the_run_s_and_a_slip_is_refused(prepared):
    options = "-p workload fourcastnet -p test_years 2019 -p epochs 3 -p embed_dim 32 -p name a-1"
    found = Kernel().parameters(prepared(*options.split()))
    assert (found["epochs"], found["embed_dim"], found["name"]) == (3, 32, "a-1")
    run = made(found)
    assert run.test_years == "2019" and run.workload == "fourcastnet"
    found = Kernel().parameters(prepared("-p", "epoch", "3"))
    refused("epoch: not a parameter.*did you mean epochs", made, found)


def test_a_notebook_runs_again_in_its_kernel_with_what_was_changed(prepared):
    kernel = Kernel()
    gone = dict(old="workload", new="w")
    refused("^the cell of parameters is not found", kernel.parameters, **gone)
    kernel.cell("epoch = 7; mine = [1]; note = 3\nfrom pathlib import Path")
    words = ["-p", "workload", "fourcastnet", "-p", "depth", "1"]
    first = kernel.parameters(prepared(*words))
    assert (first["seed"], first["depth"]) == (0, 1)
    kernel.cell("record, field, labels, parameters = {}, 'metrics', {}, dict(a=1)")
    kernel.cell("for width in range(3): x: int = 4\nlearning_rate = 77.0")
    kernel.namespace["In"].append("this had (no effect")
    again = kernel.parameters(old="seed = 0", new="seed = 1")
    assert again["seed"] == 1 and again["workload"] == "resnet50"
    more = kernel.parameters(old="seed = 0", new="seed = 0\nepochs: int = 4\nepoch = 5")
    assert more["epochs"] == 4 and more["epoch"] == 5, (
        "also a slip, which is then refused"
    )
    assert again.keys() == Kernel().parameters().keys(), "as in a new kernel"
    new = "runs_dir = Path('a folder')"
    assert kernel.parameters(old="runs_dir = None", new=new)["runs_dir"] == Path(
        "a folder"
    )
    refused(
        "^note: papermill made 3 of it.*in quotes",
        kernel.parameters,
        old="note = None",
        new="note = 3",
    )
