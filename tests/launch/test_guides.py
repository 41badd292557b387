"""Every command of README.md and docs/*.md is typed, in order, in the place that they name.

A command is a line of a block, or a code span that begins with a program. One with dots leaves
something out, and is none.
"""

import os
import re
import shutil
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from energynn import records
from energynn.analysis import results
from energynn.host.files import REPOSITORY
from tests import powercap
from tests.conftest import write_perun_hdf5
from tests.jpegs import as_jpegs
from tests.processes import ended, variables_without
from tests.run_files import text_of

GUIDES = ["README.md"]
SHORT_GUIDES = ("README.md", "docs/data.md", "docs/gpu.md", "docs/measure.md")
GUIDES += sorted(f"docs/{path.name}" for path in (REPOSITORY / "docs").glob("*.md"))
PROGRAMS = "energynn|make|papermill|pip|python|sudo|grep|pgrep|source|export"
# indented by four spaces, blank lines within it included; fenced, with its answer; in a sentence
STEP = re.compile(
    r"(?<=\n\n)(?P<block>(?: {4}.*\n|\n(?= {4}))+)"
    r"|^```text\n\$ (?P<typed>.*)\n(?P<answer>(?s:.*?))^```"
    rf"|`(?P<span>(?:{PROGRAMS}) (?!.*\.\.\.)[^`\n]+)`",
    re.MULTILINE,
)

REPRODUCED = "`make reproduce` types it after its runs"
LONG = "takes ten minutes and more"
GPU = (
    "needs a GPU; tests/test_examples.py and tests/test_gpu_study.py have imagined ones"
)
FETCHED = "fetches packages; tests/test_wheel.py installs without"
DATA = "needs ImageNet or ERA5; tests/data describes and prepares parts of them"
# beginnings of commands that are not typed, and why
NOT_TYPED = {
    "make reproduce": LONG,
    "make test": "is this",
    "make coverage": LONG,
    "make bench": LONG,
    "python -m tests.bench peers": LONG,
    "energynn forecast predict --held-out": REPRODUCED,
    "energynn check --reference": REPRODUCED,
    "python -m energynn.analysis": "`make paper` types it",
    "make lab": "is a server, which does not end",
    "make env": FETCHED,
    "make train-env": FETCHED,
    "make WHEELHOUSE": FETCHED,
    "make wheelhouse": FETCHED,
    "make gpu-carry": FETCHED,
    "pip install -e": FETCHED,
    "make gpu-minutes": GPU,
    "make gpu-study": GPU,
    "sudo nvidia-smi": GPU,
    "energynn run -p device gpu": GPU,
    "energynn data describe imagenet": DATA,
    "energynn data verify imagenet": DATA,
    "energynn data imagenet": DATA,
    "energynn data era5": DATA,
    "energynn data describe era5": DATA,
    "export ENERGYNN_ERA5": DATA,
    "energynn run workload=fourcastnet dataset=era5": DATA,
    "source ~/conda": "is a site's own",
}
# what several guides name, and one types for all
TYPED_BY = {
    "make paper": "docs/paper.md",
    "grep -A": "docs/paper.md",
    "energynn run -p local_batch_size 8,16,32": "docs/questions.md",
}
# what a person has, and a guide says in words, before a command and after it
SLEEP = "energynn measure --name other -- sleep 3; energynn measure -- sleep 3"
OWN_RUNS = "energynn forecast fit --workload resnet50 --system horeka-a100 --out build/fit.json; "
OWN_RUNS += "energynn forecast simulate R4 --fit build/fit.json --out runs"
BEFORE = {
    "energynn data describe my-": "mkdir -p build/data; cp -r $OWN/* build/data",
    "energynn measure --name a": "energynn measure --name b -- python train.py 8",
    "energynn compare RUN RUN": SLEEP,
    "energynn forecast fit --runs-dir": OWN_RUNS,
    "energynn doctor --system my_cluster.toml": "energynn cancel --all",
}
AFTER = {
    "pip install .": "(cd /; PYTHONPATH=$PIP_TARGET $PIP_TARGET/bin/energynn --version)",
    "pip install build/wheel": "mkdir empty; cd empty; export PYTHONPATH=$PIP_TARGET",
    # .venv has it
    "export PYTHONPATH=examples": "export PYTHONPATH=$PYTHONPATH:$CHECKOUT",
}
WORDS = {
    "RUN RUN": "other last",
    "RUN": "last",
    "COMMAND": "sleep 1",
    "FILE": "train.hdf5",
}
# the status that a guide promises, where it is not 0
STATUS = {
    "energynn doctor --system": "0",
    "energynn doctor": "1",  # a CPU's sensor is simulated
    "energynn submit paper-a100 --system horeka-a100 --max-gpu-hours": "2",  # no ImageNet
    "energynn submit R2 --system horeka-a100": "2",
}


def of(table, step):
    """What a table has of a command by its beginning; "" for none."""
    return next((table[name] for name in table if step.startswith(name)), "")


def is_python(block):
    if re.match(rf"({PROGRAMS}) ", block):  # of which some are expressions, too
        return False
    try:
        compile(block, "block", "exec")
    except SyntaxError:
        return False
    return True


def steps(guide):
    """The commands and Python programs of a guide, in its order."""
    found = []
    for step in STEP.finditer((REPOSITORY / guide).read_text()):
        block = textwrap.dedent(step["block"] or "").strip("\n")
        if is_python(block) or block.startswith("#!"):
            found.append(block)
        else:
            found += [re.split(" +# ", line)[0] for line in block.splitlines()]
        found += [step["typed"], step["span"]]
    return list(filter(None, found))


def typed(step):
    """What a person types for a step."""
    if step.startswith("#!"):
        return f"cat > job.sh <<'END'\n{step}\nEND\nsbatch --wait job.sh"
    if "def study(" in step:
        return f"cat > my_study.py <<'END'\n{step}\nEND"
    if "class Config(" in step:
        copied = "mkdir mywork; cp energynn/train/resnet50.py mywork/resnet50_adam.py"
        words = "PYTHONPATH=mywork:$PYTHONPATH energynn run workload=resnet50_adam warmup_epochs=0"
        return f"{copied}\ncat >> mywork/resnet50_adam.py <<'END'\n{step}\nEND\n{words}"
    if is_python(step):
        return f"python - <<'END'\nimport energynn\n{step}\nEND"
    command = step
    for word, meaning in WORDS.items():
        command = re.sub(rf"\b{word}\b", meaning, command)
    return f"status=0; {command} || status=$?; test $status = {of(STATUS, step) or 0}"


@pytest.fixture
def checkout(tmp_path):
    """What git brings, with an environment, and what a person has beside it."""
    here, own = tmp_path / "checkout", tmp_path / "own"
    never = (".*", "build", "local", "measured", "imported", "__pycache__")
    shutil.copytree(REPOSITORY, here, ignore=shutil.ignore_patterns(*never))
    (here / ".venv").symlink_to(Path(sys.executable).parent.parent)
    for name in ("train.py", "my_trainer.py"):
        (here / name).write_text("import time\n\ntime.sleep(3)\n")
    write_perun_hdf5(here / "train.hdf5", 20.0, 30.0)
    cluster = text_of("systems/slurm.toml")
    for old, new in (
        ("devices_per_node = 4", "devices_per_node = 1"),
        ("sockets_per_node = 2", "sockets_per_node = 1"),
        ('"--gres=gpu:4", ', ""),
        (', "--cpus-per-task=8"', ""),
    ):
        assert old in cluster
        cluster = cluster.replace(old, new)
    (here / "my_cluster.toml").write_text(cluster)
    (own / "my-points").mkdir(parents=True)
    x = np.linspace(-1, 1, 1000)
    points = np.column_stack([x, 3 * x])
    np.savetxt(own / "my-points" / "points.csv", points, delimiter=",")
    for split, count in (("train", 40), ("val", 8)):
        for name in ("coffee", "rocket"):
            folder = own / "my-images" / split / name
            folder.mkdir(parents=True)
            for number, data in enumerate(as_jpegs(name, count, (160, 120))):
                (folder / f"{number}.jpg").write_bytes(data)
    return here


@pytest.fixture
def environment(request, checkout):
    """Variables of a person's shell; pip is without a network, sensors are simulated."""
    folder = checkout.parent
    guide = request.getfixturevalue("guide")
    variables = variables_without("ENERGYNN_RUNS", "MAKE", "SLURM_")
    if guide == "docs/cluster.md":
        variables = request.getfixturevalue("cluster").environment
    with powercap.constant_power(folder / "powercap", 300.0):
        yield variables | {
            "PATH": f"{checkout}/.venv/bin{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(checkout),
            "CHECKOUT": str(checkout),
            "OWN": str(folder / "own"),
            "HOME": str(folder),
            "ENERGYNN_POWERCAP": str(folder / "powercap"),
            "PIP_NO_INDEX": "1",
            "PIP_NO_DEPS": "1",
            "PIP_NO_BUILD_ISOLATION": "0",  # pip's word for: none
            "PIP_TARGET": str(folder / "installed"),
        }


def check_own_training(runs_dir, said):
    """Own images, own data and an own optimizer train, and three commands are forecast."""
    made = records.read_all(runs_dir)
    made = {record.workload: record for record in made if record.system == "local"}
    assert made.keys() == {"resnet50", "resnet50_adam", "straight_line"}
    assert all(record.valid for record in made.values())
    assert made["resnet50"].dataset_samples == 80
    line = made["straight_line"]
    assert line.metrics["slope"] == pytest.approx(3, abs=0.01)
    assert (line.devices, len(line.history)) == (2, line.config["epochs"])
    assert line.optimizer_steps * 20 == line.config["epochs"] * 1000
    assert records.check(runs_dir) == []
    runs = results.load_records(runs_dir)
    assert {*made} <= {*runs["workload"].values}
    answer = said.partition("forecast plan --workload mine")[2]
    assert "fastest" in answer and "3 simulated runs" in answer and "kWh" in answer


def check_batch_script(runs_dir, _said):
    (path,) = runs_dir.glob("my_cluster/resnet50-photographs-n2-lbs16-*/record.json")
    record = records.read_record_if_any(path.parent)
    assert record.valid and record.nodes == 2, record.invalid_reasons


CHECKS = {
    "docs/own.md": check_own_training,
    "docs/cluster.md": check_batch_script,
}


def masked(text):
    """A text without its numbers, and without what it says of sensors."""
    return re.sub(r"[\d.]+|estimated|simulated|measured", "#", text)


def marked(guide):
    """Minutes long are those that make many runs, or the paper, or wait for Slurm."""
    mark = pytest.mark.slow if guide in SHORT_GUIDES else pytest.mark.nightly
    return pytest.param(guide, marks=mark)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("guide", [marked(guide) for guide in GUIDES])
def test_a_guide_is_true(checkout, environment, guide):
    script = ["exec 2>&1", "set -e", "PS4='+ $SECONDS s: '", "set -x"]
    for step in steps(guide):
        if not of(NOT_TYPED, step) and (of(TYPED_BY, step) or guide) == guide:
            script += [of(BEFORE, step), typed(step), of(AFTER, step)]
    done = ended("bash", "-c", "\n".join(script), cwd=checkout, env=environment)
    assert done.returncode == 0, done.stdout
    for shown in STEP.finditer(text_of(guide)):
        same = str if "forecast" in (shown["typed"] or "") else masked
        for line in (shown["answer"] or "").splitlines():
            assert "  CPU: " in line or same(line) in same(done.stdout), line
    if guide in CHECKS:
        CHECKS[guide](checkout / "runs", done.stdout)


def test_what_is_said_of_commands_is_said_of_some_in_the_guides():
    there = "".join(f"\n{step}" for guide in GUIDES for step in steps(guide))
    for name in (*NOT_TYPED, *TYPED_BY, *BEFORE, *AFTER, *STATUS):
        assert f"\n{name}" in there, name
