"""What a configuration is made from, what it refuses, and what its run is called."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from energynn import cli, config, studies


@pytest.mark.parametrize(
    "parameters, message",
    [
        (
            dict(learning_rte=0.1),
            "learning_rte: not a parameter.* did you mean learning_rate?",
        ),
        (dict(patch_size=4), "patch_size: not a parameter"),
        (dict(devices=2, global_batch_size=3), "3 is not local_batch_size x 2 devices"),
        (
            dict(devices=2, global_batch_size=40, local_batch_size=16),
            "choose a multiple of 2",
        ),
        (dict(global_batch_size=10, accumulation_steps=3), "choose a multiple of 3"),
        (dict(learning_rate=float("nan")), "learning_rate: must have .*minimum 0"),
        (dict(dataset="../photographs"), "dataset: .*up to 64 letters"),
        (dict(system="a\nb"), "system: must have up to 64 letters"),
        (dict(preset="best"), "preset: .*fast.*paper.*smoke"),
        (
            dict(workload="alexnet"),
            "workload: .* choose one of resnet50, fourcastnet, or a module",
        ),
        (
            dict(workload="fourcastnet", stage="finetune"),
            "initial_run: .* needs the run_id",
        ),
        (
            dict(workload="fourcastnet", patch_size=8),
            "patch_size: 8 must divide the 60 x 120",
        ),
        (
            dict(workload="fourcastnet", embed_dim=20),
            "embed_dim: 20 must be a multiple",
        ),
        (dict(workload="fourcastnet", test_years="twenty"), "test_years: .*years as"),
    ],
)
def test_a_bad_parameter_is_named_with_the_remedy(parameters, message):
    with pytest.raises(ValueError, match=message) as error:
        config.make(**parameters)
    assert "\n" not in str(error.value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda members: st.lists(members) | st.dictionaries(st.text(), members),
    max_leaves=5,
)


@given(st.sampled_from(list(config.CONFIGS)), st.data(), JSON)
def test_any_value_of_any_parameter_is_within_its_limits_or_refused_by_name(
    workload, data, value
):
    kinds = config.types(config.CONFIGS[workload])
    name = data.draw(st.sampled_from([name for name in kinds if name != "workload"]))
    limits = msgspec.json.schema(kinds[name])
    try:
        made = config.make(
            **config.from_notebook({"workload": workload, name: value, "_": 1})
        )
    except ValueError as error:
        text = str(error)
        assert "\n" not in text and len(text) < 300
        assert name in text or "batch_size" in text
        return
    number = getattr(made, name)
    assert limits.get("minimum", number) <= number <= limits.get("maximum", number)
    assert config.from_dict(config.to_dict(made)) == made


def test_batch_sizes_follow_from_each_other():
    assert config.make(devices=4, global_batch_size=64).local_batch_size == 16
    assert config.make(devices=4, local_batch_size=16).global_batch_size == 64
    made = config.make(devices=2, local_batch_size=8, global_batch_size=64)
    assert (made.accumulation_steps, made.local_batch_size) == (4, 8)
    made = config.make(devices=2, local_batch_size=8, accumulation_steps=4)
    assert made.global_batch_size == 64
    assert (
        config.make(global_batch_size=64, accumulation_steps=4).local_batch_size == 16
    )


def test_paper_is_the_recipe_of_the_study_and_fast_changes_its_cost_only():
    paper = config.to_dict(config.make("resnet50", preset="paper"))
    fast = config.to_dict(config.make("resnet50", preset="fast"))
    differing = {name for name in paper | fast if paper.get(name) != fast.get(name)}
    assert differing == {"preset", *config.FAST, *config.FAST_IMAGES}
    network = dict(dataset="era5", patch_size=8, embed_dim=768, depth=12)
    network |= dict(local_batch_size=1)
    tuning = dict(stage="finetune", initial_run="a-run")
    pretrain = config.make("fourcastnet").learning_rate, 80
    for parameters, recipe in (
        (dict(preset="paper"), pretrain),
        (dict(preset="fast"), pretrain),
        (dict(preset="paper", **tuning), (1e-4, 50)),
    ):
        made = config.make("fourcastnet", **parameters)
        assert config.to_dict(made) | network == config.to_dict(made)
        assert (made.learning_rate, made.epochs) == recipe
    assert pretrain[0] == 5e-4


def test_a_record_without_a_parameter_is_refused():
    plain = config.to_dict(config.make(preset="fast"))
    assert config.make(**plain) == config.from_dict(plain)
    del plain["seed"]
    with pytest.raises(ValueError, match="has no seed"):
        config.from_dict(plain)


def test_a_runs_name_is_what_it_was():
    """Records lie in folders of these names, and a study finds them there."""
    made = config.make(preset="paper", devices=4, local_batch_size=256)
    assert (
        config.run_id(made)
        == "resnet50-paper-imagenet-n4-lbs256-gbs1024-s0-r0-33d214dd"
    )
    made = config.make("fourcastnet", stage="finetune", initial_run="a-run", devices=2)
    name = "fourcastnet-finetune-era5_ensemble-n2-lbs1-gbs2-s0-r0-a26b45a9"
    assert config.run_id(made) == name
    before = studies.SHORT | dict(devices=2, image_size=64, training_samples=288)
    plain = config.make(**before)
    assert config.run_id(plain) == "resnet50-photographs-n2-lbs16-gbs32-s0-r0-c4d74d27"
    assert not set(config.LATER) & config.to_dict(plain).keys(), (
        "names of earlier runs stay"
    )
    later = config.make(**before, gradient_buckets=True)
    assert config.to_dict(later) == config.to_dict(plain) | {"gradient_buckets": True}
    changes = [dict(repeat=1), dict(seed=1), dict(epochs=7), dict(system="other")]
    names = {config.run_id(config.make(**before | change)) for change in changes}
    assert len(names | {config.run_id(plain), config.run_id(later)}) == 6


def test_every_parameter_is_listed_with_its_meaning_values_and_limits(capsys):
    assert cli.main(["run", "--list"]) == 0
    text = capsys.readouterr().out
    shared = config.types(config.RunConfig)
    for config_class in config.CONFIGS.values():
        for name, kind in config.types(config_class).items():
            assert f"; {config.limits(kind)}\n" in text, name
            assert text.count(f"\n{name}: ") >= 2 + (name in shared), (
                "its meaning and its values"
            )


def test_a_power_limit_is_refused_and_old_records_with_one_are_read():
    for watts in (300, "300", 0.5):
        with pytest.raises(ValueError, match=r"^power_limit_W: .*nvidia-smi -pl .*\Z"):
            config.make(power_limit_W=watts)
    plain = config.make()
    assert "power_limit_W" not in config.to_dict(plain)
    assert config.make(power_limit_W=0) == plain
    old = config.to_dict(plain) | {"power_limit_W": 300.0}
    assert config.to_dict(config.from_dict(old)) == old
    assert config.run_id(config.from_dict(old)) != config.run_id(plain)
