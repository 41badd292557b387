"""Names that people give to runs, and how every command finds a run by them."""

import json
from pathlib import Path

import pytest

import energynn
from energynn import cli, config, records
from energynn.files import write_json
from energynn.launch import start
from tests.conftest import write_run_dir


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
    intent = json.loads((folder / "run.json").read_text())
    labels = records.labels(name, "why: a/b")
    write_json(folder / "run.json", intent | labels | {"started_at": started_at})
    records.build(folder, "finished", "")


def said(capsys, *words):
    status = cli.main(list(map(str, words)))
    answer = capsys.readouterr()
    return status, answer.out, answer.err


def test_a_run_is_found_by_folder_run_id_name_part_of_either_and_as_the_last(runs):
    first, last = runs
    for word in (
        first,
        first.resolve(),
        records.place(first),
        "mine.1",
        "e.1",
        "local",
    ):
        assert records.find(word, Path("runs")).samefile(first), word
    assert records.find("last", Path("runs")) == last
    call(first, "mine")  # an exact name is no part of others
    assert records.find("mine", Path("runs")) == first


def test_a_word_that_means_two_runs_or_none_is_one_line_with_their_dates(runs, capsys):
    before = sorted(Path("runs").rglob("*"))
    commands = (["show"], ["compare", "last"], ["status", "--watch"], ["check"])
    for words in (*commands, ["cancel"]):
        status, out, err = said(capsys, *words, "mine")
        assert (status, out) == (2, "") and err.count("\n") == 1, err
        for folder, day in zip(runs, ("2026-01-01", "2026-01-02"), strict=True):
            assert f"{records.place(folder)} of {day}" in err
        status, _, err = said(capsys, *words, "yours")
        assert status == 2 and "yours" in err and err.count("\n") == 1
    with pytest.raises(ValueError, match="means 2 runs"):
        energynn.trace("mine")
    assert sorted(Path("runs").rglob("*")) == before


def test_what_takes_a_run_takes_its_name(runs, capsys):
    for words in (["show"], ["show", "mine.2"], ["show", "last"]):
        assert str(runs[1]) in said(capsys, *words)[1]
    assert said(capsys, "compare", "mine.1", "last")[0] == 0
    assert "1 record" in said(capsys, "check", "mine.1")[1]
    assert energynn.trace("mine.1").sizes["sensor"] == 1
    assert energynn.compare("mine.1", "last").loc["system"].iloc[0] == "local"


@pytest.mark.parametrize("name", ["a/b", "last", "-x", "..", "a b", "ä", "a" * 99])
def test_a_name_that_is_none_is_refused_before_anything_is_made(
    tmp_path, monkeypatch, capsys, name
):
    monkeypatch.chdir(tmp_path)
    for words in (["run", f"--name={name}"], ["measure", f"--name={name}", "true"]):
        status, out, err = said(capsys, *words)
        assert status == 2 and err.startswith("energynn: name: ") and "letters" in err
    assert not list(tmp_path.iterdir())


def test_a_name_is_in_the_record_and_not_in_the_digest(tmp_path, capsys):
    folder = tmp_path / "run"
    words = ["--out", folder, "--name", "mine", "--note", "a/b: ä", "--", "true"]
    assert said(capsys, "measure", *words)[0] == 0
    record = records.read(folder)
    assert (record["name"], record["note"]) == ("mine", "a/b: ä")
    assert records.check(tmp_path) == []
    words[3] = "other"  # a further segment is of the same run
    status, _, err = said(capsys, "measure", *words)
    assert status == 2 and "holds something else" in err
    assert records.read(folder) == record


def test_a_run_that_is_made_keeps_its_name(run_dir):
    made = config.make("resnet50", devices=2, local_batch_size=16)
    call(run_dir, "mine")
    assert start.run(made, run_dir.parent.parent, {"name": "mine"}) == run_dir
    with pytest.raises(ValueError, match="exists with name 'mine'; leave out --name"):
        start.run(made, run_dir.parent.parent, {"name": "yours"})
