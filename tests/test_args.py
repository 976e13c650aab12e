"""Preset and command line: one parse, one type check, errors that name value and fix."""

import pytest
import yaml

import train_mlm
from roberta_recipe.args import InputError, parse, read_preset

CLASSES = [train_mlm.MlmArguments, train_mlm.MlmTrainingArguments]


def parsed(argv, preset):
    return parse(CLASSES, ["--config", preset, *argv], "unused.yaml", "")


def test_order_is_default_then_preset_then_command_line(preset):
    (args, training_args), _ = parsed(["--max_steps", "7"], preset)
    assert args.mlm_probability == 0.15  # dataclass default
    assert args.max_seq_length == 64  # preset
    assert training_args.max_steps == 7  # command line over the preset's 4


def test_paper_values_stand_in_for_trainers_defaults(preset):
    (_, training_args), _ = parsed([], preset)
    assert (training_args.adam_beta2, training_args.adam_epsilon) == (0.98, 1e-6)
    assert (training_args.weight_decay, training_args.max_grad_norm) == (0.01, 0.0)
    assert training_args.logging_nan_inf_filter is False


@pytest.mark.parametrize("written", ["6e-4", "6E-4", "0.0006", "6.0e-4", "+6e-4"])
def test_numbers_of_yaml(tmp_path, written):
    path = tmp_path / "p.yaml"
    path.write_text(f"learning_rate: {written}\n")
    assert read_preset(path, CLASSES) == {"learning_rate": 6e-4}


def test_resolved_arguments_are_a_preset_that_resolves_to_the_same(preset, tmp_path):
    argv = [
        "--learning_rate",
        "6e-4",
        "--mask_count",
        "exact",
        "--bf16",
        "--eval_strategy",
        "steps",
        "--eval_steps",
        "2",
    ]
    _, resolved = parsed(argv, preset)
    again = tmp_path / "again.yaml"
    again.write_text(yaml.safe_dump(resolved))
    _, resolved_again = parsed([], str(again))
    assert resolved_again == resolved
    assert resolved["learning_rate"] == 6e-4 and resolved["mask_count"] == "exact" and resolved["bf16"] is True


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("max_stepz: 3", ["max_stepz", "max_steps"]),
        ("max_steps: many", ["max_steps", "'many'", "whole number"]),
        ("max_steps: 2.5", ["max_steps", "2.5", "whole number"]),
        ("max_steps: true", ["max_steps", "True", "whole number"]),
        ("learning_rate: fast", ["learning_rate", "'fast'", "a number"]),
        ("bf16: 1", ["bf16", "1", "true or false"]),
        ("input_format: sentences", ["input_format", "'sentences'", "full_sentences", "contiguous"]),
        ("eval_strategy: sometimes", ["eval_strategy", "'sometimes'", "steps"]),
        ("train_file: a.txt", ["train_file", "'a.txt'", "list"]),
        ("train_file: [1]", ["train_file", "[1]", "list of text"]),
        ("corpus: 3", ["corpus", "3", "text"]),
        ("seed: 1\nseed: 2", ["seed", "twice", "line 2"]),
        ("- a\n- b", ["key: value"]),
        ("a: [", ["not valid YAML"]),
    ],
)
def test_bad_presets(tmp_path, text, named):
    path = tmp_path / "bad.yaml"
    path.write_text(text + "\n")
    with pytest.raises(InputError) as error:
        read_preset(path, CLASSES)
    for word in ["bad.yaml", *named]:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--max_step", "3"], ["--max_step", "--max_steps"]),  # an abbreviation
        (["--learning_rat", "3"], ["--learning_rat", "--learning_rate"]),
        (["--max_steps", "many"], ["--max_steps", "many"]),
        (["--input_format", "x"], ["--input_format", "full_sentences"]),
        (["--max_steps", "0"], ["max_steps=0"]),
        (["--dataloader_num_workers", "4"], ["dataloader_num_workers=4", "0 or 1"]),
        (["--remove_unused_columns"], ["remove_unused_columns"]),
        (["stray"], ["stray"]),
    ],
)
def test_bad_flags(preset, argv, named):
    with pytest.raises(InputError) as error:
        parsed(argv, preset)
    for word in named:
        assert word in str(error.value)


def test_missing_preset_names_its_neighbours(preset, tmp_path):
    with pytest.raises(InputError, match=r"no such file: .*nothing.yaml; its folder has .*preset.yaml"):
        read_preset(tmp_path / "nothing.yaml", CLASSES)


def test_every_preset_of_the_repository_is_valid(root):
    presets = sorted((root / "presets" / "mlm").glob("*.yaml"))
    for path in presets:
        (args, training_args), _ = parse(CLASSES, ["--config", str(path), "--use_cpu", "--bf16", "false"], "", "")
        assert (root / args.config_name).is_file() and (root / args.corpus).is_file()
        assert (training_args.adam_beta1, training_args.adam_beta2, training_args.adam_epsilon) == (0.9, 0.98, 1e-6)
        assert training_args.max_grad_norm == 0.0
    assert [path.stem for path in presets] == ["roberta_base", "roberta_large", "roberta_small", "roberta_tiny"]
