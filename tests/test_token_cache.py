"""The token cache: the same blocks as from text, built by several machines, repaired, and refused for other data."""

import itertools

import pytest
from conftest import make_documents, write_parquet

from roberta_recipe import durable
from roberta_recipe.data import token_cache
from roberta_recipe.data.corpus import Corpus, Source
from roberta_recipe.data.order import batches_of
from roberta_recipe.data.stream import TextReader
from roberta_recipe.data.token_cache import TokenCache
from roberta_recipe.errors import InputError


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
    return Corpus("c", sources, validation_share=0.2)


def reader_of(corpus, tokenizer, **changes):
    settings = dict(input_format="full_sentences", max_seq_length=64, seed=5, shuffle_window=16)
    return TextReader(corpus, tokenizer, **{**settings, **changes})


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
    assert facts(cache.validation(7)) == held_out[:7]
    assert cache.fingerprint() == reader.fingerprint()
    assert cache.count_table()["a"]["held_out_documents"] > 0 == cache.count_table()["b"]["held_out_documents"]
    assert sum(counts["blocks"] for counts in cache.count_table().values()) > 100


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
    assert token_cache.build(folder, reader, num_proc=1)
    assert shard.read_bytes() == good and (folder / "a" / "train-00000.arrow").stat().st_mtime_ns == others


def test_a_cache_of_something_else_is_refused(corpus, tokenizer, tmp_path):
    token_cache.build(tmp_path / "cache", reader_of(corpus, tokenizer), num_proc=1)
    changes = {"max_seq_length": (64, 32), "input_format": ("full_sentences", "contiguous")}
    for name, (was, now) in changes.items():
        with pytest.raises(InputError, match=rf"{name} was {was!r}, is {now!r}"):
            token_cache.build(tmp_path / "cache", reader_of(corpus, tokenizer, **{name: now}), num_proc=1)
    write_parquet(tmp_path / "a1.parquet", make_documents(5, seed=99))
    corpus._files.clear()
    with pytest.raises(InputError, match=r"source a was '3 files, \w+', is '3 files, \w+'"):
        token_cache.build(tmp_path / "cache", reader_of(corpus, tokenizer), num_proc=1)
    with pytest.raises(InputError, match="holds other files"):
        token_cache.build(tmp_path, reader_of(corpus, tokenizer), num_proc=1)
