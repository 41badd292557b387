"""Studies, systems and batch scripts: what is planned, what it costs, and that nothing in a name becomes a command."""

import dataclasses
import inspect
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import papermill.parameterize
import papermill.translators
import pytest

from energynn import cli, config, files, records, studies
from energynn.cluster import costs, job, slurm, status, submit, systems
from energynn.data import manifests
from energynn.files import REPOSITORY
from tests.conftest import minimal_record, own_manifests

TWO_NODES = str(REPOSITORY / "tests" / "cluster" / "two-nodes.toml")
COUNTS = {
    "R1": 45,
    "R2": 25,
    "R3": 20,
    "R4": 45,
    "R5": 25,
    "R6": 20,
    "F1": 7,
    "F2": 5,
    "F3": 3,
    "F4": 3,
    "F5": 3,
    "T1": 3,
    "fluctuation": 3,
}


def hardware(name):
    return "H100" if name in ("F4", "F5") else "A100"


# ------------------------------------------------------------------------------------------------------------- studies


def test_every_series_of_the_paper_is_there_and_shares_the_runs_that_it_shares():
    found = studies.find(list(COUNTS), "horeka-a100")
    assert {name: len(runs) for name, runs in found.items()} == COUNTS
    assert all(len(set(runs)) == len(runs) for runs in found.values())
    shared = {
        pair: {run.devices for run in set(found[pair[0]]) & set(found[pair[1]])}
        for pair in (
            ("R1", "R2"),
            ("R1", "R3"),
            ("R1", "R4"),
            ("R2", "R5"),
            ("R3", "R6"),
            ("R4", "R6"),
            ("F1", "F3"),
            ("F1", "T1"),
            ("F4", "T1"),
            ("F5", "T1"),
            ("F1", "fluctuation"),
        )
    }
    assert list(shared.values()) == [{1}, {32}, {256}, {16}, {256}, {32}, {64}, {16, 32}, {4, 16}, {32}, set()]
    (two,) = {run.training_samples for run in found["R4"] if run.devices == 2}
    assert two == 10_009 and {run.validation_samples for run in found["R5"] if run.devices == 1} == {3125}
    assert all(run.preset == "paper" and run.device == "gpu" for runs in found.values() for run in runs)
    before = {config.run_id(run): run for run in found["F1"]}
    assert all(before[run.initial_run].devices == run.devices for run in found["F2"])


@pytest.mark.parametrize("name", studies.PAPER)
def test_a_series_tells_its_figure_hardware_cost_and_expected_result(name):
    text = inspect.getdoc(studies.PAPER[name])
    assert re.search(r"^(Figures|Table|Text): ", text, re.M) and "Expected: " in text
    assert hardware(name) in re.search(r"Hardware: (.*)\.", text)[1]
    sums = costs.total(costs.expect(run, hardware(name)) for run in studies.find([name])[name])
    (cost,) = re.findall(r"^Cost: (.*(?:\n.*)?)\nExpected", text, re.M)
    assert cost.startswith(f"{sums['gpu_hours']:,.0f} GPU hours, {sums['energy_kWh']:,.0f} kWh")
    said = f"{sums['published']} of {sums['runs']} runs published" if sums["scaled"] else "all published"
    assert said in cost and sums["unknown"] == 0


def test_costs_are_the_published_ones_where_there_are_any():
    r5 = studies.find(["R5"])["R5"]
    one = costs.expect(next(run for run in r5 if run.devices == 8))
    assert (one.source, round(one.gpu_hours, 2), round(one.energy_kWh, 2)) == ("published", 47.94, 15.01)
    full = costs.expect(next(run for run in studies.find(["R1"])["R1"] if run.devices == 1))
    assert full.source == "scaled" and 36 < full.energy_kWh < 41  # the paper: 17.6 + 18.9 kWh and RAM, section 3.2.2
    assert costs.expect(config.make("resnet50")).source == "unknown"
    four = config.make("fourcastnet", preset="paper", devices=4, local_batch_size=4)
    assert costs.expect(four, "H100").gpu_hours == 421.26 and costs.expect(four, "A100").energy_kWh == 120.70


def test_a_study_of_ones_own_is_one_small_file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from energynn import config\ndef study(system):\n    return [config.make(system=system, seed=7)]\n"
    )
    assert [run.seed for run in studies.find([str(path)], "x")[str(path)]] == [7]
    for text, words in [
        ("", "defines no study"),
        ("1/0", "ZeroDivisionError"),
        ("def study(system): return [3]", "must return"),
        ("def study(system): return config", "NameError"),
        ("def study(system): return []", "must return"),
        ("def (", "SyntaxError"),
        ("raise SystemExit", "SystemExit"),
    ]:
        path.write_text(text)
        with pytest.raises(ValueError, match=words):
            studies.find([str(path)])


def test_study_list_and_show(capsys):
    assert cli.main(["study", "list"]) == 0
    listed = capsys.readouterr().out
    assert all(re.search(rf"^{name} +\d+ runs", listed, re.M) for name in studies.STUDIES)
    assert cli.main(["study", "show", "R1", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["R1"]
    assert shown["total"]["runs"] == len(shown["runs"]) == 45 and shown["total"]["published"] == 5
    assert cli.main(["study", "show", "R5"]) == 0 and "5 resnet50         16   16    256" in capsys.readouterr().out


# ---------------------------------------------------------------------------------------------------------------- plans


def test_a_dry_run_of_all_series_takes_seconds_and_needs_no_slurm(tmp_path):
    begun, outputs = resource.getrusage(resource.RUSAGE_CHILDREN), []
    for group, system in (("paper-a100", "horeka-a100"), ("paper-h100", "horeka-h100")):
        command = [sys.executable, "-m", "energynn.cli", "submit", group, "--system", system, "--dry-run"]
        done = subprocess.run(
            [*command, "--runs-dir", tmp_path / "runs"],
            capture_output=True,
            text=True,
            cwd=REPOSITORY,
            env=os.environ | {"PATH": "/nowhere", "PYTHONPATH": str(REPOSITORY)},
        )
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout)
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)  # CPU time, because other work goes on here
    assert ended.ru_utime + ended.ru_stime - begun.ru_utime - begun.ru_stime < 5
    assert re.search(r"168 to make in \d+ job arrays, expected 24,463 GPU hours, 5,806 kWh", outputs[0])
    assert re.search(r"6 to make in \d+ job arrays, expected 2,959 GPU hours, 812 kWh", outputs[1])
    assert (
        "#SBATCH --nodes=64\n#SBATCH --ntasks=256\n#SBATCH --ntasks-per-node=4\n" in outputs[0]
        and not (tmp_path / "runs").exists()
    )


def fine_tuning(system="two-nodes"):
    first = config.make("fourcastnet", system=system)
    tuned = config.make("fourcastnet", system=system, stage="finetune", initial_run=config.run_id(first))
    return first, tuned


def test_fine_tuning_waits_for_its_pre_training(tmp_path, monkeypatch):
    site, (first, tuned) = systems.site(TWO_NODES), fine_tuning()
    jobs = submit.plan([tuned, first], site, tmp_path, set())
    assert [(job.runs, job.after) for job in jobs] == [((first,), ""), ((tuned,), config.run_id(first))]
    asked = []
    monkeypatch.setattr(slurm, "submit", lambda script, tasks, after: asked.append(after) or str(40 + len(asked)))
    list(submit.submit(jobs, site, tmp_path, ["mine"]))
    assert asked == ["", "41_0"]
    assert submit.plan([tuned], site, tmp_path, {config.run_id(first)})[0].after == config.run_id(first)
    with pytest.raises(ValueError, match="initial_run: .* is not made yet"):
        submit.plan([tuned], site, tmp_path, set())
    folder = tmp_path / "two-nodes" / config.run_id(first)
    files.write_json(folder / "record.json", minimal_record(valid=True))
    assert [job.after for job in submit.plan([tuned, first], site, tmp_path, set())] == [""]


def test_time_limits_follow_the_cost_and_the_partition():
    site = systems.site("horeka-a100")
    by_devices = {job.devices: job for job in submit.plan(studies.find(["R1"])["R1"], site, Path("/runs"), set())}
    assert by_devices[1].minutes == 48 * 60  # 82 h on one GPU: in two jobs
    assert by_devices[256].minutes < 90 and by_devices[256].nodes == 64 and len(by_devices[256].runs) == 5


def test_time_limits_are_learnt_from_finished_epochs(tmp_path):
    site = systems.site("horeka-a100")
    begun, repeat, other = (
        config.make("fourcastnet", epochs=10, system=site.name, **each)
        for each in ({}, {"repeat": 1, "seed": 1}, {"embed_dim": 64})
    )
    folder = tmp_path / site.name / config.run_id(begun)
    folder.mkdir(parents=True)
    history = [{"epoch": epoch} for epoch in range(1, 5)]  # four of ten epochs, an hour each
    files.write_json(folder / "record.json", minimal_record(history=history, training_time_s=4 * 3600.0))
    jobs = submit.plan([begun, repeat, other], site, tmp_path, set())
    minutes = {run: job.minutes for job in jobs for run in job.runs}
    assert minutes[begun] == pytest.approx(1.3 * 360 + 30, abs=1)  # rounded up
    assert minutes[repeat] == pytest.approx(1.3 * 600 + 30, abs=1)
    assert minutes[other] == 60 * site.default_hours


def test_spending_more_than_a_limit_is_asked_for(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(slurm, "queue", lambda jobs: {})
    monkeypatch.setattr(slurm, "submit", lambda *_: pytest.fail("submitted without asking"))
    words = ["submit", "R4", "--system", "horeka-a100", "--runs-dir", str(tmp_path)]
    assert cli.main(words) == 2 and "more than 100 GPU hours; give --yes" in capsys.readouterr().err
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda _: "n")
    assert cli.main([*words, "--limit", "20"]) == 1
    assert cli.main([*words, "--limit", "nan"]) == 1
    for minutes in ("0", "-5"):
        assert cli.main([*words, "--minutes", minutes]) == 2 and "minutes: must be" in capsys.readouterr().err
    assert cli.main([*words, "--limit", "5000"]) == 2 and "no manifest" in capsys.readouterr().err  # but no data here


def test_the_environment_of_a_job_is_what_the_script_says(tmp_path, monkeypatch):
    monkeypatch.setenv("A_SECRET_TOKEN", "hush-hush")
    monkeypatch.setenv("ENERGYNN_ERA5", "/data/it's era5; rm -rf $HOME")
    text = submit.script(submit.Job(fine_tuning()[:1], 1, 60), systems.site(TWO_NODES), tmp_path, ["mine"])
    assert "#SBATCH --export=HOME,USER,LOGNAME,LANG,PATH\n" in text and "SECRET" not in text and "hush" not in text
    assert "ENERGYNN_PYTHON" not in text
    assert """export ENERGYNN_ERA5='/data/it'"'"'s era5; rm -rf $HOME'""" in text


def test_ranks_in_a_container_are_called_as_the_system_says(tmp_path):
    contained = tmp_path / "two-nodes.toml"
    words = 'python = "apptainer exec --nv --bind /project/$(whoami) image.sif python"\n'
    contained.write_text(Path(TWO_NODES).read_text() + words)
    text = submit.script(submit.Job(fine_tuning()[:1], 1, 60), systems.site(str(contained)), tmp_path, ["mine"])
    assert "export ENERGYNN_PYTHON='apptainer exec --nv --bind /project/$(whoami) image.sif python'\n" in text


def test_the_patience_of_a_run_is_a_matter_of_its_system_and_not_of_what_it_is(tmp_path):
    patient = tmp_path / "two-nodes.toml"
    patient.write_text(Path(TWO_NODES).read_text() + "\nsilence_limit_s = 300\nrank_limit_s = 600\n")
    texts = {}
    for file in (TWO_NODES, str(patient)):
        texts[file] = submit.script(submit.Job(fine_tuning()[:1], 1, 60), systems.site(file), tmp_path, ["mine"])
    assert "export ENERGYNN_SILENCE_LIMIT_S=90.0\n" in texts[TWO_NODES]
    assert "export ENERGYNN_FIRST_SAMPLE_LIMIT_S=120.0\nexport ENERGYNN_READY_LIMIT_S=60.0\n" in texts[TWO_NODES]
    assert "export ENERGYNN_SILENCE_LIMIT_S=300\n" in texts[str(patient)]
    assert "export ENERGYNN_RANK_LIMIT_S=600\n" in texts[str(patient)]
    folders = [re.findall(r"two-nodes/\S+n\d+-\S+", text) for text in texts.values()]
    assert folders[0] == folders[1] and folders[0], "the same run, whatever the limits"


# ------------------------------------------------------------------------------------ what must not become a command

PAYLOADS = (
    "$(touch {})",
    "`touch {}`",
    "; touch {}",
    "x; touch {}",
    "x & touch {}",
    "x && touch {}",
    "x || touch {}",
    "x | touch {}",
    "'; touch {}; '",
    '"; touch {}; "',
    "\\'; touch {}; \\'",
    "x\ntouch {}",
    "x\r\ntouch {}",
    "\n#SBATCH --wrap=touch {}",
    "${{IFS}}touch {}",
    "$'\\ntouch {}'",
    "x > {}",
    "x >> {}",
    "< {}",
    "<(touch {})",
    "{{touch,{}}}",
    "~; touch {}",
    "x\ttouch {}",
    "*; touch {}",
    "!touch {}",
    "x # touch {}",
    "\x00touch {}",
    "\x1b[2Jtouch {}",
    "\u2028touch {}",
    "@python@ touch {}",
    "../../{}",
    "a/../../{}",
    "..",
    "/{}",
    '"""\nimport os; os.system("touch {}")',
    "'\n__import__('os').mknod('{}')#",
    " {}",
    "",
    "eval touch {}",
    "$((`touch {}`))",
    "${{x:-$(touch {})}}",
    "$(<{})",
    "x\\\ntouch {}",
    "\\$(touch {})",
    "'$(touch {})'",
    '"$(touch {})"',
    "x' $(touch {}) '",
    "--wrap=touch {}",
    "-c 'touch {}'",
    "x --export=ALL",
    "x\n#SBATCH --uid=0",
    "x\vtouch {}",
    "x\ftouch {}",
    "x\x85touch {}",
    "x\xa0touch {}",
    "\ufefftouch {}",
    "\u202etouch {}",
    "x\x7ftouch {}",
    "\x08\x08touch {}",
    "%(touch {})s",
    "%j; touch {}",
    "@runs@",
    "@options@\ntouch {}",
    "x)\ntouch {}\n(",
    ")\nrun=$(touch {})\n(",
    "EOF\ntouch {}",
    "\\N{{LINE FEED}}touch {}",
    'f\'{{__import__("os").mknod("{}")}}\'',
    "\\'\n__import__('os').mknod('{}')#",
    "'''\n__import__('os').mknod('{}')#",
    "%%bash\ntouch {}",
    "%run {}",
    "~root/{}",
    "./{}",
    "a/b",
    "x" * 5000 + "; touch {}",
)


def payloads(tmp_path):
    return [text.format(tmp_path / "done") for text in PAYLOADS]


def render(site, tmp_path, runs_dir="/runs"):
    return submit.script(submit.Job(fine_tuning()[:1], 1, 60), site, Path(runs_dir), ["mine"])


@pytest.mark.parametrize("number", range(len(PAYLOADS)))
@pytest.mark.parametrize("field", ["dataset", "system", "initial_run", "device", "stage", "preset", "training_years"])
def test_a_text_that_could_become_a_command_is_refused_in_a_configuration(tmp_path, field, number):
    text = payloads(tmp_path)[number]
    if field == "initial_run" and not text:
        pytest.skip("no initial run")
    with pytest.raises(ValueError, match=f"^{field}: "):
        config.make("fourcastnet", **{field: text})


@pytest.mark.parametrize("number", range(len(PAYLOADS)))
def test_a_text_that_could_become_a_command_is_refused_in_a_system(tmp_path, number):
    text = payloads(tmp_path)[number]
    path = tmp_path / "mine.toml"
    base = {"scheduler": "slurm", "devices_per_node": 1}
    for key in ("sbatch", "srun", "modules", "stage_to", "scheduler", "gpu"):
        value = (
            text if key in ("stage_to", "scheduler", "gpu") else [f"--partition={text}" if key != "modules" else text]
        )
        if not text and key in ("sbatch", "srun", "stage_to"):
            continue
        if re.match("[a./@]+[a-z]+[^;]*$", text) and key not in ("scheduler", "gpu"):  # a path, or a name, no command
            continue
        path.write_text("\n".join(f"{name} = {json.dumps(one)}" for name, one in (base | {key: value}).items()))
        with pytest.raises(ValueError, match="mend it"):
            systems.site(str(path))
            raise AssertionError(f"{key} = {value!r} was taken")
    for name in (text, f"{text}.toml"):
        with pytest.raises(ValueError, match="^system: "):
            systems.site(name)
    with pytest.raises(ValueError, match="^study: "):
        studies.find([text])
    with pytest.raises(ValueError, match="^study: "):
        studies.find([f"{text}.py"])


@pytest.mark.parametrize("number", range(len(PAYLOADS)))
def test_a_text_that_has_to_be_free_is_quoted_or_refused(tmp_path, monkeypatch, number):
    """Values of environment variables, where the data lie, and the runs' folder: the script is run to see."""
    text = payloads(tmp_path)[number]
    site = systems.site(TWO_NODES)
    site.environment["GIVEN"] = text
    (tmp_path / "run" / "job").mkdir(parents=True)
    try:
        script = render(site, tmp_path, tmp_path)
    except ValueError as error:
        assert not text.isprintable() and "cannot be printed" in str(error)
        return
    folder = submit.quote(tmp_path / "two-nodes" / config.run_id(fine_tuning()[0]))
    script = script.replace(folder, str(tmp_path / "run")).replace(
        submit.quote(sys.executable) + " -m energynn.cluster.job", "env #"
    )
    subprocess.run(["bash", "-c", script], env={"PATH": os.environ["PATH"]}, cwd=tmp_path, check=True)
    assert not (tmp_path / "done").exists()
    assert f"GIVEN={text}\n" in (tmp_path / "run" / "job" / "log.txt").read_text()


@pytest.mark.parametrize("number", range(len(PAYLOADS)))
def test_a_notebook_takes_a_text_as_a_text(tmp_path, number):
    text = payloads(tmp_path)[number]
    code = papermill.translators.PythonTranslator.codify({"dataset": text})
    found = {}
    exec(code, found)
    assert found["dataset"] == text and not (tmp_path / "done").exists()


@pytest.mark.parametrize(
    "line, words",
    [
        ("devices_per_node = 0", "devices_per_node: must be more than 0"),
        ("devices_per_node = true", "must be of type int"),
        ("max_hours = -1", "max_hours: must be"),
        ("max_hours = 'x'", "max_hours: must be of type"),
        ("partition = 'x'", "partition: not known"),
        ("sbatch = [1]", "sbatch: must be"),
        ("sbatch = '--x'", "sbatch: must be"),
        ("modules = ['-x']", "modules: '-x'"),
        ("environment = {A = 1}", "environment: must be"),
        ("environment = {'A B' = 'x'}", "environment: 'A B'"),
        ("max_hours = nan", "max_hours"),
        ("stage_to = 'relative'", "stage_to"),
        ("stage_to = '/a/../b'", "stage_to"),
        ("sbatch = ['partition=x']", "sbatch"),
        ("x = [", "mend it"),
    ],
)
def test_a_fault_in_a_systems_file_is_one_clear_line(tmp_path, line, words):
    path = tmp_path / "mine.toml"
    base = "scheduler = 'slurm'\n" + ("" if line.startswith("devices_per_node") else "devices_per_node = 4\n")
    path.write_text(base + line)
    with pytest.raises(ValueError, match=re.escape(words)) as error:
        systems.site(str(path))
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    "folder", ["runs%A", "runs'", 'runs"', "runs\n", "runs$(x)", "runs`x`", "runs;x", "runs\\x", "runs*", "runs\x00"]
)
def test_a_folder_of_runs_that_slurm_would_misread_is_refused(tmp_path, monkeypatch, folder):
    monkeypatch.setattr(slurm, "submit", lambda *_: pytest.fail("submitted"))
    with pytest.raises(ValueError, match="runs_dir: .*choose another"):
        list(
            submit.submit([submit.Job(fine_tuning()[:1], 1, 60)], systems.site(TWO_NODES), tmp_path / folder, ["mine"])
        )


def test_the_systems_that_ship_can_be_read():
    assert {path.stem for path in (REPOSITORY / "systems").glob("*.toml")} == {
        "horeka-a100",
        "horeka-h100",
        "slurm",
        "local",
    }
    for path in (REPOSITORY / "systems").glob("*.toml"):
        assert systems.site(path.stem).name == path.stem
        assert subprocess.run(["bash", "-n"], input=render(systems.site(path.stem), path), text=True).returncode == 0


@pytest.mark.slow
def test_data_in_an_archive_are_unpacked_to_the_node_and_measured_by_themselves(tmp_path, monkeypatch, capfd):
    """What a job does before the run, without Slurm: of four images the run reads three."""
    names = [f"{split}/cat/{k}.JPEG" for split, count in (("train", 3), ("val", 1)) for k in range(count)]
    for name in names:
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / name).write_text("pixels")
    subprocess.run(["tar", "-cf", tmp_path / "imagenet.tar", "-C", tmp_path / "tree", "."], check=True)
    own_manifests(tmp_path, monkeypatch, imagenet=names)
    monkeypatch.setenv("ENERGYNN_IMAGENET", str(tmp_path / "imagenet.tar"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "node"))
    site = dataclasses.replace(systems.site("local"), stage_to="$TMPDIR")
    run = config.make("resnet50", dataset="imagenet", system="local", training_samples=2, validation_samples=1)
    stage = submit._facts(submit.Job((run,), 1, 60), site, ["mine"])["stage_in"]
    folder = tmp_path / "runs" / "local" / config.run_id(run)
    (folder / "job").mkdir(parents=True)
    files.write_json(folder / "job" / "submission.json", {"stage_in": stage})
    files.write_json(folder / "job" / "parameters.json", config.to_dict(run))
    with job._staged_in(folder, []) as problem:
        there = Path(os.environ["ENERGYNN_IMAGENET"])
        assert problem == "" and there.parent == tmp_path / "node" and there.name != "energynn-data"
        assert sorted(there.rglob("*.JPEG")) == sorted(there / name for name in manifests.files_read(run))
    assert "3 of 4 files" in capfd.readouterr().out
    assert not there.exists(), "the data go with the job"
    (record,) = [records.read(path.parent) for path in folder.glob("job/stage-in-*/record.json")]
    assert record["status"] == "finished" and record["energy_total_J"] > 0 and "stage_in" in record["config"]["command"]
    assert records.hash_files(folder) == {}  # no part of the run
    for path in folder.glob("job/stage-in-*/record.json"):
        shutil.rmtree(path.parent)
    subprocess.run(
        ["tar", "--delete", "-f", tmp_path / "imagenet.tar", f"./{manifests.files_read(run)[0]}"], check=True
    )
    with job._staged_in(folder, []) as problem:
        assert problem.endswith(f"has no {manifests.files_read(run)[0]}, which the run reads; pack the data again")
    begun = time.monotonic()
    (tmp_path / "imagenet.tar").unlink()
    os.mkfifo(tmp_path / "imagenet.tar")  # as storage that does not answer
    with job._staged_in(folder, [signal.SIGUSR1]) as problem:
        assert "the data were not unpacked" in problem and time.monotonic() - begun < 60
    monkeypatch.setenv("ENERGYNN_IMAGENET", str(tmp_path / "imagenet.tar"))
    with pytest.raises(ValueError, match="names an archive, but two-nodes.toml has no stage_to"):
        submit.script(submit.Job((run,), 1, 60), systems.site(TWO_NODES), tmp_path, ["mine"])


def test_runs_of_one_array_need_the_same_data_and_what_ships_is_never_unpacked(tmp_path, monkeypatch):
    for name in ("ERA5", "ERA5_ENSEMBLE", "IMAGENET", "SYNTHETIC"):
        monkeypatch.setenv(f"ENERGYNN_{name}", "/project/data.tar")
    sets = [
        ("fourcastnet", "era5"),
        ("fourcastnet", "synthetic"),
        ("fourcastnet", "era5_ensemble"),
        ("resnet50", "imagenet"),
    ]
    runs = [config.make(workload, dataset=dataset, system="mine") for workload, dataset in sets]
    site = dataclasses.replace(systems.site(TWO_NODES), stage_to="$TMPDIR")
    jobs = submit.plan(runs, site, tmp_path, set(), 60)
    staged = {job.runs[0].dataset: submit._stage_in(job, site).get("variable") for job in jobs}
    assert [len(job.runs) for job in jobs] == [1, 1, 1, 1]
    assert staged == dict(era5="ENERGYNN_ERA5", synthetic=None, era5_ensemble=None, imagenet="ENERGYNN_IMAGENET")


def test_the_container_holds_all_that_its_commands_need(tmp_path):
    """Without Apptainer: its files copied as it would, its own test's command on them, and the extras that it names."""
    text = (REPOSITORY / "systems" / "energynn.def").read_text()
    parts = dict(re.findall(r"^%(\w+)\n((?:    .*\n)+)", text, re.M))
    root = tmp_path / "root"
    for line in parts["files"].splitlines():
        source, target = line.split()
        assert target == f"/opt/energynn/{source}"
        (root / source).parent.mkdir(parents=True, exist_ok=True)
        if (REPOSITORY / source).is_dir():
            shutil.copytree(REPOSITORY / source, root / source, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(REPOSITORY / source, root / source)
    extras = re.search(r"\.\[(.*)\]", parts["post"])[1].split(",")
    assert set(extras) <= set(tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    assert subprocess.run(["sh", "-n"], input=parts["post"] + parts["test"], text=True).returncode == 0
    (command,) = [line.split() for line in parts["test"].splitlines() if line.split()[0] == "energynn"]
    for words in (
        command[1:],
        ["manifest", "verify", "era5_ensemble"],
        ["submit", "smoke", "--system", "slurm", "--dry-run"],
    ):
        done = subprocess.run(
            [sys.executable, "-m", "energynn.cli", *words],
            cwd=root,
            capture_output=True,
            text=True,
            env=os.environ | {"PYTHONPATH": str(root)},
        )
        assert done.returncode == 0, done.stderr


def test_the_wheelhouse_is_what_the_environment_is_made_from():
    """The commands that make would give: the same extras, nothing from an index."""
    fetch, install = (
        subprocess.run(["make", "-n", "VENV=/no/such", *words], cwd=REPOSITORY, capture_output=True, text=True).stdout
        for words in (["wheelhouse"], ["WHEELHOUSE=build/wheelhouse", "train-env"])
    )
    extras = re.search(r"pip download -q -d build/wheelhouse -c requirements.lock \"(\.\[.*?\])\"", fetch)[1]
    lines = [line for line in install.splitlines() if "pip install" in line]
    assert len(lines) == 1 and extras in lines[0]
    assert all("--no-index --find-links build/wheelhouse" in line for line in lines)


@pytest.mark.parametrize("devices, nodes", [(1, 1), (4, 1), (6, 2), (9, 3)])
def test_a_job_has_whole_nodes_for_all_its_devices(tmp_path, devices, nodes):
    site = dataclasses.replace(systems.site("horeka-a100"), devices_per_node=4)
    run = config.make("fourcastnet", preset="paper", devices=devices, system=site.name)
    (job,) = submit.plan([run], site, tmp_path, set(), 60)
    assert job.nodes == nodes


@pytest.mark.parametrize("minutes, warning_s", [(10, 50), (60, 300), (600, 300)])
def test_a_warning_comes_five_minutes_before_the_end_and_later_in_short_jobs(tmp_path, minutes, warning_s):
    run = config.make("fourcastnet", preset="paper", system="horeka-a100")
    text = submit.script(submit.Job((run,), 1, minutes), systems.site("horeka-a100"), tmp_path, ["mine"])
    assert f"--signal=B:USR1@{warning_s}\n" in text.replace("'", "").replace('"', "")


# ------------------------------------------------------------------- several users, several calls, a Slurm that is slow


class FakeSlurm:
    """sbatch, squeue and scontrol as programs see them, with a queue that is told what to do."""

    def __init__(self, monkeypatch):
        self.number, self.jobs, self.refuses, self.is_slow = 40, {}, "", False
        monkeypatch.setattr(slurm, "call", self.call)

    def call(self, *command):
        return getattr(self, command[0])(*command[1:])

    def sbatch(self, *words):
        text = Path(words[-1]).read_text()
        if self.refuses and self.jobs:
            raise ValueError(self.refuses)
        self.number += 1
        self.jobs[str(self.number)] = re.search("--comment=(.*)", text)[1]
        if self.is_slow:
            raise slurm.NoAnswer("sbatch: no answer in 20 s")
        return f"{self.number}\n"

    def squeue(self, *words):
        if "--me" in words:
            return "".join(f"{number}|{comment}\n" for number, comment in self.jobs.items())
        (asked,) = [word.removeprefix("--jobs=").split(",") for word in words if word.startswith("--jobs=")]
        return "".join(f"{number}_0|PENDING|None\n" for number in asked if number in self.jobs)

    def scontrol(self, *_):
        return "MaxArraySize            = 3\n"


@pytest.fixture
def fake_slurm(monkeypatch):
    return FakeSlurm(monkeypatch)


def my_study(folder, *seeds):
    path = folder / "mine.py"
    made = ", ".join(f"config.make('fourcastnet', system=system, devices={devices})" for devices in seeds)
    path.write_text(f"from energynn import config\ndef study(system):\n    return [{made}]\n")
    return path


def words_of(tmp_path, command="submit", *more):
    study = [str(my_study(tmp_path, 1, 2))] if command == "submit" else []
    system = ["--system", TWO_NODES] if command == "submit" else []
    return [command, *study, *system, "--runs-dir", str(tmp_path / "runs"), *more]


def test_what_slurm_refuses_is_not_submitted_and_what_it_took_is_told(tmp_path, fake_slurm, capsys):
    fake_slurm.refuses = "sbatch: Job violates accounting/QOS policy"
    assert cli.main(words_of(tmp_path)) == 2
    told = capsys.readouterr()
    assert "job 41: 1 x " in told.out and "1 of 2 job arrays are submitted; submit again for the rest" in told.err
    rows, _ = status.rows(status.folders(tmp_path / "runs", []))
    assert sorted(row["state"] for row in rows) == ["not submitted", "queued"]
    assert cli.main(words_of(tmp_path)) == 2 and "policy; nothing is submitted\n" in capsys.readouterr().err
    fake_slurm.refuses = ""
    assert cli.main(words_of(tmp_path)) == 0 and "job 42: 1 x " in capsys.readouterr().out
    assert cli.main(words_of(tmp_path)) == 0 and "0 to make" in capsys.readouterr().out


def test_a_job_that_sbatch_did_not_confirm_is_found_and_not_made_twice(tmp_path, fake_slurm, capsys, monkeypatch):
    fake_slurm.is_slow = True
    assert cli.main(words_of(tmp_path)) == 0 and "job 42: 1 x " in capsys.readouterr().out
    assert cli.main(words_of(tmp_path)) == 0 and "0 to make" in capsys.readouterr().out
    assert len(fake_slurm.jobs) == 2


def test_a_job_that_is_found_late_is_found_by_status_or_says_so_itself(tmp_path, fake_slurm, capsys, monkeypatch):
    fake_slurm.is_slow = True
    number_of, silent = slurm.number_of, []

    def no_answer(comment):
        silent.append(comment)
        raise slurm.NoAnswer("squeue: no answer in 20 s")

    monkeypatch.setattr(slurm, "number_of", no_answer)
    assert cli.main(words_of(tmp_path)) == 2 and "no answer" in capsys.readouterr().err and silent
    monkeypatch.setattr(slurm, "number_of", number_of)
    rows, _ = status.rows(status.folders(tmp_path / "runs", []))
    assert [row["job"] for row in rows if row["state"] == "queued"] == ["41_0"]

    run_dir = Path(rows[0]["folder"])
    submitted = status.submission(run_dir)
    files.write_json(run_dir / "job" / "submission.json", {key: submitted[key] for key in submitted if key != "job_id"})
    for name, value in (("SLURM_ARRAY_JOB_ID", "41"), ("SLURM_ARRAY_TASK_ID", "0")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(status.SUBMISSION, "of an earlier call")
    assert not job._is_ours(run_dir) and not submit.job_of(run_dir)
    monkeypatch.setenv(status.SUBMISSION, submitted["submitted_at"])
    assert job._is_ours(run_dir) and submit.job_of(run_dir) == "41_0"


def test_two_calls_of_submit_do_not_work_at_once(tmp_path, fake_slurm, capsys):
    folder = tmp_path / "runs" / "two-nodes"
    folder.mkdir(parents=True)
    with files.lock(folder / ".submit"):
        assert cli.main(words_of(tmp_path)) == 2 and "another `energynn submit` goes on" in capsys.readouterr().err
    assert not fake_slurm.jobs and cli.main(words_of(tmp_path)) == 0


def test_a_folder_that_others_do_not_share_is_told_with_the_remedy(tmp_path, fake_slurm, capsys, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(submit.files, "lock", refuse)
    assert cli.main(words_of(tmp_path)) == 2
    told = capsys.readouterr().err
    assert f"you may not write to {tmp_path}/runs/two-nodes/.submit; its owner shares it by `chmod -R g+w" in told


def test_large_arrays_come_in_parts_that_slurm_takes(tmp_path):
    runs = tuple(config.make("fourcastnet", seed=seed) for seed in range(5))
    parts = submit._arrays([submit.Job(runs, 1, 60, after="first")], most=2)
    assert [len(part.runs) for part in parts] == [2, 2, 1] and {part.after for part in parts} == {"first"}
    assert tuple(run for part in parts for run in part.runs) == runs


def test_runs_of_a_colleague_are_neither_made_again_nor_cancelled_nor_called_failed(
    tmp_path, fake_slurm, capsys, monkeypatch
):
    assert cli.main(words_of(tmp_path)) == 0
    me = status.getpass.getuser()
    monkeypatch.setattr(status.getpass, "getuser", lambda: "anna")
    monkeypatch.setattr(submit.getpass, "getuser", lambda: "anna")
    capsys.readouterr()
    assert cli.main(words_of(tmp_path, "cancel", "--all")) == 0 and len(fake_slurm.jobs) == 2
    assert capsys.readouterr().out == f"0 jobs cancelled\n2 jobs are {me}'s, and go on; only {me} can cancel them\n"
    fake_slurm.jobs.clear()  # where Slurm shows nobody the jobs of others
    rows, _ = status.rows(status.folders(tmp_path / "runs", []))
    assert {row["state"] for row in rows} == {"unknown"} and len({row["user"] for row in rows}) == 1
    assert {row["reason"] for row in rows} == {f"{me}'s job has ended, or is hidden from you"}
    capsys.readouterr()
    assert cli.main(words_of(tmp_path)) == 0
    told = capsys.readouterr().out
    assert f"0 of 2 runs are made or queued; 0 to make\n2 of them {me} has submitted" in told and not fake_slurm.jobs
    assert cli.main(words_of(tmp_path, "resubmit", "--failed")) == 0 and "no run has failed" in capsys.readouterr().out
    assert cli.main(words_of(tmp_path, "cancel", "--all")) == 0 and "0 jobs cancelled" in capsys.readouterr().out


def test_what_was_cancelled_is_not_submitted_again_unasked(tmp_path, fake_slurm, capsys):
    assert cli.main(words_of(tmp_path)) == 0
    for path in (tmp_path / "runs").glob("*/*/job"):
        (path / "cancelled").touch()
    capsys.readouterr()
    assert cli.main(words_of(tmp_path)) == 0 and "2 runs are still being cancelled" in capsys.readouterr().out
    fake_slurm.jobs.clear()
    assert cli.main(words_of(tmp_path, "resubmit", "--failed")) == 0 and "no run has failed" in capsys.readouterr().out
    assert cli.main(words_of(tmp_path)) == 0 and "2 to make" in capsys.readouterr().out


def test_options_of_one_submission_stand_in_its_scripts_alone(tmp_path, fake_slurm, capsys):
    more = ["--account", "mine", "--", "--exclude=cn[1-2]", "-p long"]
    assert cli.main(words_of(tmp_path, "submit", *more)) == 0
    (script, *_) = (tmp_path / "runs").glob("*/*/job/job.sh")
    for option in ("--account=mine", "--exclude=cn[1-2]", "-p long"):
        assert f"#SBATCH {option}\n" in script.read_text()
    assert cli.main(words_of(tmp_path, "submit", "--", "--wrap=touch x")) == 2
    assert "not of the form" in capsys.readouterr().err


def test_what_slurm_allows_is_allowed(tmp_path):
    path = tmp_path / "mine.toml"
    options = ["--exclude=cn[1-2]", "--constraint=[a|b]", "-p main", "--acctg-freq=energy=1"]
    path.write_text(Path(TWO_NODES).read_text().replace('["--exclusive"]', json.dumps(options)) + "runs_at_once = 4\n")
    text = submit.script(submit.Job(fine_tuning()[:1] * 9, 1, 60), systems.site(str(path)), tmp_path, ["mine"])
    assert "#SBATCH --array=0-8%4\n" in text and all(f"#SBATCH {option}\n" in text for option in options)


@pytest.mark.parametrize("line, status", [("false", 1), ("true", 0), ("source /no/such/conda.sh", 1)])
def test_a_line_of_set_up_that_fails_stops_the_job(tmp_path, line, status):
    site = dataclasses.replace(systems.site("local"), setup=[line])
    run = fine_tuning("local")[0]
    text = submit.script(submit.Job((run,), 1, 60), site, tmp_path, ["mine"])
    (tmp_path / "local" / config.run_id(run) / "job").mkdir(parents=True)
    text = text.replace(submit.quote(sys.executable) + " -m energynn.cluster.job", "echo made #")
    done = subprocess.run(["bash", "-c", text], env={"PATH": os.environ["PATH"]})
    log = next(tmp_path.glob("local/*/job/log.txt")).read_text()
    assert done.returncode == status and ("made" in log) == (status == 0)
    assert (f"energynn: failed: {line}" in log) == (status == 1)


def test_modules_that_fail_stop_the_job(tmp_path):
    site = dataclasses.replace(systems.site("local"), modules=["no/such"])
    assert "\nmodule load no/such || exit\n" in submit.script(
        submit.Job(fine_tuning("local")[:1], 1, 60), site, tmp_path, ["mine"]
    )


def test_a_workload_of_ones_own_is_found_in_the_job_and_has_no_known_cost(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{REPOSITORY}")
    text = submit.script(submit.Job(fine_tuning()[:1], 1, 60), systems.site(TWO_NODES), tmp_path, ["mine"])
    assert f"export PYTHONPATH={REPOSITORY}:{tmp_path}:{REPOSITORY}\n" in text
    monkeypatch.syspath_prepend(REPOSITORY / "tests")
    study = tmp_path / "mine.py"
    made = "config.make('thumbnails', system=system)"
    study.write_text(f"from energynn import config\ndef study(system):\n    return [{made}]\n")
    assert cli.main(["study", "show", str(study)]) == 0 and "of unknown cost" in capsys.readouterr().out


# -------------------------------------------------------------------------------------------------------------- budgets












# -------------------------------------------------------------------------------------------------- a renamed system


def test_a_system_file_that_is_renamed_keeps_its_runs_by_the_name_in_it(tmp_path, fake_slurm, capsys):
    old, new = tmp_path / "old.toml", tmp_path / "new.toml"
    old.write_text(Path(TWO_NODES).read_text())
    words = ["submit", str(my_study(tmp_path, 1, 2)), "--runs-dir", str(tmp_path / "runs"), "--system"]
    assert cli.main([*words, str(old)]) == 0
    old.rename(new)
    assert cli.main([*words, str(new), "--dry-run"]) == 0
    told = capsys.readouterr().out
    assert "2 to make" in told and 'new.toml has taken its place, write name = "old" in it' in told
    new.write_text('name = "old"\n' + new.read_text())
    assert cli.main([*words, str(new)]) == 0 and "2 of 2 runs are made or queued" in capsys.readouterr().out
    new.write_text(new.read_text().replace('"old"', '"../old"'))
    assert cli.main([*words, str(new)]) == 2 and "name: '../old' is not of the form" in capsys.readouterr().err


def test_system_check_says_what_it_waits_for_and_where_no_gpu_was_visible(tmp_path, monkeypatch, capsys):
    """Slurm is played: one waits for resources, then for its turn, and ends on a CPU, where the file asks for GPUs."""
    site = dataclasses.replace(systems.site(TWO_NODES), sbatch=("--gres=gpu:1",), gpu="H100")
    waiting = [{"state": "queued", "reason": reason} for reason in ("Resources", "Resources", "Priority")]
    states = iter([*waiting, {"state": "running"}, {"state": "finished"}])
    made = dict(nodes=2, sockets=2 * site.sockets_per_node, device_kind="cpu", device_name="EPYC", perun_time_s=1.0)
    made |= dict(launcher="srun", energy_total_provenance="estimated")
    monkeypatch.setattr(submit, "REPOSITORY", tmp_path)
    monkeypatch.setattr(submit, "submit", lambda *arguments: [])
    monkeypatch.setattr(submit.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(status, "rows", lambda folders: ([next(states)], None))
    monkeypatch.setattr(records, "read", lambda folder: minimal_record() | made)
    assert submit.check(site) == 1
    told = capsys.readouterr().out
    assert [line.strip() for line in told.splitlines()[1:4]] == ["queued Resources", "queued Priority", "running"]
    assert "no GPU was visible, though sbatch asks for some: the run was made on EPYC" in told
    made.update(device_kind="gpu", device_name="NVIDIA A100")
    states = iter([{"state": "finished"}])
    assert submit.check(site) == 1
    assert "gpu: NVIDIA A100, where the file says H100" in capsys.readouterr().out
