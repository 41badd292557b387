"""Read the systems that runs are made on: systems/NAME.toml, and over it runs/NAME/system.toml."""

import math
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from energynn.experiment.config import Natural, Number, OneOrMore, RunConfig, suggestion
from energynn.host.files import shipped_path
from energynn.host.reading import join_faults, read_toml
from energynn.measure import machine

# An option of sbatch or srun: sbatch reads it from a comment, where nothing is quoted. Jobs of
# another cluster (--clusters, -M) could not be asked for.
OPTION_TEXT = r"[\w.,:@/+*()&|=\[\]-]"
OPTION_REGEX = (
    rf"^(?!--clusters|-M)(--[a-z][a-z-]*([= ]{OPTION_TEXT}+)?"
    rf"|-[A-Za-z] ?{OPTION_TEXT}*)\Z"
)
SlurmOption = Annotated[str, Meta(pattern=OPTION_REGEX)]
SrunOption = Annotated[str, Meta(pattern=r"^-.+\Z")]  # which a variable hands over
Hours = Annotated[float, Meta(gt=0)]  # 0 is Slurm's word for no limit
VariableName = Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]*\Z")]

SCHEDULERS = ("slurm", "local")
# What becomes part of a batch script.
SCRIPT_FIELDS = ("setup", "python", "environment", "sbatch", "srun")


# Of a system, what a forecast depends on; 0: not known.
FORECAST_FIELDS = (
    "devices_per_node",
    "nodes",
    "link_GB_per_s",
    "gpu_link_GB_per_s",
    "cpu_W",
    "cpu_thread_W",
    "ram_W",
    "gpu_idle_W",
)


class Site(
    machine.SystemDescription, forbid_unknown_fields=True, frozen=True, kw_only=True
):
    """A system that runs can be made on; ``name`` and ``file`` follow from where its file lies."""

    name: Annotated[str, Meta(pattern=r"^\w[\w.-]{0,99}\Z")]
    file: str
    scheduler: str = "slurm"
    gpu: str = ""  # "": as its runs say
    devices_per_node: Natural = 0  # 0: of a local system, as the machine has
    sockets_per_node: OneOrMore = 1
    max_hours: Hours = 24.0
    # of a run for which nothing published tells how long it takes
    default_hours: Hours = 1.0
    max_gpu_hours: Number = 100.0  # of one submission, where it gives no other
    sbatch: list[SlurmOption] = []
    srun: list[SrunOption] | None = None
    python: str = ""  # how srun calls it, where it is in a container
    # of one job array; 0: as many as Slurm starts
    runs_at_once: Natural = 0
    setup: list[str] = []
    environment: dict[VariableName, str] = {}
    # What a forecast needs (energynn/forecast/); 0: not known.
    nodes: Natural = 0
    link_GB_per_s: Number = 0.0  # of one node to the others
    gpu_link_GB_per_s: Number = 0.0  # between the GPUs of a node
    cpu_W: Number = 0.0  # all sockets of a node, without a busy thread
    cpu_thread_W: Number = 0.0
    ram_W: Number = 0.0  # of a node
    gpu_idle_W: Number = 0.0
    published_as: str = ""  # device_name of the published runs made here

    def nodes_of(self, devices: int) -> int:
        """Count the nodes that so many devices fill; one where it is not known what a node has."""
        return math.ceil(devices / (self.devices_per_node or devices))


def select_runs_that_fit(
    site: Site, runs: list[RunConfig]
) -> tuple[list[RunConfig], str]:
    """Choose the runs that a system has nodes for, as far as that is known; name those left out.

    Raises ValueError where it has nodes for none.
    """
    most = site.nodes * site.devices_per_node or math.inf
    kept = [run for run in runs if run.devices <= most]
    sizes = sorted({run.devices for run in runs if run.devices > most})
    if not sizes:
        return runs, ""
    left_out = (
        f"left out: {len(runs) - len(kept)} run(s) on {', '.join(map(str, sizes))} devices; "
        f"{site.name} has {most} (nodes, devices_per_node in {site.file})"
    )
    if not kept:
        raise ValueError(left_out)
    return kept, left_out


def read_site(name: str) -> Site:
    """Read systems/NAME.toml with this machine's own fields of it, or a file of one's own (.toml).

    Raises ValueError with the remedy.
    """
    folder = shipped_path("systems")
    is_own = name.endswith(".toml")
    path = Path(name) if is_own else folder / f"{name}.toml"
    if not path.is_file():
        if is_own:
            raise ValueError(f"system: there is no file {path.absolute()}")
        known = sorted(path.stem for path in folder.glob("*.toml"))
        raise ValueError(
            f"system: {name!r} is not known{suggestion(name, known)}; "
            f"choose one of {', '.join(known)}, or write a file (.toml)"
        )
    own = path if is_own else machine.system_file(system=name)
    with join_faults(own if own.exists() else path):
        values = read_toml(path)
        if not is_own:
            shipped = values
            values = machine.read_system_table(own)
            # a file among the runs may come from others, and brings no commands
            for field in SCRIPT_FIELDS:
                if values.get(field) != shipped.get(field):
                    raise ValueError(
                        f"{field} would become a command of a job; write it in systems/NAME.toml"
                    )
        if values.get("scheduler", "slurm") not in SCHEDULERS:
            raise ValueError(f"scheduler: write one of {', '.join(SCHEDULERS)}")
        facts = {"name": path.stem, "file": str(path.resolve())}
        site = msgspec.convert(values | facts, Site)
        if site.scheduler == "slurm" and not site.devices_per_node:
            raise ValueError(
                "devices_per_node: is missing; say how many GPUs a node has"
            )
        return site
