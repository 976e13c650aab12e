"""Presets and command line: parsing, type checks, errors that name the value and the fix."""

import re
from pathlib import Path

import pytest
import yaml

import finetune_glue
import finetune_ner
import finetune_race
import finetune_squad
import train_mlm
from roberta_recipe.errors import InputError
from roberta_recipe.model import weights
from roberta_recipe.record import write_preset
from roberta_recipe.settings import check_mapping, flags_of, load_yaml
from roberta_recipe.training.pretraining import check_data

CLASSES = [train_mlm.MlmArguments, train_mlm.MlmTrainingArguments]


def read_preset(path):
    return check_mapping(load_yaml(path), CLASSES, str(path))


def parsed(argv, preset):
    return train_mlm.read_arguments(["--config", str(preset), *argv])


def test_order_is_default_then_preset_then_command_line(preset):
    (args, training_args), _ = parsed(["--max_steps", "7"], preset)
    assert args.mlm_probability == 0.15  # dataclass default
    assert args.max_seq_length == 64  # preset
    assert training_args.max_steps == 7  # command line over the preset's 4


@pytest.mark.parametrize("script", [train_mlm, finetune_glue, finetune_squad, finetune_race, finetune_ner])
def test_help_lists_every_flag_trainers_last_and_compact(script, capsys):
    with pytest.raises(SystemExit) as ended:
        script.read_arguments(["--help"])
    assert ended.value.code == 0
    shown, _, of_trainer = capsys.readouterr().out.partition("\nFlags of transformers.TrainingArguments")
    found = re.findall(r"^  (?:-h, )?--(\w+)", shown, re.M)
    (args, training_args), resolved = script.read_arguments([])
    names = [name for name in found if name[3:] not in found]  # no_
    names += [word.split("=")[0] for word in of_trainer.split("\n", 1)[1].split() if re.match(r"\w", word)]
    own, locked = flags_of(type(args)), {n for n, f in flags_of(type(training_args)).items() if f.scope == "locked"}
    assert {"help", "config", *own, *flags_of(type(training_args))} - set(names) <= locked
    assert set(found[2 : 2 + len(own)]) == set(own)
    assert f"learning_rate={resolved['learning_rate']} " in of_trainer.replace("\n", " ")  # the preset's
    assert "(default: None)" not in shown and "--max-seq-length" not in shown and "%%" not in shown
    assert len((shown + of_trainer).splitlines()) < 240


def test_a_script_that_was_copied_without_its_preset(capsys, monkeypatch):
    monkeypatch.setattr(finetune_glue, "OWN", "presets/absent/own.yaml")
    with pytest.raises(SystemExit):
        finetune_glue.read_arguments(["--train_file", "a.csv", "--help"])
    assert "--max_seq_length" in capsys.readouterr().out
    with pytest.raises(InputError, match="no such file: presets/absent"):
        finetune_glue.read_arguments(["--train_file", "a.csv"])


@pytest.mark.parametrize("written", ["6e-4", "6E-4", "0.0006", "6.0e-4", "+6e-4"])
def test_numbers_of_yaml(tmp_path, written):
    path = tmp_path / "p.yaml"
    path.write_text(f"learning_rate: {written}\n")
    assert read_preset(path) == {"learning_rate": 6e-4}


def test_resolved_arguments_are_a_preset_that_resolves_to_the_same(preset, tmp_path):
    argv = "--learning_rate 6e-4 --mask_count exact --bf16 --resume_from_checkpoint x --hub_model_id me/x"
    _, resolved = parsed(argv.split(), preset)
    again = tmp_path / "again.yaml"
    again.write_text(yaml.safe_dump(resolved))
    _, resolved_again = parsed([], again)
    assert resolved_again == resolved
    assert resolved["learning_rate"] == 6e-4 and resolved["mask_count"] == "exact" and resolved["bf16"] is True
    # values that no preset or flag gave are saved too, so that the file means the same when a default changes
    assert resolved["adam_beta2"] == 0.98 and resolved["seed"] == 42 and resolved["lr_scheduler_type"] == "linear"
    assert not {"resume_from_checkpoint", "hub_model_id"} & resolved.keys()  # those of one start are not


def test_written_presets_read_back(tmp_path):
    """A run named 5e-4 is not the number."""
    values = {"run_name": "5e-4", "output_dir": "1e4", "learning_rate": 5e-4, "train_file": ["é.txt", "no"], "seed": 3}
    write_preset(values, tmp_path)
    assert load_yaml(tmp_path / "preset.yaml") == values


def test_a_flag_replaces_its_alternative_in_the_preset(preset):
    (args, _), _ = parsed(["--corpus", "presets/corpus/docstrings.yaml"], preset)
    assert args.train_file is None and args.validation_file is None and args.corpus == "presets/corpus/docstrings.yaml"
    (args, _), _ = parsed(["--model_name_or_path", "m"], preset)
    assert args.config_name is None and args.model_name_or_path == "m"
    with pytest.raises(InputError, match=r"corpus=c and train_file=.* exclude each other"):
        parsed(["--corpus", "c", "--train_file", "f"], preset)


def test_flags_of_train_file_do_not_apply_to_a_corpus(preset):
    of_run = Path(preset).with_name("of_run.yaml")
    of_run.write_text(f"{Path(preset).read_text()}\ntext_column: body\nlanguage: de\n")
    (args, _), _ = parsed([], of_run)
    assert (args.text_column, args.language) == ("body", "de")
    corpus = ["--corpus", "presets/corpus/docstrings.yaml"]
    (args, _), _ = parsed(corpus, of_run)
    assert (args.text_column, args.language) == ("text", "en")
    for flag in (["--text_column", "body"], ["--language", "de"]):
        with pytest.raises(InputError, match="text_column and language need train_file"):
            check_data(parsed([*corpus, *flag], preset)[0][0])


@pytest.mark.parametrize(
    ("argv", "wanted"),
    [
        (["--fp16"], (False, True)),
        (["--fp16", "false"], (True, False)),  # a flag that sets nothing replaces nothing
        ([], (True, False)),
        (["--bf16", "false"], (False, False)),
        (["--bf16", "false", "--fp16", "true"], (False, True)),
    ],
)
def test_fp16_of_the_command_line_replaces_the_bf16_of_the_preset(root, argv, wanted):
    (_, training_args), resolved = parsed(["--use_cpu", *argv], root / "presets" / "mlm" / "roberta_base.yaml")
    assert (training_args.bf16, training_args.fp16) == (resolved["bf16"], resolved["fp16"]) == wanted


def test_merge_keys_of_yaml(tmp_path):
    """A mapping's own keys take precedence over merged ones, also if the merged mapping has a merge of its own and
    comes later."""
    path = tmp_path / "merged.yaml"
    path.write_text("a: &a {x: 1, y: 1}\nb: {c: {d: &d {<<: *a, y: 2}}}\ne: {<<: *d, z: 3}\n")
    merged = {"x": 1, "y": 2}
    assert load_yaml(path) == {"a": {"x": 1, "y": 1}, "b": {"c": {"d": merged}}, "e": {**merged, "z": 3}}


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("max_stepz: 3", ["max_stepz", "max_steps"]),
        ("max_steps: many", ["max_steps", "'many'", "valid integer"]),
        ("max_steps: 2.5", ["max_steps", "2.5", "valid integer"]),
        ("max_steps: true", ["max_steps", "True", "valid integer"]),
        ("learning_rate: fast", ["learning_rate", "'fast'", "valid number"]),
        ("bf16: 1", ["bf16", "1", "valid boolean"]),
        ("input_format: sentences", ["input_format", "'sentences'", "full_sentences", "contiguous"]),
        ("train_file: a.txt", ["train_file", "'a.txt'", "list"]),
        ("train_file: [1]", ["train_file", "[1]", "string"]),
        ("run_name: no", ["run_name is False", "put it in quotes"]),
        ("save_strategy: no", ["save_strategy is False, and must be 'no' or 'steps'; put it in quotes"]),
        ("seed: 1\nseed: 2", ["seed", "twice"]),
        ("a: &a {x: 1}\nb: {<<: *a, y: 1, y: 2}", ["'y'", "twice"]),
        ("- a\n- b", ["key: value"]),
        ("\0\0\0", ["not valid YAML"]),  # zeros, of a disk that lost its power
        ("a: [", ["not valid YAML"]),
        ("output_dir: {{ out }}", ["not valid YAML", "line 1"]),
        ("run_name: 2024-02-30", ["not valid YAML", "day"]),
        ("bf16: !!bool foo", ["not valid YAML", "'foo'"]),
    ],
)
def test_bad_presets(tmp_path, text, named):
    path = tmp_path / "bad.yaml"
    path.write_text(text + "\n")
    with pytest.raises(InputError) as error:
        read_preset(path)
    assert all(word in str(error.value) for word in ["bad.yaml", *named]), error.value


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("--max_step 3", "--max_step.*--max_steps"),  # an abbreviation
        ("--max_steps many", "--max_steps.*many"),
        ("--max_steps 0", "max_steps=0"),
        ("--input_format x", "--input_format.*full_sentences"),
        ("--eval_strategy sometimes", "--eval_strategy.*sometimes"),
        ("--eval_strategy epoch", "--eval_strategy.*invalid choice: 'epoch'.*steps"),
        ("--learning_rate nan", "learning_rate=nan must be at least 0"),
        ("--adam_epsilon -1", "adam_epsilon=-1.0 must be at least 0"),
        ("--seed 4294967296", r"seed=4294967296 must be .* below 2\^32"),
        ("--logging_steps 0", "logging_steps"),
        ("--accelerator_config nofile.json", "nofile.json"),
        ("stray", "stray"),
    ],
)
def test_bad_flags(preset, argv, said):
    with pytest.raises(InputError, match=said):
        parsed(argv.split(), preset)


def test_numbers_of_a_preset_are_checked_too(preset):
    with open(preset, "a") as stream:
        stream.write("save_total_limit: -3\n")
    with pytest.raises(InputError, match="save_total_limit=-3 must be at least 0"):
        parsed([], preset)


def test_missing_preset_names_its_neighbours(preset, tmp_path):
    with pytest.raises(InputError, match=r"no such file: .*nothing.yaml; its folder has .*preset.yaml"):
        read_preset(tmp_path / "nothing.yaml")


@pytest.mark.parametrize(
    ("name", "learning_rate", "warmup_steps"), [("roberta_base", 6e-4, 24_000), ("roberta_large", 4e-4, 30_000)]
)
def test_presets_are_table_9(root, name, learning_rate, warmup_steps):
    (args, training), _ = parsed(["--use_cpu", "--bf16", "false"], root / "presets" / "mlm" / f"{name}.yaml")
    assert (training.learning_rate, training.get_warmup_steps(500_000)) == (learning_rate, warmup_steps)
    assert (args.global_batch_size, training.max_steps, args.max_seq_length) == (8192, 500_000, 512)
    assert (training.weight_decay, training.lr_scheduler_type, args.mlm_probability) == (0.01, "linear", 0.15)
    assert (args.input_format, training.max_grad_norm) == ("full_sentences", 0.0)


def test_modernbert_has_the_rotation_and_decay_of_its_first_phase(root):
    """Base 10,000 in all layers (160,000 is the second phase's), and a weight decay of 1e-5 after AdamW's
    multiplication by the learning rate (arXiv 2412.13663, section 2.2 and appendix A.3)."""
    (args, training), _ = parsed(["--use_cpu", "--bf16", "false"], root / "presets" / "mlm" / "modernbert_base.yaml")
    config = weights.fresh_config(str(root / args.config_name), None)
    assert {of["rope_theta"] for of in config.rope_parameters.values()} == {10_000} and len(config.rope_parameters) == 2
    assert training.weight_decay * training.learning_rate == pytest.approx(1e-5)


def test_every_preset_of_the_repository_is_valid(root):
    presets = sorted((root / "presets" / "mlm").glob("*.yaml"))
    assert len(presets) == 13
    for path in presets:
        (args, training_args), _ = parsed(["--use_cpu", "--bf16", "false"], path)
        if path.stem != "roberta_h100":  # its clock ends it
            assert training_args.warmup_steps < 1
        if path.stem == "continue":
            assert (args.corpus, args.config_name) == (None, None)
            continue
        assert (root / args.config_name).is_file() and (root / args.corpus).is_file()
        if path.stem.startswith("roberta"):
            assert (training_args.adam_beta1, training_args.adam_beta2, training_args.adam_epsilon) == (0.9, 0.98, 1e-6)
            assert training_args.max_grad_norm == (1.0 if path.stem in ("roberta_h100", "roberta_mini") else 0.0)
