"""Flags and example commands of transformers' run_mlm.py, run_glue.py, run_qa.py and run_swag.py: accepted with the
same meaning, or refused with a hint."""

import logging
import re
import shlex
import sys

import pytest

import finetune_glue  # noqa: F401
import finetune_race  # noqa: F401
import finetune_squad
import train_mlm
from roberta_recipe import stock_flags
from roberta_recipe.errors import InputError, library_errors
from roberta_recipe.training import launching

# Fields of the argument classes in examples/pytorch of huggingface/transformers: run_mlm.py at a22a4378 (4.49),
# run_qa.py at 03ea97ae (4.55), run_glue.py at 242e7fc6 (4.34), run_swag.py at 0055f834 (4.20) with the `token` and
# `trust_remote_code` of its siblings; `torch_dtype` is `dtype` in 5.x
MODEL = "model_name_or_path config_name tokenizer_name cache_dir model_revision use_auth_token token trust_remote_code"
DATA = "train_file validation_file overwrite_cache max_seq_length pad_to_max_length max_train_samples max_eval_samples"
ON_HUB = "dataset_name dataset_config_name"
FIELDS = {
    "train_mlm": f"{MODEL} {DATA} {ON_HUB} model_type config_overrides use_fast_tokenizer torch_dtype dtype "
    "low_cpu_mem_usage validation_split_percentage preprocessing_num_workers mlm_probability line_by_line streaming",
    "finetune_glue": f"{MODEL} {DATA} {ON_HUB} task_name use_fast_tokenizer ignore_mismatched_sizes test_file "
    "max_predict_samples",
    "finetune_squad": f"{MODEL} {DATA} {ON_HUB} test_file preprocessing_num_workers max_predict_samples doc_stride "
    "version_2_with_negative null_score_diff_threshold n_best_size max_answer_length",
    "finetune_race": f"{MODEL} {DATA} use_fast_tokenizer preprocessing_num_workers",
}
# Values with a meaning here; any other field is given a 7, or nothing where it is a boolean
VALUES = {"model_revision": "main", "trust_remote_code": "false", "dtype": "float32", "torch_dtype": "float32"}
VALUES |= {"mlm_probability": "0.2", "null_score_diff_threshold": "0.5", "config_overrides": "vocab_size=9"}
BOOLEANS = (
    "use_fast_tokenizer overwrite_cache pad_to_max_length low_cpu_mem_usage line_by_line streaming use_auth_token "
)
BOOLEANS += "ignore_mismatched_sizes version_2_with_negative"
# Flags of TrainingArguments in 4.x, in the shell histories of users
FORMER = "overwrite_output_dir warmup_ratio evaluation_strategy no_cuda logging_dir group_by_length save_safetensors"


def parse(script, words):
    """Parse a command line as in the script; returns the filled dataclasses."""
    return sys.modules[script].read_arguments([*words, "--use_cpu"])[0]


def refused(script, words):
    """The error message for a command line; None if it is accepted."""
    try:
        parse(script, words)
    except InputError as error:
        return str(error)
    return None


@pytest.mark.parametrize("script", FIELDS)
def test_every_field_is_accepted_or_refused_by_its_name_here(script):
    accepted = 0
    for name in [*FIELDS[script].split(), *FORMER.split()]:
        value = [] if name in BOOLEANS.split() else [VALUES.get(name, "7")]
        line = refused(script, [f"--{name}", *value])
        accepted += line is None
        assert line is None or (
            line.startswith((f"unknown argument '--{name}'", f"unsupported value of '--{name}'")) and "here: " in line
        ), line
        assert line is None or ("did you mean" not in line and len(line) < 200 and "\n" not in line)
    assert accepted >= len(FIELDS[script].split()) // 2, accepted


def test_hints_name_flags_that_exist():
    known = [set().union(*(vars(args) for args in parse(script, []))) for script in FIELDS]
    hints = {stock_flags.hint(name, flags) for name in stock_flags.REFUSED for flags in known if name not in flags}
    named = set(re.findall(r"--([\w-]+)", " ".join(filter(None, hints))))
    assert len(named) > 10 and named <= set().union(*known), named.difference(*known)


COMMANDS = {
    # language-modeling/README.md at 00aff44a
    "train_mlm": """
--model_name_or_path roberta-base --dataset_name wikitext --dataset_config_name wikitext-2-raw-v1 \
--per_device_train_batch_size 8 --per_device_eval_batch_size 8 --do_train --do_eval --output_dir /tmp/test-mlm
--model_name_or_path roberta-base --train_file path_to_train_file --validation_file path_to_validation_file \
--per_device_train_batch_size 8 --per_device_eval_batch_size 8 --do_train --do_eval --output_dir /tmp/test-mlm
--model_name_or_path roberta-base --train_file path_to_train_file --validation_file path_to_validation_file \
--per_device_train_batch_size 8 --per_device_eval_batch_size 8 --do_train --do_eval --output_dir /tmp/test-mlm \
--line_by_line --pad_to_max_length
--dataset_name wikitext --dataset_config_name wikitext-2-raw-v1 --model_name_or_path roberta-base --output_dir \
/tmp/test-mlm
--model_type roberta --tokenizer_name gpt2 --config_overrides=n_embd=1024,n_head=16,n_layer=48,n_positions=102
""",
    # text-classification/README.md at 05ce25be
    "finetune_glue": """
--model_name_or_path bert-base-cased --task_name mrpc --do_train --do_eval --max_seq_length 128 \
--per_device_train_batch_size 32 --learning_rate 2e-5 --num_train_epochs 3 --output_dir /tmp/mrpc/
--model_name_or_path bert-base-cased --task_name mrpc --do_train --do_eval --max_seq_length 128 \
--per_device_train_batch_size 32 --learning_rate 2e-5 --num_train_epochs 3 --output_dir /tmp/mrpc/ --fp16
--model_name_or_path bert-base-cased --dataset_name imdb --do_train --do_predict --max_seq_length 128 \
--per_device_train_batch_size 32 --learning_rate 2e-5 --num_train_epochs 3 --output_dir /tmp/imdb/
--model_name_or_path bert-base-cased --task_name mrpc --max_length 128 --per_device_train_batch_size 32 \
--learning_rate 2e-5 --num_train_epochs 3 --output_dir /tmp/mrpc/
""",
    # question-answering/README.md at 299108c6
    "finetune_squad": """
--model_name_or_path bert-base-uncased --dataset_name squad --do_train --do_eval --per_device_train_batch_size 12 \
--learning_rate 3e-5 --num_train_epochs 2 --max_seq_length 384 --doc_stride 128 --output_dir /tmp/debug_squad/
--model_name_or_path bert-base-uncased --dataset_name squad_v2 --do_train --do_eval --version_2_with_negative \
--learning_rate 3e-5 --num_train_epochs 4 --max_seq_length 384 --doc_stride 128 --output_dir /tmp/s \
--per_device_eval_batch_size=2 --per_device_train_batch_size=2 --save_steps 5000
--model_name_or_path bert-base-uncased --dataset_name squad --max_seq_length 384 --doc_stride 128 --output_dir \
/tmp/debug_squad
""",
    # multiple-choice/README.md at 194a58a9
    "finetune_race": """
--model_name_or_path FacebookAI/roberta-base --do_train --do_eval --learning_rate 5e-5 --num_train_epochs 3 \
--output_dir /tmp/swag_base --per_device_eval_batch_size=16 --per_device_train_batch_size=16 --overwrite_output
--model_name_or_path bert-base-cased --dataset_name swag --max_seq_length 128 --per_device_train_batch_size 32 \
--learning_rate 2e-5 --num_train_epochs 3 --output_dir /tmp/swag
""",
}  # fmt: skip
ACCEPTED = {"train_mlm": {1}, "finetune_glue": {0, 1}, "finetune_squad": {0, 1, 2}, "finetune_race": set()}  # by row


@pytest.mark.parametrize("script", COMMANDS)
def test_example_commands_parse_or_name_the_flag_here(script):
    for row, command in enumerate(COMMANDS[script].strip().splitlines()):
        line = refused(script, shlex.split(command))
        assert line is None or (
            line.startswith(("unknown argument '--", "unsupported value of '--")) and "; here: " in line
        ), line
        assert (line is None) >= (row in ACCEPTED[script]), f"{command}: {line}"


def test_accepted_flags_are_logged_once_and_change_nothing(caplog):
    stock_flags.log_once.cache_clear()
    words = [
        "--overwrite_cache",
        "--streaming",
        "true",
        "--preprocessing-num-workers=4",
        "--pad_to_max_length",
        "False",
    ]
    with caplog.at_level(logging.INFO, "recipe"):
        plain, given, _ = parse("train_mlm", []), parse("train_mlm", words), parse("train_mlm", words)
    assert given == plain and len([line for line in caplog.messages if "has no effect: " in line]) == 4
    assert "Flags       --streaming has no effect: text is always streamed" in caplog.messages


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--trust_remote_code", "code from the Hub never runs"),
        ("--model_revision v2", "hf download MODEL --revision"),
        ("--dtype bfloat16", "--bf16 or --fp16"),
        ("--use_fast_tokenizer false", "tokenizers are always fast"),
        ("--preprocessing_num_workers many", "tokenization before training uses all cores"),
        ("--streaming maybe", "text is always streamed"),
        ("--use_auth_token hf_abcdefgh", "the token of `hf auth login` or HF_TOKEN"),
    ],
)
def test_a_value_that_would_change_something_is_refused(words, said):
    line = refused("train_mlm", words.split())
    assert said in line and words.split()[-1].removeprefix("--") not in line.replace(words.split()[0], "")


def test_evaluation_alone_is_refused():
    assert refused("train_mlm", ["--do_eval"]).endswith("tools/evaluate.py evaluates a checkpoint")
    assert refused("train_mlm", ["--do_eval", "--do_train"]) is None


def test_squad_is_named_as_on_the_hub(monkeypatch):
    monkeypatch.setattr(finetune_squad.protocol, "check_arguments", lambda *args, **kwargs: None)

    def check(*words):
        finetune_squad.check_arguments(*parse("finetune_squad", words))

    check("--dataset_name", "rajpurkar/squad")
    check("--dataset_name", "squad_v2", "--version_2_with_negative")
    for words in (["squad_v2"], ["squad", "--version_2_with_negative"], ["squad", "--data_dir", "d"], ["natural"]):
        with pytest.raises(InputError, match=r"dataset_name=\w+ must be squad"):
            check("--dataset_name", *words)


# Errors that libraries raise for flags


def test_more_data_workers_than_a_machine_can_run_are_refused(preset):
    """Without starting them: Python would fork them all."""
    (_, training_args), _ = train_mlm.read_arguments(["--config", preset, "--dataloader_num_workers", "100000"])
    with pytest.raises(InputError, match="dataloader_num_workers=100000: each is a process"):
        launching.check_launch(training_args)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--report_to nosuch", "report_to: ValueError: nosuch is not supported, only .*tensorboard"),
        ("--torch_compile_backend nosuch", "torch_compile_backend or .*'NOSUCH' is not a valid DynamoBackend"),
        (
            "--dataloader_prefetch_factor 0 --dataloader_num_workers 1",
            r"data loading \(dataloader_prefetch_factor, ...\): AssertionError: prefetch_factor must be greater",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # torch's half-built iterator
def test_an_error_of_a_library_for_a_flag_is_one_line(preset, words, said):
    with pytest.raises(InputError, match=said):
        train_mlm.main(["--config", preset, *words.split()])


def raising(module, error):
    """A function in the library's module that raises `error`."""
    exec("def function(*_):\n    raise error", names := {"__name__": module, "error": error})
    return names["function"]


def test_data_workers_that_cannot_start_are_one_line(preset, monkeypatch):
    error = BlockingIOError(11, "Resource temporarily unavailable")  # no more processes for this user
    monkeypatch.setattr("os.fork", raising("multiprocessing.popen_fork", error))
    with pytest.raises(InputError, match="too many data workers, lower dataloader_num_workers: BlockingIOError"):
        train_mlm.main(["--config", preset, "--dataloader_num_workers", "2"])


@pytest.mark.parametrize(
    ("module", "error", "is_start"),
    [
        ("roberta_recipe.data.stream", ValueError("ours"), True),
        ("torch.nn.functional", RuntimeError("shapes"), True),
        ("transformers.models.roberta", ValueError("ids"), True),
        ("torch.utils.data.dataloader", OSError("later"), False),
        ("torch.utils.data.dataloader", RuntimeError("DataLoader worker (pid 1) is killed"), True),  # `lost_process`
    ],
)
def test_other_errors_keep_their_traceback(module, error, is_start):
    with pytest.raises(type(error)) as raised, library_errors(lambda: is_start):
        raising(module, error)()
    assert raised.value is error
