"""A power limit on a fake NVML that enforces it: the right energy, and set back whatever ends."""

import json
import signal

import pytest

from energynn import config, records
from tests.measure.test_command import environment, has_begun, measured, start
from tests.processes import energynn, wait_until

GPU = dict(high_W=300.0, update_s=0.02)
SET_MW = [200_000, 700_000]  # and set back


@pytest.fixture
def limits(tmp_path):
    """The environment of two fake GPUs, and what each limit has been so far."""
    path = tmp_path / "limits"
    env = environment([GPU, GPU], FAKE_LIMITS=str(path))

    def of_gpu(index):
        rows = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
        return [limit for _, number, limit in rows if number == index]

    return env, of_gpu


def test_a_command_draws_what_the_limit_allows_and_the_record_says_so(tmp_path, limits):
    env, of_gpu = limits
    options = ["--power-limit-W", "200"]
    record, status, _ = measured(
        tmp_path / "run", "sleep", "3", options=options, env=env
    )
    assert (status, record["power_limit_gpu_W"]) == (0, 200)
    assert record["valid"], record["invalid_reasons"]
    both_J = 2 * 200 * record["training_time_s"]
    assert record["energy_gpu_J"] == pytest.approx(both_J, rel=0.02)
    assert of_gpu(0) == of_gpu(1) == SET_MW
    assert records.check(tmp_path) == []
    record, _, _ = measured(tmp_path / "again", "sleep", "0.1", env=env)
    assert record["power_limit_gpu_W"] == 700


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_limit_is_set_back_whatever_ends_the_command(tmp_path, limits, number):
    env, of_gpu = limits
    options = ["--power-limit-W", "200"]
    started = start(tmp_path / "run", "sleep", "60", options=options, env=env)
    wait_until(lambda: has_begun(tmp_path / "run"))
    assert of_gpu(0) == SET_MW[:1]
    started.send_signal(number)
    started.communicate(timeout=60)
    wait_until(lambda: of_gpu(0) == of_gpu(1) == SET_MW)


@pytest.mark.parametrize(
    "watts, gpus, said",
    [
        (
            "701",
            [GPU],
            "GPU 0: 701 W: Invalid Argument; only root may, in the range of",
        ),
        ("99", [GPU], "GPU 0: 99 W: Invalid Argument; only root may, in the range of"),
        (
            "200",
            [GPU | {"is_ours": False}],
            "GPU 0: 200 W: Insufficient Permissions; only root may",
        ),
        ("200", [], "no NVIDIA GPU is used; leave it out"),
    ],
)
@pytest.mark.parametrize("command", ["measure", "run"])
def test_what_cannot_be_is_refused_and_nothing_is_changed(
    tmp_path, watts, gpus, said, command
):
    env = environment(gpus, FAKE_LIMITS=str(tmp_path / "limits"))
    words = ["run", f"power_limit_W={watts}", "--runs-dir", str(tmp_path / "runs")]
    if command == "measure":
        words = ["measure", "--power-limit-W", watts, "--out", str(tmp_path / "runs")]
        words += ["--", "touch", str(tmp_path / "made")]
    done = energynn(*words, env=env)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert f"power_limit_W: {said}" in done.stderr
    assert not list(tmp_path.glob("runs/*/*/run.json"))
    assert not (tmp_path / "made").exists()
    rows = (tmp_path / "limits").read_text() if gpus else ""
    assert not {200_000, 99_000, 701_000} & {
        json.loads(row)[2] for row in rows.split("\n") if row
    }


def test_a_run_without_a_limit_is_called_as_ever():
    plain, limited = config.make(), config.make(power_limit_W=300)
    assert config.run_id(plain) != config.run_id(limited)
    assert "power_limit_W" not in config.to_dict(plain)
    assert config.from_dict(config.to_dict(limited)) == limited
