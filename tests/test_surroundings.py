"""What stands around a process of ours and is not its own: files of the working folder, variables
of a shell, a pod or a step of Slurm, kernels, and places that are too small.
"""

import os
import re
import subprocess
import sys

import nbformat
import pytest

from energynn import config, files, launchers, processes, records
from energynn.cluster import local
from energynn.launch import start
from tests.processes import energynn

# names that our own processes import
STRANGERS = (
    "random",
    "socket",
    "msgspec",
    "numpy",
    "energynn",
    "pynvml",
    "perun",
    "psutil",
)
POD = "RANK=0 LOCAL_RANK=0 WORLD_SIZE=2 MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 PET_NNODES=2 "
POD += "PMI_RANK=1 PMI_SIZE=3 PMI_FD=9 OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2 PMIX_RANK=0"
STEP = "SLURM_STEP_ID=0 SLURM_PROCID=0 SLURM_NTASKS=4 SLURM_JOB_ID=7 SLURM_NODELIST=nowhere"
TINY = "workload=fourcastnet embed_dim=32 depth=1 step_period_s=0.02".split()


def variables(text):
    return dict(word.split("=", 1) for word in text.split())


@pytest.fixture
def clean(monkeypatch):
    """An environment without a launcher's variables."""
    for name in list(os.environ):
        if launchers.TOLD.fullmatch(name) or name.startswith("SLURM_"):
            monkeypatch.delenv(name)
    return monkeypatch


@pytest.fixture
def strange(tmp_path):
    """A working folder whose files have the names of modules, and end who imports them."""
    folder = tmp_path / "strange"
    (folder / "psutil").mkdir(parents=True)
    for name in STRANGERS:
        path = folder / (f"{name}/__init__.py" if name == "psutil" else f"{name}.py")
        path.write_text(f"raise SystemExit('a stranger is {name}')")
    return folder


# ------------------------------ the working folder


def test_a_strange_folder_is_measured_in_and_the_command_has_its_user_s_variables(
    strange,
):
    program = "import os, sys; print(os.environ.get('PYTHONPATH'), sys.flags.safe_path)"
    words = [sys.executable, "-c", program]
    without = {name: os.environ[name] for name in os.environ if name != "PYTHONPATH"}
    command = [os.path.dirname(sys.executable) + "/energynn", "measure", "--out", "out"]
    done = subprocess.run(
        [*command, "--", *words],
        cwd=strange,
        env=without,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "stranger" not in done.stderr, done.stderr
    assert done.stdout.startswith("None False\n")
    assert records.read(strange / "out")["status"] == "finished"


@pytest.mark.parametrize(
    "named, stays",
    [
        ("", []),
        (":", []),
        ("/a::/b:", ["/a", "/b"]),
        ("mine:/a:.", ["{here}/mine", "/a", "{here}"]),
    ],
)
def test_what_a_user_names_stays_and_an_empty_entry_does_not(
    tmp_path, monkeypatch, named, stays
):
    """An own workload's folder is often named by a relative path, as in docs/own.md."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", named)
    entries = processes.own_environment()["PYTHONPATH"].split(":")
    assert entries == [
        str(files.PACKAGE.parent),
        *(each.format(here=tmp_path) for each in stays),
    ]


@pytest.mark.slow
def test_a_study_in_a_strange_folder_with_another_kernel_in_a_pod(strange, tmp_path):
    kernel = tmp_path / "jupyter" / "kernels" / "python3" / "kernel.json"
    kernel.parent.mkdir(parents=True)
    other = {"argv": ["/bin/false", "{connection_file}"], "display_name": "x"}
    files.write_json(kernel, other | {"language": "python"})
    around = variables(f"{POD} {STEP} JUPYTER_PATH={tmp_path}/jupyter")
    runs_dir = tmp_path / "runs"
    command = [os.path.dirname(sys.executable) + "/energynn", "run", "epochs=6"]
    done = subprocess.run(
        [*command, *TINY, "devices=1,2", "--runs-dir", runs_dir],
        cwd=strange,
        env=os.environ | around,
        capture_output=True,
        text=True,
    )
    made = [records.read(path.parent) for path in runs_dir.glob("local/*/record.json")]
    assert [record["status"] for record in made] == ["finished"] * 2, done.stderr
    assert "stranger" not in done.stderr + done.stdout


@pytest.mark.slow
def test_a_notebook_is_executed_by_the_python_that_starts_it(strange, tmp_path):
    """The other kernel first, as a site's module names it; and the remedy for plain papermill."""
    program = "import sys, random; print(sys.executable, sys.flags.safe_path)"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(program)])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "x"}
    nbformat.write(notebook, tmp_path / "in.ipynb")
    words = [
        sys.executable,
        "-P",
        "-m",
        "papermill",
        "--cwd",
        str(strange),
        "--log-output",
    ]
    words += [str(tmp_path / "in.ipynb"), str(tmp_path / "out.ipynb")]
    status, last_line = local.execute(words, tmp_path / "run")
    assert status == 0, last_line
    (cell,) = nbformat.read(tmp_path / "out.ipynb", 4).cells
    assert cell.outputs[0].text == f"{sys.executable} True\n"


# ------------------------------ launchers


def test_our_launcher_hears_nothing_of_another_and_the_user_s_choices_stay(clean):
    kept = variables(
        "OMPI_MCA_btl=tcp PMIX_MCA_x=1 NCCL_DEBUG=INFO MPICH_X=1 RANKED=1 SLURMY=1"
    )
    for name, value in (variables(f"{POD} {STEP}") | kept).items():
        clean.setenv(name, value)
    environment = launchers.mpi_environment()
    assert not (variables(f"{POD} {STEP}").keys() & environment.keys())
    assert kept.items() <= environment.items()
    for name, value in (("SLURM_NNODES", "2"), (launchers.SRUN_VARIABLE, "--mpi=pmi2")):
        with pytest.MonkeyPatch.context() as patched:
            patched.setenv(name, value)  # whose mpirun, or srun, asks Slurm where
            environment = launchers.mpi_environment()
            assert "SLURM_NODELIST" in environment and "RANK" not in environment


@pytest.mark.parametrize(
    "around, place",
    [
        (STEP, (0, 4)),
        (f"{STEP} SLURM_STEP_NUM_TASKS=4", (0, 4)),
        (f"{STEP} SLURM_STEP_NUM_TASKS=1", None),
        (f"{STEP} SLURM_STEP_NUM_TASKS=1 PMIX_RANK=0", None),
        ("SLURM_PROCID=0 SLURM_NTASKS=4", None),
        ("RANK=0 WORLD_SIZE=4", (0, 4)),
        ("RANK=0", None),
        ("RANK=4 WORLD_SIZE=4", "RANK=4, WORLD_SIZE=4"),
        ("RANK=-1 WORLD_SIZE=4", "RANK=-1, WORLD_SIZE=4"),
        ("PMI_RANK=x PMI_SIZE=2", "PMI_RANK=x, PMI_SIZE=2"),
        ("OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=", "OMPI_COMM_WORLD_SIZE="),
    ],
)
def test_a_place_among_ranks_is_told_refused_by_name_or_none(clean, around, place):
    for name, value in variables(around).items():
        clean.setenv(name, value)
    if isinstance(place, str):
        with pytest.raises(ValueError, match=f"{place}: is no place .*`unset "):
            launchers.rank_and_size()
    else:
        assert launchers.rank_and_size() == place


@pytest.mark.parametrize(
    "around", ["RANK=0 WORLD_SIZE=4", STEP, "PMI_RANK=2 PMI_SIZE=3"]
)
def test_measure_names_the_variables_of_a_launcher_and_the_remedy_helps(
    clean, tmp_path, around
):
    pairs = variables(around)
    words = ["measure", "--", "true"]
    done = energynn(*words, env=os.environ | pairs, cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    rank, size = re.search("unset (.*) (.*)`", done.stderr).groups()
    assert f"{rank}={pairs[rank]}, {size}={pairs[size]}: give --out" in done.stderr
    for name in pairs.keys() - {rank, size}:
        clean.setenv(name, pairs[name])
    assert launchers.rank_and_size() is None


@pytest.mark.parametrize(
    "around, words",
    [
        ("", None),
        (f"{STEP} SLURM_STEP_NUM_TASKS=1", None),
        (f"{STEP} SLURM_STEP_NUM_TASKS=1 SLURM_NNODES=2", "salloc or a batch script"),
        ("SLURM_JOB_ID=7 SLURM_NNODES=2", None),
        (f"{STEP} SLURM_STEP_NUM_TASKS=2", "2 tasks; start it by `srun -n 1`"),
        (f"{STEP} ENERGYNN_SRUN=--mpi=pmi2", "ENERGYNN_SRUN='--mpi=pmi2 --overlap'"),
        (f"{STEP} ENERGYNN_SRUN=", "ENERGYNN_SRUN='--overlap'"),
        (f"{STEP} ENERGYNN_SRUN=--overlap", None),
        (f"{STEP} SLURM_STEP_ID=4294967290 SLURM_NNODES=2", None),
    ],
)
def test_a_step_that_can_start_no_ranks_says_so_before_anything(
    clean, tmp_path, around, words
):
    for name, value in variables(around).items():
        clean.setenv(name, value)
    if words is None:
        return launchers.require_no_step()
    with pytest.raises(ValueError, match=re.escape(words)) as refusal:
        start.run(config.make(), tmp_path / "runs")
    assert "\n" not in str(refusal.value) and not list(tmp_path.iterdir())


def test_the_reason_has_the_last_line_of_the_launcher(tmp_path):
    """srun is a program that labels a rank's line and cannot go on."""
    says = "srun: Job 2 step creation temporarily disabled (Requested nodes are busy)"
    lines = f"echo '{says}'; echo '0: epoch 1'; echo; echo ----"
    (tmp_path / "srun").write_text(f"#!/bin/sh\n{lines}\nexit 1\n")
    (tmp_path / "srun").chmod(0o755)
    around = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        launchers.SRUN_VARIABLE: "--overlap",
    }
    done = energynn(
        "run", "--runs-dir", tmp_path / "runs", *TINY, env=os.environ | around
    )
    assert done.returncode == 1
    assert f'srun with status 1, its last line: "{says}"; no epoch' in done.stderr


# ------------------------------ too small


def prepare(tmp_path, folder, **parameters):
    """Prepare a run in a process whose TMPDIR is a folder; returns what it was refused for."""
    program = "import sys\nfrom pathlib import Path\nfrom energynn import config\n"
    program += "from energynn.launch import start\n"
    program += f"run = config.make(**{parameters!r})\n"
    program += f"try: start.prepare(run, Path({str(tmp_path / 'a' / 'b' / 'c')!r}))\n"
    program += "except ValueError as error: print(error)"
    words = [sys.executable, "-c", program]
    around = os.environ | {"TMPDIR": str(folder)}
    return subprocess.run(
        words, env=around, capture_output=True, text=True, check=True
    ).stdout


def test_a_tmpdir_too_long_for_a_worker_s_socket_is_refused_and_the_remedy_helps(
    tmp_path,
):
    longest = tmp_path / ("a" * (75 - len(str(tmp_path)) - 1))
    for folder, parameters, is_fit in (
        (longest, dict(loader_workers=1), True),
        (f"{longest}a", dict(loader_workers=1), False),
        (f"{longest}a", dict(loader_workers=0), True),
    ):
        os.makedirs(folder, exist_ok=True)
        said = prepare(tmp_path, folder, **parameters)
        assert (said == "") == is_fit, said
        if not is_fit:
            assert said.startswith("TMPDIR: ") and said.count("\n") == 1
            remedy = re.search("`export TMPDIR=(.*)`", said)[1]
            assert prepare(tmp_path, remedy, **parameters) == ""


@pytest.mark.parametrize(
    "parameters, need_MB",
    [
        (dict(workload="resnet50", image_size=224, local_batch_size=64), 154.1),
        (dict(image_size=224, local_batch_size=64, uint8_to_device=True), 38.5),
        (dict(workload="fourcastnet", dataset="synthetic", devices=2), 1327.1),
        (dict(image_size=224, image_loading="device"), 0),
        (dict(image_size=224, data_staging=False), 0),
    ],
)
def test_batches_that_do_not_fit_into_shared_memory_are_refused(
    monkeypatch, tmp_path, parameters, need_MB
):
    run = config.make(**parameters, loader_workers=2)
    found = os.statvfs_result([4096, 4096, *[0] * 8])

    def has(MB):
        blocks = round(MB * 1e6 / 4096)
        small = os.statvfs_result([*found[:4], blocks, *found[5:]])
        monkeypatch.setattr(start.os, "statvfs", lambda _: small)

    has(need_MB + 0.1)
    start.require_room_for_workers(run)
    has(need_MB - 0.1 if need_MB else 0)
    if need_MB:
        with pytest.raises(
            ValueError, match=f"may take {need_MB} MB.*loader_workers=0"
        ):
            start.require_room_for_workers(run)
        start.require_room_for_workers(config.replace(run, loader_workers=0))
    else:
        start.require_room_for_workers(run)
