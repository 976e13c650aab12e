"""Order of blocks: shares, shuffle windows and ranks, by arithmetic alone."""

import itertools
import re
import runpy
import sys

import numpy as np
import pytest
from conftest import make_documents, write_parquet
from hypothesis import given
from hypothesis import strategies as st

from roberta_recipe.data.order import (
    batches_of,
    block_id,
    blocks_by_source,
    interleave,
    mixture,
    place_of,
    position_after,
    random_order,
    read_ranges,
    sample_evenly,
    union,
    unskipped,
)
from roberta_recipe.errors import InputError

MIXTURES = [[5, 3, 2], [1], [50] + [5] * 10, [1, 1000], [7, 13, 100], [3.9, 12.1, 10.1, 30.4, 30.4, 5.1, 38, 31]]


@pytest.mark.parametrize("sizes", MIXTURES, ids=str)
def test_the_mixture_keeps_shares_and_needs_no_earlier_positions(sizes):
    shares = [size / sum(sizes) for size in sizes]
    sources, indices = mixture(shares, 0, 3000)
    streams = [zip(itertools.repeat(number), itertools.count()) for number in range(len(sizes))]
    assert [*zip(sources, indices, strict=True)] == [*itertools.islice(interleave(streams, shares), 3000)]
    for number, share in enumerate(shares):
        own = sources == number
        ahead = np.cumsum(own) - np.arange(1, 3001) * share
        assert ahead.max() <= 1 + 1e-6 and ahead.min() >= -len(sizes) * share - 1e-6
        assert (indices[own] == np.arange(own.sum())).all()
    for start in [*range(200), 999, 2900]:
        there = mixture(shares, start, 100)
        assert (there[0] == sources[start : start + 100]).all() and (there[1] == indices[start : start + 100]).all()
        taken = [int((sources[:start] == number).sum()) for number in range(len(sizes))]
        assert blocks_by_source(shares, start) == taken
    far = 8192 * 500_000
    halves = zip(mixture(shares, far, 50), mixture(shares, far + 50, 50), strict=True)
    assert all((np.concatenate(of) == both).all() for of, both in zip(halves, mixture(shares, far, 100), strict=True))


@pytest.mark.parametrize("processes", [1, 2, 3])
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_step_k_takes_the_same_positions_in_every_layout(processes, workers, batch_size):
    """Positions [k x B, (k + 1) x B), each once, for any number of processes, data workers and accumulation steps."""
    batch, start = 24, 48
    steps = [[] for _ in range(4)]
    for process in range(processes):
        loaders = [batches_of(start, batch_size, processes, process, workers, w) for w in range(workers)]
        in_turn = (next(loaders[number % workers]) for number in itertools.count())  # as a DataLoader asks its workers
        for step in steps:
            for micro in itertools.islice(in_turn, batch // (batch_size * processes)):
                step.extend(itertools.chain.from_iterable(micro))
    for k, positions in enumerate(steps):
        assert sorted(positions) == list(range(start + k * batch, start + (k + 1) * batch))


def skipped_at_random(rng):
    """Ranges that overlap, touch or contain each other, in any order; and the set of their positions."""
    starts = rng.integers(0, 300, size=rng.integers(0, 7))
    ranges = [range(int(start), int(start + rng.integers(1, 60))) for start in starts]
    return ranges, set(itertools.chain.from_iterable(ranges))


@pytest.mark.parametrize("seed", range(200))
def test_skipped_positions_are_left_out_and_all_others_stay_in_order(seed):
    rng = np.random.default_rng(seed)
    ranges, inside = skipped_at_random(rng)
    skipped, start, count = union(ranges), int(rng.integers(0, 200)), int(rng.integers(1, 120))
    assert set(itertools.chain.from_iterable(skipped)) == inside
    assert all(left.stop < right.start for left, right in itertools.pairwise(skipped))
    wanted = list(itertools.islice((n for n in itertools.count(start) if n not in inside), count + 1))
    taken = unskipped(start, count, skipped)
    assert list(itertools.chain.from_iterable(taken)) == wanted[:-1]
    assert position_after(start, count, skipped) == wanted[-1]
    # micro-batches of three, two processes, two data workers
    loaders = [[batches_of(start, 3, 2, process, 2, worker, skipped) for worker in range(2)] for process in range(2)]
    micro = [next(loaders[process][number % 2]) for number in range(count) for process in range(2)]
    positions = [position for batch in micro for part in batch for position in part]
    assert positions[:count] == wanted[:-1]
    assert read_ranges(f"{part.start}-{part[-1]}" for part in ranges) == skipped


@pytest.mark.parametrize("word", ["", "5-", "-5", "9-3", "1,000", "1.5", "a-b", "1-2-3", "1 - 2"])
def test_ranges_that_cannot_be_read(word):
    with pytest.raises(InputError, match=r"skip_blocks: .* must look like 41000-41063"):
        read_ranges([word])


def test_random_orders_differ_by_all_that_they_are_drawn_from():
    base = random_order(1, 0, (2, 3), 50)
    assert sorted(base) == list(range(50)) and (base == random_order(1, 0, (2, 3), 50)).all()
    others = [(2, 0, (2, 3)), (1, 1, (2, 3)), (1, 0, (2, 4)), (1, 0, (2, 3, 0)), (1, 0, (2,))]
    assert all((base != random_order(*other, 50)).any() for other in others)


def test_names_of_blocks():
    names = {block_id(s, f, i) for s in (0, 1, 2047) for f in (0, 1, 2**24 - 1) for i in (0, 1, 2**28 - 1)}
    assert len(names) == 27 and max(names) < 2**63
    assert place_of(block_id(2047, 2**24 - 1, 2**28 - 1)) == (2047, 2**24 - 1, 2**28 - 1)


@given(
    counts=st.lists(st.integers(0, 60), min_size=1, max_size=4),
    limit=st.one_of(st.none(), st.integers(1, 150)),
    seed=st.integers(0, 9),
)
def test_a_draw_takes_one_item_of_each_of_as_many_equal_stretches(counts, limit, seed):
    shares = [1 / len(counts)] * len(counts)
    drawn = sample_evenly(counts, shares, limit, seed)
    assert sum(map(len, drawn)) == min(sum(counts), limit or sum(counts))
    for count, indices in zip(counts, drawn, strict=True):
        stretches = [range(k * count // len(indices), (k + 1) * count // len(indices)) for k in range(len(indices))]
        assert all(index in stretch for index, stretch in zip(indices.tolist(), stretches, strict=True))
    again = sample_evenly(counts, shares, limit, seed)
    assert all(np.array_equal(one, two) for one, two in zip(drawn, again, strict=True))
    most = max(map(len, drawn))
    assert all(len(own) in (count, most, most - 1) for own, count in zip(drawn, counts, strict=True))


def test_the_benchmark_of_mixing_and_resuming_runs(root, tmp_path, tokenizer_dir, monkeypatch, capsys):
    """`benchmarks/order.py`, cited in docs/pretraining.md: neighbours share most batches in file order, and few in
    permuted order."""
    text = write_parquet(tmp_path / "text.parquet", make_documents(200, seed=1))
    (tmp_path / "corpus.yaml").write_text(f"sources: [{{name: stories, files: {text}}}]\nvalidation_share: 0.1\n")
    flags = ["--corpus", str(tmp_path / "corpus.yaml"), "--tokenizer_name", tokenizer_dir, "--max_seq_length", "32"]
    flags += ["--token_cache", str(tmp_path / "cache"), "--batch", "8"]
    monkeypatch.setattr(sys, "argv", ["order.py", *flags])
    runpy.run_path(str(root / "benchmarks" / "order.py"), run_name="__main__")
    said = capsys.readouterr().out
    met = [float(share) for share in re.findall(r"stories ([\d.]+)% \(", said)]
    assert len(met) == 4 and met[0] > 80 and met[1] < 20, said
    assert "fresh start: cache " in said and "after 50% of a pass: cache " in said
