"""A start on many hosts, on this machine: calls on the shared folder, connections, and seconds.

``python -m tests.nodes run|measure [HOSTS] [RANKS]``. Each host has a name of its own (a UTS namespace), and up to four
of them share a network namespace on a bridge. Each rank is a real process. What they execute is the package's own: the
supervisor and its record, locks and elections, samplers, their clocks, the store, agreements; or all of `energynn measure`. Only torch's training is not there. Needs root, ip and unshare.
"""

import ctypes
import datetime
import gc
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path

from energynn.files import REPOSITORY
from tests import counted_files, powercap

TRAINING_S, STEP_S, PORT = 10.0, 0.2, 29500
NETWORKS = 16  # of more, the kernel's table of neighbours, which all namespaces share, takes no more
CLONE_NEWUTS, CLONE_NEWNET = 0x04000000, 0x40000000
NETWORK = "10.78.0"


def main(mode: str = "run", hosts: int = 64, ranks: int = 4) -> dict:
    """Make the hosts, start a run or a measured command on all of them, and tell what it took."""
    place = Path(tempfile.mkdtemp(prefix="nodes-"))
    writer = powercap.constant_power(place / "powercap", 300.0)
    try:
        make_networks()
        (place / "counts").mkdir()
        (place / "runs").mkdir()
        (place / "sitecustomize.py").write_text("import tests.counted_files\n")
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "PYTEST_"))}
        environment = clean | {
            "PYTHONPATH": f"{place}:{REPOSITORY}",
            "COUNTED_FOLDER": str(place / "runs"),
            "COUNTED_OUT": str(place / "counts"),
            "ENERGYNN_POWERCAP": str(place / "powercap"),
            "ENERGYNN_READY_LIMIT_S": "300",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "GLOO_SOCKET_IFNAME": "eth0",
        }
        # torch asks for the names of addresses, also as IPv6 has them; without an answer that takes 10 s.
        names = [f"{address(host)} {name(host)}\n::ffff:{address(host)} {name(host)}\n" for host in range(hosts)]
        (place / "hosts").write_text("127.0.0.1 localhost\n" + "".join(names))
        as_first = f'hostname {name(0)} && mount --bind {place}/hosts /etc/hosts && exec "$@"'
        first = ["ip", "netns", "exec", network(0), "unshare", "--uts", "--mount", "sh", "-c", as_first, "sh"]
        words = [sys.executable, "-m", "tests.nodes", f"first-{mode}", place, hosts, ranks]
        begun = time.monotonic()
        done = subprocess.run(
            [*first, *map(str, words)], env=environment, cwd=REPOSITORY, capture_output=True, text=True, timeout=900
        )
        ended = time.monotonic()
        told = [json.loads(path.read_text()) for path in place.glob("rank-*.json")]
        if done.returncode or len(told) != hosts * ranks:
            raise RuntimeError(
                f"{len(told)} ranks of {hosts * ranks} ended well:\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
            )
        return summary(place, told, begun, ended)
    finally:
        for number in range(NETWORKS):
            subprocess.run(["ip", "netns", "del", network(number)], capture_output=True)
        subprocess.run(["ip", "link", "del", "nodes"], capture_output=True)
        writer.kill()
        writer.wait()
        shutil.rmtree(place, ignore_errors=True)


def name(host: int) -> str:
    return f"node{host:02}"


def network(host: int) -> str:
    return f"nodes{host % NETWORKS}"


def address(host: int) -> str:
    return f"{NETWORK}.{host % NETWORKS + 1}"


def make_networks() -> None:
    """Namespaces, each with eth0 on one bridge, and a route to everywhere."""
    lines = ["link add nodes type bridge", "link set nodes up", f"addr add {NETWORK}.254/24 dev nodes"]
    for number in range(NETWORKS):
        space, link = network(number), f"{network(number)}v"
        lines += [f"netns add {space}", f"link add {link} type veth peer name eth0 netns {space}"]
        lines += [f"link set {link} master nodes up"]
    ip("-batch", "-", lines=lines)
    for number in range(NETWORKS):
        lines = [f"addr add {address(number)}/24 dev eth0", "link set eth0 up", "link set lo up"]
        ip("-n", network(number), "-batch", "-", lines=[*lines, f"route add default via {NETWORK}.254"])


def ip(*words: str, lines: list[str]) -> None:
    subprocess.run(["ip", *words], input="\n".join(lines), text=True, check=True, capture_output=True)


def summary(place: Path, told: list[dict], begun: float, ended: float) -> dict:
    """What the ranks, the samplers and the first host's supervisor have left."""
    starts, ends = max(rank["started"] for rank in told), min(rank["ended"] for rank in told)
    spans = {"before": Counter(), "training": Counter(), "after": Counter()}
    kinds, of_host = defaultdict(Counter), defaultdict(Counter)
    for path in (place / "counts").iterdir():
        host = path.name.rpartition("-")[0]
        for moment, kind in json.loads(path.read_text()):
            span = "before" if moment < starts else "training" if moment < ends else "after"
            spans[span][host] += 1
            kinds[span][kind] += 1
            of_host[host][kind] += 1
    result = {"seconds until training": round(starts - begun, 1), "seconds after it": round(ended - ends, 1)}
    for span, counts in spans.items():
        result[f"calls {span}: all hosts, median host, first host"] = [
            sum(counts.values()), sorted(counts.values())[len(counts) // 2] if counts else 0, counts[name(0)]
        ]  # fmt: skip
        result[f"calls {span} by kind"] = dict(kinds[span].most_common(6))
    result["calls/s of all hosts while training"] = round(sum(spans["training"].values()) / (ends - starts), 1)
    for what in ("sockets", "threads", "cpu_s"):
        values = [rank.get(what, 0) for rank in told]
        result[f"{what} of all ranks, of the one with most"] = [round(sum(values), 1), round(max(values), 1)]
    for what in told[0].get("steps", ()):
        result[f"s until {what}, last rank"] = round(max(rank["steps"][what] for rank in told) - begun, 1)
    for path in place.glob("runs/**/record.json"):
        record = json.loads(path.read_text())
        result["record"] = [
            record["status"],
            record["status_reason"][:200],
            record.get("nodes"),
            record["invalid_reasons"],
        ]
    return result


# ------------------------------------------------------------------------------------------- on the hosts


def first_run(place: Path, hosts: int, ranks: int) -> None:
    """What the launch notebook does on the first host: the intent, and the supervisor, whose launcher starts hosts."""
    from energynn import config
    from energynn.launch import start, supervise

    run_dir = place / "runs" / "local" / "simulated"
    start.begin(start.intend(config.make("fourcastnet", devices=hosts * ranks, sampling_period_s=0.5), run_dir))
    intent = json.loads((run_dir / "run.json").read_text())
    (run_dir / "run.json").write_text(json.dumps(intent | {"launcher": "torchrun"}))  # whose ranks start the samplers
    words = [sys.executable, "-m", "tests.nodes", "hosts-run", str(place), str(hosts), str(ranks)]
    supervise.ranks_command = lambda *_: words
    supervise.supervise(run_dir, os.getppid(), "", "")


def first_measure(place: Path, hosts: int, ranks: int) -> None:
    start_hosts("measure", place, hosts, ranks)


def start_hosts(mode: str, place: Path, hosts: int, ranks: int) -> None:
    """Fork the ranks of all hosts and wait for them; each host's own place is given as srun gives it."""
    import energynn.launch.command  # noqa: F401
    import energynn.train.rank  # noqa: F401

    gc.freeze()  # fewer pages are copied
    children = []
    for rank in range(hosts * ranks):
        if child := os.fork():
            children.append(child)
            continue
        status = 1
        try:
            be_on_host(rank // ranks)
            os.environ |= {
                "SLURM_PROCID": str(rank),
                "SLURM_NTASKS": str(hosts * ranks),
                "SLURM_LOCALID": str(rank % ranks),
                "SLURM_STEP_ID": "0",
                "SLURM_STEP_TASKS_PER_NODE": f"{ranks}(x{hosts})",
                "MASTER_ADDR": address(0),
                "MASTER_PORT": str(PORT),
            }
            told = {"run": rank_of_run, "measure": rank_of_measure}[mode](place)
            (place / f"rank-{rank}.json").write_text(json.dumps(told))
            counted_files.leave()
            status = 0
        except BaseException as error:
            print(f"rank {rank}: {type(error).__name__}: {error}", flush=True)
        finally:
            os._exit(status)
    statuses = [os.waitpid(child, 0)[1] for child in children]
    sys.exit(any(statuses))


def be_on_host(host: int) -> None:
    """Take the network of a host, and its name; each of its ranks has a UTS namespace with this name."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{network(host)}") as space:
        if libc.setns(space.fileno(), CLONE_NEWNET) or libc.unshare(CLONE_NEWUTS):
            raise OSError(ctypes.get_errno(), "setns or unshare")
    socket.sethostname(name(host))
    counted_files.calls.clear()


def own_facts() -> dict:
    """Sockets, threads and seconds of CPU of this process."""
    sockets = 0
    for number in os.listdir("/proc/self/fd"):
        try:
            sockets += os.readlink(f"/proc/self/fd/{number}").startswith("socket:")
        except OSError:
            continue
    return {"sockets": sockets, "threads": len(os.listdir("/proc/self/task")), "cpu_s": time.process_time()}


def rank_of_run(place: Path) -> dict:
    """What a rank of a run does around its training."""
    import torch

    from energynn.measure.sampler_process import start_sampler
    from energynn.measure.samples import Events, has_begun
    from energynn.train import distributed

    folder, steps = place / "runs" / "local" / "simulated", {}
    rank, size, local_rank, make_store = distributed._find()
    host = socket.gethostname()
    stop_sampler = start_sampler(folder, size, [])
    assert has_begun(folder, host)
    steps["sampling"] = time.monotonic()
    timeout = datetime.timedelta(seconds=300)
    store = make_store(timeout)
    steps["store"] = time.monotonic()
    world = distributed.World(rank, size, local_rank, torch.device("cpu"), host, store)
    distributed.require_own_gpu(world, f"GPU-{rank}")
    steps["own GPU"] = time.monotonic()
    events = Events(folder, rank)
    events.mark("rank_start", **world.describe())
    distributed.dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    agreement = distributed.Agreement(world, folder)
    agreement()  # all ranks have to be there
    counts = dict(samples_trained=0, samples_evaluated=0, optimizer_steps=0, forward_backward_passes=0)
    events.mark("training_start", dataset_samples=1, samples_done=0)
    started, cpu_s = time.monotonic(), time.process_time()
    steps["agreement"] = started
    for number in range(int(TRAINING_S / STEP_S)):
        time.sleep(max(0.0, started + number * STEP_S - time.monotonic()))
        if agreement.is_due():
            agreement()
    told = own_facts()
    told |= {"started": started, "ended": time.monotonic(), "steps": steps, "cpu_s": told["cpu_s"] - cpu_s}
    distributed.leave()
    events.mark("training_end", **counts, metrics={})
    stop_sampler()
    events.mark("rank_end", status="finished", reason="")
    return told


def rank_of_measure(place: Path) -> dict:
    """`energynn measure --out DIR -- sleep 10`."""
    from energynn.launch import command

    moments, run = {}, command._run

    def noted(*given):
        moments["started"] = time.monotonic() + command.IDLE_S
        run(*given)

    command._run = noted
    command.measure(["sleep", str(TRAINING_S)], place / "runs" / "measured", 0.5, quiet=True)
    return moments | {"ended": moments["started"] + TRAINING_S, "cpu_s": time.process_time()}


if __name__ == "__main__":
    mode, numbers = sys.argv[1], [int(word) for word in sys.argv[2:] if word.isdigit()]
    if mode in ("run", "measure"):
        for what, value in main(mode, *numbers).items():
            print(f"{what}: {value}")
    elif mode.startswith("first-"):
        {"first-run": first_run, "first-measure": first_measure}[mode](Path(sys.argv[2]), *numbers)
    else:
        start_hosts(mode.removeprefix("hosts-"), Path(sys.argv[2]), *numbers)
