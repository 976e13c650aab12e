"""docs/adapting.md: its commands run as they are written, in a copy of the repository, with fewer steps."""

import itertools
import json
import os
import random
import re
import shutil
import string
import subprocess
import sys
from pathlib import Path

from conftest import make_documents, write_jsonl, write_text

FEWER = ((r"--max_steps \d+", "--max_steps 4"), (r"--save_steps \d+", "--save_steps 2"))
FEWER += ((r"--warmup_steps \d+ ", "--warmup_steps 1 "), (r"--num_train_epochs 3", "--num_train_epochs 1 --seeds 1 2"))
FEWER += ((r'"num_hidden_layers": 3', '"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 64'),)
# what no test can have: the Hub, its 124.7 M parameters, a GPU
ELSEWHERE = (("FacebookAI/roberta-base", "runs/mine"),)
ELSEWHERE += (("--config presets/mlm/roberta_base.yaml", "--config presets/mlm/roberta_mini.yaml --use_cpu"),)
ELSEWHERE += (("--global_batch_size 2048", "--global_batch_size 32"),)


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```bash\n(.*?)^```$", page.read_text(encoding="utf-8"), re.S | re.M)


def clone(root: Path, place: Path) -> Path:
    """The tracked parts that a command of the page may need."""
    for name in ("roberta_recipe", "presets", "ds_configs", "tokenizer"):
        others = shutil.ignore_patterns("__pycache__", *(p.name for p in (root / "tokenizer").iterdir() if p.is_dir()))
        shutil.copytree(root / name, place / name, ignore=others)
    for script in root.glob("*.py"):
        shutil.copy(script, place)
    return place


def write_inputs(place: Path) -> None:
    """my_text/ and my_task/, as the page says that they lie there; enough words for its 8,192 entries."""
    rng = random.Random(0)
    words = ["".join(rng.choices(string.ascii_lowercase, k=rng.randint(3, 10))) for _ in range(3000)]
    sentences = (" ".join(rng.choices(words, k=10)).capitalize() + "." for _ in range(1500 * 20))
    texts = ["\n".join(itertools.islice(sentences, 20)) for _ in range(1500)]
    for name in ("books", "mail"):
        (place / "my_text" / name).mkdir(parents=True)
    write_text(place / "my_text/books/a.txt", texts[::2])
    write_jsonl(place / "my_text/mail/a.jsonl", texts[1::2], column="body")
    (place / "my_task").mkdir()
    for split, seed in (("train", 1), ("dev", 2)):
        rows = [f"{text.splitlines()[1]}\t{('ham', 'spam')[n % 2]}" for n, text in enumerate(make_documents(24, seed))]
        (place / "my_task" / f"{split}.tsv").write_text("text\tlabel\n" + "\n".join(rows) + "\n")


def test_every_command_of_the_page_runs(root, tmp_path):
    place = clone(root, tmp_path / "clone")
    write_inputs(place)
    commands = blocks(root / "docs" / "adapting.md")
    assert len(commands) == 6
    shown = []
    for block in commands:
        for pattern, fewer in FEWER:
            block = re.sub(pattern, fewer, block)
        for wanted, there in ELSEWHERE:
            block = block.replace(wanted, there)
        block = re.sub(r"(presets/mlm/roberta_mini.yaml|my_project/mine.yaml)(?! --use_cpu)", r"\1 --use_cpu", block)
        block = re.sub(
            r"cp presets/glue/rte.yaml my_project/mine.yaml --use_cpu",
            "cp presets/glue/rte.yaml my_project/mine.yaml",
            block,
        )
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", "-e", "-c", block],
            cwd=place,
            env={**os.environ, "PATH": path},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, f"{block}\n{done.stderr}"
        shown.append(done.stdout + done.stderr)
    assert "8,192 entries in tokenizer/mine" in shown[1] and "days" in shown[2]
    record = json.loads((place / "runs/mine/run_record.json").read_text())
    assert record["steps"] == 4 and set(record["metrics_by_source"]) == {"books", "mail"}
    measured = re.findall(r"validation loss ([\d.]+) nats", shown[4])
    assert len(measured) == 2 and float(measured[0]) == round(record["metrics"]["eval_loss"], 3) != float(measured[1])
    summary = json.loads((place / "runs/my_task/summary.json").read_text())
    assert summary["task"] == "mine" and set(summary["settings"][0]["medians"]) == {"accuracy", "f1"}
    assert "mine, validation accuracy x 100" in shown[5] and (place / "runs/my_task/loss_curve.png").is_file()
