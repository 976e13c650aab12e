"""The token cache: the same blocks as from text, built by several machines, repaired, and refused for other data."""

import collections
import itertools
import json
import multiprocessing
import os
import random
import shutil
import signal
import time
from multiprocessing import resource_sharer

import numpy as np
import psutil
import pyarrow as pa
import pytest
import torch
from conftest import Forked, corpus_of, make_documents, write_parquet

from roberta_recipe import durable, lock
from roberta_recipe.data import stream, token_cache
from roberta_recipe.data.corpus import Source
from roberta_recipe.data.documents import documents, text_digest
from roberta_recipe.data.formats import PACKERS
from roberta_recipe.data.order import batches_of, place_of
from roberta_recipe.data.packing import NO_LABEL
from roberta_recipe.data.pairs import NSP, SOP
from roberta_recipe.data.stream import TextReader, TrainBlocks
from roberta_recipe.data.token_cache import TokenCache
from roberta_recipe.errors import InputError, RunError, exit_on_error


@pytest.fixture
def corpus(tmp_path):
    """Two sources of unlike shares; the second has its own validation files."""
    for name in "ab":
        for number in range(3):
            texts = make_documents(40, seed=ord(name) + number)
            write_parquet(tmp_path / f"{name}{number}.parquet", ["", *texts, None])
    write_parquet(tmp_path / "valid.parquet", make_documents(30, seed=7))
    sources = [
        Source("a", files=str(tmp_path / "a*.parquet"), weight=1.0),
        Source("b", files=str(tmp_path / "b*.parquet"), weight=3.0, validation_files=str(tmp_path / "valid.parquet")),
    ]
    return corpus_of("c", sources, validation_share=0.2)


def reader_of(corpus, tokenizer, **changes):
    settings = dict(input_format="full_sentences", max_seq_length=64, seed=5, shuffle_window=16)
    return TextReader(corpus, tokenizer, **{**settings, **changes})


def same(block, other):
    return block.keys() == other.keys() and all(np.array_equal(block[name], other[name]) for name in block)


def nth(reader, position):
    block = next(reader.blocks(batches_of(position, 1, 1, 0), position))
    block.pop("states")
    return block


def facts(blocks, count=None):
    return [(b["epoch"], b["block_id"], b["input_ids"].tolist()) for b in itertools.islice(blocks, count)]


@pytest.mark.parametrize("num_proc", [1, 2])
def test_cache_and_text_give_the_same_blocks_in_the_same_order(corpus, tokenizer, tmp_path, num_proc):
    reader = reader_of(corpus, tokenizer)
    assert token_cache.build(tmp_path / "cache", reader, num_proc=num_proc)
    cache = TokenCache(tmp_path / "cache", corpus, seed=5, shuffle_window=16)
    from_text = facts(reader.blocks(batches_of(0, 4, 1, 0)), 600)
    assert facts(cache.blocks(batches_of(0, 4, 1, 0)), 600) == from_text and from_text[-1][0] > 0
    assert facts(cache.blocks(batches_of(333, 4, 1, 0)), 100) == from_text[333:433]
    held_out = facts(reader_of(corpus, tokenizer).validation(None))
    assert facts(cache.validation(None)) == held_out and len(held_out) > 10
    drawn = facts(cache.validation(7))
    assert drawn == facts(reader_of(corpus, tokenizer).validation(7)) and len(drawn) == 7
    assert all(block in held_out for block in drawn) and drawn != held_out[:7]
    assert cache.fingerprint() == reader.fingerprint()
    assert cache.count_table()["a"]["held_out_documents"] > 0 == cache.count_table()["b"]["held_out_documents"]
    assert sum(counts["blocks"] for counts in cache.count_table().values()) > 100


def label_of(block):
    return next(block[name].tolist() for name in (NSP, SOP) if name in block)


@pytest.mark.parametrize("name", [name for name in PACKERS if "_pair" in name])
def test_pairs_have_ten_versions_from_text_and_from_the_cache(name, tokenizer, tmp_path, monkeypatch):
    """Three passes and the eleventh, over two sources; a block of validation has one version."""
    for number in range(3):
        write_parquet(tmp_path / f"{number}.parquet", make_documents(20, seed=number))
    sources = [Source(n, files=f"{tmp_path}/{files}.parquet", weight=1.0) for n, files in (("a", "[01]"), ("b", "2"))]
    corpus = corpus_of("c", sources, validation_share=0.2)
    reader = reader_of(corpus, tokenizer, input_format=name)
    assert token_cache.build(tmp_path / "cache", reader, num_proc=1)
    cache = TokenCache(tmp_path / "cache", corpus, seed=5, shuffle_window=16)
    passes, blocks = collections.defaultdict(dict), reader.blocks(batches_of(0, 4, 1, 0))
    from_cache = cache.blocks(batches_of(0, 4, 1, 0))
    count = 0
    while len(passes) < 12:
        block, other = next(blocks), next(from_cache)
        block.pop("states", None)
        assert same(block, other), count
        count += 1
        if place_of(block["block_id"])[0] == 0:
            passes[block["epoch"]][block["block_id"]] = (block["input_ids"].tolist(), label_of(block))
    assert cache.passes(count)["a"] > 11 and same(next(cache.blocks(batches_of(37, 4, 1, 0))), nth(reader, 37))
    assert passes[10] == passes[0]
    random = name != "sentence_pair in_order"  # two sentences in their order are the same pair in any version
    assert (passes[1] != passes[0]) == (passes[2] != passes[1]) == random
    ones = [label for one in range(10) for _, of in passes[one].values() for label in of if label != NO_LABEL]
    assert sum(ones) / len(ones) == pytest.approx(0 if "in_order" in name else 0.5, abs=0.05)
    held_out = [label_of(block) for block in cache.validation(None)]
    assert held_out == [label_of(block) for block in reader.validation(None)]
    assert cache.count_table()["a"]["blocks"] == len(passes[0])


def test_a_cache_of_other_formats_has_one_version(corpus, tokenizer, tmp_path):
    """Under the names, and with the facts, that it had before pairs had versions."""
    token_cache.build(tmp_path / "cache", reader_of(corpus, tokenizer), num_proc=1)
    names = {path.relative_to(tmp_path / "cache").as_posix() for path in (tmp_path / "cache").glob("*/*.arrow")}
    train = {f"{source}/train-0000{number}.arrow" for source in "ab" for number in range(3)}
    assert names == train | {f"a/validation-0000{number}.arrow" for number in range(3)} | {"b/validation-00000.arrow"}
    assert not any("version" in json.loads(path.read_text()) for path in (tmp_path / "cache").glob("*/*.json"))


def test_what_is_left_out_of_the_text_is_left_out_of_the_cache(corpus, tokenizer, tmp_path):
    """In a source without validation files, whose held-out documents are packed with the training documents."""
    source = corpus.sources[0]
    texts = list(documents(corpus, source, "validation", seed=0))
    (tmp_path / "near.json").write_text(json.dumps({"documents": [text_digest(text) for text in texts[::2]]}))
    corpus = corpus_of("c", corpus.sources, validation_share=0.2, leave_out=str(tmp_path / "near.json"))
    reader = reader_of(corpus, tokenizer)
    token_cache.build(tmp_path / "cache", reader, num_proc=1)
    cache = TokenCache(tmp_path / "cache", corpus, seed=5)
    assert facts(cache.validation(None)) == facts(reader.validation(None))
    counts = cache.count_table("validation")["a"]
    assert (counts["documents"], counts["held_out_documents"]) == (len(texts) // 2, len(texts[::2]))


def test_validation_of_so_many_blocks_reads_as_many_files_as_hold_them(tmp_path, tokenizer, monkeypatch):
    """The same of text and cache; its own validation files are read to the end."""
    for number in range(12):
        write_parquet(tmp_path / f"{number}.parquet", make_documents(40, seed=number))
        write_parquet(tmp_path / f"own{number}.parquet", make_documents(9, seed=100 + number))
    share = Source("share", files=str(tmp_path / "[0-9]*.parquet"), weight=1.0)
    files = {"files": str(tmp_path / "0.parquet"), "validation_files": str(tmp_path / "own*.parquet")}
    own = Source("own", **files, weight=1.0)
    corpus, opened = corpus_of("c", [share, own], validation_share=0.2), []
    reader = reader_of(corpus, tokenizer)
    token_cache.build(tmp_path / "cache", reader, num_proc=1)
    cache = TokenCache(tmp_path / "cache", corpus, seed=5)
    read = stream.file_rows
    monkeypatch.setattr(stream, "file_rows", lambda *args, **kwargs: opened.append(args[3]) or read(*args, **kwargs))
    everything = facts(cache.validation(None))
    for limit in (1, 5, 20, 60, 10**6):
        opened.clear()
        drawn = facts(reader.validation(limit))
        assert drawn == facts(cache.validation(limit)) and len(drawn) == min(limit, len(everything))
        files = [corpus.files(share, "train")[1].index(path) for path in opened if "own" not in path]
        held = [sum(place_of(name)[:2] == (0, file) for _, name, _ in everything) for file in files]
        assert sum(held[:-1]) < limit <= sum(held) or len(files) == 12
        assert len(opened) - len(files) == 12 and (len(files) < 12) == (limit < 10**6)
    assert sorted(drawn) == sorted(everything)


def test_three_machines_make_the_same_bytes_as_a_single_machine(corpus, tokenizer, tmp_path):
    reader = reader_of(corpus, tokenizer)
    done = [token_cache.build(tmp_path / "three", reader, num_proc=1, machine=n, machines=3) for n in range(3)]
    assert done == [False, False, True]
    token_cache.build(tmp_path / "whole", reader, num_proc=1)
    manifests = [durable.read_json(tmp_path / name / "manifest.json") for name in ("three", "whole")]
    assert manifests[0] == manifests[1] and len(manifests[0]["shards"]) == 3 + 3 + 3 + 1


@pytest.mark.parametrize("fault", ["bit", "truncated", "missing"])
def test_a_bad_shard_is_refused_or_made_again(corpus, tokenizer, tmp_path, fault):
    reader, folder = reader_of(corpus, tokenizer), tmp_path / "cache"
    token_cache.build(folder, reader, num_proc=1)
    shard = folder / "a" / "train-00001.arrow"
    good, others = shard.read_bytes(), (folder / "a" / "train-00000.arrow").stat().st_mtime_ns
    bad = bytearray(good)
    bad[len(bad) // 2] ^= 4
    shard.unlink() if fault == "missing" else shard.write_bytes(bad if fault == "bit" else good[:-100])
    if fault != "bit":  # only a full read would find a flipped bit
        with pytest.raises(InputError, match=r"a/train-00001.arrow is missing or not of \d+ bytes; pack it again"):
            TokenCache(folder, corpus, seed=5)
        assert token_cache.ensure(folder, reader, num_proc=1) is None and shard.read_bytes() == good
        shard.write_bytes(bad)
    assert token_cache.build(folder, reader, num_proc=1)
    assert shard.read_bytes() == good and (folder / "a" / "train-00000.arrow").stat().st_mtime_ns == others


def test_a_cache_of_something_else_is_refused(corpus, tokenizer, tmp_path):
    token_cache.build(tmp_path / "cache", reader_of(corpus, tokenizer), num_proc=1)
    changes = {"max_seq_length": (64, 32), "input_format": ("full_sentences", "contiguous")}
    for name, (was, now) in changes.items():
        with pytest.raises(InputError, match=rf"{name} was {was!r}, is {now!r}"):
            token_cache.build(tmp_path / "cache", reader_of(corpus, tokenizer, **{name: now}), num_proc=1)
    write_parquet(tmp_path / "a1.parquet", make_documents(5, seed=99))
    changed = corpus_of("c", corpus.sources, validation_share=0.2)
    with pytest.raises(InputError, match=r"source a was '3 files, \w+', is '3 files, \w+'"):
        token_cache.build(tmp_path / "cache", reader_of(changed, tokenizer), num_proc=1)
    with pytest.raises(InputError, match="holds other files"):
        token_cache.build(tmp_path, reader_of(corpus, tokenizer), num_proc=1)


# Damage


def everything(folder, corpus):
    """All blocks of a cache, training and validation."""
    cache = TokenCache(folder, corpus, seed=5)
    size = sum(counts["blocks"] for counts in cache.count_table().values())
    return facts(cache.blocks(batches_of(0, size, 1, 0)), size) + facts(cache.validation(None))


@pytest.fixture
def small(tmp_path, tokenizer):
    """(corpus, reader, folder of its complete cache): a file, 18 blocks and 3 held out."""
    path = write_parquet(tmp_path / "a.parquet", make_documents(30, seed=3))
    corpus = corpus_of("c", [Source("a", files=path)], validation_share=0.2)
    reader = reader_of(corpus, tokenizer, max_seq_length=128)
    token_cache.build(tmp_path / "cache", reader, num_proc=1)
    return corpus, reader, tmp_path / "cache"


def test_a_flipped_bit_ends_the_run_and_the_next_start_packs_that_shard_again(corpus, tokenizer, tmp_path):
    reader, folder = reader_of(corpus, tokenizer), tmp_path / "cache"
    token_cache.build(folder, reader, num_proc=1)
    wanted, shard = everything(folder, corpus), folder / "a" / "train-00001.arrow"
    good, other = shard.read_bytes(), folder / "a" / "train-00000.arrow"
    with pa.memory_map(str(shard)) as source:
        ids = pa.ipc.open_file(source).get_batch(0)["input_ids"].values.to_numpy().tobytes()
    bad = bytearray(good)
    bad[good.index(ids) + len(ids) // 2] ^= 1
    shard.write_bytes(bad)
    written = other.stat().st_mtime_ns
    with pytest.raises(InputError, match=r"a/train-00001.arrow is damaged: block \d+ is not what was .*start the same"):
        everything(folder, corpus)
    assert not shard.with_suffix(".json").exists()
    token_cache.ensure(folder, reader, num_proc=1)
    assert shard.read_bytes() == good and other.stat().st_mtime_ns == written
    assert everything(folder, corpus) == wanted


def test_flipped_bits_anywhere_never_give_other_blocks(small):
    """Each file of a cache, at positions drawn from a seed: the same blocks, or an error that says what to do. The
    next start gives the same blocks, but where it is not known any more what the cache was made from."""
    corpus, reader, folder = small
    wanted, files = everything(folder, corpus), sorted(path for path in folder.rglob("*") if path.is_file())
    contents, rng, outcomes = {path: path.read_bytes() for path in files}, random.Random(0), []
    assert len(wanted) > 20 and len([path for path in files if path.suffix in (".arrow", ".json")]) == 6
    for path, content in contents.items():
        for number in range(200 if content else 0):
            position = rng.randrange(len(content))
            with open(path, "r+b") as stream:
                stream.seek(position)
                stream.write(bytes([content[position] ^ 1 << rng.randrange(8)]))
            try:
                assert everything(folder, corpus) == wanted
                outcomes.append("same")
            except InputError as error:
                assert (
                    "pack it again" in str(error) or "fingerprint.json" in str(error) or "former version" in str(error)
                )
                outcomes.append("refused")
                if number % 40 == 0 and path.name != token_cache.FINGERPRINT:
                    token_cache.ensure(folder, reader, num_proc=1)
                    assert everything(folder, corpus) == wanted
            for other in [path, *(other for other in files if not other.exists())]:
                other.write_bytes(contents[other])
    assert outcomes.count("refused") > 500 and outcomes.count("same") > 300


def test_a_shard_or_block_of_another_place_is_refused(corpus, tokenizer, tmp_path):
    """Of the same size, so that sizes alone do not tell."""
    write_parquet(tmp_path / "a1.parquet", ["", *make_documents(40, seed=ord("a")), None])  # a copy of a0
    corpus = corpus_of("c", corpus.sources, validation_share=0.2)
    reader, folder = reader_of(corpus, tokenizer), tmp_path / "cache"
    token_cache.build(folder, reader, num_proc=1)
    shards = [folder / "a" / f"train-0000{number}.arrow" for number in (0, 1)]
    assert shards[0].stat().st_size == shards[1].stat().st_size and shards[0].read_bytes() != shards[1].read_bytes()
    shutil.copy(shards[0], shards[1])
    with pytest.raises(InputError, match=r"a/train-00001.arrow is damaged: block \d+ is not what was written"):
        everything(folder, corpus)
    # the first file again, by another name: another corpus, whose blocks have the same tokens
    shutil.copy(tmp_path / "a0.parquet", tmp_path / "c0.parquet")
    files = [str(tmp_path / f"{name}.parquet") for name in ("a1", "a2", "c0")]
    elsewhere = corpus_of("c", [Source("a", files=files, weight=1.0), corpus.sources[1]], validation_share=0.2)
    token_cache.build(tmp_path / "other", reader_of(elsewhere, tokenizer), num_proc=1)
    token_cache.ensure(folder, reader, num_proc=1)
    assert len(everything(folder, corpus)) > 100
    for suffix in (".arrow", ".json"):
        shutil.copy(tmp_path / "other" / "a" / f"train-00000{suffix}", shards[0].with_suffix(suffix))
    with pytest.raises(InputError, match=r"a/train-00000.arrow is damaged: block \d+ is not what was written"):
        everything(folder, corpus)


@pytest.mark.parametrize("fault", ["cut", "gone"])
def test_a_shard_that_is_cut_or_removed_in_mid_run_is_refused(small, fault):
    """To read the map of a file that was cut is a bus error, which no process survives."""
    corpus, reader, folder = small
    wanted, shard = everything(folder, corpus), folder / "a" / "train-00000.arrow"
    blocks = TokenCache(folder, corpus, seed=5).blocks(batches_of(0, 1, 1, 0))
    taken = [next(blocks) for _ in range(3)]
    os.truncate(shard, 0) if fault == "cut" else shard.unlink()
    with pytest.raises(InputError, match=r"a/train-00000.arrow is damaged: (it has no longer|No such file)"):
        next(blocks)
    assert facts(taken) == wanted[:3]  # nothing of a block that was given is still in the map
    token_cache.ensure(folder, reader, num_proc=1)
    assert everything(folder, corpus) == wanted


def test_damage_that_a_data_worker_finds_is_one_line(small, capsys):
    corpus, _, folder = small
    shard = folder / "a" / "train-00000.arrow"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 255
    shard.write_bytes(content)
    blocks = TrainBlocks(TokenCache(folder, corpus, seed=5), batch_size=4)
    loader = torch.utils.data.DataLoader(blocks, batch_size=4, num_workers=1, collate_fn=facts)
    with pytest.raises(SystemExit) as ended:
        exit_on_error(lambda: list(itertools.islice(loader, 10)))
    lines = capsys.readouterr().err.strip().splitlines()
    assert ended.value.code == 2 and len(lines) == 1 and lines[0].startswith(f"error: token_cache={folder}: a/train-")


def test_a_shard_that_the_disk_changes_while_it_is_written_is_said(corpus, tokenizer, tmp_path, monkeypatch):
    sync = durable.sync

    def flipping(path):
        if str(path).endswith(".tmp") and ".arrow." in str(path):
            content = bytearray(path.read_bytes())
            content[len(content) // 2] ^= 1
            path.write_bytes(content)
        sync(path)

    monkeypatch.setattr(durable, "sync", flipping)
    with pytest.raises(RunError, match="not what was written a moment ago: the disk is faulty"):
        token_cache.build(tmp_path / "cache", reader_of(corpus, tokenizer), num_proc=1)
    assert not list((tmp_path / "cache").rglob("*.arrow"))


@pytest.mark.parametrize("fault", ["bit", "missing"])
def test_a_damaged_manifest_is_made_again_from_the_shards(small, fault):
    corpus, reader, folder = small
    wanted, manifest, shard = everything(folder, corpus), folder / "manifest.json", folder / "a" / "train-00000.arrow"
    content, written = manifest.read_bytes(), shard.stat().st_mtime_ns
    count = durable.read_json(manifest)["shards"][0]["counts"]["blocks"]
    less = content.replace(f'"blocks": {count}'.encode(), f'"blocks": {count - 1}'.encode(), 1)
    manifest.unlink() if fault == "missing" else manifest.write_bytes(less)
    assert less != content and len(less) == len(content)
    with pytest.raises(InputError, match=r"manifest.json is missing, or is not what was written; pack it again"):
        everything(folder, corpus)
    token_cache.ensure(folder, reader, num_proc=1)
    assert manifest.read_bytes() == content and shard.stat().st_mtime_ns == written
    assert everything(folder, corpus) == wanted


def test_a_cache_without_checksums_is_refused(small):
    corpus, reader, folder = small
    durable.write_json(folder / token_cache.FINGERPRINT, reader.fingerprint())
    for start in (lambda: token_cache.ensure(folder, reader, num_proc=1), lambda: everything(folder, corpus)):
        with pytest.raises(InputError, match=r"packed by a former version, without checksums; remove it"):
            start()


# Several packers


def forked(function, *args):
    process = multiprocessing.get_context("fork").Process(target=function, args=args)
    process.start()
    return process


def test_of_two_starts_with_different_corpora_one_is_refused(tmp_path, monkeypatch):
    """The second begins when the first has seen an empty folder, and has not written yet."""
    create = durable.create_sealed

    def create_late(path, values):
        other = forked(token_cache.claim, path.parent, {"tokenizer": "another"}) if values["tokenizer"] == "one" else 0
        if other:
            other.join(timeout=60)
            assert other.exitcode == 0
        create(path, values)

    monkeypatch.setattr(durable, "create_sealed", create_late)
    with pytest.raises(InputError, match=r"made from something else: tokenizer was 'another', is 'one'"):
        token_cache.claim(tmp_path / "cache", {"tokenizer": "one"})
    assert durable.read_sealed(tmp_path / "cache" / token_cache.FINGERPRINT)["tokenizer"] == "another"
    token_cache.claim(tmp_path / "cache", {"tokenizer": "another"})


def test_nothing_is_sent_to_a_packing_process(corpus, tokenizer, tmp_path):
    """What is sent by descriptor is served by a thread, which prints a traceback where a packing process is killed."""
    before = resource_sharer._resource_sharer._listener
    assert token_cache.build(tmp_path / "cache", reader_of(corpus, tokenizer), num_proc=2)
    assert resource_sharer._resource_sharer._listener is before


@pytest.mark.parametrize(("number", "by"), [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM")])
def test_packing_that_is_stopped_is_one_line_and_continues(corpus, tokenizer, tmp_path, monkeypatch, number, by):
    folder, reader = tmp_path / "cache", reader_of(corpus, tokenizer)
    write_shard = token_cache._write_shard

    def slow(folder, made_from, shard, *args):
        write_shard(folder, made_from, shard, *args)
        time.sleep(60 * (shard.source == 1))  # b is never finished

    monkeypatch.setattr(token_cache, "_write_shard", slow)
    run = Forked(lambda: (os.setpgid(0, 0), token_cache.build(folder, reader, num_proc=2)), tmp_path / "log")
    while len(list(folder.glob("b/*.arrow"))) < 2:
        time.sleep(0.01)
    os.killpg(run.pid, number)  # as a terminal does
    assert run.end(20) == {"Ctrl-C": 130, "SIGTERM": 75}[by]
    last = run.log.strip().splitlines()[-1]
    assert last.startswith(f"ended by {by}; what was saved is whole. Continue with: ") and "Traceback" not in run.log
    monkeypatch.setattr(token_cache, "_write_shard", write_shard)
    assert token_cache.build(folder, reader, num_proc=2)


def hold(folder, name, taken):
    lock.take(folder, name)
    taken.set()
    time.sleep(60)


def test_a_second_packer_of_a_share_is_told_who_packs_it(corpus, tokenizer, tmp_path):
    reader, taken = reader_of(corpus, tokenizer), multiprocessing.get_context("fork").Event()
    tmp_path = tmp_path / "cache"
    tmp_path.mkdir()
    other = forked(hold, tmp_path, ".lock-1-of-2", taken)
    assert taken.wait(60)
    with pytest.raises(InputError, match=rf"is in use by process {other.pid} on .*; wait for it"):
        token_cache.build(tmp_path, reader, num_proc=1, machine=0, machines=2)
    assert not token_cache.build(tmp_path, reader, num_proc=1, machine=1, machines=2)
    other.kill()
    other.join()
    assert token_cache.build(tmp_path, reader, num_proc=1, machine=0, machines=2)
    next_packer = forked(lock.take, tmp_path, ".lock-1-of-2")  # the lock was given back when the share was packed
    next_packer.join(timeout=60)
    assert next_packer.exitcode == 0


def pack_for_long(*_):
    time.sleep(60)


def test_packing_processes_end_with_the_packer(corpus, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(token_cache, "pack_file", pack_for_long)
    packer = forked(lambda: token_cache.build(tmp_path / "cache", reader_of(corpus, tokenizer), num_proc=2))
    children = []
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


def test_a_cache_whose_blocks_name_no_document_is_refused(corpus, tokenizer, tmp_path, monkeypatch):
    """As it was packed before validation had errors over documents."""
    with monkeypatch.context() as before:
        before.setattr(token_cache, "_FORMAT", {"cache_format": "a checksum for each block"})
        token_cache.build(tmp_path / "cache", reader_of(corpus, tokenizer), num_proc=1)
    with pytest.raises(InputError, match="was made from something else: cache_format"):
        token_cache.build(tmp_path / "cache", reader_of(corpus, tokenizer), num_proc=1)
