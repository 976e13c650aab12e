"""ZeRO on two CPU processes; forbidden settings of DeepSpeed configurations."""

import copy
import functools
import json
import re
from pathlib import Path

import pytest
import torch
import yaml
from accelerate.commands import launch
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils import DeepSpeedPlugin
from accelerate.utils.launch import prepare_deepspeed_cmd_env
from conftest import end_well, losses
from safetensors.torch import load_file
from test_sharing import SMALL
from transformers import AutoModelForMaskedLM

import train_mlm
from roberta_recipe.errors import InputError
from roberta_recipe.input_files import ROOT
from roberta_recipe.model.masked_lm import build_model
from roberta_recipe.training import checkpoint, launching

CONFIGS = sorted((ROOT / "ds_configs").glob("*.json"))
LAUNCH_FILES = sorted((ROOT / "ds_configs" / "accelerate").glob("*.yaml"))


def read_record(path):
    return json.loads((Path(path) / "run_record.json").read_text())


@pytest.fixture
def start(config_file, tokenizer, tmp_path):
    """Flags that continue from a checkpoint and pad its vocabulary, four micro-batches per step."""
    torch.manual_seed(0)
    build_model(tokenizer, config_name=config_file, max_seq_length=64).save_pretrained(tmp_path / "start")
    tokenizer.save_pretrained(tmp_path / "start")
    flags = ["--model_name_or_path", tmp_path / "start", "--pad_vocab_to_multiple_of", "64"]
    return [*map(str, flags), "--per_device_train_batch_size", "2"]


@pytest.mark.parametrize(
    ("stage", "eval_batch"),
    [(1, 4), (2, 9), (3, 27)],  # 27 blocks: processes evaluate 4 and 3 batches, 2 and 1, 1 and 0
)
def test_zero_gives_the_curve_and_the_weights_of_one_process(
    stage, eval_batch, preset, start, tmp_path, deepspeed_ranks
):
    flags = [*start, "--per_device_eval_batch_size", str(eval_batch)]
    single = train_mlm.main(["--config", preset, *flags, "--output_dir", str(tmp_path / "single")])
    flags += ["--save_strategy", "steps", "--save_steps", "2"]
    ranks = deepspeed_ranks(f"zero{stage}", lambda rank: train_mlm.main(["--config", preset, *flags]), tmp_path)
    end_well(ranks)
    zero = read_record(tmp_path / "run")
    assert losses(zero) == pytest.approx(losses(single), rel=1e-5) and len(losses(zero)) == 4  # measured: 2e-7
    assert zero["metrics"]["eval_loss"] == pytest.approx(single["metrics"]["eval_loss"], rel=1e-5)
    assert (zero["tokens_seen"], zero["parameters"]) == (single["tokens_seen"], single["parameters"])
    assert "Batch       8 sequences = 2 processes" in ranks[0].log
    assert len(list((tmp_path / "run" / "checkpoint-4").glob("global_step*/*optim_states.pt"))) == 2  # sharded

    wanted = load_file(tmp_path / "single" / "model.safetensors")
    for folder in (tmp_path / "run", tmp_path / "run" / "checkpoint-4"):
        assert [path.name for path in folder.glob("*.safetensors")] == ["model.safetensors"]
        weights = load_file(folder / "model.safetensors")
        assert weights.keys() == wanted.keys() and len(weights) > 40
        for name, weight in weights.items():
            # Adam's first steps are signs, so a gradient of nearly 0 may step either way: by at most the rates' sum
            torch.testing.assert_close(weight, wanted[name], rtol=0, atol=2.5e-3 if name.endswith("key.bias") else 1e-5)
        model = AutoModelForMaskedLM.from_pretrained(folder)
        assert model.dtype == torch.float32 and model.config.vocab_size == 448
        assert (model.lm_head.bias[400:] < -9e3).all()


CASES = {
    "nsp": (2, ["--input_format", "segment_pair", "--objective", "mlm", "nsp"]),
    "sbo": (3, ["--input_format", "doc_sentences", "--masking_unit", "span", "--objective", "mlm", "sbo"]),
    "shared attention": (3, ["--config_name", "albert.json"]),
}


@pytest.mark.parametrize("case", CASES)
def test_other_objectives_and_models_are_the_same_under_zero(case, preset, tmp_path, deepspeed_ranks):
    """Two processes with two micro-batches each, and one process with the whole batch."""
    stage, own = CASES[case]
    (tmp_path / "albert.json").write_text(json.dumps({**SMALL, "shared_parameters": "attention"}))
    own = [str(tmp_path / word) if word.endswith(".json") else word for word in own]
    flags = ["--config", preset, *own, "--per_device_eval_batch_size", "4", "--fill_mask_examples", "The <mask>"]
    whole = train_mlm.main([*flags, "--output_dir", str(tmp_path / "single"), "--per_device_train_batch_size", "8"])
    flags += ["--per_device_train_batch_size", "2"]
    end_well(deepspeed_ranks(f"zero{stage}", lambda rank: train_mlm.main(flags), tmp_path))
    zero = read_record(tmp_path / "run")
    assert zero["digest"] == whole["digest"] and len(losses(zero)) == 4
    assert losses(zero) == pytest.approx(losses(whole), rel=1e-5)
    measured = {name for name in whole["metrics"] if name.endswith("_loss")}
    assert len(measured) == (1 if case == "shared attention" else 2)
    for name in measured:
        assert zero["metrics"][name] == pytest.approx(whole["metrics"][name], rel=1e-5)
    _, report = AutoModelForMaskedLM.from_pretrained(tmp_path / "run", output_loading_info=True)
    assert not any(report.values()), report


def test_bf16_is_close_and_its_checkpoint_fp32(preset, start, tmp_path, deepspeed_ranks):
    single = train_mlm.main(["--config", preset, *start, "--output_dir", str(tmp_path / "single")])
    argv = ["--config", preset, *start, "--bf16", "true"]
    end_well(deepspeed_ranks("zero1", lambda rank: train_mlm.main(argv), tmp_path))
    half = read_record(tmp_path / "run")
    assert losses(half) == pytest.approx(losses(single), rel=2e-3) and losses(half) != losses(single)  # measured: 2e-4
    assert half["metrics"]["eval_loss"] == pytest.approx(single["metrics"]["eval_loss"], rel=2e-3)
    weights = load_file(tmp_path / "run" / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.float32}
    # the weights are the optimizer's: bf16 cannot hold most of their values
    word = weights["roberta.embeddings.word_embeddings.weight"]
    assert (word != word.bfloat16().float()).float().mean() > 0.5
    assert AutoModelForMaskedLM.from_pretrained(tmp_path / "run").dtype == torch.float32


def test_deepspeed_configurations_leave_the_recipe_to_the_preset():
    assert [path.stem for path in CONFIGS] == ["zero1", "zero2", "zero2_offload", "zero3", "zero3_offload"]
    sizes = ["train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"]
    scale = {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 1000}
    for path in CONFIGS:
        values = json.loads(path.read_text())
        assert not {"optimizer", "scheduler", "amp"} & values.keys(), path
        assert all(values[key] == "auto" for key in [*sizes, "gradient_clipping"]), path
        assert values["bf16"] == {"enabled": "auto"}, path
        assert values["fp16"].items() >= {**scale, "min_loss_scale": 1}.items(), path
        # in half precision, a sum of hundreds of micro-batches loses the last summands
        assert values["data_types"]["grad_accum_dtype"] == values["communication_data_type"] == "fp32", path
        zero = values["zero_optimization"]
        assert path.stem.startswith(f"zero{zero['stage']}"), path
        assert ("offload_optimizer" in zero) == path.stem.endswith("offload"), path
        assert ("offload_param" in zero) == (path.stem == "zero3_offload"), path


def test_launch_files_say_where_to_run_and_nothing_else():
    names = ["eight_gpus", "one_gpu", "two_cpus", "two_nodes", *(path.stem for path in CONFIGS)]
    assert [path.stem for path in LAUNCH_FILES] == names
    for path in LAUNCH_FILES:
        assert f"accelerate launch --config_file ds_configs/accelerate/{path.name}" in path.read_text()
        values = yaml.safe_load(path.read_text())
        loaded = load_config_from_file(str(path))  # accelerate refuses keys that it does not know
        assert loaded.mixed_precision is None and loaded.num_processes == values["num_processes"], path
        wanted = {"deepspeed_config_file": f"ds_configs/{path.stem}.json"} if path.stem.startswith("zero") else {}
        assert values.get("deepspeed_config", {}) == wanted, path


def test_zero_on_two_nodes_starts_all_gpus_of_each(monkeypatch, tmp_path):
    """By the README's list of keys to copy."""
    text = (ROOT / "ds_configs" / "README.md").read_text()
    copied = re.findall(r"`(\w+)`", re.search(r"For several nodes with ZeRO, copy(.*?) from", text, re.DOTALL)[1])
    folder = ROOT / "ds_configs" / "accelerate"
    zero, nodes = (yaml.safe_load((folder / name).read_text()) for name in ("zero2.yaml", "two_nodes.yaml"))
    zero |= {key: nodes[key] for key in copied}
    zero["deepspeed_config"]["deepspeed_multinode_launcher"] = "standard"
    (tmp_path / "nodes.yaml").write_text(yaml.safe_dump(zero))
    launched = []
    monkeypatch.setattr(launch, "deepspeed_launcher", launched.append)
    flags = ["--config_file", str(tmp_path / "nodes.yaml"), "--machine_rank", "1", "--main_process_ip", "127.0.0.1"]
    launch.launch_command(launch.launch_command_parser().parse_args([*flags, "script.py"]))
    command, _ = prepare_deepspeed_cmd_env(*launched)
    assert (launched[0].nnodes, launched[0].nproc_per_node, launched[0].node_rank, command) == ("2", "8", 1, None)


def test_the_preset_sets_the_precision(preset, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    with pytest.raises(InputError, match=r"mixed_precision=fp16, the preset bf16=true and fp16=false: remove"):
        train_mlm.main(["--config", preset, "--bf16", "true"])
    with pytest.raises(InputError, match=r"mixed_precision=fp16, the preset bf16=false and fp16=false"):
        train_mlm.main(["--config", preset])


def test_a_deepspeed_configuration_comes_by_the_launch_file(preset):
    with pytest.raises(InputError, match=r"zero2\.json: use a launch file"):
        launching.check_deepspeed(_with(preset, deepspeed="ds_configs/zero2.json")[1])


CONTRADICTIONS = {  # key -> a value, and the flag with its value as `_own_file` has them
    "train_micro_batch_size_per_gpu": (3, "per_device_train_batch_size=4"),
    "train_batch_size": (99, "train_batch_size (calculated)=8"),
    "gradient_accumulation_steps": (5, "gradient_accumulation_steps=2"),
    "gradient_clipping": (1.0, "max_grad_norm=0.5"),
    "fp16.enabled": (True, "fp16|fp16_full_eval=False"),
    "optimizer.params.lr": (3e-5, "learning_rate=0.001"),
    "scheduler.params.warmup_max_lr": (3e-5, "learning_rate=0.001"),
}


def _own_file(preset, values, left_out=()):
    """`zero2.json` with `values`, as passed by a launcher to a run of two micro-batches of 4."""
    content = json.loads((ROOT / "ds_configs" / "zero2.json").read_text())
    for key, value in values.items():
        *sections, name = key.split(".")
        functools.reduce(lambda section, one: section.setdefault(one, {}), sections, content)[name] = value
    for name in left_out:
        del content[name]
    sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_grad_norm": 0.5}
    args = _with(preset, **sizes, learning_rate=1e-3, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=content))[1]
    return args, copy.deepcopy(args.deepspeed_plugin.deepspeed_config)


def test_each_value_that_contradicts_a_flag_is_named_and_all_at_once(preset):
    for keys in [*((key,) for key in CONTRADICTIONS), tuple(CONTRADICTIONS)]:
        args, _ = _own_file(preset, {key: CONTRADICTIONS[key][0] for key in keys})
        with pytest.raises(InputError) as raised:
            launching.check_deepspeed(args)
        for key, (value, flag) in CONTRADICTIONS.items():
            assert (f"{key}={value} vs hf {flag}" in str(raised.value)) == (key in keys), (keys, raised.value)
        for section in ("optimizer", "scheduler"):
            named = f"section {section!r}" in str(raised.value)
            assert named == any(key.startswith(section) for key in keys), (keys, raised.value)


def test_stage_0_is_refused(preset):
    with pytest.raises(InputError, match="zero_stage=0 shards nothing"):
        launching.check_deepspeed(_own_file(preset, {"zero_optimization.stage": 0})[0])


def test_keys_that_a_deepspeed_file_lacks_are_those_of_the_files_here(preset):
    args, _ = _own_file(preset, {}, ["gradient_clipping", "data_types", "communication_data_type"])
    launching.check_deepspeed(args)
    assert args.deepspeed_plugin.deepspeed_config == _own_file(preset, {})[1]


def test_an_offloaded_sgd_is_not_replaced_by_adam(preset):
    """`accelerate` would, unless told otherwise."""
    key, offload = "zero_force_ds_cpu_optimizer", {"zero_optimization.offload_optimizer.device": "cpu"}
    for values, is_set in (({}, False), (offload, True)):
        args, _ = _own_file(preset, values)
        args.optim = "sgd"
        launching.check_deepspeed(args)
        assert (args.deepspeed_plugin.deepspeed_config.get(key) is False) == is_set
    args, before = _own_file(preset, {**offload, key: True})
    launching.check_deepspeed(args)  # AdamW
    assert args.deepspeed_plugin.deepspeed_config == before
    args.optim = "sgd"
    with pytest.raises(InputError, match=f"{key}=True vs optim=sgd .set it to false"):
        launching.check_deepspeed(args)


def test_a_change_of_clipping_reaches_zero(preset, start, tmp_path, deepspeed_ranks):
    """ZeRO's checkpoints hold the norm."""
    flags = [*start, "--save_strategy", "steps", "--save_steps", "2"]
    first = [*flags, "--output_dir", str(tmp_path / "first")]
    end_well(deepspeed_ranks("zero2", lambda rank: train_mlm.main(["--config", preset, *first]), tmp_path))
    flags += ["--resume_from_checkpoint", str(tmp_path / "first" / "checkpoint-2"), "--resume_despite_changes", "true"]
    flags += ["--max_grad_norm", "0.25"]
    end_well(deepspeed_ranks("zero2", lambda rank: train_mlm.main(["--config", preset, *flags]), tmp_path))
    (state, _) = sorted((tmp_path / "run" / "checkpoint-4").glob("global_step*/*optim_states.pt"))
    assert torch.load(state, weights_only=False)["optimizer_state_dict"]["clip_grad"] == 0.25


def test_a_deepspeed_file_that_agrees_is_taken_as_it_is(preset):
    agreeing = {"train_batch_size": 8, "gradient_clipping": 0.5, "bf16.enabled": False, "fp16.enabled": "auto"}
    args, before = _own_file(preset, agreeing)
    launching.check_deepspeed(args)
    assert args.deepspeed_plugin.deepspeed_config == before  # "auto" is Trainer's to fill in


def test_keys_that_reorder_the_optimizer_state_are_in_the_layout(preset):
    """DeepSpeed loads a state in another order of weights without an error."""
    keys = {"round_robin_gradients": True, "sub_group_size": 1000}
    args, _ = _own_file(preset, {f"zero_optimization.{name}": value for name, value in keys.items()})
    assert {name: checkpoint.layout(args)[name] for name in keys} == keys
    args, _ = _own_file(preset, {"zero_optimization.round_robin_gradients": False})
    assert not keys.keys() & checkpoint.layout(args).keys()


def test_processes_that_would_train_apart_are_refused(preset, monkeypatch):
    arguments = _with(preset)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match=r"2 processes were started without a process group.*--use_cpu"):
        train_mlm.check_arguments(*arguments)


def _with(preset, **changes):
    (args, training_args), _ = train_mlm.read_arguments(["--config", preset])
    for name, value in changes.items():
        setattr(training_args, name, value)
    return args, training_args
