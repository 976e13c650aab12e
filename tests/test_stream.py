"""Blocks of random corpora: each chunk packed alone, in the order by definition, from text and token cache, for any
number of processes and data workers, from any position on, with any chunk index."""

import contextlib
import copy
import functools
import itertools
import random
from collections import Counter
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from conftest import corpus_of, make_documents, write_jsonl, write_parquet, write_text
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import normalizers

from roberta_recipe.data import chunks, token_cache
from roberta_recipe.data.chunks import PACKERS, File, TextReader, pair_versions
from roberta_recipe.data.corpus import Corpus, Source
from roberta_recipe.data.documents import file_rows, read_file, split_sentences
from roberta_recipe.data.masking import MlmCollator
from roberta_recipe.data.order import (
    FILES,
    WINDOWS,
    batches_of,
    block_id,
    blocks_by_source,
    interleave,
    random_order,
    unskipped,
)
from roberta_recipe.data.packing import Block
from roberta_recipe.data.stream import (
    TrainBlocks,
    blocks_at,
    blocks_of_pass,
    consumed,
    count_table,
    validation_blocks,
)
from roberta_recipe.data.token_cache import TokenCache
from roberta_recipe.data.tokenization import boundary_ids
from roberta_recipe.errors import InputError
from roberta_recipe.record import INDEX_NAME
from roberta_recipe.training.data_loading import MicroBatchLoader, micro_batches, unflatten_batches

POSITIONS = 200
FORMATS = ["full_sentences", "doc_sentences", "contiguous", "segment_pair nsp", "sentence_pair sop"]


def reader_of(corpus, tokenizer, **changes):
    return TextReader(corpus, tokenizer, **dict(packer="full_sentences", max_seq_length=64, seed=0) | changes)


def blocks_of(provider, start=0, count=POSITIONS):
    return [*map(facts, blocks_at(provider, [(range(start, start + count),)]))]


def facts(block):
    """All fields of a block, comparable with `==`."""
    columns = {name: (np.asarray(value).dtype.name, np.asarray(value).tolist()) for name, value in block.items()}
    return block.id, block.epoch, block.document, columns


def random_corpus(rng, folder):
    """1 to 3 sources of any format, of 1 to 3 files with some empty rows, with or without validation files; documents
    of 1 to 40 sentences."""
    sources = []
    for name in "abc"[: rng.randint(1, 3)]:
        suffix, write = rng.choice([("parquet", write_parquet), ("jsonl", write_jsonl), ("txt", write_text)])
        own = rng.random() < 0.4
        for number in range(rng.randint(1, 3) + own):
            texts = make_documents(rng.randint(3, 9), seed=rng.random(), sentences=(1, rng.choice([3, 40])))
            texts[rng.randrange(len(texts)) : 0] = rng.choice([[], ["", " "]])
            write(folder / f"{name}{number if number or not own else '-own'}.{suffix}", texts)
        held_out = str(folder / f"{name}-own.*") if own else None
        weight = rng.choice([1.0, 2.0, 5.0])
        sources.append(Source(name, files=str(folder / f"{name}[0-9]*"), weight=weight, validation_files=held_out))
    return corpus_of("c", sources, validation_share=0.2)


class Case(NamedTuple):
    """A random corpus, its reader settings, its first blocks by definition, and a generator."""

    corpus: Corpus
    settings: dict[str, Any]
    tokenizer: Any
    folder: Any
    whole: list[Any]
    rng: random.Random

    def reader(self, **changes):
        return reader_of(self.corpus, self.tokenizer, **self.settings | changes)


@pytest.fixture(scope="module", params=enumerate(FORMATS), ids=lambda param: param[1])
def made(request, tokenizer, tmp_path_factory):
    """(bytes per chunk, case) for each format."""
    seed, name = request.param
    rng, folder = random.Random(seed), tmp_path_factory.mktemp("corpus")
    size, length = rng.choice([300, 1000, 3000]), rng.choice([24, 64])
    settings = dict(packer=name, max_seq_length=length, seed=seed, shuffle_window=int(seed % 4 > 0))
    case = Case(random_corpus(rng, folder), settings, tokenizer, folder, [], rng)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "CHUNK_BYTES", size)
        streams = [of_source(case, number) for number in range(len(case.corpus.sources))]
        case.whole.extend(itertools.islice(interleave(streams, case.corpus.shares), POSITIONS))
    assert max(epoch for _, epoch, *_ in case.whole) > 0
    return size, case


@pytest.fixture
def case(made, monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK_BYTES", made[0])
    return made[1]


@functools.cache
def encoded(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False)


def chunks_of(case, file):
    """Reference: (document ids by sentence, blocks) of each chunk of a file."""
    source, name, found = case.corpus.sources[file.source], case.settings["packer"], []
    first_block, begin, own = 0, 0, []
    for row in file_rows(case.corpus, source, file.split, case.corpus.files(source, file.split)[1][file.number]):
        own += [row] * (row.text is not None)
        if sum(len(row.text.encode()) for row in own) < chunks.CHUNK_BYTES and row.text is not None:
            continue
        pieces = [
            [text] if name == "contiguous" else [" " * ("_pair" in name) + one for one in split_sentences(text)]
            for text in (row.text for row in own)
        ]
        documents = [[encoded(case.tokenizer, piece) for piece in of] for of in pieces]
        key = (file.source, file.number, begin, file.version)
        blocks = PACKERS[name](documents, case.settings["max_seq_length"], **boundary_ids(case.tokenizer), key=key)
        blocks = [
            (block_id(file.source, file.number, number), own[block["document"]].number, block)
            for number, block in enumerate(blocks, first_block)
        ]
        found.append((documents, blocks))
        first_block, begin, own = first_block + len(blocks), row.number + 1, []
    return found


def files_of(case, source, split="train", epoch=0):
    count = len(case.corpus.files(case.corpus.sources[source], split)[1])
    version = epoch % pair_versions(case.settings["packer"]) if split == "train" else 0
    order = random_order(case.settings["seed"], FILES, (source, epoch), count).tolist()
    return [File(source, split, number, version) for number in order]


def of_source(case, source, split="train", epochs=None):
    """The `facts` of a source's blocks, pass after pass."""
    for epoch in epochs or itertools.count():
        in_order = itertools.chain.from_iterable(chunks_of(case, file) for file in files_of(case, source, split, epoch))
        for number, (_, blocks) in enumerate(in_order):
            order = random_order(case.settings["seed"], WINDOWS, (source, epoch, number), len(blocks))
            for index in order if case.settings["shuffle_window"] and split == "train" else range(len(blocks)):
                name, row, columns = blocks[index]
                columns = {**columns, "input_ids": np.array(columns["input_ids"], dtype=np.uint16)}
                yield facts(Block({k: v for k, v in columns.items() if k != "document"}, name, epoch, row))


def test_blocks_are_those_of_each_chunk_alone_in_the_order_by_definition(case):
    assert blocks_of(case.reader()) == case.whole
    streams = [of_source(case, number, "validation", [0]) for number in range(len(case.corpus.sources))]
    held_out = [*interleave(streams, case.corpus.shares)]
    assert [*map(facts, validation_blocks(case.reader(), None))] == held_out


def test_text_and_cache_give_the_same_blocks_and_counts(case):
    reader, folder = case.reader(), case.folder / "cache"
    assert token_cache.build(folder, reader, num_proc=1)
    cache = TokenCache(folder, case.corpus, seed=reader.seed, shuffle_window=reader.shuffle_window)
    assert blocks_of(cache) == blocks_of(reader) == case.whole and cache.fingerprint() == reader.fingerprint()
    for limit in (None, 1, 7):
        assert [*map(facts, validation_blocks(cache, limit))] == [*map(facts, validation_blocks(reader, limit))]
    for position in (0, 1, *case.rng.sample(range(POSITIONS), 5), POSITIONS):
        from_text, from_cache = consumed(reader, position), consumed(cache, position)
        assert from_text[0] == from_cache[0]
        for name, counts in recounted(case, position).items():
            assert counts.items() <= from_cache[0][name].items()
        for name, passes in from_text[1].items():  # whole numbers where the length of a pass is not known
            assert passes == from_cache[1][name] or (
                isinstance(passes, int) and passes + 1 >= from_cache[1][name] > passes
            )
    for source in case.corpus.sources:
        counts, (format, paths) = count_table(cache, "train")[source.name], case.corpus.files(source, "train")
        texts = [text for path in paths for text in read_file(source, format, path)]
        assert counts["empty_documents"] == sum(not (text or "").strip() for text in texts)
        assert counts["documents"] + counts["empty_documents"] + counts["held_out_documents"] == len(texts)
    several = TokenCache(folder, case.corpus, seed=reader.seed, shuffle_window=3)
    together = blocks_of(several)
    for start in case.rng.sample(range(POSITIONS - 20), 3):
        assert blocks_of(cache, start, 20) == case.whole[start : start + 20]
        assert blocks_of(several, start, 20) == together[start : start + 20]


def recounted(case, position):
    """Counts of the chunks with the first `position` blocks, by source."""
    found = {}
    for number, taken in enumerate(blocks_by_source(case.corpus.shares, position)):
        passes = (chunks_of(case, file) for epoch in itertools.count() for file in files_of(case, number, epoch=epoch))
        counts = Counter()
        for chunk in itertools.chain.from_iterable(passes):
            if counts["blocks"] >= taken:
                break
            counts.update(counts_of(case, *chunk))
        found[case.corpus.sources[number].name] = counts
    return found


def counts_of(case, documents, blocks):
    sizes, name = [len(sentence) for document in documents for sentence in document], case.settings["packer"]
    longest = case.settings["max_seq_length"] - (4 if "_pair" in name else 2)
    return {
        "documents": len(documents),
        "sentences": len(sizes),
        "split_sentences": sum(size > longest for size in sizes) if name != "contiguous" else 0,
        "tokens": sum(sizes),
        "blocks": len(blocks),
    }


def test_a_run_started_anywhere_with_any_index_is_not_another_run(case):
    """With an index that is intact, missing, truncated, of other blocks, with a flipped bit, or written by another
    process."""
    path, elsewhere = case.folder / INDEX_NAME, case.folder / "other"
    elsewhere.mkdir()
    blocks_of(case.reader(index_folder=case.folder))
    blocks_of(case.reader(index_folder=elsewhere, max_seq_length=40))
    every = [file for n in range(len(case.corpus.sources)) for e in range(10) for file in files_of(case, n, epoch=e)]
    index, longest = path.read_bytes(), max(len(own) for file in every for own, _ in chunks_of(case, file))
    for start in case.rng.sample(range(POSITIONS - 20), 2):
        wanted = case.whole[start : start + 20]
        reader = case.reader(index_folder=case.folder)
        assert blocks_of(reader, start, 1) == wanted[:1] and int(reader.progress) <= longest  # a chunk is read, no more
        place, bit = case.rng.randrange(len(index)), 1 << case.rng.randrange(8)
        flipped = index[:place] + bytes([index[place] ^ bit]) + index[place + 1 :]
        for damaged in (b"", index[:place], flipped, (elsewhere / INDEX_NAME).read_bytes()):
            path.write_bytes(damaged)
            readers = [case.reader(index_folder=case.folder) for _ in range(2)]
            both = [blocks_at(one, [(range(start, start + 20),)]) for one in readers]
            assert [tuple(map(facts, pair)) for pair in zip(*both, strict=True)] == [(one, one) for one in wanted]
            assert blocks_of(case.reader(index_folder=case.folder), start, 20) == wanted
        path.write_bytes(index)


def test_any_processes_and_workers_read_one_sequence(case):
    """Four processes with four workers, and other layouts, with skipped blocks."""
    cache, folder = case.folder / "cache of workers", case.folder / "index of workers"
    folder.mkdir()
    token_cache.build(cache, case.reader(), num_proc=1)
    text = [case.reader(index_folder=folder) for _ in range(2)]
    disk = TokenCache(cache, case.corpus, seed=case.settings["seed"], shuffle_window=case.settings["shuffle_window"])
    for processes, workers, providers in ((1, 1, text), (2, 3, text), (4, 4, [disk])):
        start, size = case.rng.randrange(80), case.rng.randint(1, 5)
        skipped = [range(start + 3, start + 9), range(start + 40, start + 41)]
        makers = []
        for process, worker in itertools.product(range(processes), range(workers)):
            batches = batches_of(start, size, processes, process, workers, worker, skipped)
            makers.append(blocks_at(providers[worker % len(providers)], batches))
        in_turn = [
            facts(block)
            for number in range(100 // (size * processes))
            for process in range(processes)
            for block in itertools.islice(makers[process * workers + number % workers], size)
        ]
        wanted = [case.whole[n] for part in unskipped(start, len(in_turn), skipped) for n in part]
        assert in_turn == wanted and len(wanted) > 70


@pytest.fixture
def one_source(tmp_path, monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 4000)
    paths = [write_parquet(tmp_path / f"{n}.parquet", make_documents(20, seed=n)) for n in range(4)]
    return corpus_of("c", [Source("s", files=paths)])


@pytest.mark.parametrize("input_format", ["full_sentences", "segment_pair sop"])
def test_a_sentence_of_which_a_normalizer_leaves_nothing_is_none(wordpiece, tmp_path, input_format):
    """BERT's normalizer removes a soft hyphen, a byte order mark and a zero-width space."""
    wordpiece = copy.deepcopy(wordpiece)
    wordpiece.backend_tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False)
    texts = make_documents(20, seed=3)
    odd = ["\u00ad\n" + text.replace("\n", "\n\ufeff\n\u200b\n") for text in texts]
    found = []
    for name, of_name in (("plain", texts), ("odd", [*odd, "\u200b", "\u00ad\n\ufeff"])):
        source = Source("s", files=write_parquet(tmp_path / f"{name}.parquet", of_name))
        corpus = corpus_of("c", [source], validation_share=1e-9)
        reader = reader_of(corpus, wordpiece, packer=input_format, shuffle_window=0)
        found.append(blocks_of(reader, 0, 20))
    assert found[0] == found[1]


def test_an_empty_source_is_no_endless_search(tmp_path, tokenizer):
    write_parquet(tmp_path / "blank.parquet", ["", " ", None])
    corpus = corpus_of("c", [Source("s", files=str(tmp_path / "blank.parquet"))])
    with pytest.raises(InputError, match=r"source 's' is empty"):
        blocks_of(reader_of(corpus, tokenizer))


@pytest.mark.parametrize("limit", [10, 10**5])
def test_the_first_blocks_only_again_and_again(one_source, tokenizer, limit):
    """All blocks of a pass if it has no more."""
    of_pass = itertools.takewhile(lambda one: one[1] == 0, blocks_of(reader_of(one_source, tokenizer), 0, 1000))
    size = min(limit, len([*of_pass]))

    def limited(start):
        return iter(TrainBlocks(reader_of(one_source, tokenizer), batch_size=1, limit=limit, start=start))

    blocks = [*map(facts, itertools.islice(limited(0), 3 * size))]
    orders = [[name for name, *_ in blocks[size * epoch :][:size]] for epoch in range(3)]
    assert [epoch for _, epoch, *_ in blocks] == [epoch for epoch in range(3) for _ in range(size)]
    first = {name for name, *_ in blocks_of(reader_of(one_source, tokenizer), 0, size)}
    assert all({*order} == first for order in orders) and orders[0] != orders[1] != orders[2]
    assert [*map(facts, itertools.islice(limited(13), 7))] == blocks[13:20]


def test_passes_over_repeated_blocks(one_source, tokenizer):
    reader = reader_of(one_source, tokenizer)
    for positions, read, passes in ((25, 10, 2.5), (3, 3, 0.3)):
        assert consumed(reader, positions, limit=10) == (consumed(reader, read)[0], {"s": passes})
    consumed(reader, 1000)  # reads more than one pass
    once = blocks_of_pass(reader)
    assert 10 < once < 1000
    assert consumed(reader, 3 * once, limit=10**5) == (consumed(reader, once)[0], {"s": 3})


def test_blocks_of_a_source_that_ends_among_the_first_are_counted_once(tmp_path, tokenizer, caplog):
    counts = {"small": 10, "large": 600}
    sources = [
        Source(name, files=write_jsonl(tmp_path / f"{name}.jsonl", make_documents(count, seed=count)), weight=1.0)
        for name, count in counts.items()
    ]
    blocks = TrainBlocks(reader_of(corpus_of("c", sources), tokenizer), batch_size=1, limit=100)
    different = {block.id for block in itertools.islice(blocks, 100)}
    assert len(different) < 100
    assert f"max_train_samples=100: found only {len(different)} different blocks" in caplog.text


# Micro-batches


@given(lengths=st.lists(st.integers(1, 64), min_size=1, max_size=40), size=st.integers(1, 8))
def test_micro_batches_hold_each_block_once_and_like_lengths_pad_less(lengths, size):
    blocks = [Block({"input_ids": np.zeros(length)}, number) for number, length in enumerate(lengths)]
    columns, shapes, record = micro_batches(
        lambda blocks: {"ids": torch.tensor([block.id for block in blocks])}, size, blocks
    )
    found = [batch["ids"].tolist() for batch in unflatten_batches(columns, shapes, "cpu")]
    assert sorted(itertools.chain.from_iterable(found)) == [*range(len(lengths))] and record[0] == sum(lengths)
    assert [*map(len, found)] == [len(lengths[start:][:size]) for start in range(0, len(lengths), size)]
    by_micro_batch = [[lengths[number] for number in numbers] for numbers in found]
    assert all(min(one) >= max(two) for one, two in itertools.pairwise(by_micro_batch))


def assert_same(batches, others):
    assert [list(batch) for batch in batches] == [list(other) for other in others]
    for batch, other in zip(batches, others, strict=True):
        for name, value in batch.items():
            assert value.dtype == torch.int64 and torch.equal(value, other[name]), name


@pytest.mark.parametrize("workers", [0, 2])
def test_the_loader_gives_what_the_collator_makes(one_source, tokenizer, tmp_path, workers):
    """Its workers append chunks to the index, whose counts survive a flipped bit."""
    collator = MlmCollator(tokenizer, mlm_probability=0.15, pad_to_multiple_of=8, seed=3)
    reader = reader_of(one_source, tokenizer, index_folder=tmp_path)
    counts = []
    loader = MicroBatchLoader(
        TrainBlocks(reader, batch_size=8),
        **{"batch_size": 8, "collate_fn": functools.partial(micro_batches, collator, 2), "num_workers": workers},
        **{"device": "cpu", "waiting": contextlib.nullcontext, "count": counts.append},
    )
    blocks, direct = [*blocks_at(reader_of(one_source, tokenizer), [(range(40),)])], []
    for step in range(5):
        own = sorted(blocks[8 * step :][:8], key=lambda block: -len(block["input_ids"]))
        direct += [collator(own[start : start + 2]) for start in range(0, 8, 2)]
    found = list(itertools.islice(loader, len(direct)))
    tokens = [sum(len(block["input_ids"]) for block in blocks[8 * step :][:8]) for step in range(5)]
    assert [count[0] for count in counts] == tokens
    assert_same(found, direct)
    assert 0 < sum("attention_mask" in batch for batch in found) < len(found)
    fresh = reader_of(one_source, tokenizer)
    blocks_of(fresh, 0, 40)
    assert consumed(reader, 40) == consumed(fresh, 40)
    index = bytearray((tmp_path / INDEX_NAME).read_bytes())
    index[40] ^= 1
    (tmp_path / INDEX_NAME).write_bytes(index)
    assert consumed(reader_of(one_source, tokenizer, index_folder=tmp_path), 40) == consumed(fresh, 40)
