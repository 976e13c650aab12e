"""From documents to blocks: nothing is lost, the order is fixed, and a run resumes anywhere without reading from the
start."""

import contextlib
import copy
import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from conftest import corpus_of, make_documents, write_parquet
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import normalizers

from roberta_recipe.data import documents as reading
from roberta_recipe.data.corpus import Source
from roberta_recipe.data.masking import MlmCollator
from roberta_recipe.data.order import batches_of, source_of
from roberta_recipe.data.stream import MicroBatches, MicroBatchLoader, TextReader, TrainBlocks, packed, unpacked
from roberta_recipe.data.tokenization import split_sentences
from roberta_recipe.errors import InputError


def reader_of(corpus, tokenizer, **changes):
    settings = dict(input_format="full_sentences", max_seq_length=64, seed=0)
    return TextReader(corpus, tokenizer, **{**settings, **changes})


def blocks_of(corpus, tokenizer, **changes):
    return reader_of(corpus, tokenizer, **changes).blocks(batches_of(0, 4, 1, 0))


def first_pass(corpus, tokenizer, **changes):
    """The blocks of a source's first pass."""
    return list(itertools.takewhile(lambda block: block["epoch"] == 0, blocks_of(corpus, tokenizer, **changes)))


def facts(blocks):
    return [(b["epoch"], b["block_id"], b["input_ids"].tolist()) for b in blocks]


def first(blocks, count=200):
    return facts(itertools.islice(blocks, count))


@pytest.fixture
def one_source(tmp_path):
    paths = [write_parquet(tmp_path / f"{n}.parquet", make_documents(80, seed=n)) for n in range(4)]
    return corpus_of("c", [Source("s", files=paths)])


@pytest.fixture
def three_sources(tmp_path):
    """Two files each, documents of very different length, shares unlike the sizes, some rows empty."""
    sources = []
    for name, (count, length, weight) in {
        "a": (12, (80, 90), 1.0),
        "b": (40, (3, 9), 5.0),
        "c": (60, (9, 20), 2.5),
    }.items():
        for number in range(2):
            texts = make_documents(count, seed=ord(name) + number, sentences=length)
            write_parquet(tmp_path / f"{name}{number}.parquet", ["", None, *texts[:5], " ", *texts[5:], ""])
        sources.append(Source(name, files=str(tmp_path / f"{name}*.parquet"), weight=weight))
    return corpus_of("c", sources, validation_share=0.1)


@pytest.mark.parametrize("input_format", ["full_sentences", "contiguous"])
def test_a_pass_loses_nothing(one_source, tokenizer, input_format):
    blocks = first_pass(one_source, tokenizer, input_format=input_format)
    special = torch.tensor(tokenizer.all_special_ids)
    tokens = sum(int((~torch.isin(torch.from_numpy(b["input_ids"].astype(int)), special)).sum()) for b in blocks)
    texts = list(reading.documents(one_source, one_source.sources[0], "train", seed=0))
    units = [s for t in texts for s in ([t] if input_format == "contiguous" else split_sentences(t))]
    assert tokens == sum(len(tokenizer.encode(unit, add_special_tokens=False)) for unit in units)
    assert all(len(b["input_ids"]) <= 64 and b["input_ids"].dtype == "uint16" for b in blocks)
    assert len({b["block_id"] for b in blocks}) == len(blocks) > 50
    if input_format == "contiguous":  # only the last block of each file is shorter
        assert sum(len(b["input_ids"]) < 64 for b in blocks) <= 4


@pytest.mark.parametrize("input_format", ["full_sentences", "segment_pair sop"])
def test_a_sentence_of_which_a_normalizer_leaves_nothing_is_none(wordpiece, tmp_path, input_format):
    """As BERT's takes away a soft hyphen, a byte order mark and a space of no width."""
    wordpiece = copy.deepcopy(wordpiece)
    wordpiece.backend_tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False)
    texts = make_documents(20, seed=3)
    odd = ["\u00ad\n" + text.replace("\n", "\n\ufeff\n\u200b\n") for text in texts]
    found = []
    for name, of_name in (("plain", texts), ("odd", ["\u200b", *odd, "\u00ad\n\ufeff"])):
        source = Source("s", files=write_parquet(tmp_path / f"{name}.parquet", of_name))
        corpus = corpus_of("c", [source], validation_share=1e-9)
        blocks = first_pass(corpus, wordpiece, input_format=input_format, shuffle_window=0)
        found.append([block["input_ids"].tolist() for block in blocks])
    assert found[0] == found[1] and len(found[0]) > 5


def test_the_order_is_a_function_of_corpus_and_seed(one_source, tokenizer):
    once = first(blocks_of(one_source, tokenizer, shuffle_window=16))
    assert once == first(blocks_of(one_source, tokenizer, shuffle_window=16))
    other = first(blocks_of(one_source, tokenizer, shuffle_window=16, seed=1))
    assert [b[1] for b in once] != [b[1] for b in other]


@pytest.mark.parametrize("window", [0, 7, 16, 10**6])
def test_every_pass_has_the_same_blocks_in_another_order(one_source, tokenizer, window):
    size = len(first_pass(one_source, tokenizer))
    blocks = first(blocks_of(one_source, tokenizer, shuffle_window=window), 3 * size)
    passes = [blocks[n * size : (n + 1) * size] for n in range(3)]
    for number, blocks_of_pass in enumerate(passes):
        assert {epoch for epoch, _, _ in blocks_of_pass} == {number}
        assert sorted(b[1:] for b in blocks_of_pass) == sorted(b[1:] for b in passes[0])
    assert passes[0] != passes[1] and [b[1] for b in passes[0]] != [b[1] for b in passes[1]]
    in_order = [b[1] for b in facts(first_pass(one_source, tokenizer))]
    shuffled = [b[1] for b in passes[0]]
    assert (shuffled == in_order) == (window == 0)
    for start in range(0, size, max(window, 1)):  # shuffling moves no block to another window
        assert sorted(shuffled[start : start + window]) == sorted(in_order[start : start + window])


def test_a_window_reads_one_block_ahead_for_each_it_gives(one_source, tokenizer):
    reader = reader_of(one_source, tokenizer, shuffle_window=20)
    for count, _ in enumerate(itertools.islice(reader.blocks(batches_of(0, 1, 1, 0)), 60), 1):
        assert reader.count_table()["s"]["blocks"] <= count + 20


def test_shares_of_the_mixture_count_tokens_not_documents(tmp_path, tokenizer):
    """Two sources of equal share; documents of the first are 40 times as long as documents of the second."""
    files = {
        "long": write_parquet(tmp_path / "long.parquet", make_documents(20, seed=5, sentences=(200, 200))),
        "short": write_parquet(tmp_path / "short.parquet", make_documents(800, seed=6, sentences=(5, 5))),
    }
    corpus = corpus_of("c", [Source(name, files=path, weight=1.0) for name, path in files.items()])
    tokens = Counter()
    for block in itertools.islice(blocks_of(corpus, tokenizer), 400):
        tokens[source_of(block["block_id"])] += len(block["input_ids"])
    assert abs(tokens[0] / sum(tokens.values()) - 0.5) < 0.02


def test_a_reader_resumes_at_any_batch(three_sources, tokenizer):
    """With the states of any batch, a reader resumes at any later batch: same blocks, and same counts at the end."""
    settings, count = dict(shuffle_window=10), 400
    reader = reader_of(three_sources, tokenizer, **settings)
    whole = list(itertools.islice(reader.blocks(batches_of(0, 4, 1, 0)), count))
    counted = reader.count_table()
    states = [[state.to_dict() for state in block["states"]] for block in whole if "states" in block]
    assert len(states) == count // 4 and max(block["epoch"] for block in whole) > 0
    for batch in (0, 1, 7, 30, 55, 80, 98):
        for later in (batch + 1, min(batch + 9, 99)):
            again = reader_of(three_sources, tokenizer, **settings)
            rest = list(
                itertools.islice(
                    again.blocks(batches_of(4 * later, 4, 1, 0), 4 * later, states[batch]), count - 4 * later
                )
            )
            assert facts(rest) == facts(whole[4 * later :]), (batch, later)
            assert again.count_table() == counted or later > 80  # so late, some source is not read again
    assert max(len(str(state)) for state in states) < 3 * 2000  # a few KB at any position


def test_batches_of_a_window_share_its_states(one_source, tokenizer):
    """With NSP a state has tokens of many documents. Copying them took longer than a step of a small model."""
    reader = reader_of(one_source, tokenizer, input_format="segment_pair nsp", shuffle_window=10)
    blocks = itertools.islice(reader.blocks(batches_of(0, 1, 1, 0)), 60)
    states = [block["states"][0] for block in blocks]
    assert len({*map(id, states)}) == 6 and len(states[-1].pack.extra["donors"]) > 1


def test_what_is_read_to_resume_is_a_window_not_the_stream(one_source, tokenizer, monkeypatch):
    whole = list(itertools.islice(blocks_of(one_source, tokenizer, shuffle_window=10), 200))
    read = []
    monkeypatch.setattr(
        "roberta_recipe.data.stream.file_rows",
        lambda *a, **k: (read.append(row) or row for row in reading.file_rows(*a, **k)),
    )
    reader = reader_of(one_source, tokenizer, shuffle_window=10)
    monkeypatch.setattr("roberta_recipe.data.stream._TEXT_PER_CALL", 1)
    states = [state.to_dict() for state in whole[179]["states"]]
    block = next(reader.blocks(batches_of(180, 4, 1, 0), 180, states))
    assert facts([block]) == facts(whole[180:181]) and 0 < len(read) < 30


@pytest.mark.parametrize(("processes", "workers"), [(1, 0), (1, 2), (2, 0), (2, 2), (3, 1)])
def test_all_layouts_read_one_sequence(one_source, tokenizer, processes, workers):
    """Two passes over all blocks by several processes with several data workers: none twice, none missing."""
    size = len(first_pass(one_source, tokenizer))
    whole = first(blocks_of(one_source, tokenizer, shuffle_window=16), 2 * size)
    batches, micro = [], 4
    for process in range(processes):
        blocks = TrainBlocks(
            reader_of(one_source, tokenizer, shuffle_window=16), batch_size=micro, processes=processes, process=process
        )
        loader = torch.utils.data.DataLoader(blocks, batch_size=micro, num_workers=workers, collate_fn=facts)
        batches.append(list(itertools.islice(loader, -(-2 * size // (micro * processes)))))
    in_turn = [block for together in zip(*batches, strict=True) for batch in together for block in batch]
    assert in_turn[: 2 * size] == whole
    assert len({block[:2] for block in in_turn[: 2 * size]}) == 2 * size


def test_a_data_worker_counts_what_it_reads(one_source, tokenizer):
    reader = reader_of(one_source, tokenizer)
    loader = torch.utils.data.DataLoader(
        TrainBlocks(reader, batch_size=4), batch_size=4, num_workers=2, collate_fn=facts
    )
    assert len(list(itertools.islice(loader, 10))) == 10
    # the worker that counts has made batches 0, 2, ..., 8, for which it read 36 blocks; prefetching may read more
    assert reader.count_table()["s"]["blocks"] >= 36


def test_empty_documents_are_skipped_and_counted(three_sources, tokenizer):
    reader = reader_of(three_sources, tokenizer)
    size = sum(1 for block in itertools.islice(reader.blocks(batches_of(0, 1, 1, 0)), 400) if block["epoch"] == 0)
    for source in three_sources.sources:
        counts, passes = reader.count_table()[source.name], reader.count_table()[source.name]["passes"]
        documents = len(list(reading.documents(three_sources, source, "train", seed=0)))
        held_out = len(list(reading.documents(three_sources, source, "validation", seed=0)))
        assert passes * 8 <= counts["empty_documents"] <= (passes + 1) * 8
        assert passes * held_out <= counts["held_out_documents"] <= (passes + 1) * held_out
        assert passes * documents <= counts["documents"] <= (passes + 1) * documents
    assert size > 50 and reader.count_table()["b"]["passes"] > 0


def test_an_empty_source_is_no_endless_search(tmp_path, tokenizer):
    write_parquet(tmp_path / "blank.parquet", ["", " ", None])
    corpus = corpus_of("c", [Source("s", files=str(tmp_path / "blank.parquet"))])
    with pytest.raises(InputError, match=r"source 's' is empty"):
        next(blocks_of(corpus, tokenizer))


# The first blocks only


def limited(corpus, tokenizer, limit, **changes):
    return iter(TrainBlocks(reader_of(corpus, tokenizer), batch_size=1, limit=limit, **changes))


def test_the_first_blocks_only_again_and_again(one_source, tokenizer):
    blocks = first(limited(one_source, tokenizer, 10), 30)
    kept = {name for _, name, _ in blocks}
    assert kept == {name for _, name, _ in first(blocks_of(one_source, tokenizer), 10)} and len(kept) == 10
    for epoch in range(3):
        repeated = blocks[10 * epoch : 10 * epoch + 10]
        assert {b[1] for b in repeated} == kept and {b[0] for b in repeated} == {epoch}
    assert [b[1] for b in blocks[:10]] != [b[1] for b in blocks[10:20]]
    assert first(limited(one_source, tokenizer, 10, start=13), 17) == blocks[13:]


def test_a_limit_above_the_corpus_is_the_corpus(one_source, tokenizer):
    size = len(first_pass(one_source, tokenizer))
    blocks = first(limited(one_source, tokenizer, 10**5), 2 * size)
    assert [epoch for epoch, _, _ in blocks] == [0] * size + [1] * size
    assert len({name for _, name, _ in blocks}) == size


@given(lengths=st.lists(st.integers(1, 64), min_size=1, max_size=40), size=st.integers(1, 8))
def test_micro_batches_hold_each_block_once_and_like_lengths_pad_less(lengths, size):
    blocks = [{"input_ids": np.zeros(length), "block_id": number} for number, length in enumerate(lengths)]
    blocks[-1]["states"] = ["where the text stands"]
    in_order = [lengths[start : start + size] for start in range(0, len(lengths), size)]
    _, made = MicroBatches(lambda blocks: {"blocks": blocks}, size)(blocks)
    found = [[block["block_id"] for block in micro_batch["blocks"]] for micro_batch in made]
    assert sorted(itertools.chain.from_iterable(found)) == list(range(len(lengths)))
    assert [len(micro_batch) for micro_batch in found] == [len(part) for part in in_order]
    assert ["states" in micro_batch for micro_batch in made] == [False] * (len(made) - 1) + [True]
    by_micro_batch = [[lengths[number] for number in numbers] for numbers in found]
    assert all(min(one) >= max(two) for one, two in itertools.pairwise(by_micro_batch))


def assert_same(batches, others):
    assert [list(batch) for batch in batches] == [list(other) for other in others]
    for batch, other in zip(batches, others, strict=True):
        for name, value in batch.items():
            if isinstance(value, torch.Tensor):
                assert value.dtype == torch.int64 and torch.equal(value, other[name]), name
            else:
                assert value == other[name], name


def test_a_step_travels_as_one_narrow_tensor_per_column():
    """Widths differ, a column is missing in a micro-batch, another is 1-D and of any length."""
    sent = [
        {"ids": [[7, 65535], [1, 2]], "labels": [[-100, 65535], [4, 5]], "pair": [0, 1], "predicted": [], "tokens": 4},
        {"ids": [[3], [0]], "labels": [[-100], [3]], "mask": [[1], [0]], "pair": [1, 1], "predicted": [9, 70000, 1]},
    ]
    sent = [{k: torch.tensor(v, dtype=torch.int64) if k != "tokens" else v for k, v in one.items()} for one in sent]
    columns, shapes = packed(sent)
    assert {name: column.dtype for name, column in columns.items()} == {
        **{"ids": torch.uint16, "labels": torch.int32, "pair": torch.uint8, "predicted": torch.int32},
        "mask": torch.uint8,
    }
    assert all(column.dim() == 1 for column in columns.values())
    assert_same(unpacked(columns, shapes, "cpu"), sent)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_loader_gives_what_the_collator_makes(one_source, tokenizer, workers):
    collator = MlmCollator(tokenizer, mlm_probability=0.15, pad_to_multiple_of=8, seed=3)
    loader = MicroBatchLoader(
        TrainBlocks(reader_of(one_source, tokenizer), batch_size=8),
        **{"batch_size": 8, "collate_fn": MicroBatches(collator, 2), "num_workers": workers},
        **{"device": "cpu", "waiting": contextlib.nullcontext},
    )
    blocks, direct = blocks_of(one_source, tokenizer), []
    for _ in range(5):
        step = sorted(itertools.islice(blocks, 8), key=lambda block: -len(block["input_ids"]))
        direct += [collator(step[start : start + 2]) for start in range(0, 8, 2)]
    found = list(itertools.islice(loader, len(direct)))
    assert ["states" in batch for batch in found] == [False, False, False, True] * 5
    assert_same([{name: batch[name] for name in batch if name != "states"} for batch in found], direct)
    assert 0 < sum("attention_mask" in batch for batch in found) < len(found)
