"""Runs killed with SIGKILL at random moments, twice each, against a run that was not killed.

    python benchmarks/kill_and_resume.py [--runs 20]

Every run trains a small model with dropout on generated text, through the command line, in one of four layouts: one or
two processes, from text with data workers or from a token cache. A run that was killed twice and started again with the
same command must end with the losses, gradient norms and data digests of every step, and the weights, of the run of the
same layout that was not killed, to the last bit. The exit code is 1 where a run differs.
"""

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import psutil
from conftest import make_documents, write_parquet

from roberta_recipe.data import tokenizer_training
from roberta_recipe.durable import sha256

PRESET = """
train_file: [{folder}/train*.parquet]
validation_file: [{folder}/valid.parquet]
tokenizer_name: {folder}/tokenizer
config_name: {folder}/config.json
max_seq_length: 64
shuffle_window: 32
global_batch_size: 8
per_device_train_batch_size: 2
per_device_eval_batch_size: 4
max_steps: {steps}
learning_rate: 1e-3
logging_steps: 1
eval_strategy: steps
eval_steps: 7
save_strategy: steps
save_steps: 5
use_cpu: true
disable_tqdm: true
"""
CONFIG = {
    **{"model_type": "roberta", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"intermediate_size": 64, "max_position_embeddings": 66, "type_vocab_size": 1, "vocab_size": 400},
}
LAYOUTS = {
    "1 process, text, 2 workers": (1, ["--dataloader_num_workers", "2"]),
    "2 processes, text, 2 workers": (2, ["--dataloader_num_workers", "2"]),
    "1 process, token cache": (1, ["--token_cache", "{folder}/cache"]),
    "2 processes, token cache, 1 worker": (2, ["--token_cache", "{folder}/cache", "--dataloader_num_workers", "1"]),
}


def make_inputs(folder: Path, steps: int) -> None:
    tokenizer_training.train_tokenizer(make_documents(300, seed=0), vocab_size=400).save_pretrained(
        folder / "tokenizer"
    )
    (folder / "config.json").write_text(json.dumps(CONFIG))
    for number in range(4):
        write_parquet(folder / f"train{number}.parquet", make_documents(100, seed=number + 1))
    write_parquet(folder / "valid.parquet", make_documents(20, seed=9))
    (folder / "preset.yaml").write_text(PRESET.format(folder=folder, steps=steps))


def start(folder: Path, layout: str, output_dir: Path) -> subprocess.Popen:
    """Start the command of a layout in its own process group; the log is `<output_dir>.log`."""
    processes, flags = LAYOUTS[layout]
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", str(processes), "--standalone"]
    command = [sys.executable, *(launcher if processes > 1 else []), str(ROOT / "train_mlm.py")]
    command += ["--config", str(folder / "preset.yaml"), "--output_dir", str(output_dir)]
    with open(f"{output_dir}.log", "ab") as log:
        return subprocess.Popen(
            command + [flag.format(folder=folder) for flag in flags],
            **{"stdout": log, "stderr": log, "start_new_session": True, "cwd": folder},
            env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        )


def kill_at(process: subprocess.Popen, log: Path, steps: int, then_s: float) -> int:
    """SIGKILL to the command and its children, `then_s` after the log has `steps` steps; returns the number of steps
    that the log has in the end."""
    while log.read_text().count("  loss ") < steps and process.poll() is None:
        time.sleep(0.01)
    time.sleep(then_s)
    if process.poll() is None:
        for victim in [*psutil.Process(process.pid).children(recursive=True), process]:
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.kill()
    process.wait()
    time.sleep(0.2)  # until all processes are gone
    return log.read_text().count("  loss ")


def outcome(output_dir: Path, steps: int) -> dict:
    """The outcome that must be equal: every logged step, the digest of the data, the weights."""
    history = json.loads((output_dir / f"checkpoint-{steps}" / "trainer_state.json").read_text())["log_history"]
    keys = ("step", "loss", "grad_norm", "learning_rate", "tokens_seen", "digest", "eval_loss")
    record = json.loads((output_dir / "run_record.json").read_text())
    return {
        "history": [{key: entry[key] for key in keys if key in entry} for entry in history],
        "eval_loss": record["metrics"]["eval_loss"],
        "digest": record["digest"],
        "weights": sha256(output_dir / "model.safetensors"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng, identical = random.Random(args.seed), 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_inputs(folder, args.steps)
        not_killed = {}
        for number, layout in enumerate(LAYOUTS):
            output_dir = folder / f"not_killed{number}"
            if start(folder, layout, output_dir).wait(timeout=300):
                sys.exit(Path(f"{output_dir}.log").read_text())
            not_killed[layout] = outcome(output_dir, args.steps)
        for number in range(args.runs):
            layout = list(LAYOUTS)[number % len(LAYOUTS)]
            output_dir, killed_at = folder / f"run{number}", []
            for kill in range(2):
                target = rng.randint(1, args.steps * (kill + 1) // 3)
                process, log = start(folder, layout, output_dir), Path(f"{output_dir}.log")
                killed_at.append(kill_at(process, log, target, rng.uniform(0, 0.2)))
            failed = start(folder, layout, output_dir).wait(timeout=300)
            same = not failed and outcome(output_dir, args.steps) == not_killed[layout]
            identical += same
            log = Path(f"{output_dir}.log").read_text()
            first, both = killed_at[0], killed_at[1]
            print(
                f"{number + 1:>3}  {layout:<36} killed after {first:>2} steps, and {both - first:>2} further; "
                f"passed over {log.count('Passed over')}; {'identical' if same else 'DIFFERENT'}",
                flush=True,
            )
            if failed:
                print(log[-3000:])
    print(f"\n{identical} of {args.runs} identical")
    sys.exit(identical != args.runs)


if __name__ == "__main__":
    main()
