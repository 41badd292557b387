"""A training at a given pace, on one batch that stays where it is, after idling with all set up."""

from energynn.measure import accounting


def test_steps_keep_their_distance_and_use_one_batch(train, tmp_path):
    sizes = dict(patch_size=12, embed_dim=32, depth=1, num_blocks=4, epochs=1, local_batch_size=4)
    pace = dict(step_period_s=0.2, idle_ready_s=0.4, states_on_device=True, loader_workers=2, learning_rate=0.0)
    run = train(tmp_path / "run", "fourcastnet", **sizes, **pace)
    assert run.status == 0, run.output
    assert len(run.losses) > 3 and len(set(run.losses)) == 1, "with a learning rate of 0, one batch has one loss"
    by_name = {event["event"]: event["t_mono_ns"] / 1e9 for event in run.events()}
    training_s = by_name["training_end"] - by_name["training_start"]
    assert training_s >= 0.2 * (len(run.losses) - 1)
    idle = [event for event in run.events() if event["event"].startswith("idle")]
    assert [event["when"] for event in idle] == ["ready", "ready"]
    begin, end = (event["t_mono_ns"] / 1e9 for event in idle)
    assert end - begin >= 0.4 and end <= by_name["training_start"] <= end + 0.2


def test_the_idle_power_of_a_ready_device_is_the_one_to_take_off():
    class Of:
        pass

    part = Of()
    part.hosts, part.marks, part.windows = [Of()], Of(), {"a": (0, 1)}
    part.hosts[0].host = "a"
    part.marks.idle = {("a", when): (0, 1) for when in ("before", "ready", "after")}
    part.hosts[0].idle_W = {
        ("gpu", when): watts for when, watts in (("before", 70.0), ("ready", 120.0), ("after", 110.0))
    }
    found = accounting._idle([part], {"energy_gpu_J": 5000.0, "training_time_s": 10.0})
    assert found["idle_power_gpu_ready_W"] == 120.0 and found["energy_net_gpu_J"] == 5000 - 1200
