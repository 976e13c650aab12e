"""Invariance of loss and gradient to micro-batches, accumulation, processes and ZeRO stages, on the CPU in fp32.

    python benchmarks/batch_invariance.py [--steps 50] [--bound 1e-5]

First, one step over 16 sequences by stock `RobertaForMaskedLM` with `Trainer` and by ours, with the same weights and
masks: loss, gradient norm, and the largest difference of a gradient entry from that of the undivided batch, relative to
the norm.

Then train_mlm.py trains a small model without dropout on generated text, 16 sequences per step: one process, two
processes, and two processes under ZeRO 1, 2 and 3, with three micro-batch sizes each. Prints the largest relative
difference of logged losses from one process with the undivided batch; the exit code is 1 above the bound. About five
minutes on two cores; DeepSpeed needs a C++ compiler for its first run on a CPU.
"""

import argparse
import json
import random
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # run as a script, from anywhere

import numpy as np
import torch
import transformers
from transformers import AutoTokenizer, PrinterCallback, RobertaConfig, Trainer, TrainerCallback

from benchmarks.memory import launch
from roberta_recipe.data.masking import MlmCollator
from roberta_recipe.data.packing import Block
from roberta_recipe.data.tokenizer_training import train_tokenizer
from roberta_recipe.model.masked_lm import masked_lm_class
from roberta_recipe.training.arguments import MlmTrainingArguments
from roberta_recipe.training.mlm_trainer import MlmTrainer

GLOBAL_BATCH_SIZE = 16
LAUNCHES = [("one process", "one_gpu", 1), ("two processes", "two_cpus", 2)]
LAUNCHES += [(f"ZeRO {stage}, two processes", f"zero{stage}", 2) for stage in (1, 2, 3)]


def write_inputs(folder: Path) -> Path:
    """Write text, tokenizer, model config and a preset that names these files; returns the preset."""
    rng = random.Random(0)
    words = ["".join(rng.choices("aeioulnrst", k=rng.randint(2, 7))) for _ in range(300)]
    weights = [1 / rank for rank in range(1, len(words) + 1)]  # Zipf's law, which can be learnt
    sentences = [" ".join(rng.choices(words, weights, k=rng.randint(4, 16))) + "." for _ in range(12000)]
    documents = ["\n".join(sentences[start : start + 8]) for start in range(0, len(sentences), 8)]
    (folder / "train.txt").write_text("\n\n".join(documents[:1400]), encoding="utf-8")
    (folder / "validation.txt").write_text("\n\n".join(documents[1400:]), encoding="utf-8")
    tokenizer = train_tokenizer(documents, vocab_size=600)
    tokenizer.save_pretrained(folder / "tokenizer")
    config = RobertaConfig.from_json_file(ROOT / "presets" / "model" / "tiny.json")  # two layers, no dropout
    config.vocab_size, config.max_position_embeddings = len(tokenizer), 66
    config.to_json_file(folder / "config.json")
    values = {
        "train_file": [str(folder / "train.txt")],
        "validation_file": [str(folder / "validation.txt")],
        "tokenizer_name": str(folder / "tokenizer"),
        "config_name": str(folder / "config.json"),
        "output_dir": str(folder / "run"),
        "max_seq_length": 64,
        "global_batch_size": GLOBAL_BATCH_SIZE,
        "max_eval_samples": 48,
        "learning_rate": 2e-3,
        "warmup_steps": 10,
        "logging_steps": 1,
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
    }
    preset = folder / "preset.yaml"
    preset.write_text(json.dumps(values), encoding="utf-8")  # JSON is valid YAML
    return preset


class Blocks(torch.utils.data.IterableDataset):
    """Blocks of 16 to 62 ids, so that micro-batches differ in padding and in predicted positions."""

    def __init__(self, folder: Path, tokenizer):
        text = (folder / "validation.txt").read_text(encoding="utf-8").split("\n\n")
        ids = tokenizer(text[:GLOBAL_BATCH_SIZE])["input_ids"]
        lengths = [16 + 46 * number // (GLOBAL_BATCH_SIZE - 1) for number in range(GLOBAL_BATCH_SIZE)]
        self.rows = [np.array(row[:length], dtype=np.uint16) for row, length in zip(ids, lengths, strict=True)]

    def __iter__(self):
        for number, row in enumerate(self.rows):
            yield Block({"input_ids": row}, number)


class KeepGradient(TrainerCallback):
    """Callback that keeps the gradient of the step."""

    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        self.gradient = torch.cat([parameter.grad.flatten().clone() for parameter in model.parameters()])


def one_step(folder: Path, stock: bool, micro_batch: int) -> tuple[float, float, torch.Tensor]:
    """(loss, gradient norm, gradient) of a step over all blocks, by the stock model and `Trainer`, or by ours."""
    torch.manual_seed(0)
    tokenizer, keep = AutoTokenizer.from_pretrained(folder / "tokenizer"), KeepGradient()
    collator, config = MlmCollator(tokenizer, seed=0), RobertaConfig.from_json_file(folder / "config.json")
    values = {"max_steps": 1, "logging_steps": 1, "save_strategy": "no", "use_cpu": True, "disable_tqdm": True}
    values |= {"per_device_train_batch_size": micro_batch, "output_dir": str(folder / "step")}
    values |= {"gradient_accumulation_steps": GLOBAL_BATCH_SIZE // micro_batch, "report_to": "none"}
    shared = {"train_dataset": Blocks(folder, tokenizer), "callbacks": [keep], "args": MlmTrainingArguments(**values)}
    if stock:
        columns = ("input_ids", "attention_mask", "labels")  # arguments of the stock class
        trainer = Trainer(
            model=transformers.RobertaForMaskedLM(config),
            data_collator=lambda examples: {name: x for name, x in collator(examples).items() if name in columns},
            **shared,
        )
    else:
        of_ours = {"flops_per_token": 1.0, "fingerprint": {"global_batch_size": GLOBAL_BATCH_SIZE}, "resumed": None}
        model = masked_lm_class(config)(config)
        trainer = MlmTrainer(model=model, data_collator=collator, **of_ours, **shared)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return trainer.state.log_history[0]["loss"], float(keep.gradient.norm()), keep.gradient


def print_gradients(folder: Path) -> None:
    """Loss and gradient of one step in two layouts, stock and ours."""
    _, _, at_once = one_step(folder, False, GLOBAL_BATCH_SIZE)
    print(f"{'one step':<24}{'sequences x accumulation':>26}{'loss':>12}{'gradient norm':>15}{'difference':>15}")
    for stock in (True, False):
        for micro_batch in (GLOBAL_BATCH_SIZE, 1):
            loss, norm, gradient = one_step(folder, stock, micro_batch)
            difference = float((gradient - at_once).abs().max() / at_once.norm())
            layout = f"{micro_batch} x {GLOBAL_BATCH_SIZE // micro_batch}"
            print(f"{'stock' if stock else 'ours':<24}{layout:>26}{loss:>12.5f}{norm:>15.5f}{difference:>15.1e}")
    print(flush=True)


def losses(preset: Path, launch_file: str, processes: int, micro_batch: int, steps: int) -> list[float]:
    """The loss of every step, and the validation loss at the end."""
    output_dir = preset.parent / f"{launch_file}-{micro_batch}"
    flags = ["--config", str(preset), "--output_dir", str(output_dir), "--max_steps", str(steps)]
    launch(launch_file, processes, ["train_mlm.py", *flags, "--per_device_train_batch_size", str(micro_batch)])
    curves = json.loads((output_dir / "run_record.json").read_text())["loss_at_steps"]
    return [loss for split in ("train", "validation") for _, loss in curves[split]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--bound", type=float, default=1e-5, help="largest relative difference of a loss")
    args = parser.parse_args()

    largest, reference = 0.0, None
    with tempfile.TemporaryDirectory() as folder:
        preset = write_inputs(Path(folder))
        print_gradients(Path(folder))
        print(f"{'launch':<24}{'sequences x accumulation':>26}{'last loss':>12}{'largest relative difference':>30}")
        for name, launch_file, processes in LAUNCHES:
            at_once = GLOBAL_BATCH_SIZE // processes
            for accumulation in (1, 4, at_once):
                micro_batch = at_once // accumulation
                curve = losses(preset, launch_file, processes, micro_batch, args.steps)
                reference = reference or curve
                difference = max(abs(a - b) / b for a, b in zip(curve, reference, strict=True))
                largest = max(largest, difference)
                layout = f"{micro_batch} x {accumulation}"
                print(f"{name:<24}{layout:>26}{curve[args.steps - 1]:>12.6f}{difference:>30.1e}", flush=True)
    print(f"largest of all {largest:.1e}, bound {args.bound:g}")
    sys.exit(largest > args.bound)


if __name__ == "__main__":
    main()
