"""Preset and command line: one parse, one type check, errors that name the value and the fix."""

import re

import pytest
import yaml

import finetune_glue
import finetune_race
import finetune_squad
import train_mlm
from roberta_recipe.args import INHERITED_GROUP, flags_of
from roberta_recipe.errors import InputError
from roberta_recipe.presets import load_yaml, read_preset
from roberta_recipe.training.arguments import RecipeTrainingArguments

CLASSES = [train_mlm.MlmArguments, train_mlm.MlmTrainingArguments]


def parsed(argv, preset):
    return train_mlm.read_arguments(["--config", str(preset), *argv])


def test_order_is_default_then_preset_then_command_line(preset):
    (args, training_args), _ = parsed(["--max_steps", "7"], preset)
    assert args.mlm_probability == 0.15  # dataclass default
    assert args.max_seq_length == 64  # preset
    assert training_args.max_steps == 7  # command line over the preset's 4


@pytest.mark.parametrize("script", [train_mlm, finetune_glue, finetune_squad, finetune_race])
def test_help_lists_every_flag_in_groups_those_of_the_recipe_first(script, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    with pytest.raises(SystemExit) as ended:
        script.read_arguments(["--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    found = re.findall(r"^  (?:-h, )?--(\w+)", shown, re.M)
    (args, training_args), resolved = script.read_arguments([])
    own, names = flags_of(type(args)), [name for name in found if name[3:] not in found]  # no_
    assert sorted(names) == sorted(["help", "config", *own, *flags_of(type(training_args))])
    assert set(names[2 : 2 + len(own)]) == set(own)
    titles = re.findall(r"^(\S.*):$", shown, re.M)
    assert titles[-2:] == [RecipeTrainingArguments._argument_group_name, INHERITED_GROUP]
    (rate,) = re.findall(r"--learning_rate LEARNING_RATE\s[^(]*\(default: (\S+)\)", shown)
    assert float(rate) == resolved["learning_rate"]  # the preset's
    assert "(default: None)" not in shown and "--learning-rate" not in shown


def test_help_of_a_script_that_was_copied_without_its_preset(capsys, monkeypatch):
    monkeypatch.setattr(finetune_glue, "DEFAULT", "presets/absent/rte.yaml")
    with pytest.raises(SystemExit):
        finetune_glue.read_arguments(["--help"])
    assert "--learning_rate" in capsys.readouterr().out
    for argv in ([], ["--help", "--config", "presets/absent/mine.yaml"]):
        with pytest.raises(InputError, match="no such file: presets/absent"):
            finetune_glue.read_arguments(argv)


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
    # values that no preset or flag gave are saved too, so that the file means the same when a default changes
    assert resolved["adam_beta2"] == 0.98 and resolved["seed"] == 42 and resolved["lr_scheduler_type"] == "linear"


def test_what_belongs_to_one_start_is_not_saved(preset):
    _, resolved = parsed(["--resume_from_checkpoint", "x", "--hub_model_id", "me/x"], preset)
    assert not {"resume_from_checkpoint", "hub_model_id"} & resolved.keys() and "me/x" not in resolved.values()


def test_a_flag_replaces_its_alternative_in_the_preset(preset):
    (args, _), _ = parsed(["--corpus", "presets/corpus/docstrings.yaml"], preset)
    assert args.train_file is None and args.validation_file is None and args.corpus == "presets/corpus/docstrings.yaml"
    (args, _), _ = parsed(["--model_name_or_path", "m"], preset)
    assert args.config_name is None and args.model_name_or_path == "m"
    with pytest.raises(InputError, match=r"corpus=c and train_file=.* exclude each other"):
        parsed(["--corpus", "c", "--train_file", "f"], preset)


def test_merge_keys_of_yaml(tmp_path):
    """What a mapping says itself comes before what it merges, also where that merges another and comes later."""
    path = tmp_path / "merged.yaml"
    path.write_text("a: &a {x: 1, y: 1}\nb: {c: {d: &d {<<: *a, y: 2}}}\ne: {<<: *d, z: 3}\n")
    assert load_yaml(path) == {
        "a": {"x": 1, "y": 1},
        "b": {"c": {"d": {"x": 1, "y": 2}}},
        "e": {"x": 1, "y": 2, "z": 3},
    }


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
        ("train_file: [1]", ["train_file", "[1]", "text (entry 1)"]),
        ("corpus: 3", ["corpus", "3", "text"]),
        ("seed: 1\nseed: 2", ["seed", "twice", "line 2"]),
        ("a: &a {x: 1}\nb: {<<: *a, <<: *a}", ["'<<'", "twice", "line 2"]),
        ("a: &a {x: 1}\nb: {<<: *a, y: 1, y: 2}", ["'y'", "twice", "line 2"]),
        ("- a\n- b", ["key: value"]),
        ("a: [", ["not valid YAML"]),
        ("output_dir: {{ out }}", ["{'out': None} is no key", "line 1"]),
        ("run_name: 2024-02-30", ["not valid YAML", "day"]),
        ("max_steps: !!int foo", ["not valid YAML", "'foo'"]),
        ("bf16: !!bool foo", ["not valid YAML", "'foo'"]),
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
        (["--logging_nan_inf_filter"], ["logging_nan_inf_filter"]),
        (["--load_best_model_at_end"], ["load_best_model_at_end"]),
        (["--remove_unused_columns"], ["remove_unused_columns"]),
        (["--eval_strategy", "epoch"], ["eval_strategy=epoch", "steps"]),
        (["--save_strategy", "epoch"], ["save_strategy=epoch", "steps"]),
        (["--num_train_epochs", "2"], ["num_train_epochs=2.0", "max_steps"]),
        (["--label_smoothing_factor", "0.1"], ["label_smoothing_factor=0.1"]),
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


@pytest.mark.parametrize(
    ("name", "learning_rate", "warmup_steps"), [("roberta_base", 6e-4, 24_000), ("roberta_large", 4e-4, 30_000)]
)
def test_presets_are_table_9(root, name, learning_rate, warmup_steps):
    (args, training), _ = parsed(["--use_cpu", "--bf16", "false"], root / "presets" / "mlm" / f"{name}.yaml")
    assert (training.learning_rate, training.warmup_steps) == (learning_rate, warmup_steps)
    assert (args.global_batch_size, training.max_steps, args.max_seq_length) == (8192, 500_000, 512)
    assert (training.weight_decay, training.lr_scheduler_type, args.mlm_probability) == (0.01, "linear", 0.15)
    assert (args.input_format, training.max_grad_norm) == ("full_sentences", 0.0)


def test_every_preset_of_the_repository_is_valid(root):
    presets = sorted((root / "presets" / "mlm").glob("*.yaml"))
    for path in presets:
        (args, training_args), _ = parsed(["--use_cpu", "--bf16", "false"], path)
        assert (root / args.config_name).is_file() and (root / args.corpus).is_file()
        if path.stem.startswith("roberta"):
            assert (training_args.adam_beta1, training_args.adam_beta2, training_args.adam_epsilon) == (0.9, 0.98, 1e-6)
            assert training_args.max_grad_norm == (1.0 if path.stem == "roberta_h100" else 0.0)
    sizes = [f"roberta_{size}" for size in ("base", "h100", "large", "mini", "small", "tiny")]
    assert [path.stem for path in presets] == ["albert_base", "bert_base", *sizes, "spanbert_base"]


def test_fp16_of_the_command_line_replaces_the_bf16_of_the_preset(root):
    path = root / "presets" / "mlm" / "roberta_base.yaml"
    for argv, wanted in (
        (["--fp16", "true"], (False, True)),
        (["--fp16"], (False, True)),
        (["--fp16", "false"], (True, False)),  # a flag that sets nothing replaces nothing
        ([], (True, False)),
        (["--bf16", "false"], (False, False)),
        (["--bf16", "false", "--fp16", "true"], (False, True)),
    ):
        (_, training_args), resolved = parsed(["--use_cpu", *argv], path)
        assert (training_args.bf16, training_args.fp16) == (resolved["bf16"], resolved["fp16"]) == wanted
    with pytest.raises(InputError, match="bf16=True and fp16=True exclude each other; leave one of them out"):
        parsed(["--use_cpu", "--bf16", "--fp16"], path)
