"""Where the line between evidence and no evidence runs exactly."""

import pytest

from energynn import records
from tests.conftest import built
from tests.run_files import ZERO_NS, read_lines, rewrite, write_lines


def change_events(run_dir, change):
    for path in run_dir.glob("events-rank*.jsonl"):
        rewrite(path, change)


@pytest.mark.parametrize("samples, is_enough", [(60, True), (59, False)])
def test_sixty_samples_are_enough(run_dir, samples, is_enough):
    path = run_dir / "samples-host.jsonl"
    header, *lines = read_lines(path)
    header["period_s"] = 0.5
    inside = [line for line in lines if 0 <= line["t"] - ZERO_NS <= 20e9]
    kept = inside[:: len(inside) // samples][: samples - 1] + inside[-1:]
    around = [line for line in lines if line not in inside]
    both = sorted(kept + around, key=lambda line: line["t"])
    write_lines(path, [header, *both])
    record = built(run_dir)
    assert record.samples_in_training == samples
    assert ("power samples" in str(record.invalid_reasons)) != is_enough


def test_a_rank_that_left_no_events_is_missed(run_dir):
    assert built(run_dir).valid
    (run_dir / "events-rank1.jsonl").unlink()
    reasons = str(built(run_dir).invalid_reasons)
    assert "1 ranks of a start left no events: their energy is missing" in reasons


def test_a_metric_that_is_no_number_is_no_evidence(run_dir):
    def change(line):
        if "metrics" in line:
            line["metrics"] = {"top1_error": float("nan")}

    change_events(run_dir, change)
    record = built(run_dir)
    assert "metric top1_error is not a number" in record.invalid_reasons


@pytest.mark.parametrize("samples_trained", [319, 321])
def test_samples_are_steps_times_global_batch_size(run_dir, samples_trained):
    change_events(
        run_dir,
        lambda line: (
            line.update(samples_trained=samples_trained)
            if "samples_trained" in line
            else None
        ),
    )
    record = built(run_dir)
    assert "samples_trained is not" in str(record.invalid_reasons)


def test_of_an_epoch_that_stands_in_two_segments_the_last_counts(run_dir):
    epochs = [
        line
        for line in read_lines(run_dir / "events-rank0.jsonl")
        if line["event"] == "epoch"
    ]
    (run_dir / "segment-2").mkdir()
    again = epochs[0] | {"training_loss": 1.0, "t_wall_ns": epochs[0]["t_wall_ns"] + 1}
    write_lines(run_dir / "segment-2" / "events-rank0.jsonl", [again])
    record = records.save_record(run_dir, "interrupted", "stopped")
    assert [entry["training_loss"] for entry in record.history] == [1.0]


def test_a_perun_file_that_was_cut_off_costs_no_record(run_dir):
    path = next(run_dir.glob("perun/*.hdf5"))
    path.write_bytes(path.read_bytes()[:700])
    record = built(run_dir)
    assert record.energy_cpu_J > 0 and record.energy_perun_total_J is None
    assert "cut off while it wrote" in str(record.flags)
    assert "perun's HDF5 is missing or cannot be read" in record.invalid_reasons
