"""Make the data folder for an offline GPU machine: text, tokenizer, BLiMP, GLUE, SQuAD; pip adds the wheels.

    python -m benchmarks.gpu.carry --data DIR --output runs/gpu_carried

DIR has pretrain/<domain>/{train,valid}-*.parquet (the domains of presets/corpus/five_domains.yaml, a document per row,
column `text`), glue/{CoLA,MRPC,SST-2}/{train,dev}.tsv, squad/v1.1/{train,dev}.json and blimp/*.jsonl (official files).

    <output>/text/<domain>/{train,valid}-*.jsonl.bz2   the first documents of each file, the same share of each domain
    <output>/tokenizer                                 trained on this text
    <output>/tasks.tar.xz                              GLUE's and SQuAD's files, 100 pairs of each paradigm of BLiMP
"""

import argparse
import bz2
import io
import itertools
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq

from benchmarks.gpu.runs import PAIRS, TASKS
from roberta_recipe.errors import InputError, exit_on_error
from roberta_recipe.input_files import ROOT
from roberta_recipe.settings import load_yaml

CORPUS = "presets/corpus/five_domains.yaml"
GLUE = ("CoLA", "MRPC", "SST-2")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.carry", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder with pretrain, glue and blimp")
    parser.add_argument("--output", type=Path, default=Path("runs/gpu_carried"), help="new folder")
    parser.add_argument("--text_mb", type=float, default=130, help="MB of uncompressed text")
    parser.add_argument("--vocab_size", type=int, default=16384, help="entries of the tokenizer")
    args = parser.parse_args(argv)
    if (args.output / "text").exists():
        raise InputError(f"output={args.output} holds text already; name another folder, or delete it")
    write_text(args.data / "pretrain", args.output / "text", 1e6 * args.text_mb)
    write_tasks(args.data, args.output / TASKS)
    trainer = ["tokenizer/train_tokenizer.py", "--corpus", CORPUS, "--vocab_size", str(args.vocab_size)]
    subprocess.run(
        [sys.executable, *trainer, "--output_dir", str(args.output.resolve() / "tokenizer")],
        check=True,
        cwd=ROOT,
        env={**os.environ, "FIVE_DOMAINS": str(args.output.resolve() / "text")},
    )
    print(*sizes(args.output), sep="\n")


def write_text(source: Path, target: Path, most_bytes: float) -> None:
    """Write the first documents of each training file, the same share of each, `most_bytes` of UTF-8 in all, and all
    validation files. Raises `InputError` for a domain without files."""
    domains = [entry["name"] for entry in load_yaml(CORPUS)["sources"]]
    files = {path: target / name for name in domains for path in _files(source / name)}
    sizes = {path: sum(len(text.encode()) for text in _texts(path)) for path in files}
    share = most_bytes / sum(size for path, size in sizes.items() if path.name.startswith("train"))
    for path, folder in files.items():
        folder.mkdir(parents=True, exist_ok=True)
        room = sizes[path] * (min(share, 1.0) if path.name.startswith("train") else 1.0)
        with bz2.open(folder / f"{path.stem}.jsonl.bz2", "wt", encoding="utf-8") as stream:
            for text in _texts(path):
                stream.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
                room -= len(text.encode())
                if room <= 0:
                    break


def _files(domain: Path) -> list[Path]:
    """The Parquet files of a domain."""
    files = sorted(domain.glob("*.parquet"))
    if {path.name.partition("-")[0] for path in files} != {"train", "valid"}:
        raise InputError(f"{domain} must hold train-*.parquet and valid-*.parquet")
    return files


def _texts(path: Path) -> Iterator[str]:
    return (text for batch in pq.ParquetFile(path).iter_batches(columns=["text"]) for text in batch[0].to_pylist())


def write_tasks(data: Path, path: Path) -> None:
    """Write `tasks.tar.xz`: GLUE's labelled splits, SQuAD, and the first `PAIRS` pairs of each BLiMP file."""
    with tarfile.open(path, "w:xz", preset=9) as archive:
        for name, split in itertools.product(GLUE, ("train", "dev")):
            archive.add(data / "glue" / name / f"{split}.tsv", f"glue/{name}/{split}.tsv")
        for split in ("train", "dev"):
            archive.add(data / "squad" / "v1.1" / f"{split}.json", f"squad/{split}-v1.1.json")
        for file in sorted((data / "blimp").glob("*.jsonl")):
            lines = b"".join(file.read_bytes().splitlines(keepends=True)[:PAIRS])
            entry = tarfile.TarInfo(f"blimp/{file.name}")
            entry.size = len(lines)
            archive.addfile(entry, io.BytesIO(lines))


def sizes(folder: Path) -> list[str]:
    """Lines with the sizes of the folder's entries, and the total."""
    of = {
        entry.name: sum(path.stat().st_size for path in (entry, *entry.rglob("*")) if path.is_file())
        for entry in sorted(folder.iterdir())
    }
    return [f"{size:>12,} bytes  {name}" for name, size in {**of, "in all": sum(of.values())}.items()]


if __name__ == "__main__":
    exit_on_error(main)
