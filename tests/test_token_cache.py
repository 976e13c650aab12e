"""Token cache: built by several machines, damaged anywhere, repaired, refused for other data."""

import dataclasses
import datetime
import functools
import itertools
import json
import multiprocessing
import os
import random
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import fsspec
import psutil
import pytest
import torch
from conftest import Forked, corpus_of, forked_ranks, make_documents, train, wait_until, write_jsonl
from fsspec.registry import _registry
from test_stream import blocks_of, facts, reader_of

from roberta_recipe import durable
from roberta_recipe.data import chunks, token_cache
from roberta_recipe.data import corpus as corpora
from roberta_recipe.data.corpus import Source
from roberta_recipe.data.documents import documents, text_hash
from roberta_recipe.data.stream import TrainBlocks, blocks_at, count_table, validation_blocks
from roberta_recipe.data.token_cache import TokenCache
from roberta_recipe.errors import InputError, RunError, exit_on_error
from roberta_recipe.publishing import hub
from roberta_recipe.record import LISTS_NAME
from roberta_recipe.settings import dump_yaml, load_yaml
from roberta_recipe.training.launching import end_together, first_process_first
from roberta_recipe.training.mlm_trainer import MlmTrainer
from tools import estimate


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    """Two sources with different shares, several chunks per file; the second has a validation file."""
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 3000)
    for name, number in itertools.product("ab", range(3)):
        write_jsonl(tmp_path / f"{name}{number}.jsonl", ["", *make_documents(15, seed=ord(name) + number), None])
    write_jsonl(tmp_path / "valid.jsonl", make_documents(10, seed=7))
    sources = [
        Source("a", files=str(tmp_path / "a*.jsonl"), weight=1.0),
        Source("b", files=str(tmp_path / "b*.jsonl"), weight=3.0, validation_files=str(tmp_path / "valid.jsonl")),
    ]
    return corpus_of("c", sources, validation_share=0.2)


def held_out(provider, limit=None):
    return [*map(facts, validation_blocks(provider, limit))]


def files_of(folder):
    """path -> content of the files that the next start reads."""
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.suffix in (".bin", ".json")}


def everything(folder, corpus):
    """All training and validation blocks of a cache."""
    cache = TokenCache(folder, corpus, seed=5)
    size = sum(counts["blocks"] for counts in count_table(cache, "train").values())
    return blocks_of(cache, 0, 2 * size) + held_out(cache)


@pytest.fixture
def built(corpus, tokenizer, tmp_path):
    """(reader, folder of its complete cache)."""
    reader = reader_of(corpus, tokenizer)
    assert token_cache.build(tmp_path / "cache", reader, num_proc=1)
    return reader, tmp_path / "cache"


@pytest.mark.parametrize(("input_format", "count"), [("contiguous", 1), ("segment_pair sop", 10)])
def test_any_machines_and_processes_make_the_same_files(corpus, tokenizer, tmp_path, input_format, count):
    """Of pairs, ten shards per training file."""
    reader = reader_of(corpus, tokenizer, packer=input_format)
    done = [token_cache.build(tmp_path / "three", reader, num_proc=1, machine=n, machines=3) for n in range(3)]
    assert done == [False, False, True]
    token_cache.build(tmp_path / "whole", reader, num_proc=2)
    three, whole = (
        {path.relative_to(tmp_path / name): content for path, content in files_of(tmp_path / name).items()}
        for name in ("three", "whole")
    )
    assert three == whole and len(three) == 1 + 2 * (6 * count + 3 + 1)
    counts = count_table(TokenCache(tmp_path / "whole", corpus, seed=0), "train")
    assert estimate.blocks_per_pass(tmp_path / "whole", corpus) == sum(of["blocks"] for of in counts.values())


def test_epochs_are_not_estimated_from_a_part_of_a_cache_or_from_another_text(corpus, tokenizer, tmp_path):
    reader, known = reader_of(corpus, tokenizer), []
    for machine in range(3):
        token_cache.build(tmp_path, reader, num_proc=1, machine=machine, machines=3)
        known.append(estimate.blocks_per_pass(tmp_path, corpus))
    assert known[:2] == [None, None] and known[2] > 0
    renamed = dataclasses.replace(corpus.sources[1], name="c")
    for others in (corpus.sources[:1], [corpus.sources[0], renamed]):
        assert estimate.blocks_per_pass(tmp_path, dataclasses.replace(corpus, sources=others)) is None


def test_what_is_left_out_of_the_text_is_left_out_of_the_cache(corpus, tokenizer, tmp_path):
    """In a source without validation files, whose held-out documents are packed with the training documents."""
    source = corpus.sources[0]
    texts = list(documents(corpus, source, "validation", seed=0))
    (tmp_path / "near.json").write_text(json.dumps({"documents": [text_hash(text) for text in texts[::2]]}))
    corpus = corpus_of("c", corpus.sources, validation_share=0.2, leave_out=str(tmp_path / "near.json"))
    reader = reader_of(corpus, tokenizer)
    token_cache.build(tmp_path / "cache", reader, num_proc=1)
    cache = TokenCache(tmp_path / "cache", corpus, seed=0)
    assert held_out(cache) == held_out(reader)
    counts = count_table(cache, "validation")["a"]
    assert (counts["documents"], counts["held_out_documents"]) == (len(texts) // 2, len(texts[::2]))


def test_a_cache_of_something_else_is_refused(corpus, built, tokenizer, tmp_path, monkeypatch):
    _, folder = built
    changes = {"max_seq_length": {"max_seq_length": 32}, "input_format": {"packer": "contiguous"}}
    for name, change in changes.items():
        with pytest.raises(InputError, match=rf"{name} was .*, is {next(iter(change.values()))!r}"):
            token_cache.build(folder, reader_of(corpus, tokenizer, **change), num_proc=1)
    with monkeypatch.context() as patch:
        patch.setattr(chunks, "version", lambda name: "1.0.33")
        with pytest.raises(InputError, match=r"sentencex was None, is '1.0.33'"):
            token_cache.build(folder, reader_of(corpus, tokenizer), num_proc=1)
        assert "sentencex" not in reader_of(corpus, tokenizer, packer="contiguous").fingerprint()
    write_jsonl(tmp_path / "a1.jsonl", make_documents(5, seed=99))
    changed = corpus_of("c", corpus.sources, validation_share=0.2)
    with pytest.raises(InputError, match=r"source a was '3 files, \w+', is '3 files, \w+'"):
        token_cache.build(folder, reader_of(changed, tokenizer), num_proc=1)
    durable.write_json(folder / token_cache.FINGERPRINT, reader_of(corpus, tokenizer).fingerprint())
    with pytest.raises(InputError, match=r"fingerprint.json cannot be read .*; remove the folder"):
        token_cache.build(folder, reader_of(corpus, tokenizer), num_proc=1)


def test_ranks_wait_for_each_other_without_a_time_limit_and_see_what_was_damaged_meanwhile(corpus, tokenizer, tmp_path):
    """Rank 0's metadata is zeroed while rank 1 packs; the default group's timeout is shorter."""
    folder, reader = tmp_path / "cache", reader_of(corpus, tokenizer)

    def start(rank):
        torch.distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=1))
        with end_together():
            time.sleep(3 * rank)
            token_cache.build(folder, reader, num_proc=1, machine=rank, machines=2)
            if rank == 0:
                (folder / "a" / "train-00000.json").write_bytes(bytes(100))
        TokenCache(folder, corpus, seed=0)

    ranks = forked_ranks(start, tmp_path)
    assert [rank.end() for rank in ranks] == [2, 2]
    assert all("a/train-00000.bin is missing or damaged; start the same command again" in rank.log for rank in ranks)


@pytest.mark.parametrize("fails", [False, True])
def test_the_first_process_works_first_without_a_time_limit(tmp_path, fails):
    """Both ranks write a line; the default group's timeout is shorter than the work of the first."""
    lines = tmp_path / "lines"

    def start(rank):
        torch.distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=1))
        with first_process_first(SimpleNamespace(local_process_index=rank)):
            time.sleep(0 if rank else 3)
            with lines.open("a") as file:
                file.write(f"{rank}\n")
            if fails:
                raise InputError("no such file")

    ranks = forked_ranks(start, tmp_path)
    assert [rank.end() for rank in ranks] == ([2, 2] if fails else [0, 0]), [rank.log for rank in ranks]
    assert lines.read_text().split() == ["0", "1"]


def test_sigterm_of_the_launcher_ends_the_first_process_too(tmp_path):
    def start(rank):
        torch.distributed.init_process_group("gloo")
        (tmp_path / f"began{rank}").touch()
        with first_process_first(SimpleNamespace(local_process_index=rank)):
            time.sleep(60)

    ranks = forked_ranks(start, tmp_path)
    wait_until(lambda: len(list(tmp_path.glob("began*"))) == 2)
    time.sleep(0.5)
    for rank in reversed(ranks):
        os.kill(rank.pid, signal.SIGTERM)
        assert rank.end(20) == 75, rank.log


@pytest.mark.parametrize(
    ("rank", "number", "code", "line"),
    [(0, signal.SIGTERM, 75, "ended by SIGTERM"), (1, signal.SIGKILL, 1, "another process of this run is gone")],
)
def test_a_rank_that_waits_for_the_others_can_be_stopped_and_notices_a_lost_one(tmp_path, rank, number, code, line):
    def start(rank):
        torch.distributed.init_process_group("gloo")
        with end_together():
            (tmp_path / f"began{rank}").touch()
            time.sleep(60 * rank)

    ranks = forked_ranks(start, tmp_path)
    wait_until(lambda: len(list(tmp_path.glob("began*"))) == 2)
    time.sleep(0.5)
    os.kill(ranks[rank].pid, number)
    assert ranks[0].end(20) == code and line in ranks[0].log, ranks[0].log
    ranks[1].kill()


# Damage


def test_a_flipped_bit_or_a_cut_never_gives_other_blocks_and_is_repaired(corpus, built):
    """In each file, at random places: the same blocks, or an error that names the file, after which the next start
    packs that shard again. The user must delete a damaged fingerprint."""
    reader, folder = built
    wanted, rng, refused, contents = everything(folder, corpus), random.Random(0), 0, files_of(folder)
    assert len(contents) == 21 and all(contents.values())
    for (path, content), number in itertools.product(contents.items(), range(6)):
        place = rng.randrange(len(content))
        flipped = bytearray(content)
        flipped[place] ^= 1 << rng.randrange(8)
        path.write_bytes(content[:place] if number % 3 == 0 else flipped)
        try:
            assert everything(folder, corpus) == wanted
        except InputError as error:
            refused += 1
            if path.name == token_cache.FINGERPRINT:
                assert "fingerprint.json cannot be read" in str(error) and "remove" in str(error)
                path.write_bytes(content)
                continue
            name = path.relative_to(folder).with_suffix("").as_posix()
            assert name in str(error) and "start the same command again" in str(error)
        others = {other: other.stat().st_mtime_ns for other in contents if other.stem[-5:] != path.stem[-5:]}
        token_cache.build(folder, reader, num_proc=1)
        assert {other: other.read_bytes() for other in contents} == contents, (path, place)
        assert all(other.stat().st_mtime_ns == written for other, written in others.items())
    assert refused > 115


def test_a_shard_of_another_place_or_corpus_is_refused(corpus, tokenizer, tmp_path):
    """Also if it has the same size."""
    shutil.copy(tmp_path / "a0.jsonl", tmp_path / "a1.jsonl")
    corpus = corpus_of("c", corpus.sources, validation_share=0.2)
    reader, folder = reader_of(corpus, tokenizer), tmp_path / "cache"
    token_cache.build(folder, reader, num_proc=1)
    wanted, shards = everything(folder, corpus), [folder / "a" / f"train-0000{number}.bin" for number in (0, 1)]
    elsewhere = corpus_of("c", corpus.sources, validation_share=0.3)
    token_cache.build(tmp_path / "other", reader_of(elsewhere, tokenizer), num_proc=1)
    for place in (shards[0], tmp_path / "other" / "a" / "train-00001.bin"):
        for suffix in (".bin", ".json"):
            shutil.copy(place.with_suffix(suffix), shards[1].with_suffix(suffix))
        with pytest.raises(InputError, match=r"a/train-00001.bin is missing or damaged; start the same command again"):
            everything(folder, corpus)
        token_cache.build(folder, reader, num_proc=1)
        assert everything(folder, corpus) == wanted


@pytest.mark.parametrize("fault", ["cut", "gone"])
def test_a_shard_that_is_cut_or_removed_in_mid_run_is_refused(corpus, built, fault):
    """Reading the memory map of a truncated file is a bus error, which kills the process."""
    reader, folder = built
    blocks = blocks_at(TokenCache(folder, corpus, seed=0), [(range(10**6),)])
    taken = [next(blocks) for _ in range(3)]
    for shard in folder.rglob("train*.bin"):
        os.truncate(shard, 0) if fault == "cut" else shard.unlink()
    with pytest.raises(InputError, match=r"/train-0000\d.bin is damaged \((its size|.*No such file).*start the same"):
        next(blocks)
    assert [*map(facts, taken)] == blocks_of(reader, 0, 3)  # nothing of a block that was given is still in the map
    token_cache.build(folder, reader, num_proc=1)
    assert blocks_of(TokenCache(folder, corpus, seed=0)) == blocks_of(reader)


def test_damage_that_a_data_worker_finds_is_one_line(corpus, built, capsys):
    _, folder = built
    for shard in folder.glob("*/train*.bin"):
        shard.write_bytes(bytes(byte ^ 255 for byte in shard.read_bytes()))
    blocks = TrainBlocks(TokenCache(folder, corpus, seed=5), batch_size=4)
    loader = torch.utils.data.DataLoader(blocks, batch_size=4, num_workers=1, collate_fn=len)
    with pytest.raises(SystemExit) as ended:
        exit_on_error(lambda: list(itertools.islice(loader, 10)))
    lines = capsys.readouterr().err.strip().splitlines()
    assert ended.value.code == 2 and len(lines) == 1 and lines[0].startswith(f"error: {folder}/")


@pytest.mark.parametrize(("cache", "run"), [("run", "run"), ("run/a/tokens", "run"), ("tokens", "tokens/run")])
def test_a_cache_and_a_run_within_each_other(preset, tmp_path, monkeypatch, cache, run):
    """Killed before its first checkpoint and finished, a run keeps the cache, and does not publish it."""
    flags = ["--token_cache", tmp_path / cache, "--output_dir", tmp_path / run]
    flags += ["--save_strategy", "steps", "--save_steps", 1, "--save_total_limit", 1]
    with monkeypatch.context() as patch:
        patch.setattr(MlmTrainer, "train", mock.Mock(side_effect=RunError("killed")))
        with pytest.raises(RunError, match="killed"):
            train(preset, *flags)
    before = {path: path.read_bytes() for path in (tmp_path / cache / "train_file").iterdir()}
    assert train(preset, *flags)["steps"] == 4
    assert {path: path.read_bytes() for path in before} == before and len(before) == 4
    published = {path.name for path in hub.prepare("me/small", tmp_path / run).iterdir()}
    assert "model.safetensors" in published and not published & {"fingerprint.json", "train_file", "a"}


# Several packers


@pytest.mark.parametrize(("number", "by"), [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM")])
def test_packing_that_is_stopped_is_one_line_and_continues(corpus, tokenizer, tmp_path, monkeypatch, number, by):
    folder, reader = tmp_path / "cache", reader_of(corpus, tokenizer)
    write_shard = token_cache._write_shard

    def slow(folder, made_from, shard, *args):
        tokens = write_shard(folder, made_from, shard, *args)
        time.sleep(60 * (shard.source == 1))  # b is never finished
        return tokens

    monkeypatch.setattr(token_cache, "_write_shard", slow)
    run = Forked(lambda: (os.setpgid(0, 0), token_cache.build(folder, reader, num_proc=2)), tmp_path / "log")
    wait_until(lambda: len(list(folder.glob("b/*.bin"))) >= 2)
    os.killpg(run.pid, number)  # as a terminal does
    assert run.end(20) == {"Ctrl-C": 130, "SIGTERM": 75}[by]
    last = run.log.strip().splitlines()[-1]
    assert last.startswith(f"ended by {by}; saved files are complete. Continue with: ") and "Traceback" not in run.log
    monkeypatch.setattr(token_cache, "_write_shard", write_shard)
    assert token_cache.build(folder, reader, num_proc=2)


def test_packing_processes_end_with_the_packer(corpus, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(token_cache, "pack_file", lambda *_: time.sleep(60))
    build = functools.partial(token_cache.build, tmp_path / "cache", reader_of(corpus, tokenizer), num_proc=2)
    packer, children = multiprocessing.get_context("fork").Process(target=build), []
    packer.start()
    while packer.is_alive() and len(children) < 2:
        time.sleep(0.02)
        children = psutil.Process(packer.pid).children()
    assert len(children) == 2
    os.kill(packer.pid, signal.SIGKILL)
    packer.join()
    gone, alive = psutil.wait_procs(children, timeout=20)
    for process in alive:
        process.kill()
    assert len(gone) == 2


def test_a_complete_cache_needs_no_hub(preset, train_file, tmp_path, monkeypatch):
    """The files of a dataset at a commit are listed once, and its text is read once; without the list, the Hub is asked
    again. A branch may change, so that its files are listed at each start."""
    commit, hub = "0123" * 10, fsspec.filesystem("memory")
    monkeypatch.setitem(_registry, "hf", type("Hub", (type(hub),), {"protocol": "hf"}))
    values = load_yaml(preset)
    del values["train_file"], values["validation_file"]
    cache, own = tmp_path / "cache", tmp_path / "own.yaml"

    def start(revision, name, reachable):
        url = f"hf://datasets/me/text@{revision}/a.parquet"
        found = SimpleNamespace(name="parquet", config=SimpleNamespace(data_files={"train": [url]}))
        answer = mock.Mock(return_value=found, side_effect=None if reachable else ConnectionError("no route"))
        monkeypatch.setattr(corpora.datasets, "load_dataset_builder", answer)
        if reachable:
            hub.pipe(url, Path(train_file).read_bytes())
        else:
            hub.store.clear()
        (tmp_path / "hub.yaml").write_text(
            f'validation_share: 0.2\nsources: [{{name: a, dataset: me/text, revision: "{revision}"}}]\n',
            encoding="utf-8",
        )
        own.write_text(dump_yaml({**values, "corpus": str(tmp_path / "hub.yaml")}), encoding="utf-8")
        return train(own, "--token_cache", cache / revision, "--output_dir", tmp_path / name)

    before = start(commit, "online", True)
    assert start(commit, "offline", False)["digest"] == before["digest"]
    assert start("main", "branch", True)
    with pytest.raises(InputError, match=r"'main'.* cannot be opened .*: no route"):
        start("main", "branch_offline", False)
    (cache / commit / LISTS_NAME).unlink()
    with pytest.raises(InputError, match=r"cannot be opened .*: no route"):
        start(commit, "unlisted", False)
