"""A wheel built from the repository works where there is no checkout: in an empty folder, from
the command line.
"""

import json
import shutil
import sys
import zipfile

import pytest

from energynn.host.files import REPOSITORY
from tests.processes import printed, variables_without

pytestmark = pytest.mark.slow
NOT_READ = (".*", "build", "local", "measured", "imported", "__pycache__", "tests")
PIP = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy, because setuptools leaves its own files beside what it reads."""
    folder = tmp_path_factory.mktemp("wheel")
    ignored = shutil.ignore_patterns(*NOT_READ)
    copy = shutil.copytree(REPOSITORY, folder / "copy", ignore=ignored)
    words = "wheel --no-deps --no-index --no-build-isolation --wheel-dir".split()
    printed(*PIP, *words, folder, copy)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """Folder with the package, and an empty one to work in; what it depends on is this
    environment's.
    """
    target, here = map(tmp_path_factory.mktemp, ("installed", "empty"))
    printed(*PIP, "install", "--no-deps", "--no-index", "--target", target, wheel)
    environment = variables_without("ENERGYNN_") | {"PYTHONPATH": str(target)}

    def python(*words, **options):
        where = dict(cwd=here, env=environment)
        return printed(sys.executable, "-P", *words, **where, **options)

    program = "import energynn, energynn.host.files as files\n"
    program += "print(energynn.__file__, files.IS_CHECKOUT, files.REPOSITORY)"
    assert python("-c", program) == f"{target}/energynn/__init__.py False {here}\n"
    python.folder = here
    return python


def test_the_wheel_holds_every_module(wheel):
    held = set(zipfile.ZipFile(wheel).namelist())
    modules = {
        str(path.relative_to(REPOSITORY))
        for path in (REPOSITORY / "energynn").rglob("*.py")
    }
    assert modules <= held, "pyproject.toml lists the packages"
    assert "energynn/shipped/data_manifests/imagenet/SHA256SUMS" not in held, (
        "140 MB that are made anew"
    )


@pytest.fixture(scope="module")
def measured(installed):
    """The record of a command that was measured in the empty folder."""
    sleep = [sys.executable, "-c", "import time; time.sleep(3)"]
    return json.loads(
        installed("-m", "energynn.cli", "measure", "--json", "--", *sleep)
    )


def test_a_measured_command_leaves_its_record_below_the_working_folder(
    installed, measured
):
    assert measured["status"] == "finished"
    assert not measured.get("git_commit") and not measured.get("git_dirty")
    folder = installed.folder / "runs" / "measured" / measured["run_id"]
    assert (folder / "record.json").is_file()


@pytest.mark.parametrize(
    "words, expected",
    [
        ("check", "records below runs: 1, valid: 1, faults: 0"),
        ("study show smoke", "10 runs"),
        (
            "submit kick-the-tires --system horeka-a100 --dry-run --scripts",
            "cd {folder}",
        ),
        (
            "data verify",
            "photographs: every file of its manifest is there and has its SHA-256 "
            "({folder}/build/data",
        ),
    ],
)
def test_a_command_works_in_an_empty_folder(installed, measured, words, expected):
    said = installed("-m", "energynn.cli", *words.split())
    assert expected.format(folder=installed.folder) in said


def test_runs_are_loaded_and_a_plan_is_made_in_an_empty_folder_without_torch(installed):
    program = "import sys, energynn; runs = energynn.load()\n"
    program += "print(runs.sizes['run'], 'torch' in sys.modules)"
    number, has_torch = installed("-c", program).split()
    assert int(number) > 20 and has_torch == "False"
    plan = "forecast plan --workload resnet50 --system horeka-a100 --deadline-h 3 --devices 64"
    assert "kWh" in installed("-m", "energynn.cli", *plan.split())


def test_remedies_are_those_of_an_installed_package(installed):
    """Where there is no checkout there is no make."""
    said = installed("-c", "from energynn.host import files; print(files.INSTALLATION)")
    assert said == "`pip install 'energynn[train]'`\n"


def test_doctor_works_in_an_empty_folder(installed):
    # without a sensor that measures it says 1
    program = "import sys; from energynn import cli; sys.exit(cli.main(['doctor', '--json']) > 1)"
    assert json.loads(installed("-c", program))
    assert {path.name for path in installed.folder.iterdir()} <= {"runs", "build"}


def test_a_study_of_embedded_data_is_made_in_an_empty_folder(installed):
    pytest.importorskip("torch")
    study = (
        "from energynn.experiment import config\n\ndef study(system):\n"
        "    sizes = {'embed_dim': 32, 'depth': 1}\n"
        "    return [config.make('fourcastnet', system=system, epochs=400, **sizes)]\n"
    )
    (installed.folder / "mine.py").write_text(study)
    said = installed("-m", "energynn.cli", "study", "run", "mine.py", timeout=700)
    assert "1 of 1 runs have a valid record" in said
    (run_dir,) = (installed.folder / "runs" / "local").glob("fourcastnet-*")
    assert (run_dir / "notebook.ipynb").is_file()
    assert "faults: 0" in installed("-m", "energynn.cli", "check", "runs")
