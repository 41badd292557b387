import dataclasses
import re

import pytest

from energynn import cli, config
from energynn.files import REPOSITORY


@pytest.mark.parametrize(
    "parameters, message",
    [
        (dict(learning_rte=0.1), "learning_rte: not a parameter of resnet50"),
        (dict(local_batch_size=0), "local_batch_size: must be at least 1"),
        (dict(local_batch_size=1.5), "local_batch_size: must be a whole number"),
        (dict(local_batch_size="16"), "local_batch_size: must be a whole number"),
        (dict(local_batch_size=True), "local_batch_size: must be a whole number"),
        (dict(devices=2, global_batch_size=3), "3 is not divisible by 2 devices"),
        (dict(devices=2, global_batch_size=40, local_batch_size=16), "give a local batch size that divides it"),
        (
            dict(devices=2, global_batch_size=10, accumulation_steps=3),
            "10 is not divisible by 2 devices x 3 accumulation",
        ),
        (dict(learning_rate=float("nan")), "learning_rate: must be a number"),
        (dict(evaluate_training_set=1), "evaluate_training_set: must be True or False"),
        (dict(patch_size=4), "patch_size: not a parameter of resnet50"),
        (dict(dataset="../photographs"), "dataset: "),
        (dict(system="a/b"), "system: "),
        (dict(preset="best"), "preset: must be one of smoke, paper, fast"),
        (dict(precision="float16"), "precision: must be one of float32, bfloat16"),
        (dict(image_loading="gpu"), "image_loading: must be one of pil, fast, store, device"),
    ],
)
def test_a_bad_parameter_is_named_with_the_remedy(parameters, message):
    with pytest.raises(ValueError, match=message) as error:
        config.make("resnet50", **parameters)
    assert "\n" not in str(error.value)


def test_an_unknown_workload_names_the_known_ones():
    with pytest.raises(ValueError, match="resnet50, fourcastnet"):
        config.make("alexnet")


def test_global_and_local_batch_size_follow_from_each_other():
    assert config.make("resnet50", devices=4, global_batch_size=64).local_batch_size == 16
    assert config.make("resnet50", devices=4, local_batch_size=16).global_batch_size == 64


def test_a_global_batch_is_reached_by_adding_up_gradients():
    made = config.make("resnet50", devices=2, local_batch_size=8, global_batch_size=64)
    assert (made.accumulation_steps, made.local_batch_size) == (4, 8)
    made = config.make("resnet50", devices=2, local_batch_size=8, accumulation_steps=4)
    assert made.global_batch_size == 64
    assert config.make("resnet50", global_batch_size=64, accumulation_steps=4).local_batch_size == 16


def test_none_means_not_given():
    assert config.make("resnet50", epochs=None) == config.make("resnet50")


def test_fine_tuning_needs_the_run_it_starts_from():
    with pytest.raises(ValueError, match="initial_run"):
        config.make("fourcastnet", stage="finetune")
    assert config.make("fourcastnet", stage="finetune", initial_run="a-run").learning_rate == 1e-4
    assert config.make("fourcastnet").learning_rate == 5e-4


def test_paper_is_the_recipe_of_the_study_and_fast_changes_its_cost_only():
    paper, fast = (config.to_dict(config.make("resnet50", preset=preset)) for preset in ("paper", "fast"))
    assert (
        paper
        | {
            "dataset": "imagenet",
            "image_size": 224,
            "local_batch_size": 256,
            "epochs": 100,
            "warmup_epochs": 5,
            "loader_workers": 4,
            "data_staging": True,
            "precision": "float32",
            "evaluate_training_set": True,
            "validation_crop": "random",
            "image_loading": "pil",
            "pinned_memory": False,
            "persistent_workers": False,
            "channels_last": False,
            "fused_optimizer": False,
            "compile": False,
            "deterministic": True,
            "uint8_to_device": False,
            "crop_scale_min": 0.5,
            "perun_sampling_period_s": 1.0,
            "preset": "paper",
        }
        == paper
    )
    differing = {name for name in paper | fast if paper.get(name) != fast.get(name)}
    assert differing == {"preset"} | set(config.FAST | config.FAST_IMAGES)
    assert config.make("resnet50", preset="fast", precision="float32").precision == "float32"
    tuning = dict(stage="finetune", initial_run="a-run", preset="paper")
    for parameters, epochs in ((dict(preset="paper"), 80), (dict(preset="fast"), 80), (tuning, 50)):
        made = config.make("fourcastnet", **parameters)
        assert (made.epochs, made.patch_size, made.embed_dim, made.depth) == (epochs, 8, 768, 12)
        assert (made.dataset, made.local_batch_size, made.precision == "bfloat16") == ("era5", 1, made.preset == "fast")


def test_a_configuration_survives_its_record():
    for workload in config.CONFIGS:
        for preset in config.PRESETS:
            made = config.make(workload, devices=2, preset=preset)
            assert config.from_dict(config.to_dict(made)) == config.make(**config.to_dict(made)) == made
    with pytest.raises(ValueError, match="fields differ"):
        config.from_dict({**config.to_dict(made), "more": 1})


def test_run_ids_tell_apart_what_differs():
    ids = {
        config.run_id(config.make("resnet50", **change))
        for change in [{}, dict(repeat=1), dict(seed=1), dict(epochs=7), dict(devices=2), dict(system="other")]
    }
    assert len(ids) == 6
    assert config.run_id(config.make("resnet50")).startswith("resnet50-photographs-n1-lbs16-gbs16-s0-r0-")
    fast = config.make("resnet50", preset="fast", dataset="photographs")
    assert config.run_id(fast).startswith("resnet50-fast-photographs-n1-lbs256-gbs256-s0-r0-")


def test_notebook_parameters_are_all_simple_literals():
    found = config.from_notebook({"devices": 2, "_hidden": 1, "config": config, "In": [], "typo": "x", "nothing": None})
    assert found == {"devices": 2, "typo": "x", "nothing": None}


def test_every_parameter_says_what_it_means_and_the_document_is_made_from_that():
    for parameters in config.groups().values():
        assert all(known.meaning for known in parameters.values()), parameters
    assert set(config.facts(config.ResNet50Config)) | set(config.facts(config.FourCastNetConfig)) == {
        name for parameters in config.groups().values() for name in parameters
    }
    document = (REPOSITORY / "docs" / "parameters.md").read_text()
    assert document == config.document() + "\n", "python -m energynn.config > docs/parameters.md"


def test_run_help_shows_every_parameter(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["run", "--help"])
    text = capsys.readouterr().out
    assert end.value.code == 0 and max(map(len, text.splitlines())) <= 80
    for name in config.facts(config.ResNet50Config) | config.facts(config.FourCastNetConfig):
        assert re.search(rf"^  {name} \((int|float|bool|str), .+\)$", text, re.M), name
    with pytest.raises(SystemExit) as end:
        cli.main(["run", "-p", "devices"])
    assert end.value.code == 2 and len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize(
    "workload, parameters, message",
    [
        (
            "resnet50",
            dict(sampling_period_s=0.001),
            "sampling_period_s: must be at least 0.01 and at most 60, got 0.001",
        ),
        ("resnet50", dict(dataset=""), "dataset: must be up to 64 letters, digits, '_', '-' and '.', got ''"),
        ("fourcastnet", dict(test_years="twenty"), "test_years: must be years as 1979-2015 or 2016,2018, got 'twenty'"),
        (
            "fourcastnet",
            dict(initial_run="a b"),
            "initial_run: must be up to 200 letters, digits, '_', '-' and '.', got 'a b'",
        ),
        ("fourcastnet", dict(embed_dim=20), "embed_dim: 20 must be a multiple of num_blocks"),
    ],
)
def test_a_limit_is_told_in_words(workload, parameters, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        config.make(workload, **parameters)
    assert config.make("fourcastnet", test_years=2018).test_years == "2018"


def test_limits_hold_in_a_workload_that_only_changes_a_default():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Config(config.ResNet50Config):
        devices: int = 2

    assert config.facts(Config)["devices"].limits() == "at least 1 and at most 65,536"
    assert config.facts(Config)["preset"].choices == tuple(config.PRESETS)


def test_a_runs_name_is_what_it_was():
    """Records lie in folders of these names, and a study finds them there."""
    made = config.make("resnet50", preset="paper", devices=4, local_batch_size=256)
    assert config.run_id(made) == "resnet50-paper-imagenet-n4-lbs256-gbs1024-s0-r0-33d214dd"
    made = config.make("fourcastnet", stage="finetune", initial_run="a-run", devices=2)
    assert config.run_id(made) == "fourcastnet-finetune-era5_ensemble-n2-lbs1-gbs2-s0-r0-a26b45a9"


def test_a_later_field_leaves_the_names_of_earlier_runs():
    """At its default it is no part of a configuration on disk, so a record of before it reads as one of now."""
    plain = config.make("resnet50", devices=2)
    later = {name for name, known in config.facts(type(plain)).items() if known.is_later}
    assert later == {"gradient_compression", "gradient_buckets", "gradient_noise_steps", "step_period_s"} | {
        "idle_ready_s",
        "setup_timeout_s",
    }
    assert not later & config.to_dict(plain).keys()
    other = config.make("resnet50", devices=2, gradient_noise_steps=10)
    assert config.to_dict(other) == config.to_dict(plain) | {"gradient_noise_steps": 10}
    assert config.from_dict(config.to_dict(other)) == other != plain
    assert config.run_id(other) != config.run_id(plain) == "resnet50-photographs-n2-lbs16-gbs32-s0-r0-c4d74d27"
    with pytest.raises(ValueError, match="fields differ"):
        config.from_dict({name: value for name, value in config.to_dict(plain).items() if name != "seed"})
