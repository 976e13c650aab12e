"""tools/explain.py: model inputs of a step, reconstructed from a run's folder, equal those of training."""

import itertools
import json
import random
import re
import shutil

import numpy as np
import pytest
from conftest import forked_ranks, make_documents, train, write_parquet

from roberta_recipe import durable, input_files
from roberta_recipe.data.corpus import Corpus, Source
from roberta_recipe.data.masking import IGNORED, MlmCollator
from roberta_recipe.data.packing import Block
from roberta_recipe.errors import InputError, RunError
from roberta_recipe.training.mlm_trainer import MlmTrainer
from tools import explain, pack

SAVING = ["--save_strategy", "steps", "--save_steps", "4", "--max_steps", "10"]


@pytest.fixture
def hooked(monkeypatch, tmp_path):
    """A function from an output_dir to {step: rows}, all micro-batches of training; rows are (input_ids, labels)
    without padding. Includes other processes; for a step that was trained twice, the last time."""
    step = MlmTrainer.training_step
    folder = tmp_path / "hooked"

    def recording(self, model, inputs, num_items_in_batch=None):
        rows = zip(inputs["input_ids"], inputs["labels"], inputs.get("attention_mask", [None] * 99), strict=False)
        for ids, labels, mask in rows:
            length = len(ids) if mask is None else int(mask.sum())
            run = folder / self.args.output_dir.replace("/", "_") / f"{self.args.process_index}"
            run.mkdir(parents=True, exist_ok=True)
            line = [self.state.global_step + 1, self.position, ids[:length].tolist(), labels[:length].tolist()]
            with open(run / "seen.jsonl", "a") as file:
                file.write(json.dumps(line) + "\n")
        return step(self, model, inputs, num_items_in_batch)

    monkeypatch.setattr(MlmTrainer, "training_step", recording)

    def seen(output_dir):
        steps = {}
        for path in (folder / str(output_dir).replace("/", "_")).glob("*/seen.jsonl"):
            for number, _, ids, labels in map(json.loads, path.read_text().splitlines()):
                steps.setdefault(number, []).append((ids, labels))
        return steps

    return seen


def told(output_dir, step, *argv):
    """The tool's rows of a step, as in `hooked`."""
    found = explain.main(["--output-dir", str(output_dir), "--step", str(step), "--show_blocks", "99", *argv])
    return [(row["input_ids"].tolist(), row["labels"].tolist()) for row in found]


SOURCES = {
    "text": [],
    "cache": ["--token_cache", "CACHE", "--mask_count", "exact", "--input_format", "contiguous"],
    "repeated": ["--max_train_samples", 30],
    "skipped": ["--skip_blocks", "9-14", "20", "47-48", "--dataloader_num_workers", 2],
}


@pytest.mark.parametrize("source", SOURCES)
def test_any_step_is_what_the_run_saw(preset, tmp_path, hooked, capsys, source):
    """The run from text was resumed, with micro-batches smaller than the batch. From the last checkpoint before the
    step, and without a checkpoint."""
    out, draw = tmp_path / "run", random.Random(source)
    flags = [str(tmp_path / "cache") if flag == "CACHE" else flag for flag in SOURCES[source]]
    flags = [*SAVING, "--per_device_train_batch_size", 2, *flags]
    train(preset, *flags)
    if source == "text":
        for step in (8, 10):
            shutil.rmtree(out / f"checkpoint-{step}")
        (out / "run_record.json").unlink()
        shutil.rmtree(tmp_path / "hooked")
        train(preset, *flags)
    seen = hooked(out)
    assert len(seen) == (6 if source == "text" else 10)
    for step in draw.sample(sorted(seen), 4):
        capsys.readouterr()
        assert sorted(told(out, step)) == sorted(seen[step]) and len(seen[step]) == 8
        assert "blocks and masks match the hash in its log" in capsys.readouterr().out
    for path in out.glob("checkpoint-*"):
        shutil.rmtree(path)
    step = draw.choice(sorted(seen))
    assert sorted(told(out, step)) == sorted(seen[step])


def test_two_processes_saw_the_batch_that_is_told(preset, tmp_path, hooked):
    flags = ["--per_device_train_batch_size", 2, "--logging_steps", 3, *SAVING]
    ranks = forked_ranks(lambda rank: train(preset, *flags), tmp_path)
    assert [rank.end() for rank in ranks] == [0, 0], ranks[0].log
    seen = hooked(tmp_path / "run")
    for step in (1, 5, 10):
        assert sorted(told(tmp_path / "run", step)) == sorted(seen[step]) and len(seen[step]) == 8


def test_what_is_printed_is_the_text_that_the_model_sees(preset, tmp_path, hooked, tokenizer, capsys):
    """Without its marks, the printed text gives the tokens before and after masking; also before training."""
    flags = ["--config", preset, "--per_device_train_batch_size", "4", "--output_dir", str(tmp_path / "run")]
    explain.main([*flags, "--show_blocks", "2"])
    before_training = capsys.readouterr().out
    assert "step 1 of a new run" in before_training and not (tmp_path / "run").exists()
    train(preset)
    told(tmp_path / "run", 1, "--show_blocks", "2")
    printed = capsys.readouterr().out
    blocks = re.split(r"^block ([\d,]+)   ", printed, flags=re.M)
    assert blocks[1::2] == ["0", "1"] and all(block in before_training for block in blocks[2::2])
    for text in blocks[2::2]:
        where, counts, *lines = text.splitlines()
        assert re.fullmatch(rf"train_file, block \d+ of {re.escape(str(tmp_path / 'train.parquet'))}, pass 1", where)
        shown = re.sub(r"\[(.+?) → (.+?)\]", r"\2", "".join(line[4:] for line in lines))
        rows = [row for row in hooked(tmp_path / "run")[1] if bare(tokenizer.decode(row[0])) == bare(shown)]
        assert len(rows) == 1
        ids, labels = map(np.array, rows[0])
        whole = re.sub(r"\[(.+?) → (.+?)\]", r"\1", "".join(line[4:] for line in lines))
        assert bare(tokenizer.decode(np.where(labels != IGNORED, labels, ids))) == bare(whole)
        predicted = (labels != IGNORED).sum()
        assert text.count(" → ") == predicted and counts.startswith(f"{len(ids)} tokens, {predicted} predicted: ")
        sentences = [line for line in lines if line.endswith("</s>")]
        assert len(sentences) == (np.where(labels != IGNORED, labels, ids) == tokenizer.eos_token_id).sum()


def bare(text):
    """Without white space, which a token at the start of a line loses."""
    return re.sub(r"\s", "", text)


@pytest.mark.parametrize(
    ("format", "objective", "column"),
    [("segment_pair", "nsp", "next_sentence_labels"), ("sentence_pair", "sop", "sentence_order_labels")],
)
def test_labels_of_pairs_are_printed(preset, capsys, format, objective, column):
    """A label per pair of the block, or none."""
    argv = ["--config", preset, "--input_format", format, "--objective", "mlm", objective, "--show_blocks", "8"]
    rows = explain.main(argv)
    told = [told for told in capsys.readouterr().out.splitlines() if " predicted: " in told]
    labels = [[int(label) for label in row[column] if label != IGNORED] for row in rows]
    assert [line.partition(f"; {column} ")[2] for line in told] == [str(of or "none").strip("[]") for of in labels]
    assert len({*itertools.chain(*labels)}) == 2


def test_a_url_is_told_without_its_password(tokenizer):
    collator = MlmCollator(tokenizer, seed=0)
    url = "http://me:geheim@host/a.txt?key=geheim"
    corpus = Corpus("web", [Source("web", files=url)], resolved={("web", "train"): ("text", [url])})
    told = explain.describe(Block({"input_ids": np.array([0, 5, 6, 2])}, 0), collator, corpus)
    assert "geheim" not in told and "http://***@host/a.txt?key=***" in told


def test_a_text_with_control_characters_commands_no_terminal(preset, tmp_path, capsys):
    texts = [text.replace(".", " \x1b[31mred\x07 end\u202e.") for text in make_documents(100, seed=4)]
    explain.main(["--config", preset, "--train_file", write_parquet(tmp_path / "odd.parquet", texts)])
    shown = capsys.readouterr().out
    assert "\x1b" not in shown and "\x07" not in shown and "\u202e" not in shown and "\\x1b" in shown


def test_a_run_of_the_repository_from_another_directory(preset, tmp_path, monkeypatch):
    """Its checkpoints and record are found with its preset."""
    train(preset, *SAVING)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setattr(input_files, "ROOT", tmp_path)
    with pytest.raises(InputError, match="mlm_probability was"):
        explain.main(["--output_dir", "run", "--step", "3", "--mlm_probability", "0.3"])
    assert explain.main(["--output_dir", "run", "--step", "3"])
    _, (_, _, training_args) = explain.read_arguments(["--output_dir", "run", "--step", "3"])
    assert training_args.output_dir == str(tmp_path / "run")  # which has the blocks that spikes skipped
    assert not list((tmp_path / "elsewhere").iterdir())


def test_what_cannot_be_told_is_refused(preset, tmp_path, tokenizer):
    train(preset, *SAVING)
    out = str(tmp_path / "run")
    run = ["--output_dir", out, "--step"]
    for argv, said in (
        (["--step", "1"], "output_dir is not set"),
        ([*run, "0"], "step=0 must be from 1 to max_steps=10"),
        ([*run, "11"], "step=11 must be from 1 to max_steps=10"),
        (["--output_dir", str(tmp_path / "none"), "--step", "1"], "no such file: .*none/preset.yaml"),
        ([*run, "3", "--mlm_probability", "0.3"], "up to step 4 .* mlm_probability was 0.15, is 0.3"),
        ([*run, "3", "--seed", "7"], "data_seed was 42, is 7"),
        ([*run, "3", "--global_batch_size", "4"], "global_batch_size was 8, is 4"),
        ([*run, "3", "--train_file", write_parquet(tmp_path / "o.parquet", make_documents(90, 7))], "source train_fil"),
    ):
        with pytest.raises(InputError, match=said):
            explain.main(argv)
    log = tmp_path / "run" / "log.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    lines[2]["digest"] = "000000000001"
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(RunError, match="step 3 had different blocks or masks"):
        explain.main([*run, "3"])
    # resumed despite changes: the data began again at their beginning
    state = tmp_path / "run" / "checkpoint-8" / "recipe_state.json"
    durable.write_json(state, durable.read_json(state) | {"position": 16})
    with pytest.raises(InputError, match="step 8 ended at block 16: the run was resumed despite changes"):
        explain.main([*run, "9"])


def test_a_cache_of_other_text_or_blocks_is_not_shown_as_those_of_a_run_that_has_not_started(preset, tmp_path):
    cache = ["--config", str(preset), "--token_cache", str(tmp_path / "cache")]
    pack.main([*cache, "--num_proc", "1"])
    assert explain.main(cache)
    other = write_parquet(tmp_path / "o.parquet", make_documents(90, 7))
    for flag, value, said in (
        ("--max_seq_length", "24", "max_seq_length was .*, is 24"),
        ("--input_format", "contiguous", "input_format was 'full_sentences', is 'contiguous'"),
        ("--train_file", other, "source train_file was"),
    ):
        with pytest.raises(InputError, match=rf"token_cache=.* has other settings: {said}"):
            explain.main([*cache, flag, value])
