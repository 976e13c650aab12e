"""Fixtures: generated text, tokenizers trained on it, models of a few thousand parameters. No network, no Hub."""

import gc
import importlib
import json
import os
import random
import shutil
import signal
import socket
import string
import subprocess
import sys
import time
import traceback
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"  # tests run beside each other, and fork data workers

import datasets
import hypothesis
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from accelerate.commands import launch
from accelerate.state import AcceleratorState
from accelerate.utils.launch import prepare_deepspeed_cmd_env
from matplotlib.figure import Figure
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, RobertaConfig, TrainerCallback

import train_mlm
from roberta_recipe import hardware
from roberta_recipe.data import corpus as corpora
from roberta_recipe.data.tokenizer_training import train_tokenizer
from roberta_recipe.errors import exit_on_error
from roberta_recipe.input_files import ROOT
from roberta_recipe.model.masked_lm import build_model
from roberta_recipe.record import CURVE_NAME
from tools import compare

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job begins with Ctrl-C ignored
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup
datasets.config.SLEEP_TIME_ON_THREADS_SHUTDOWN = 0
torch.set_num_threads(1)


def connect(self, address, connect=socket.socket.connect):
    """Refuse connections to other machines, as without a network."""
    if self.family in (socket.AF_INET, socket.AF_INET6) and address[0] not in ("localhost", "127.0.0.1", "::1"):
        raise OSError(f"a test connects to {address}")
    return connect(self, address)


socket.socket.connect = connect


def savefig(figure, path, savefig=Figure.savefig, **options):
    """Replaces the drawing of loss curves, 0.3 s each, except in test_plots.py and in subprocesses."""
    if Path(path).name == CURVE_NAME:
        Path(path).write_bytes(b"not drawn")
    else:
        savefig(figure, path, **options)


Figure.savefig = savefig
hypothesis.settings.register_profile("suite", deadline=None, derandomize=True)  # a busy machine fails no test
hypothesis.settings.load_profile("suite")


def corpus_of(name, sources, **settings):
    """A resolved corpus with hashed files; the hashes are not cached."""
    return corpora.hash_files(corpora.resolve(corpora.Corpus(name, sources, **settings)), cache_folder=os.devnull)


def pytest_addoption(parser):
    parser.addoption(
        "--write-golden", action="store_true", help="write tests/golden_loss.json anew: read what changed, and say why"
    )


@pytest.fixture(autouse=True, scope="module")
def frozen():
    """Exempt imported modules from garbage collection, so that accelerate's `gc.collect` at the start and end of each
    run takes 0.01 s instead of 0.1."""
    gc.collect()
    gc.freeze()


def run_python(*argv, cwd, env=None):
    """Run a Python process; returns (exit code, output). Times out after five minutes."""
    return subprocess.run(
        [sys.executable, *map(str, argv)],
        cwd=cwd,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


class Forked:
    """A forked child process that runs `call()` as a script would; `end()` returns its exit code, `log` its output."""

    def __init__(self, call, log, **env):
        self.log_path = Path(log)
        gc.collect()  # a child cannot join the workers of a data loader that an earlier test left to be freed
        self.pid = os.fork()
        if self.pid:
            return
        code = 70
        try:
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)  # a child has children
            sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # as Python's own
            os.environ.update(env)
            AcceleratorState._reset_state(reset_partial_state=True)
            exit_on_error(call)
            code = 0
        except SystemExit as ended:
            code = ended.code
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    @property
    def log(self):
        return self.log_path.read_text() if self.log_path.exists() else ""

    def kill(self):
        os.kill(self.pid, signal.SIGKILL)

    def end(self, timeout_s=100):
        """The exit code (negative for a signal); fails the test after a timeout."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.01)
        self.kill()
        os.waitpid(self.pid, 0)
        raise AssertionError(f"it did not end: {self.log}")


def forked_ranks(call, folder, processes=2, **env):
    """Run `call(rank)` in forked processes with a launcher's environment, on the CPU; logs in `folder`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    sizes = {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    sizes |= {"ACCELERATE_USE_CPU": "true", **env, **address}
    return [
        Forked(lambda rank=rank: call(rank), folder / f"rank{rank}", RANK=str(rank), LOCAL_RANK=str(rank), **sizes)
        for rank in range(processes)
    ]


def end_well(ranks):
    """Wait for the processes of `forked_ranks`; fails the test if one of them fails."""
    codes = [rank.end() for rank in ranks]
    assert codes == [0] * len(ranks), "\n".join(rank.log for rank in ranks)


@pytest.fixture
def deepspeed_ranks(monkeypatch):
    """A function: `forked_ranks` under DeepSpeed, configured as by `accelerate launch` with a file of
    ds_configs/accelerate. Gloo replaces DeepSpeed's shared-memory all-reduce, which takes a minute of C++ to build."""
    backend = importlib.import_module("deepspeed.comm.torch")  # as an attribute it is torch
    monkeypatch.setattr(backend, "build_shm_op", lambda: None)
    launched = []
    monkeypatch.setattr(launch, "deepspeed_launcher", launched.append)
    monkeypatch.chdir(ROOT)  # the launch files name DeepSpeed's own relative to it

    def start(launch_file, call, folder):
        flags = ["--config_file", f"ds_configs/accelerate/{launch_file}.yaml", "--num_processes", "2"]
        flags += ["--main_process_port", "0", "script.py"]
        launch.launch_command(launch.launch_command_parser().parse_args(flags))
        _, env = prepare_deepspeed_cmd_env(launched.pop())
        added = {name: value for name, value in env.items() if os.environ.get(name) != value}
        return forked_ranks(call, folder, **added, ACCELERATE_USE_CPU="false")

    return start


def wait_until(condition, timeout_s=120):
    """Wait until `condition()` is true; fails the test after a timeout."""
    deadline_s = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert condition()


def wait_for_step(process, log, step):
    """Wait until a run has logged step `step`, or has ended."""
    deadline_s = time.monotonic() + 120
    while log.read_text().count("  loss ") < step and process.poll() is None and time.monotonic() < deadline_s:
        time.sleep(0.01)


def copied(script, folder):
    """Copy `script` and `roberta_recipe` to an empty folder, as for a new project; returns the copy's path."""
    shutil.copytree(ROOT / "roberta_recipe", folder / "roberta_recipe", ignore=shutil.ignore_patterns("__pycache__"))
    return Path(shutil.copy(ROOT / script, folder / "mine.py"))


class KeepGradients(TrainerCallback):
    """Callback that keeps the gradients of the last optimizer step."""

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.gradients = {name: p.grad.clone() for name, p in model.named_parameters()}


SUBJECTS = ["the cat", "a small dog", "my old friend", "the red boat", "every child", "no teacher"]
SUBJECTS += ["the river", "this house"]
VERBS = ["sees", "follows", "likes", "forgets", "remembers", "paints", "carries", "leaves"]
PLACES = ["in the garden", "near the sea", "behind a wall", "after the rain", "at night", "without a word", "on Monday"]


def make_documents(count: int, seed: int, sentences: tuple[int, int] = (3, 12)) -> list[str]:
    """Distinct English-like documents, a paragraph per line."""
    rng = random.Random(seed)
    documents = []
    for number in range(count):
        lines = [
            f"{rng.choice(SUBJECTS).capitalize()} {rng.choice(VERBS)} {rng.choice(SUBJECTS)} {rng.choice(PLACES)}."
            for _ in range(rng.randint(*sentences))
        ]
        documents.append("\n".join([f"Story {number} of {seed}.", *lines]))
    return documents


def write_parquet(path, texts, column="text", **others):
    pq.write_table(pa.table({column: texts, **others}), path)
    return str(path)


def write_jsonl(path, texts, column="text"):
    path.write_text("".join(json.dumps({column: text}) + "\n" for text in texts), encoding="utf-8")
    return str(path)


def write_text(path, texts):
    path.write_text("\n\n".join(texts) + "\n", encoding="utf-8")
    return str(path)


@pytest.fixture(scope="session")
def tokenizer():
    return train_tokenizer(make_documents(300, seed=0), vocab_size=400)


@pytest.fixture(scope="session")
def tokenizer_dir(tokenizer, tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(path)
    return str(path)


@pytest.fixture
def config(tokenizer):
    """Two layers of 32 without dropout, for comparing gradients of two implementations."""
    return RobertaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=66,
        type_vocab_size=1,
        layer_norm_eps=1e-5,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        bos_token_id=0,
        pad_token_id=1,
        eos_token_id=2,
    )


@pytest.fixture
def config_file(config, tmp_path):
    path = tmp_path / "config.json"
    config.to_json_file(path)
    return str(path)


@pytest.fixture
def model_dir(config_file, tokenizer, tmp_path):
    """A masked-LM checkpoint to fine-tune, without dropout in its body."""
    torch.manual_seed(0)
    model = build_model(tokenizer, config_name=config_file, max_seq_length=64)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


@pytest.fixture(scope="session")
def wordpiece():
    """A cased WordPiece tokenizer of single characters, with BERT's special tokens."""
    words = {token: number for number, token in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"])}
    for letter in string.ascii_letters + string.digits + string.punctuation:
        words.setdefault(letter, len(words))
        words.setdefault(f"##{letter}", len(words))
    backend = Tokenizer(models.WordPiece(words, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.BertProcessing(("[SEP]", words["[SEP]"]), ("[CLS]", words["[CLS]"]))
    names = {"unk": "[UNK]", "pad": "[PAD]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        **{f"{k}_token": v for k, v in names.items()},
    )


@pytest.fixture
def train_file(tmp_path):
    return write_parquet(tmp_path / "train.parquet", make_documents(200, seed=1))


@pytest.fixture
def validation_file(tmp_path):
    return write_parquet(tmp_path / "validation.parquet", make_documents(20, seed=2))


@pytest.fixture
def preset(tmp_path, tokenizer_dir, config_file, train_file, validation_file):
    """A preset that trains for a second; tests override its values by flags."""
    path = tmp_path / "preset.yaml"
    path.write_text(
        f"""
train_file: [{train_file}]
validation_file: [{validation_file}]
tokenizer_name: {tokenizer_dir}
config_name: {config_file}
output_dir: {tmp_path / "run"}
max_seq_length: 64
global_batch_size: 8
per_device_train_batch_size: 8
per_device_eval_batch_size: 4
max_steps: 4
learning_rate: 1e-3
logging_steps: 1
save_strategy: "no"
use_cpu: true
bf16: false
disable_tqdm: true
""",
        encoding="utf-8",
    )
    return str(path)


@pytest.fixture
def dropout(config, preset, tmp_path):
    """The preset with dropout, so that a checkpoint must hold the random state."""
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.1
    config.to_json_file(tmp_path / "config.json")
    return preset


def train(preset, *argv):
    """Pretrain with a preset and further flags; returns the run record."""
    return train_mlm.main(["--config", str(preset), *map(str, argv)])


def second_of_training(preset, *others, **values):
    """Command line of a fine-tuning script that trains for a second: `values`, then the words `others`."""
    values = {
        **{"max_seq_length": 64, "max_steps": 6, "warmup_steps": 1, "logging_steps": 1, "learning_rate": 1e-3},
        **{"seeds": 1, "use_cpu": True, "bf16": False, "disable_tqdm": True, "save_strategy": "no"},
        **values,
    }
    argv = [str(word) for key, value in values.items() for word in (f"--{key}", value)]
    return ["--config", str(preset), *argv, *map(str, others)]


def same_run(first, second):
    """Whether `tools/compare.py` finds two runs equal; prints the differences."""
    same, lines = compare.compare(compare.read_run(Path(first)), compare.read_run(Path(second)))
    print("\n".join(lines))
    return same


def losses(record):
    """The training losses of a run record."""
    return [loss for _, loss in record["loss_at_steps"]["train"]]


@pytest.fixture(autouse=True)
def every_machine_alike(monkeypatch):
    """Train in fp32 also on processors with bf16, and skip the matrix-rate probe."""
    monkeypatch.setattr(hardware, "has_bf16", lambda use_cpu=False: False)
    monkeypatch.setattr(hardware, "_PROBE_S", 0.0)


@pytest.fixture(scope="session")
def root():
    return ROOT
