"""What each launcher tells a rank of its place: environments as they were recorded, and the Python of a container.

Recorded on the private Slurm 22.05 of tests/cluster with two nodes, on which mpi4py found the world's size and rank as
given: MPICH 5.0.2, Open MPI 5.0.11 from PyPI, Open MPI 4.1.4 of Debian 12, PMIx 4.2.2 in Slurm.
"""

import os
import re
import subprocess
import sys

import pytest

from energynn import launchers
from energynn.cluster import systems
from energynn.files import REPOSITORY
from energynn.launch import supervise
from energynn.measure import machine
from tests.ranks import MPIRUN

STEP = {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_LOCALID": "0"}
OF_NODE = STEP | {"SLURM_PROCID": "1"}  # mpirun starts a process of its own on each node by srun, and that the ranks
RECORDED = {
    "srun --mpi=pmi2, MPICH": (STEP | {"SLURM_PROCID": "1", "PMI_FD": "11", "PMI_RANK": "1", "PMI_SIZE": "2"}, 1, 2, 1),
    "srun --mpi=pmix, Open MPI 4 and 5": (
        {
            "SLURM_STEP_ID": "0",
            "SLURM_NTASKS": "4",
            "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
            "SLURM_PROCID": "3",
            "SLURM_LOCALID": "1",
            "PMIX_NAMESPACE": "slurm.pmix.5.0",
            "PMIX_RANK": "3",
        },
        3,
        4,
        2,
    ),
    "mpirun of Open MPI 5 in a job": (
        OF_NODE
        | {
            "PMIX_NAMESPACE": "prterun-vm-10686@1",
            "PMIX_RANK": "3",
            "OMPI_COMM_WORLD_SIZE": "4",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            "OMPI_COMM_WORLD_RANK": "3",
            "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        },
        3,
        4,
        2,
    ),
    "mpirun of MPICH in a job": (
        OF_NODE | {"PMI_FD": "6", "PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1"},
        3,
        4,
        2,
    ),
}


@pytest.fixture
def environment(monkeypatch):
    """An environment without a launcher's variables, to which a test adds its own."""
    for name in list(os.environ):
        if name.startswith(("PMI", "OMPI_", "MPI_", "SLURM_", "ENERGYNN_")) or name.endswith(("RANK", "WORLD_SIZE")):
            monkeypatch.delenv(name)
    return monkeypatch


@pytest.mark.parametrize("variables, rank, size, ranks_of_host", RECORDED.values(), ids=RECORDED)
def test_a_launcher_s_variables_tell_rank_size_and_ranks_of_the_host(environment, variables, rank, size, ranks_of_host):
    for name, value in variables.items():
        environment.setenv(name, value)
    assert launchers.rank() == rank and launchers.rank_and_size() == (rank, size)
    assert launchers.ranks_of_this_host() == ranks_of_host and launchers.started_by_mpi()


def test_srun_calls_the_python_of_a_container_and_the_record_has_its_versions(environment, tmp_path):
    """Programs named apptainer and srun that only execute what they are given stand for the real ones."""
    fake, srun = tmp_path / "apptainer", tmp_path / "srun"
    fake.write_text('#!/bin/sh\nshift 4\nexec "$@"\n')
    srun.write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/sruns\nshift 3\nexec "$@"\n')
    for program in (fake, srun):
        program.chmod(0o755)
    environment.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    words = [str(fake), "exec", "--nv", "--bind", "/project", sys.executable]
    environment.setenv(launchers.SRUN_VARIABLE, "--mpi=pmix")
    intent = {"launcher": "srun", "devices": 2, "device_kind": "cpu core", "config": {"perun_sampling_period_s": 1.0}}
    alone = supervise.ranks_command(tmp_path, intent, "", "")
    assert alone[alone.index("--mpi=pmix") + 1] == sys.executable
    environment.setenv(launchers.PYTHON_VARIABLE, " ".join(words))
    command = supervise.ranks_command(tmp_path, intent, "", "")
    assert command[command.index("--mpi=pmix") + 1 :] == words + alone[alone.index(sys.executable) + 1 :]
    environment.setenv("A_DISK", str(tmp_path))
    environment.setenv(launchers.PYTHON_VARIABLE, "$A_DISK/apptainer " + " ".join(words[1:]))
    assert supervise.ranks_command(tmp_path, intent, "", "") == command
    assert launchers.find_launcher(8).name == "srun"  # perun is in there, if not here
    assert machine.versions()["container"].endswith(" ".join(words[1:]))


def test_what_the_guide_shows_of_a_system_is_taken(tmp_path):
    guide = (
        (REPOSITORY / "docs/cluster.md").read_text().split("## Ranks in a container")[1].split("## Nodes without")[0]
    )
    shown = re.findall(r"```toml\n(.*?)```", guide, flags=re.DOTALL)
    assert len(shown) >= 3
    for number, lines in enumerate(shown):
        file = tmp_path / f"shown-{number}.toml"
        file.write_text('scheduler = "slurm"\ndevices_per_node = 4\n' + lines)
        assert systems.site(str(file)).python


BEGIN = "import os, sys, threading\nfrom energynn import launchers\nlaunchers.label_lines()\n"


def labelled(program: str, label: str = "1", begin: str = BEGIN) -> tuple[list[str], int]:
    """What rank 3 gives to its pipe, by its writes, where it runs a program after ``label_lines``; and its status."""
    place = {"RANK": "3", "WORLD_SIZE": "12", "PYTHONUNBUFFERED": "1", launchers.LABELS_VARIABLE: label}
    reading, writing = os.pipe2(os.O_DIRECT)  # each read gives one write
    facts = dict(stdin=subprocess.DEVNULL, stdout=writing, stderr=writing, cwd=REPOSITORY, env=os.environ | place)
    started = subprocess.Popen([sys.executable, "-c", begin + program], **facts)
    os.close(writing)
    writes = []
    while given := os.read(reading, 2**16):
        writes.append(given.decode())
    os.close(reading)
    return writes, started.wait()


FORKS = """
import multiprocessing
worker = multiprocessing.get_context("fork").Process(target=print, args=("worker",), kwargs={"end": ""})
worker.start()
worker.join()
print("begun by the parent", end=" ")
if (child := os.fork()) == 0:
    print("child")
    os._exit(0)
os.waitpid(child, 0)
print("and ended")
"""
THREADS = """
turns = [threading.Semaphore(number == 0) for number in range(2)]
def speak(own, other, words):
    for word in words:
        own.acquire()
        sys.stdout.write(word)
        other.release()
threads = [threading.Thread(target=speak, args=(*turns, ["a", "b", "\\n"]))]
threads += [threading.Thread(target=speak, args=(*turns[::-1], ["1", "2", "\\n"]))]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""
PRINTED = {
    "parts of a line": ("print('a', 1); sys.stdout.write('b'); sys.stdout.write('c\\n')", ["a 1", "bc"]),
    "several lines at once": ("print('a\\n\\n  b\\nc', file=sys.stderr)", ["a", "", "  b", "c"]),
    "no end of the line": ("sys.stderr.write('b'); print('a', end='')", ["a", "b"]),
    "an end by os._exit": ("from energynn.train.distributed import end_the_world\n"
                           "sys.stderr.write('b'); print('a', end=''); end_the_world()", ["a", "b"]),
    "a progress bar": ("for n in range(3): print(f'\\r{n} %', end='', flush=True)\nprint()", ["0 %", "1 %", "2 %", ""]),
    "a bar that nobody flushes": ("for n in range(3): print(f'\\r{n} %', end='')\nprint()", ["0 %", "1 %", "2 %", ""]),
    "a thread that ends within a line": ("thread = threading.Thread(target=print, args='t', kwargs={'end': ''})\n"
                                         "thread.start(); thread.join(); print('a')", ["a", "t"]),
    "a long line": ("print('x' * 9000)", ["x" * 9000]),
    "forks": (FORKS, ["worker", "child", "begun by the parent and ended"]),
    "threads": (THREADS, ["ab", "12"]),
}  # fmt: skip


@pytest.mark.parametrize("program, lines", PRINTED.values(), ids=PRINTED)
def test_a_rank_labels_each_line_and_writes_it_whole(environment, program, lines):
    writes, _ = labelled(program)
    if lines[0].startswith("xxx"):  # a pipe takes a long line by pages
        writes = ["".join(writes)]
    assert writes == [f"3: {line}\n" for line in lines]


DOTS = """
import time
def dots(count):
    begun = time.process_time()
    for _ in range(count): print(".", end="")
    print()
    return time.process_time() - begun
few_s, many_s = dots(20_000), dots(200_000)
print(many_s / few_s)
"""


def test_dots_without_end_come_in_parts_and_each_takes_no_longer_than_the_one_before(environment):
    *dots, ratio = "".join(labelled(DOTS)[0]).replace("3: ", "").split()
    assert len("".join(dots)) == 220_000 and max(map(len, dots)) < 20_000 and float(ratio) < 30


def test_what_ends_a_rank_is_labelled_and_reads_as_before(environment):
    program = "of_thread = threading.Thread(target=lambda: 1 / 0)\nof_thread.start(); of_thread.join()\n"
    program += "raise OSError('full')"
    writes, status = labelled(program)
    plain, plain_status = labelled(program, label="")
    text = "".join(writes)
    assert status == plain_status == 1 and all(re.fullmatch("3: .*\n", written) for written in writes)
    number = r"0x\w+"
    unlabelled = re.sub("(?m)^3: ", "", text)
    assert re.sub(number, "", unlabelled) == re.sub(number, "", "".join(plain)) and text.endswith("3: OSError: full\n")


def test_what_perun_and_our_sampler_say_is_labelled_but_not_a_word_between_programs(environment):
    of_perun = "import logging, perun, sys\nperun.register_live_callback = lambda *given: None  # needs a run\n"
    of_perun += "log = logging.getLogger('perun'); log.addHandler(logging.StreamHandler(sys.stdout))\n"
    of_perun += "from energynn.measure import perun_adapter; perun_adapter.attach()\nlog.error('of perun')"
    program = "from types import SimpleNamespace\nfrom energynn.measure import sampler_process, sensors\n"
    program += "mute = SimpleNamespace(start=lambda: sensors._say('no power'), stop=lambda: print('ended'))\n"
    program += "sampler_process.perun_adapter.make_sampler = lambda folder: mute\nsampler_process.sample('')"
    assert labelled(of_perun, begin="")[0] == ["3: of perun\n"]
    assert "".join(labelled(program, begin="")[0]) == "3: energynn: no power\nready\n3: ended\n"


def test_ranks_label_their_lines_where_there_are_several_and_srun_does_not(environment, tmp_path):
    intent = {"devices": 2, "device_kind": "cpu core", "config": {"threads_per_device": 1}}
    assert supervise.rank_environment(tmp_path, intent)[launchers.LABELS_VARIABLE] == "1"
    assert supervise.rank_environment(tmp_path, intent | {"devices": 1})[launchers.LABELS_VARIABLE] == ""
    environment.setenv(launchers.SRUN_VARIABLE, "")
    assert supervise.rank_environment(tmp_path, intent)[launchers.LABELS_VARIABLE] == ""


BURST = """
import sys
from energynn import launchers
launchers.label_lines()
for number in range(3000):
    print(launchers.rank(), number, "x" * (number % 150), file=(sys.stdout, sys.stderr)[number % 2])
"""


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["mpirun", "torchrun"])
def test_ranks_that_print_at_the_same_time_tear_no_line(environment, tmp_path, launcher):
    script = tmp_path / "burst.py"
    script.write_text(BURST)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    if launcher == "mpirun" and not MPIRUN:
        pytest.skip("no mpirun")
    if launcher == "mpirun":
        command = [*launchers.mpi_start(*launchers.find_mpi(), 2), sys.executable, str(script)]
    variables = {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", launchers.LABELS_VARIABLE: "1"}
    variables = launchers.mpi_environment() | variables | {"PYTHONPATH": str(REPOSITORY)}
    facts = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines = subprocess.run(command, env=variables, **facts).stdout.splitlines()
    expected = [f"{rank}: {rank} {number} {'x' * (number % 150)}" for number in range(3000) for rank in range(2)]
    assert sorted(lines) == sorted(expected)
