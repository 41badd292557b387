"""What each launcher tells a rank of its place: environments as they were recorded.

Recorded on the private Slurm 22.05 of tests/launch with two nodes, on which mpi4py found the
world's size and rank as given: MPICH 5.0.2, Open MPI 5.0.11, Open MPI 4.1.4, PMIx 4.2.2 in Slurm.
"""

import os
import subprocess
import sys

import pytest

from energynn.host import launchers
from energynn.host.files import REPOSITORY
from energynn.launch import supervise
from energynn.measure import machine
from tests.processes import write_program

# mpirun starts a process of its own on each node by srun, and that the ranks
OF_NODE = "SLURM_STEP_ID=0 SLURM_NTASKS=2 SLURM_STEP_TASKS_PER_NODE=1(x2) "
OF_NODE += "SLURM_LOCALID=0 SLURM_PROCID=1 "
RECORDED = {
    "srun --mpi=pmi2, MPICH": (OF_NODE + "PMI_FD=11 PMI_RANK=1 PMI_SIZE=2", 1, 2, 1),
    "srun --mpi=pmix, Open MPI 4 and 5": (
        "SLURM_STEP_ID=0 SLURM_NTASKS=4 SLURM_STEP_TASKS_PER_NODE=2(x2) SLURM_PROCID=3 "
        "SLURM_LOCALID=1 PMIX_NAMESPACE=slurm.pmix.5.0 PMIX_RANK=3",
        3,
        4,
        2,
    ),
    "mpirun of Open MPI 5 in a job": (
        OF_NODE + "PMIX_NAMESPACE=prterun-vm-10686@1 PMIX_RANK=3 "
        "OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_SIZE=2 OMPI_COMM_WORLD_RANK=3 "
        "OMPI_COMM_WORLD_LOCAL_RANK=1",
        3,
        4,
        2,
    ),
    "mpirun of MPICH in a job": (
        OF_NODE + "PMI_FD=6 PMI_RANK=3 PMI_SIZE=4 MPI_LOCALNRANKS=2 MPI_LOCALRANKID=1",
        3,
        4,
        2,
    ),
    # whose ranks on one host nobody tells: all may be there
    "Cray's": ("PMI_RANK=3 PMI_SIZE=4", 3, 4, 4),
}


@pytest.mark.parametrize(
    "variables, rank, size, ranks_of_host", RECORDED.values(), ids=RECORDED
)
def test_a_launcher_s_variables_tell_rank_size_and_ranks_of_the_host(
    around, variables, rank, size, ranks_of_host
):
    around(variables)
    assert launchers.rank_and_size() == (rank, size)
    assert launchers.count_ranks_of_this_host(size) == ranks_of_host
    assert launchers.own_launcher() in launchers.MPI_LAUNCHERS


def test_srun_calls_the_python_of_a_container_and_the_record_names_it(
    around, monkeypatch, tmp_path
):
    """Programs named apptainer and srun that only execute what they are given stand for the real
    ones.
    """
    write_program(tmp_path / "apptainer", 'shift 4\nexec "$@"')
    srun = f'echo "$*" >> {tmp_path}/sruns\nshift 3\nexec "$@"'
    write_program(tmp_path / "srun", srun)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    options = f"exec --nv --bind /project {sys.executable}"
    monkeypatch.setenv(launchers.SRUN_VARIABLE, "--mpi=pmix")
    intent = {
        "launcher": "srun",
        "devices": 2,
        "device_kind": "cpu core",
        "config": {"perun_sampling_period_s": 1.0},
    }
    alone = supervise.ranks_command(tmp_path, intent)
    assert alone[alone.index("--mpi=pmix") + 1] == sys.executable
    monkeypatch.setenv("A_DISK", str(tmp_path))
    monkeypatch.setenv(launchers.PYTHON_VARIABLE, f"$A_DISK/apptainer {options}")
    ranks = supervise.ranks_command(tmp_path, intent)
    begin = ranks.index("--mpi=pmix") + 1
    words = [f"{tmp_path}/apptainer", *options.split()]
    assert ranks[begin:] == words + alone[alone.index(sys.executable) + 1 :]
    assert launchers.find_launcher(8) == "srun"  # perun is in there, if not here
    assert machine.package_versions()["container"].endswith(options)


def test_a_rank_writes_each_line_by_one_call():
    """So that mpirun can label it, and none is torn."""
    program = "import sys\nfrom energynn.host import launchers\nlaunchers.buffer_output_by_line()\n"
    program += "print('a', 1)\nprint('b', 2, file=sys.stderr)"
    reading, writing = os.pipe2(os.O_DIRECT)  # each read gives one write
    variables = os.environ | {"PYTHONUNBUFFERED": "1"}
    pipes = dict(stdout=writing, stderr=writing, cwd=REPOSITORY, env=variables)
    subprocess.run([sys.executable, "-c", program], check=True, **pipes)
    os.close(writing)
    assert [os.read(reading, 2**16), os.read(reading, 2**16)] == [b"a 1\n", b"b 2\n"]
