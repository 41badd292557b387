"""What people call a run, and what they are told of it: lists, comparisons, one sentence."""

from pathlib import Path

import numpy as np
import pytest

import energynn
from energynn import records
from energynn.experiment import config
from energynn.host.reading import read_json
from energynn.launch import start
from tests.conftest import built, record_of, write_run_dir
from tests.processes import answer, refusal, refused
from tests.run_files import edit


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Two runs in runs/: the earlier is called mine.1, the later mine.2."""
    monkeypatch.chdir(tmp_path)
    folders = []
    for number, system in enumerate(("local", "other"), start=1):
        folders.append(write_run_dir(Path("runs"), system))
        call(folders[-1], f"mine.{number}", f"2026-01-0{number}T00:00:00Z")
    return folders


def call(folder, name, started_at="2026-01-01T00:00:00Z"):
    labels = records.check_labels(name, "why: a/b")
    edit(folder / "run.json", started_at=started_at, **labels)
    built(folder)


def test_a_run_is_found_by_folder_run_id_name_part_of_either_and_as_the_last(runs):
    first, last = runs
    for word in (
        first,
        first.resolve(),
        f"local/{first.name}",
        "mine.1",
        "e.1",
        "local",
    ):
        assert records.find_run(word, Path("runs")).samefile(first), word
    assert records.find_run("last", Path("runs")) == last
    call(first, "mine")  # an exact name is no part of others
    assert records.find_run("mine", Path("runs")) == first


def test_a_word_that_means_two_runs_or_none_is_one_line_with_their_dates(runs):
    before = sorted(Path("runs").rglob("*"))
    for words in ("show", "compare last", "status --watch", "check", "cancel"):
        err = refusal(words, "mine")
        for folder, day in zip(runs, ("2026-01-01", "2026-01-02"), strict=True):
            assert f"{day}T00:00:00Z {folder.relative_to('runs')} mine." in err
        assert "yours" in refusal(words, "yours")
    refused("means 2 runs", energynn.trace, "mine")
    assert sorted(Path("runs").rglob("*")) == before


def test_what_takes_a_run_takes_its_name(runs):
    for words in ("show", "show mine.2", "show last"):
        assert str(runs[1]) in answer(words)
    answer("compare mine.1 last")
    assert "runs/local" in answer("check mine.1")
    assert energynn.trace("mine.1").sizes["sensor"] == 1
    assert energynn.compare("mine.1", "last").loc["system"].iloc[0] == "local"


@pytest.mark.parametrize("name", ["a/b", "last", "-x", "..", "a b", "ä", "a" * 99])
def test_a_name_that_is_none_is_refused_before_anything_is_made(
    tmp_path, monkeypatch, name
):
    monkeypatch.chdir(tmp_path)
    for words in (f"run --name='{name}'", f"measure --name='{name}' true"):
        line = answer(words, status=2)
        assert line.startswith("energynn: name: ") and "letters" in line
    assert not list(tmp_path.iterdir())


def test_a_name_is_in_the_record_and_not_in_the_digest(tmp_path):
    folder = tmp_path / "run"
    words = f"--out {folder} --name mine --note 'a/b: ä' -- true"
    answer(f"measure {words}")
    record = records.read_record_if_any(folder)
    assert (record.name, record.note) == ("mine", "a/b: ä")
    assert records.check(tmp_path) == []
    # a start with other options is no start of this run
    for option in ("--period", "--epochs"):
        said = answer(f"measure {option}=2 {words}", status=2)
        assert "other files, or a run of other " in said
    assert "of other epochs; choose a new or an empty folder" in said


def test_a_run_that_is_made_keeps_its_name(run_dir, capsys):
    made = config.make("resnet50", devices=2, local_batch_size=16)
    call(run_dir, "mine")
    assert start.make_run(made, run_dir.parent.parent, {"name": "mine"}) == run_dir
    start.make_run(made, run_dir.parent.parent, {"name": "yours"})
    assert "nor named anew" in capsys.readouterr().out
    assert records.read_record_if_any(run_dir).name == "mine"


# ------------------------------------------------------------------- what is told


def change(folder, **facts):
    """Make a run another one, as far as its record tells."""
    for name in ("run.json", "record.json"):
        edit(folder / name, **facts)


def test_status_is_a_line_for_each_run_the_newest_first(runs, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    settings = records.read_record_if_any(runs[1]).config | {
        "global_batch_size": 64,
        "seed": 7,
    }
    change(runs[1], config=settings, metrics={"top1_error": 0.584, "top5_error": 0.1})
    head, last, first, total = answer("status").splitlines()
    assert head.split()[:3] == ["started", "UTC", "run"]
    assert "mine.2 resnet50 2 64    top1 0.584 0.667 Wh simulated finished" in last
    assert "mine.1 resnet50 2 32 " in first and total.startswith("runs: 2; ")
    assert max(map(len, (head, last, first))) <= 100
    monkeypatch.setenv("COLUMNS", "300")
    (segment,) = read_json(runs[0] / "record.json")["segments"]
    change(runs[0], segments=[segment, segment])
    wide = answer("status")
    assert " 2 starts" in wide
    assert "system other; seed 7" in wide and "epochs" not in wide
    assert "mine.1" not in answer("status other")
    change(runs[0], name="R1")
    assert "mine.2" not in answer("status R1"), "which is a study, too"
    assert "runs: 1; " in answer("status R1")


def test_failed_shows_what_failed_or_is_not_valid_with_the_whole_reason(runs):
    why = "; ".join(["the disk is full"] * 20)
    change(runs[0], valid=False, status="failed", status_reason=why)
    out = answer("status --failed")
    assert why in out and "mine.2" not in out and "runs: 1; 1 failed" in out


def test_a_comparison_of_commands_shows_the_arguments_that_differ(runs):
    for folder, batch in zip(runs, (64, 512), strict=True):
        words = f"python a/long/path/to/mine.py --images-of-each-local-batch {batch} --lr 0.1"
        words += f" --note 'of {batch}, not -b 8'"
        change(
            folder,
            workload="command",
            run_id=f"run{batch}",
            config={"command": words, "local_batch_size": 8},
        )
    assert " 2 16  " in answer("status"), "the batch that a person told"
    assert list(energynn.compare("mine.1", "mine.2").loc["command"][:2]) == [
        f"--images-of-each-local-batch {batch}; --note 'of {batch}, not -b 8'"
        for batch in (64, 512)
    ]
    out = answer("compare mine.1 mine.2")
    assert "--images-of-each-local-batch 512" in out and "/long/" not in out


def test_repeats_are_averaged_by_their_name_and_three_runs_are_one_table(runs):
    third = write_run_dir(Path("runs"), "third")
    call(third, "yours")
    kept = records.read_record_if_any(runs[0]).config
    for repeat, folder in enumerate(runs):
        about = dict(name="mine", run_id=folder.parent.name)
        about["config"] = kept | {"repeat": repeat, "setup_timeout_s": 9 + repeat}
        about["system"] = "local"
        change(folder, energy_total_J=100.0 + 200 * repeat, **about)
    table = energynn.compare("mine", "yours")
    assert table.loc["energy_total_J", "mine, mean of 2"] == 200
    assert np.isnan(table.loc["repeat", "ratio"]), "which is no quantity"
    shown = answer("compare", *runs, third)
    assert shown.count("energy_total_J") == 1
    refused("two runs or more", energynn.compare, "mine")
    fourth = write_run_dir(Path("runs"), "fourth")
    call(fourth, "yours")
    for folder, joules in ((third, 400.0), (fourth, 500.0)):
        about = dict(run_id=folder.parent.name, system="local")
        change(folder, energy_total_J=joules, **about)
    # by hand, of logarithms: with 1.082 degrees of freedom, by Welch
    said = energynn.compare("mine", "yours").attrs["remarks"][-1]
    assert said.startswith("ratio of the energies: 0.00666 to 1e+03 by the scatter")
    words = "'mine' names runs of several configurations.*`energynn show mine`"
    for other in (
        {"config": kept | {"local_batch_size": 99}},
        {"config": kept | {"precision": "bfloat16"}},
        {"system": "other"},
        {"device_name": "another"},
    ):
        change(runs[1], **{"config": kept, "system": "local"} | other)
        refused(words, energynn.compare, "mine", "yours")


def test_what_was_superseded_says_so_in_the_table(runs):
    aside = runs[0].parent / "superseded" / f"{runs[0].name}.1"
    aside.parent.mkdir()
    runs[0].rename(aside)
    assert energynn.table()["why"].str.contains("superseded").sum() == 1


def test_one_sentence_says_energy_how_good_time_and_accuracy():
    record = dict(energy_total_J=360.0, energy_total_provenance="estimated")
    record |= dict(energy_total_bound_J=1.8, energy_total_systematic_J=180.0)
    record |= dict(training_time_s=22.04, metrics={"top1_error": 0.9, "loss": 2.0})
    assert records.summary_text(record_of(**record)) == (
        "0.1 Wh, estimated, good to within 50 %, in 22 s, 10% classified right"
    )
    record |= dict(energy_gpu_J=180.0, energy_gpu_provenance="measured")
    told = records.summary_text(record_of(**record))
    assert "good to within 50 %, 0.05 Wh of it measured (GPU), in 22 s" in told
    record |= dict(config={"command": ["train"], "epochs": 4})
    told = records.summary_text(record_of(**record))
    assert told.startswith("0.1 Wh, 0.025 Wh an epoch with start and end, estimated, ")
    for numbers, words in (
        ([9, 19, 29], "0.1 Wh, estimated"),
        ([1, 2, 3], "0.1 Wh, 0.033"),
    ):
        history = [{"epoch": number} for number in numbers]
        seen = record | dict(config={"command": ["train"]}, history=history)
        told = records.summary_text(record_of(**seen))
        assert told.startswith(words), "who logs each tenth epoch makes more than these"
    other = record_of(training_time_s=3.0, metrics={"rmse": 1 / 3})
    assert records.summary_text(other) == "in 3 s, rmse 0.3333"
