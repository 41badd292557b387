"""Studies, systems and batch scripts: plans, costs, and that no text becomes a command."""

import inspect
import os
import re
import shlex
import shutil
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from energynn.experiment import config, studies, systems
from energynn.host import files
from energynn.host.files import REPOSITORY
from energynn.host.reading import read_json
from energynn.launch import slurm, status, submit
from energynn.measure import machine
from tests.conftest import minimal_record
from tests.launch.conftest import TWO_NODES
from tests.processes import ENERGYNN, answer, ended, printed, refused
from tests.run_files import text_of

GUIDE = text_of("docs/cluster.md")
FIELDS = msgspec.structs.asdict(systems.read_site(TWO_NODES))
COUNTS = {"R1": 45, "R2": 25, "R3": 20, "R4": 45, "R5": 25, "R6": 20, "F1": 7, "F2": 5}
COUNTS |= {"F3": 3, "F4": 3, "F5": 3, "T1": 3, "fluctuation": 3}


def test_every_series_of_the_paper_is_there():
    found = studies.find_studies(list(COUNTS), "horeka-a100")
    assert {name: len(set(runs)) for name, runs in found.items()} == COUNTS
    assert {run.training_samples for run in found["R4"] if run.devices == 2} == {10_009}
    assert {run.validation_samples for run in found["R5"] if run.devices == 1} == {3125}
    before = {config.run_id(run): run for run in found["F1"]}
    assert all(before[run.initial_run].devices == run.devices for run in found["F2"])


@pytest.mark.parametrize("name", studies.PAPER_STUDIES)
def test_a_series_tells_its_figure_hardware_and_expected_result(name):
    text = inspect.getdoc(studies.PAPER_STUDIES[name])
    assert re.search(r"^(Figures|Table|Text): ", text, re.M) and "Expected: " in text
    gpu = "H100" if name in ("F4", "F5") else "A100"
    assert gpu in re.search(r"Hardware: (.*)\.", text)[1]


@pytest.mark.parametrize(
    "text, words",
    [
        ("", "must define"),
        ("1/0", "ZeroDivisionError"),
        ("raise SystemExit", "SystemExit"),
        ("def study(system): return [3]", "which returns runs"),
    ],
)
def test_a_study_of_ones_own_that_is_none_is_refused(tmp_path, text, words):
    path = tmp_path / "mine.py"
    path.write_text(text)
    refused(words, studies.find_studies, [str(path)])


# ------------------------------ plans


def test_a_dry_run_of_all_series_needs_no_slurm(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    runs_dir = tmp_path / "runs"
    words = f"submit paper-a100 --system horeka-a100 --dry-run --runs-dir {runs_dir}"
    for name in ("ENERGYNN_IMAGENET", "ENERGYNN_ERA5"):
        monkeypatch.delenv(name, raising=False)
    shown = answer(words)
    total = r"168 to make(?s:.*)\ntotal +168 +28,343.4 +30,495.7 +6,453.8 +93 "
    assert re.search(total, shown), shown[:500]
    assert len(shown.splitlines()) <= 40 and "#SBATCH" not in shown
    missing = re.findall("^missing: (.*?):", shown, re.M)
    assert missing == ["era5", "imagenet", "--max-gpu-hours 30496"]
    assert "no --account NAME: sbatch takes your default" in shown
    told = re.search(r"submit (paper-a100 .*--max-gpu-hours \d+)$", GUIDE, re.M)[1]
    shown = answer(f"submit {told} --dry-run --runs-dir", runs_dir)
    assert "missing: --max-gpu-hours" not in shown, "the guide's second command"
    scripts = answer(words, "--scripts")
    refused("not found; submit from a login node", slurm.call_slurm, "sbatch")
    most = "--nodes=64\n#SBATCH --ntasks=256\n#SBATCH --ntasks-per-node=4\n"
    assert most in scripts and not runs_dir.exists()
    assert "#SBATCH --job-name=paper-a100-4n\n" in scripts


def test_what_no_run_can_read_is_said_before_sbatch(tmp_path, fake_slurm, monkeypatch):
    """And that a study has not handed on its system: jobs would make its runs elsewhere."""
    setup = ["export ENERGYNN_ERA5=$TMPDIR"]
    site = systems.read_site("horeka-h100")
    brought = msgspec.structs.replace(site, setup=setup)
    runs = studies.find_studies(["F4"], site.name)["F4"]
    given = {"runs_dir": tmp_path, "max_gpu_hours": 9999}
    submitted = partial(submit.submit_runs, runs, "F4", **given)
    monkeypatch.setenv("ENERGYNN_ERA5", str(tmp_path / "nothing"))
    refused("era5: ENERGYNN_ERA5: .*nothing is no folder", submitted, site)
    monkeypatch.delenv("ENERGYNN_ERA5")
    for each, said in ((site, ".*set ENERGYNN_ERA5"), (brought, ".*no checksums")):
        refused(f"^era5: {said}", submitted, each)
    here = [config.make()]
    words = "runs of local .* hand `system` on"
    refused(words, submit.submit_runs, here, "", site, **given)
    assert not fake_slurm.queue and not list(tmp_path.iterdir())


def fine_tuning():
    first = config.make("fourcastnet", system="two-nodes")
    stage = dict(stage="finetune", initial_run=config.run_id(first))
    return first, config.make("fourcastnet", system="two-nodes", **stage)


def test_fine_tuning_waits_for_its_pre_training(tmp_path, fake_slurm):
    site, (first, tuned) = systems.read_site(TWO_NODES), fine_tuning()
    folder = tmp_path / config.run_id(first)
    plan = partial(submit.plan_jobs, site=site, system_dir=tmp_path, queued=set())
    before, after = plan([tuned, first])
    assert [*before.runs.values(), before.after] == [first, None]
    assert [*after.runs.values(), after.after] == [tuned, folder]
    waits = {"--dependency=afterok:41_0", "--kill-on-invalid-dep=yes"}
    for job, options in ((before, set()), (after, waits)):
        submit.submit_job_array(job, site, "mine")
        assert waits & {*fake_slurm.given["sbatch"]} == options
    refused("initial_run: .* is not made yet", plan, [tuned])
    files.write_json(folder / "record.json", minimal_record(valid=True))
    (job,) = plan([tuned, first])
    assert job.after is None
    running = tmp_path / "runs" / site.name / folder.name / "run.json"
    files.write_json(running, {})
    with files.lock(running):  # made by `energynn run`, on a node
        last = partial(submit.submit_runs, [first, tuned], "x", site, tmp_path / "runs")
        refused("is being made without a job; submit again", last)
    assert len(fake_slurm.queue) == 2


def render(runs=1, minutes=60, system_dir="/runs/two-nodes", **fields):
    run, _ = fine_tuning()
    folders = {Path(system_dir) / f"run-{number}": run for number in range(runs)}
    site = msgspec.convert(FIELDS | fields, systems.Site)
    return submit.render_job_script(submit.JobArray(folders, minutes), site, "mine")


def test_a_warning_comes_five_minutes_before_the_end_and_later_in_short_jobs():
    """And a site says how many runs go on at once."""
    assert "#SBATCH --array=0-8%4\n" in render(runs=9, runs_at_once=4)
    for minutes, warning_s in ((10, 50), (60, 300), (600, 300)):
        assert f"#SBATCH --signal=B:USR1@{warning_s}\n" in render(minutes=minutes)


def test_the_environment_of_a_job_is_what_the_script_says(tmp_path, monkeypatch):
    monkeypatch.setenv("A_SECRET_TOKEN", "hush-hush")
    monkeypatch.setenv("ENERGYNN_ERA5", "/data/it's era5; rm -rf $HOME")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    text = render()
    assert (
        "#SBATCH --export=HOME,USER,LOGNAME,LANG,PATH\n" in text and "hush" not in text
    )
    assert """export ENERGYNN_ERA5='/data/it'"'"'s era5; rm -rf $HOME'""" in text
    assert f"export PYTHONPATH={REPOSITORY}:{tmp_path}\n" in text, (
        "a workload of one's own is found in the job"
    )


@given(text=st.text())
@example("x'; touch /tmp/never; echo '")
@example("$(touch /tmp/never)\n")
@example("@repository")
def test_a_text_comes_back_from_the_shell_or_is_refused(text):
    try:
        script = render(environment={"MINE": text}, python=f"python {text}")
        words = shlex.split(script, comments=True)
    except ValueError as error:
        assert not text.isprintable() and "cannot be printed" in str(error)
    else:
        assert {f"MINE={text}", f"ENERGYNN_PYTHON=python {text}"} <= set(words)


@given(text=st.text() | st.from_regex(systems.OPTION_REGEX))
@example("--exclude=cn[1-2]")
def test_an_option_stays_on_its_line_or_is_refused(text):
    try:
        script = render(sbatch=[text], srun=[text])
    except ValueError:
        return
    assert f"#SBATCH {text}\n" in script and len(text.splitlines()) == 1
    srun = " ".join(map(shlex.quote, text.split()))
    assert f"ENERGYNN_SRUN={srun}" in shlex.split(script, comments=True)


@pytest.mark.parametrize(
    "line, status",
    [
        ("false # as a module that is not there", 1),
        ("true # a comment", 0),
        ("source /no/such/conda.sh", 1),
        ("sleep 0 &", 0),
        ("if false; then\n\tfalse\nelse\n\ttrue\nfi", 0),
        ("module-that-is-not \\\n  there", 1),
    ],
)
def test_a_line_of_set_up_that_fails_stops_the_job(tmp_path, line, status):
    text = render(setup=[line], system_dir=tmp_path).replace(
        " -m energynn.launch.job", " -c 'print(\"made\")' #"
    )
    (tmp_path / "run-0" / "job").mkdir(parents=True)
    done = ended("bash", "-c", text, env={"PATH": os.environ["PATH"]})
    log = (tmp_path / "run-0" / "job" / "log.txt").read_text()
    assert done.returncode == status and ("made" in log) == (status == 0)
    said = " ".join(line.split())
    assert (f"energynn: failed: {said}" in log) == (status == 1)


# ------------------------------ systems


@pytest.mark.parametrize(
    "line, words",
    [
        ("gpus = 4", "unknown field `gpus`"),
        (
            'devices_per_node = "4"',
            r"Expected `int`, got `str` - at `\$.devices_per_node`",
        ),
        ("default_hours = 0", "default_hours"),
        ('sbatch = ["--clusters=another"]', "sbatch"),
        ('sbatch = ["--wrap=touch x"]', "sbatch"),
        ('environment = {"A B" = "4"}', "environment"),
        ("scheduler = ", "is not TOML"),
    ],
)
def test_a_fault_in_a_systems_file_is_one_clear_line(tmp_path, line, words):
    path = tmp_path / "mine.toml"
    base = ('scheduler = "slurm"', "devices_per_node = 4")
    kept = [each for each in base if each.split()[0] != line.split()[0]]
    path.write_text("\n".join([*kept, line]))
    refused(f"{path}.*{words}", systems.read_site, str(path))


def test_systems_that_ship_can_be_read_and_a_slip_is_told(tmp_path):
    image = "--container-image=nvcr.io#nvidia/pytorch:25.01-py3"
    path = tmp_path / "pyxis.toml"
    path.write_text(
        f"devices_per_node = 4\nsrun = ['{image}', '--container-mounts=$HOME:/root']\n"
        "sbatch = ['--partition gpu']"
    )
    assert systems.read_site(str(path)).srun[0] == image
    for path in (REPOSITORY / "systems").glob("*.toml"):
        site = systems.read_site(path.stem)
        assert msgspec.convert(msgspec.structs.asdict(site), systems.Site) == site
    refused("did you mean horeka-a100.*choose one of", systems.read_site, "horeka-a10")


def test_a_machines_own_file_goes_before_that_of_its_system(tmp_path, monkeypatch):
    monkeypatch.setenv("ENERGYNN_RUNS", str(tmp_path))
    shipped = systems.read_site("horeka-a100")
    own = tmp_path / "horeka-a100" / "system.toml"
    own.parent.mkdir()
    own.write_text("max_hours = 2\n[thresholds]\nleast_cpu_W = 0.1")
    assert machine.system_file(system="horeka-a100") == own
    changed = {"max_hours": 2.0, "thresholds": {"least_cpu_W": 0.1}}
    fields = msgspec.structs.asdict(shipped) | changed
    assert msgspec.structs.asdict(systems.read_site("horeka-a100")) == fields
    assert machine.load_system(own)["thresholds"] == changed["thresholds"]
    for wrong, words in (
        ("max_hour = 2", "max_hour"),
        ("max_hours = -1", "max_hours"),
        ("setup = ['curl x | sh']", "setup would become a command"),
        ("python = './python'", "python would become a command"),
        ("sbatch = ['--wrap=x']", "sbatch would become a command"),
        ("environment = {PATH = '.'}", "environment would become a command"),
    ):
        own.write_text(wrong)
        refused(f"{own}: .*{words}", systems.read_site, "horeka-a100")


@pytest.mark.skipif(not (REPOSITORY / ".git").exists(), reason="no git here")
def test_git_sees_no_file_of_a_machine():
    git = "git", "-C", REPOSITORY
    printed(*git, "check-ignore", "runs/any/system.toml")
    assert printed(*git, "ls-files", "runs/*/system.toml") == ""


def test_the_containers_hold_all_that_their_commands_need(tmp_path):
    """Without Apptainer: its files are copied as it would, and a command works on them."""
    text = text_of("systems/energynn.def")
    apptainer = re.findall(r"^    (\S+) (/opt/energynn/\S+)$", text, re.M)
    docker = []
    for line in text_of("systems/Dockerfile").splitlines():
        if line.startswith("COPY "):
            docker += line.split()[1:-1]
    assert docker == [source for source, _ in apptainer]
    for source, target in apptainer:
        assert target == f"/opt/energynn/{source}"
        copy = tmp_path / source
        copy.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if (REPOSITORY / source).is_dir() else shutil.copy)(
            REPOSITORY / source, copy
        )
    words = ["submit", "smoke", "--system", "slurm", "--dry-run"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    printed(*ENERGYNN, *words, cwd=tmp_path, env=environment)


# ------------------------------ several calls, a slow Slurm


TWO = ("-p", "devices", "1,2")  # a job each


def test_what_slurm_refuses_is_not_submitted_and_what_it_took_is_left_alone(fake_slurm):
    fake_slurm.room = 1
    said = fake_slurm.submit(*TWO, status=2)
    assert "job 41: 1 run(s), the first " in said and "sbatch --parsable: no" in said
    rows, _ = status.describe_runs(status.find_run_folders(fake_slurm.runs_dir, []))
    assert sorted(row["state"] for row in rows) == ["not submitted", "queued"]
    fake_slurm.room = 99
    with files.lock(fake_slurm.runs_dir / "two-nodes" / ".submit.lock"):
        assert "another one queues" in fake_slurm.submit(*TWO, status=2)
    for told in ("1 of 2 runs are made or queued; 1 to make", "0 to make"):
        assert told in fake_slurm.submit(*TWO)
    assert len(fake_slurm.queue) == 2
    assert "jobs cancelled: 2" in fake_slurm.energynn("cancel --all")
    assert not fake_slurm.queue
    assert "2 to make" in fake_slurm.submit(*TWO)


def test_what_costs_more_than_allowed_is_refused(fake_slurm):
    said = fake_slurm.submit(*TWO, "--max-gpu-hours", "0.5", status=2)
    assert "--max-gpu-hours 1:" in said and not fake_slurm.queue
    fake_slurm.submit(*TWO, "--max-gpu-hours", "nan", status=2)
    assert not fake_slurm.queue
    fake_slurm.submit(*TWO, "--max-gpu-hours", "1")
    assert len(fake_slurm.queue) == 2


def test_a_sweep_is_every_combination_and_each_value_is_checked_before(fake_slurm):
    words = f"submit --system {TWO_NODES} "
    two = "-p local_batch_size 8,16,32 -p devices '1, 2' --name sizes"
    for told in ("job 44: 3 run(s)", "0 to make"):
        assert told in fake_slurm.energynn(f"{words} {two} --note 'a sweep'")
    folders = status.find_run_folders(fake_slurm.runs_dir, [])
    for folder in folders:
        kept = read_json(folder / "job" / "parameters.json")
        assert (kept["name"], kept["note"]) == ("sizes", "a sweep")
    sizes = [re.search(r"-n(\d)-lbs(\d+)", each.name).groups() for each in folders]
    assert sorted(sizes) == [(n, b) for n in "12" for b in ("16", "32", "8")]
    assert len(status.find_run_folders(fake_slurm.runs_dir, ["sizes"])) == 6
    shown = fake_slurm.energynn("status sizes")
    assert "runs: 6; 6 queued" in shown and shown.count("sizes") == 6
    for bad, said in (
        ("-p local_batch_size 8,,16", "local_batch_size: must have type int"),
        ("-p workload resnet50,alexnet", "workload: 'alexnet' is not known"),
        ("", "submit: give studies, or parameters"),
        (f"{two} --name a/b", "name: 'a/b' is none"),
        ("smoke -p seed 1", "submit: give studies, or parameters"),
    ):
        error = fake_slurm.energynn(words + bad, status=2)
        assert said in error and error.count("\n") == 1
    assert len(fake_slurm.queue) == 6


def test_a_value_that_holds_a_comma_is_one():
    years = dict(workload="fourcastnet", test_years="2016,2018", devices="1,2")
    runs = studies.make_sweep(years)
    assert [(run.test_years, run.devices) for run in runs] == [
        ("2016,2018", 1),
        ("2016,2018", 2),
    ]


def test_the_proof_of_a_system_tells_each_state_once_and_the_line_that_is_wrong(
    monkeypatch, capsys
):
    states = ["queued", "queued", "running", "running", "finished"]
    rows = [{"state": state, "reason": f"{state} so"} for state in states]
    monkeypatch.setattr(submit, "submit_job_array", lambda *_: None)
    monkeypatch.setattr(status, "describe_runs", lambda _: ([rows.pop(0)], []))
    monkeypatch.setattr(status, "status_text", lambda *_: "")
    monkeypatch.setattr(submit.time, "sleep", lambda _: None)
    of_node = systems.read_site(TWO_NODES).sockets_per_node
    record = Mock(valid=True, nodes=2, sockets=2 * of_node + 2)
    monkeypatch.setattr(submit.records, "read_record_if_any", lambda _: record)
    assert submit.check_system(TWO_NODES) == 1 and not rows
    shown = capsys.readouterr().out
    assert shown.count("queued so\n") == shown.count("running so\n") == 1
    assert f"write sockets_per_node = {of_node + 1} in {TWO_NODES}" in shown


def test_a_dry_run_says_that_nobody_knows_the_nodes(tmp_path):
    (tmp_path / "mine.toml").write_text("devices_per_node = 4\n")
    words = f"submit R1 --system {tmp_path}/mine.toml --dry-run --runs-dir {tmp_path}"
    assert "write nodes = N, in " in answer(words)
    (tmp_path / "mine.toml").write_text("devices_per_node = 4\nnodes = 4\n")
    shown = answer(words)
    assert "nodes = N" not in shown and "left out: " in shown
