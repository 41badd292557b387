"""What a configuration is made from, what it refuses, and what its run is called."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from energynn.experiment import config, studies
from energynn.host.files import REPOSITORY
from tests.processes import answer, refused


@pytest.mark.parametrize(
    "parameters, message",
    [
        (dict(devices=2, global_batch_size=3), "3 is not local_batch_size x 2 devices"),
        (
            dict(devices=2, global_batch_size=40, local_batch_size=16),
            "choose a multiple of 32",
        ),
        (dict(global_batch_size=10, accumulation_steps=3), "choose a multiple of 3"),
        (dict(dataset="../photographs"), "dataset: .*up to 64 letters"),
        (dict(system="a\nb"), "system: must have up to 64 letters"),
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
    refused(message, config.make, **parameters)


def test_a_workload_of_ones_own_has_no_preset(monkeypatch):
    monkeypatch.syspath_prepend(REPOSITORY / "examples")
    assert config.make("straight_line").epochs == 500
    refused(
        "preset: straight_line has none", config.make, "straight_line", preset="fast"
    )
    refused("years: ", config.parse_years, "2016,2019-2017")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda members: st.lists(members) | st.dictionaries(st.text(), members),
    max_leaves=5,
)


@given(st.sampled_from(list(config.CONFIGS)), st.data(), JSON)
def test_any_value_of_any_parameter_is_within_its_limits_or_refused_by_name(
    workload, data, value
):
    kinds = config.parameter_types(config.CONFIGS[workload])
    name = data.draw(st.sampled_from([name for name in kinds if name != "workload"]))
    limits = msgspec.json.schema(kinds[name])
    try:
        source = f"%%time\nworkload, {name} = 'here'"
        cell = {"In": [source], "workload": workload, name: value}
        made = config.make(**config.notebook_parameters(cell))
    except ValueError as error:
        text = str(error)
        assert "\n" not in text and len(text) < 300
        assert name in text or "batch_size" in text
        return
    number = getattr(made, name)
    assert limits.get("minimum", number) <= number <= limits.get("maximum", number)
    assert config.config_from_dict(config.asdict(made)) == made


def test_a_message_shortens_what_it_repeats():
    for value in ("x" * 999, [[["x" * 99] * 9] * 9] * 9, {"a": {"b": ["y" * 99] * 9}}):
        with pytest.raises(ValueError) as refusal:
            config.make(devices=value)
        assert len(str(refusal.value)) < 200


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
    paper = config.asdict(config.make("resnet50", preset="paper"))
    fast = config.asdict(config.make("resnet50", preset="fast"))
    differing = {name for name in paper | fast if paper.get(name) != fast.get(name)}
    assert differing == {"preset", *config.PRESETS["fast"]["resnet50"]}
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
        assert config.asdict(made) | network == config.asdict(made)
        assert (made.learning_rate, made.epochs) == recipe
    assert pretrain[0] == 5e-4


def test_a_record_from_before_a_parameter_has_the_value_that_the_parameter_came_with():
    plain = config.asdict(config.make(preset="fast"))
    assert config.make(**plain) == config.config_from_dict(plain)
    older = {name: plain[name] for name in plain if name not in ("seed", "drop_last")}
    assert config.config_from_dict(older) == config.config_from_dict(plain)
    del plain["image_size"]  # has no default
    refused("config: .*image_size", config.config_from_dict, plain)


def test_each_parameter_with_a_default_stands_in_the_table_of_values_at_birth():
    """A new parameter without a row would rename all runs."""
    always_named = {"workload", "dataset", "learning_rate"}  # differ by workload
    for workload, config_class in config.CONFIGS.items():
        fields = msgspec.structs.fields(config_class)
        names = {each.name for each in fields if not each.required} - always_named
        assert config.original_defaults(workload).keys() == names


def test_a_runs_name_is_what_it_was():
    """Records lie in folders of these names, and a study finds them there."""
    made = config.make(preset="paper", devices=4, local_batch_size=256)
    assert (
        config.run_id(made)
        == "resnet50-paper-imagenet-n4-lbs256-gbs1024-s0-r0-bf7a2830"
    )
    made = config.make("fourcastnet", stage="finetune", initial_run="a-run", devices=2)
    name = "fourcastnet-finetune-era5_ensemble-n2-lbs1-gbs2-s0-r0-61a915fe"
    assert config.run_id(made) == name
    before = dict(devices=2, image_size=64, training_samples=288, epochs=2)
    before |= dict(learning_rate=0.1, validation_samples=50, evaluate_training_set=True)
    plain = config.make(**before)
    assert config.run_id(plain) == "resnet50-photographs-n2-lbs16-gbs32-s0-r0-62fa4037"
    changes = [dict(repeat=1), dict(seed=1), dict(epochs=7), dict(system="other")]
    changes += [dict(gradient_buckets=True), dict(perun_sampling_period_s=1.0)]
    names = {config.run_id(config.make(**before | change)) for change in changes}
    assert len(names | {config.run_id(plain)}) == 7


WATCHED = dict(
    idle_baseline_s=2.0,
    idle_ready_s=5.0,
    collective_timeout_s=600.0,
    setup_timeout_s=60.0,
    save_weights=True,
    checkpoint_period_s=1.0,
)


@pytest.mark.parametrize("name, value", WATCHED.items())
def test_how_a_run_is_watched_changes_neither_its_name_nor_its_recipe(name, value):
    plain, other = config.make(), config.make(**{name: value})
    assert plain != other and config.run_id(plain) == config.run_id(other)
    assert config.recipe(config.asdict(plain)) == config.recipe(config.asdict(other))


def test_another_default_makes_another_name_and_a_new_parameter_none(monkeypatch):
    plain, name = config.make(), config.run_id(config.make())

    class Today(config.ResNet50Config, frozen=True, kw_only=True):
        momentum: float = 0.8
        nesterov: bool = False

    monkeypatch.setitem(config.CONFIGS, "resnet50", Today)
    shared, own = (
        config.ORIGINAL_DEFAULTS["shared"],
        config.original_defaults("resnet50"),
    )
    table = {"shared": shared, "resnet50": own | {"nesterov": False}}
    monkeypatch.setattr(config, "ORIGINAL_DEFAULTS", table)
    assert config.make().momentum == 0.8 and config.run_id(config.make()) != name
    as_before = config.make(momentum=0.9)
    assert config.run_id(as_before) == name
    assert config.run_id(config.make(momentum=0.9, nesterov=True)) != name
    values = config.asdict(plain)
    assert config.config_from_dict(values) == as_before, "with its own momentum"
    del values["momentum"]
    assert config.config_from_dict(values) == as_before, "with that of its time"


def test_a_sweep_of_how_runs_are_watched_is_refused():
    assert len(studies.make_sweep({"sampling_period_s": "0.04,0.2"})) == 2
    refused(
        "are one.* another repeat", studies.make_sweep, {"checkpoint_period_s": "0,60"}
    )


class Theirs(config.RunConfig, frozen=True, kw_only=True):
    workload: str = __name__
    dataset: str = "own"
    local_batch_size: int = 1
    global_batch_size: int = 1
    epochs: int = 1
    learning_rate: float = 0.1
    momentum: float = 0.9  # as ours, but not ours


def test_of_a_workload_that_is_not_ours_every_value_is_named():
    plain = Theirs()
    assert "momentum" in config.values_in_name(plain)
    assert "precision" not in config.values_in_name(plain), "what is shared may grow"
    changes = [
        dict(momentum=0.8),
        dict(precision="bfloat16"),
        *({name: value} for name, value in WATCHED.items()),
    ]
    names = {config.run_id(Theirs(**change)) for change in changes}
    assert len(names | {config.run_id(plain)}) == 1 + len(changes)


def test_every_parameter_is_listed_with_its_meaning_values_and_limits():
    text = answer("run --list")
    shared = config.parameter_types(config.RunConfig)
    for config_class in config.CONFIGS.values():
        for name, kind in config.parameter_types(config_class).items():
            assert f"; {config.limits_of_type(kind)}\n" in text, name
            assert text.count(f"\n{name}: ") >= 2 + (name in shared), (
                "its meaning and its values"
            )


def test_a_power_limit_is_refused_and_old_records_with_one_are_read():
    for watts in (300, "300", 0.5):
        refused(
            r"^power_limit_W: .*nvidia-smi -pl .*\Z", config.make, power_limit_W=watts
        )
    plain = config.make()
    assert config.make(power_limit_W=0) == plain
    old = config.asdict(plain) | {"power_limit_W": 300.0}
    assert config.asdict(config.config_from_dict(old)) == old
    assert config.run_id(config.config_from_dict(old)) != config.run_id(plain)
