"""What stands around a process of ours and is not its own: files of the working folder, variables
of a shell, a pod or a step of Slurm, kernels, and places that are too small.
"""

import os
import re
import sys
from pathlib import Path

import pytest

from energynn import records
from energynn.experiment import config
from energynn.host import files, launchers, processes
from energynn.launch import start
from tests.conftest import variables
from tests.processes import answer, ended, energynn, refused, write_program

# names that our own processes import
STRANGERS = "random socket msgspec numpy energynn pynvml perun psutil/__init__".split()
POD = "RANK=0 LOCAL_RANK=0 WORLD_SIZE=2 MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 PET_NNODES=2 "
POD += "PMI_RANK=1 PMI_SIZE=3 PMI_FD=9 OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2 PMIX_RANK=0"
STEP = "SLURM_STEP_ID=0 SLURM_PROCID=0 SLURM_NTASKS=4 SLURM_NODELIST=nowhere "
STEP += "PBS_NODEFILE=/n PE_HOSTFILE=/h"
ALONE = f"{STEP} SLURM_STEP_NUM_TASKS=1"
TINY = "workload=fourcastnet embed_dim=32 depth=1 step_period_s=0.02".split()


@pytest.fixture
def strange(tmp_path):
    """Run our program in a folder whose files are named as modules, and end who imports them."""
    folder = tmp_path / "strange"
    (folder / "psutil").mkdir(parents=True)
    for name in STRANGERS:
        (folder / f"{name}.py").write_text(f"raise SystemExit('a stranger: {name}')")
    program = Path(sys.executable).with_name("energynn")

    def run(*words, **more):
        done = ended(program, *words, cwd=folder, env=os.environ | more)
        assert "stranger" not in done.stdout + done.stderr
        return done

    return run


def test_a_strange_folder_is_measured_in_and_the_command_has_its_user_s_variables(
    strange, tmp_path
):
    program = "import os, sys; print(os.environ.get('PYTHONPATH'), sys.flags.safe_path)"
    words = ["measure", "--out", tmp_path / "out", "--", sys.executable, "-c", program]
    given = os.environ.get("PYTHONPATH")
    assert strange(*words).stdout.startswith(f"{given} False\n")
    assert records.read_record_if_any(tmp_path / "out").status == "finished"


def test_a_script_beside_a_checkout_finds_the_package_in_it(tmp_path):
    (tmp_path / "energynn").mkdir()
    script = tmp_path / "script.py"
    script.write_text("import energynn\nenergynn.table")
    assert not ended(sys.executable, script, cwd=tmp_path).returncode


@pytest.mark.slow
def test_a_study_in_a_strange_folder_with_another_kernel_in_a_pod(strange, tmp_path):
    kernel = tmp_path / "kernels" / "python3" / "kernel.json"
    kernel.parent.mkdir(parents=True)
    other = {"argv": ["/bin/false", "{connection_file}"], "display_name": "x"}
    files.write_json(kernel, other | {"language": "python"})
    words = ["run", *TINY, "epochs=6", "devices=1,2", "--runs-dir", tmp_path / "runs"]
    done = strange(*words, **variables(f"{POD} {ALONE} JUPYTER_PATH={tmp_path}"))
    made = records.read_all(tmp_path / "runs")
    assert [each.status for each in made] == ["finished"] * 2, done.stderr


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
    """The folder of a workload is named by a relative path in docs/own.md."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", named)
    monkeypatch.setenv("ENERGYNN_IMAGENET", ".")
    ours = processes.own_environment()
    assert ours["ENERGYNN_IMAGENET"] == str(tmp_path)
    first, *entries = ours["PYTHONPATH"].split(":")
    assert first == str(files.PACKAGE_FOLDER.parent)
    assert entries == [entry.format(here=tmp_path) for entry in stays]


def test_our_launcher_hears_nothing_of_another_and_the_user_s_choices_stay(around):
    kept = "OMPI_MCA_btl=tcp PMIX_MCA_x=1 NCCL_DEBUG=INFO RANKED=1 SLURMY=1"
    around(f"{POD} {STEP} {kept}")
    environment = launchers.mpi_environment()
    assert not variables(f"{POD} {STEP}").keys() & environment.keys()
    assert variables(kept).items() <= environment.items()
    around("SLURM_NNODES=2")  # whose mpirun asks Slurm where
    environment = launchers.mpi_environment()
    assert "SLURM_NODELIST" in environment and "RANK" not in environment


@pytest.mark.parametrize(
    "text, place",
    [
        (STEP, (0, 4)),
        (f"{STEP} SLURM_STEP_NUM_TASKS=4", (0, 4)),
        (ALONE, (0, 1)),
        (f"{ALONE} PMIX_RANK=0", (0, 1)),
        ("SLURM_PROCID=0 SLURM_NTASKS=4", (0, 1)),
        ("RANK=0", (0, 1)),
        ("RANK=4 WORLD_SIZE=4", "RANK=4, WORLD_SIZE=4"),
        ("PMI_RANK=x PMI_SIZE=2", "PMI_RANK=x, PMI_SIZE=2"),
        ("OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=", "OMPI_COMM_WORLD_SIZE="),
    ],
)
def test_a_place_among_ranks_is_told_refused_by_name_or_none(around, text, place):
    around(text)
    if isinstance(place, str):
        refused(f"{place}: is no place .*`unset ", launchers.rank_and_size)
    else:
        assert launchers.rank_and_size() == place


@pytest.mark.parametrize("text", ["RANK=0 WORLD_SIZE=4", STEP, "PMI_RANK=2 PMI_SIZE=3"])
def test_measure_names_a_launcher_s_variables_and_the_remedy_helps(
    around, monkeypatch, text
):
    around(text)
    line = answer("measure -- true", status=2)
    said = re.search(r"out: (\w+)=\d, (\w+)=\d: give --out.*`unset \1 \2` .*\n$", line)
    for name in said.groups():
        monkeypatch.delenv(name)
    assert launchers.rank_and_size() == (0, 1)


@pytest.mark.parametrize(
    "text, can_start",
    [
        (ALONE, True),
        ("SLURM_JOB_ID=7 SLURM_NNODES=2", True),
        (f"{ALONE} ENERGYNN_SRUN=--overlap", True),
        (f"{ALONE} SLURM_STEP_ID=4294967290 SLURM_NNODES=2", True),
        (f"{ALONE} SLURM_NNODES=2", False),
        (f"{STEP} SLURM_STEP_NUM_TASKS=2", False),
        (f"{ALONE} ENERGYNN_SRUN=--mpi=pmi2", False),
    ],
)
def test_a_step_that_can_start_no_ranks_says_so_before_anything(
    around, tmp_path, text, can_start
):
    around(text)
    if can_start:
        launchers.require_no_slurm_step()
    else:
        refused(
            "^this is a step of Slurm.*`srun -n 1",
            start.prepare_intent,
            config.make(),
            tmp_path / "runs" / "local" / "run",
        )


@pytest.mark.parametrize(
    "says, where",
    [
        ("srun: Job 2 step creation temporarily disabled", "its last line"),
        ("srun: error: n2: task 1: Killed", "log.txt says"),
    ],
)
def test_the_reason_has_a_line_of_the_launcher(around, tmp_path, says, where):
    """srun is a program that cannot go on, after a rank's line."""
    last = "echo 'srun: Force Terminated'; " * ("error" in says)
    lines = f"echo '{says}'; {last}echo '0: epoch 1'; echo; echo ----"
    write_program(tmp_path / "srun", f"{lines}\nexit 1")
    around(f"PATH={tmp_path}:{os.environ['PATH']} ENERGYNN_SRUN=--overlap")
    done = energynn(f"run --runs-dir {tmp_path}/runs", *TINY)
    assert f'srun with status 1, {where}: "{says}"; no epoch' in done.stderr


def test_a_tmpdir_too_long_for_a_socket_is_refused_and_the_remedy_helps(tmp_path):
    program = "import sys; from energynn.experiment import config\n"
    program += "from energynn.launch import start\n"
    program += "made = config.make(loader_workers=int(sys.argv[1]))\n"
    program += "start.require_room_for_workers(made)"

    def refusal(folder, workers=1):
        os.makedirs(folder, exist_ok=True)
        given = os.environ | {"TMPDIR": folder}
        return ended(sys.executable, "-c", program, workers, env=given).stderr

    longest = f"{tmp_path}/".ljust(75, "a")
    assert not refusal(longest) and not refusal(f"{longest}a", workers=0)
    said = refusal(f"{longest}a")
    assert not refusal(re.search("ValueError: TMPDIR: .*`export TMPDIR=(.*)`", said)[1])


IMAGES = dict(image_size=224, local_batch_size=64)


@pytest.mark.parametrize(
    "parameters, need_MB",
    [
        (IMAGES, 154.1),
        (dict(uint8_to_device=True, **IMAGES), 38.5),
        (dict(workload="fourcastnet", dataset="synthetic", devices=2), 1327.1),
    ],
)
def test_batches_that_do_not_fit_into_shared_memory_are_refused(
    monkeypatch, parameters, need_MB
):
    def require(free_MB, **more):
        found = os.statvfs_result([1, 1, 0, 0, round(free_MB * 1e6), *[0] * 5])
        monkeypatch.setattr(os, "statvfs", lambda _: found)
        run = config.make(**{**parameters, "loader_workers": 2, **more})
        start.require_room_for_workers(run)

    require(need_MB + 0.1)
    said = f"may take {need_MB} MB.*or take loader_workers=0"
    refused(said, require, need_MB - 0.1)
    require(0, loader_workers=0)
    require(0, data_staging=False)
