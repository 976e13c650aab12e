"""Sources: every format, the held-out documents, faults that are retried or refused; what a corpus is, and mixtures."""

import gzip
import io
import itertools
import json
import os
import random
import shutil
from collections import Counter

import datasets
import fsspec
import pyarrow as pa
import pytest
from conftest import corpus_of, make_documents, write_jsonl, write_parquet, write_text

from roberta_recipe import durable
from roberta_recipe.data import corpus as corpora
from roberta_recipe.data import documents as reading
from roberta_recipe.data import token_cache
from roberta_recipe.data.chunks import TextReader
from roberta_recipe.data.corpus import (
    Corpus,
    Source,
    corpus_fingerprint,
    identified,
    identify,
    read_corpus,
    resolve,
)
from roberta_recipe.data.documents import sample_documents
from roberta_recipe.data.order import interleave, taken_of_source
from roberta_recipe.data.stream import blocks_at
from roberta_recipe.errors import InputError, RunError
from roberta_recipe.record import HASHES_NAME
from roberta_recipe.training import output_folder

TEXTS = make_documents(60, seed=4)


def texts_of(of_split="train", seed=0, epoch=0, share=0.01, **source):
    corpus = resolve(Corpus("c", [Source("s", **source)], validation_share=share))
    return list(reading.documents(corpus, corpus.sources[0], of_split, seed=seed, epoch=epoch))


def check(files, **source):
    reading.check_sources(resolve(Corpus("c", [Source("s", files=str(files), **source)])))


# Sources


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "txt", "jsonl.gz", "txt.gz"])
def test_every_format_gives_the_same_documents(tmp_path, kind):
    path = tmp_path / f"data.{kind}"
    write = {"parquet": write_parquet, "jsonl": write_jsonl, "txt": write_text}[kind.split(".")[0]]
    write(path, TEXTS)
    if kind.endswith(".gz"):
        path.write_bytes(gzip.compress(path.read_bytes()))
    everything = texts_of(files=str(path), share=1e-9)
    assert [text.strip() for text in everything] == TEXTS


def test_an_empty_line_separates_documents_whatever_the_line_ends(tmp_path):
    (tmp_path / "a.txt").write_bytes("One.\nStill one.\n\n\n\nTwo é.\r\n\r\nThree.".encode())
    texts = texts_of(files=str(tmp_path / "a.txt"), share=1e-9)
    assert [t.strip() for t in texts] == ["One.\nStill one.", "Two é.", "Three."]


def test_a_line_of_blanks_separates_documents(tmp_path):
    """As between the articles and paragraphs of wikitext's files."""
    (tmp_path / "a.txt").write_text(" \n = Ships = \n \n One . \n Still one . \n \t\n\u00a0\u3000\n Two . \n", "utf-8")
    texts = texts_of(files=str(tmp_path / "a.txt"), share=1e-9)
    assert texts == ["\n = Ships = ", " One . \n Still one . ", "\n Two . \n"]


PIECES = ["One.", "é ", "\u200b", " ", "\t", "\u00a0", "\u2028", "\x0c", "\ufeff", *["\n", "\r\n", "\r", "\n\n"] * 2]


def documents_by_definition(text):
    """The oracle, of a text with Python's line ends."""
    lines = ["\n" if not line.strip() else line for line in io.StringIO(text)]
    return [document for document in "".join(lines).split("\n\n") if document]


def test_random_text_files_have_the_documents_of_the_definition(tmp_path):
    """From every row; without lines of blanks, the documents are those of `datasets`."""
    resumed = without_blanks = 0
    for seed in range(60):
        rng = random.Random(seed)
        pieces = PIECES[: None if seed % 3 else 1] + ["\n"] * 3
        text = "".join(rng.choices(pieces, k=rng.randint(1, 40)))
        data = ("\ufeff" * (seed % 2) + text).encode()
        path = tmp_path / f"{seed}.txt{'.gz' * (seed % 5 == 0)}"
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
        as_python_reads = io.TextIOWrapper(io.BytesIO(data), encoding="utf-8-sig").read()
        wanted = documents_by_definition(as_python_reads)
        source = Source("s", files=str(path))
        assert list(reading.read_file(source, "text", str(path))) == wanted, seed
        for row in {1, len(wanted) // 2, len(wanted) - 1, len(wanted), rng.randrange(40)} - {0, -1}:
            assert list(reading.read_file(source, "text", str(path), row)) == wanted[row:], (seed, row)
            resumed += 0 < row < len(wanted)
        if path.suffix == ".txt" and not any(line.isspace() and line != "\n" for line in io.StringIO(as_python_reads)):
            rows = datasets.load_dataset(
                "text", data_files=str(path), split="train", streaming=True, sample_by="paragraph", encoding="utf-8-sig"
            )
            assert [row["text"] for row in rows] == wanted
            without_blanks += len(wanted) > 1
    assert resumed > 40 and without_blanks > 10


def test_a_fingerprint_says_how_text_files_are_read(tmp_path, tokenizer):
    """So that blocks made when a line of blanks was text are refused; those of other formats are not."""
    found = {}
    for kind, write in {"jsonl": write_jsonl, "txt": write_text, "parquet": write_parquet}.items():
        source = Source("s", files=write(tmp_path / f"a.{kind}", TEXTS))
        corpus = corpus_of("c", [source])
        reader = TextReader(corpus, tokenizer, input_format="full_sentences", max_seq_length=64, seed=0)
        found[kind] = reader.fingerprint()
        former = {name: value for name, value in found[kind].items() if name != "text_files"}
        (tmp_path / kind).mkdir()
        durable.write_sealed(tmp_path / kind / token_cache.FINGERPRINT, {**token_cache._FORMAT, **former})
        if kind == "txt":
            with pytest.raises(InputError, match="text_files was None, is 'a line of blanks separates documents'"):
                token_cache.claim(tmp_path / kind, found[kind])
        else:
            assert token_cache.claim(tmp_path / kind, found[kind]) and former == found[kind]
    source = Source("s", files=str(tmp_path / "a.parquet"), validation_files=str(tmp_path / "a.txt"))
    assert corpus_fingerprint(corpus_of("c", [source]))["text_files"] == found["txt"]["text_files"]


def test_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfOne.\n")
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"\xef\xbb\xbfOne.\n"))
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "One."}\n')
    check(tmp_path / "a.jsonl", validation_files=str(tmp_path / "a.txt"))
    for name in ("a.txt", "a.txt.gz"):
        assert texts_of(files=str(tmp_path / name), share=1e-9) == ["One.\n"]
    (tmp_path / "empty.txt").write_bytes(b"\xef\xbb\xbf")
    assert texts_of(files=str(tmp_path / "empty.txt"), share=1e-9) == []
    assert texts_of(files=str(tmp_path / "a.jsonl"), share=1e-9) == ["One."]


def test_names_that_look_like_patterns_are_names(tmp_path):
    for number, name in enumerate(["part*.txt", "part1.txt", "b[1].txt", "c?.txt"]):
        write_text(tmp_path / name, TEXTS[number * 15 : number * 15 + 15])
    texts = texts_of(files=str(tmp_path), share=1e-9)
    assert sorted(text.strip() for text in texts) == sorted(TEXTS)


def test_files_without_rows_among_others_have_no_documents(tmp_path):
    for kind, write in {"jsonl": write_jsonl, "txt": write_text, "parquet": write_parquet}.items():
        folder = tmp_path / kind
        folder.mkdir()
        write(folder / f"a.{kind}", TEXTS)
        write_parquet(folder / "b.parquet", pa.array([], pa.string())) if kind == "parquet" else (
            folder / f"b.{kind}"
        ).touch()
        assert [text.strip() for text in texts_of(files=str(folder), share=1e-9)] == TEXTS


def test_file_folder_glob_and_list(tmp_path):
    (tmp_path / "deep").mkdir()
    names = ["a.parquet", "b.parquet", "deep/c.parquet"]
    for number, name in enumerate(names):
        write_parquet(tmp_path / name, TEXTS[number * 20 : number * 20 + 20])
    (tmp_path / "README.md").write_text("not data")
    found = [
        texts_of(files=files, share=1e-9)
        for files in (str(tmp_path), str(tmp_path / "**/*.parquet"), [str(tmp_path / name) for name in names])
    ]
    assert all(sorted(texts) == sorted(TEXTS) for texts in found)
    assert len(texts_of(files=str(tmp_path / "*.parquet"), share=1e-9)) == 40


def test_a_folder_has_what_is_behind_its_links(tmp_path):
    """As a glob has it; a link to a folder above, or a second link to a folder, adds nothing."""
    for number, place in enumerate(("text", "disk/wiki", "disk/wiki/deep")):
        (tmp_path / place).mkdir(parents=True)
        write_parquet(tmp_path / place / "a.parquet", TEXTS[number * 20 : number * 20 + 20])
    for name, target in (("wiki", "disk/wiki"), ("again", "disk/wiki"), ("wiki/up", "text")):
        (tmp_path / "text" / name).symlink_to(tmp_path / target)
    (tmp_path / "text" / "b.parquet").symlink_to(tmp_path / "nowhere.parquet")
    assert sorted(texts_of(files=str(tmp_path / "text"), share=1e-9)) == sorted(TEXTS)


def test_a_dataset_folder_is_read_by_config_and_split(tmp_path):
    """As for a dataset of the Hub, the card says which files belong to which split of which config."""
    (tmp_path / "card").mkdir()
    write_parquet(tmp_path / "card" / "first.parquet", TEXTS[:20], column="body")
    write_parquet(tmp_path / "card" / "second.parquet", TEXTS[20:], column="body")
    (tmp_path / "card" / "README.md").write_text(
        "---\nconfigs:\n- config_name: en\n  data_files:\n  - {split: train, path: first.parquet}\n"
        "  - {split: test, path: second.parquet}\n---\n"
    )
    source = dict(dataset=str(tmp_path / "card"), config="en", text_column="body", share=1e-9)
    assert texts_of(**source) == TEXTS[:20]
    assert texts_of(**source, split="test") == TEXTS[20:]
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "a.csv").write_text("text\nOne.\n")
    with pytest.raises(InputError, match=r"a.csv is no text, JSON, .*; convert or unpack"):
        texts_of(dataset=str(tmp_path / "tables"))
    with pytest.raises(InputError, match=r"has no split 'dev'; it has \['test', 'train'\]"):
        texts_of(**source, split="dev")
    with pytest.raises(InputError, match=r"cannot open dataset .*config 'fr'"):
        texts_of(**{**source, "config": "fr"})


def test_filters(tmp_path):
    languages = ["en" if number % 3 else "de" for number in range(60)]
    dates = [f"2019-{number % 12 + 1:02d}-15" for number in range(60)]
    path = write_parquet(tmp_path / "a.parquet", TEXTS, language=languages, date=dates)
    kept = texts_of(files=path, share=1e-9, filters=[["language", "==", "en"], ["date", "<", "2019-03-01"]])
    wanted = [
        t for t, language, date in zip(TEXTS, languages, dates, strict=True) if language == "en" and date < "2019-03-01"
    ]
    assert kept == wanted and 0 < len(wanted) < 60


def test_held_out_documents_are_no_training_documents(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", TEXTS + TEXTS[:30])  # half of the texts twice
    train, validation = (texts_of(of_split=name, files=path, share=0.3) for name in ("train", "validation"))
    assert not set(train) & set(validation)  # copies are in the same split
    assert set(train) | set(validation) == set(TEXTS) and len(train) + len(validation) == 90
    assert 5 < len(set(validation)) < 35
    assert texts_of(of_split="validation", files=path, share=0.3, seed=9) == validation


def test_validation_files_are_used_where_given(tmp_path):
    source = dict(
        files=write_parquet(tmp_path / "a.parquet", TEXTS[:50]),
        validation_files=write_parquet(tmp_path / "b.parquet", TEXTS[50:]),
    )
    assert texts_of(**source) == TEXTS[:50]
    assert texts_of(of_split="validation", **source) == TEXTS[50:]


def test_a_cache_that_cannot_be_written_is_named_before_the_work(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "file"))
    with pytest.raises(InputError, match=r"HF_HOME's cache=.*file/roberta_recipe cannot be made: Not a directory"):
        texts_of(builtin="docstrings")


def test_docstrings_are_documents(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path))
    monkeypatch.setattr("roberta_recipe.data.docstrings.MAX_BYTES", 300_000)
    texts = texts_of(builtin="docstrings", share=1e-9)
    assert 300_000 <= sum(len(text.encode()) for text in texts) < 400_000
    assert len(set(texts)) == len(texts) and all(text.strip() for text in texts)
    assert any("Abstract Base Classes" in text for text in texts)  # abc.py's: the standard library comes first
    (cached,) = (tmp_path / "roberta_recipe").glob("*.parquet")
    written = cached.stat().st_mtime_ns
    assert texts_of(builtin="docstrings", share=1e-9) == texts and cached.stat().st_mtime_ns == written
    content = bytearray(cached.read_bytes())
    content[len(content) // 2] ^= 1
    cached.write_bytes(content)
    assert texts_of(builtin="docstrings", share=1e-9) == texts  # made again


# What a corpus is


@pytest.fixture
def big_file(tmp_path):
    """A JSONL file of some 900 KB, and what makes its corpus."""
    path = tmp_path / "a.jsonl"
    write_jsonl(path, make_documents(3000, seed=1))
    assert path.stat().st_size > 800_000
    return path, lambda **settings: corpus_of("c", [Source("s", files=str(path))], **settings)


def change_the_middle(path):
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 25_000] = content[middle : middle + 25_000].replace(b"e", b"a")
    path.write_bytes(content)


def test_a_change_in_the_middle_of_a_file_is_another_corpus(big_file):
    path, corpus = big_file
    before, size = corpus_fingerprint(corpus()), path.stat().st_size
    assert corpus_fingerprint(corpus()) == before
    change_the_middle(path)
    assert path.stat().st_size == size and corpus_fingerprint(corpus()) != before


def test_a_file_is_hashed_once_for_a_run_until_it_changes(big_file, tmp_path, monkeypatch):
    path, kept = big_file[0], tmp_path / "run" / HASHES_NAME
    hashed, once = [], corpora._identity
    monkeypatch.setattr(corpora, "_identity", lambda name: hashed.append(name) or once(name))
    corpus = resolve(Corpus("c", [Source("s", files=str(path))]))

    def fingerprint(folder="run"):
        return corpus_fingerprint(identified(corpus, tmp_path / folder))

    young = fingerprint()
    assert fingerprint() == young and len(hashed) == 2  # a file so young may change and keep its times
    monkeypatch.setattr(corpora, "_SETTLED_NS", -(10**9))
    first = fingerprint()
    assert fingerprint() == first == young and len(hashed) == 3 and kept.exists()
    assert fingerprint("another") == first and len(hashed) == 4  # of another run
    output_folder.check_content(tmp_path / "run", max_steps=1)  # a run that was killed so early begins there,
    assert token_cache.claim(tmp_path / "another", {})  # and so does a token cache
    kept.write_bytes(kept.read_bytes().replace(b"sum", b"sun"))
    assert fingerprint() == first and len(hashed) == 5
    known = durable.read_sealed(kept)["files"]
    changed = {name: [[*values[:-1], "0" * 32], stamp] for name, (values, stamp) in known.items()}
    durable.write_sealed(kept, {"files": changed})
    assert fingerprint() != first and len(hashed) == 5  # it is really taken from there
    change_the_middle(path)
    assert fingerprint() != first and len(hashed) == 6


def test_a_file_that_changes_while_it_is_hashed_is_refused(big_file, monkeypatch):
    _, corpus = big_file
    sha256 = durable.sha256
    monkeypatch.setattr(durable, "sha256", lambda name: os.utime(name, ns=(0, 0)) or sha256(name))
    with pytest.raises(InputError, match=r"a.jsonl changed while it was read"):
        corpus()


def test_a_file_that_changes_in_mid_run_is_named(big_file, tokenizer):
    path, make = big_file
    content = path.read_bytes()
    reader = TextReader(make(), tokenizer, input_format="full_sentences", max_seq_length=512, seed=0)
    corpora.check_unchanged(reader.corpus)
    os.utime(path, ns=(0, 0))  # other times, the same content
    corpora.check_unchanged(reader.corpus)
    change_the_middle(path)
    with pytest.raises(RunError, match=r"a.jsonl was changed, replaced or removed while this run reads it.*Put that"):
        corpora.check_unchanged(reader.corpus)
    with pytest.raises(RunError, match=r"a.jsonl was changed"):  # when it is read to its end
        list(blocks_at(reader, [(range(2000),)]))
    path.unlink()
    with pytest.raises(RunError, match=r"a.jsonl was changed, replaced or removed"):
        corpora.check_unchanged(reader.corpus)
    path.write_bytes(content)
    corpora.check_unchanged(reader.corpus)


def test_a_file_that_is_cut_in_mid_run_is_not_passed_over(big_file):
    """`on_bad_shard: skip` is for files that were bad from the beginning."""
    path, make = big_file
    corpus = make(on_bad_shard="skip")
    path.write_bytes(path.read_bytes()[:400_000])  # ends within a line
    with pytest.raises(RunError, match=r"a.jsonl was changed"):
        list(reading.documents(corpus, corpus.sources[0], "train", seed=0))


def test_a_remote_file_is_known_by_what_its_server_tells():
    with fsspec.open("memory://identity/a.txt", "w") as stream:
        stream.write("One.")
    (name, size, version) = identify(["memory://identity/a.txt"], {})["memory://identity/a.txt"].values
    assert (name, size, version) == ("memory://identity/a.txt", 4, None)
    of_hub = "hf://datasets/org/data@0123/a.parquet"
    assert identify([of_hub], {})[of_hub].values == [of_hub]


@pytest.mark.parametrize("own_source", [True, False])
def test_a_validation_file_that_is_trained_on_is_refused(tmp_path, own_source):
    """By its content, whatever its name."""
    train, other = (write_parquet(tmp_path / f"{n}.parquet", make_documents(20, seed=n)) for n in (1, 2))
    copy = shutil.copy(train, tmp_path / "held_out.parquet")
    sources = [
        Source("a", files=train, weight=1.0, validation_files=str(copy) if own_source else None),
        Source("b", files=other, weight=1.0, validation_files=None if own_source else str(copy)),
    ]
    with pytest.raises(InputError, match=r"validation file .*held_out.parquet is the training file .*1.parquet"):
        reading.check_sources(resolve(Corpus("c", sources)))
    write_parquet(copy, TEXTS)
    reading.check_sources(resolve(Corpus("c", sources)))


# Mixture


@pytest.mark.parametrize(
    "sizes", [[5, 3, 2], [1], [50] + [5] * 10, [1, 1000], [3.9, 12.1, 10.1, 30.4, 30.4, 5.1, 38, 31]], ids=str
)
def test_interleave_keeps_shares_at_every_point(sizes):
    shares = [size / sum(sizes) for size in sizes]
    taken = Counter()
    streams = [itertools.repeat(number) for number in range(len(sizes))]
    for total, number in enumerate(itertools.islice(interleave(streams, shares), 3000), 1):
        taken[number] += 1
        for stream, share in enumerate(shares):
            assert -len(sizes) * share - 1e-6 <= taken[stream] - total * share <= 1 + 1e-6


def test_interleave_by_cost_and_to_the_end():
    long, short = [("long", 100)] * 10, [("short", 1)] * 500
    items = list(interleave([iter(long), iter(short)], [0.5, 0.5], cost=lambda item: item[1]))
    assert sorted(items) == sorted(long + short)
    half = Counter(name for name, _ in items[: items.index(long[0], 1) + 400])
    assert abs(half["long"] * 100 - half["short"]) <= 100


def test_sources_of_their_sizes_end_together():
    sizes = [7, 13, 100]
    streams = [iter([number] * size) for number, size in enumerate(sizes)]
    shares = [size / sum(sizes) for size in sizes]
    assert Counter(itertools.islice(interleave(streams, shares), 120)) == dict(enumerate(sizes))


def test_sample_of_the_mixture(tmp_path):
    sources = [
        Source("a", files=write_parquet(tmp_path / "a.parquet", make_documents(300, seed=5)), size_gb=3.0),
        Source("b", files=write_parquet(tmp_path / "b.parquet", make_documents(300, seed=6)), size_gb=1.0),
    ]
    sizes = Counter()
    for name, text in sample_documents(resolve(Corpus("c", sources)), "train", max_bytes=40_000, seed=0):
        sizes[name] += len(text.encode())
    assert 40_000 <= sum(sizes.values()) < 41_000 and abs(sizes["a"] / sum(sizes.values()) - 0.75) < 0.03


# Variables


def write_domains(folder):
    """Two sources below a folder, and a preset that names the folder by a variable."""
    (folder / "news").mkdir(parents=True)
    for split, texts in (("train", TEXTS[:40]), ("valid", TEXTS[40:])):
        write_parquet(folder / "news" / f"{split}-0.parquet", texts)
    preset = folder.parent / "domains.yaml"
    train, valid = "['${MY_DOMAINS}/news/train-*.parquet']", "${MY_DOMAINS}/news/valid-*.parquet"
    preset.write_text(f"sources: [{{name: news, files: {train}, validation_files: '{valid}'}}]")
    return preset


def test_a_preset_names_its_folder_by_a_variable(tmp_path, monkeypatch):
    """The same files in another folder are the same corpus."""
    preset, found = write_domains(tmp_path / "here"), []
    shutil.copytree(tmp_path / "here", tmp_path / "elsewhere")
    for folder in ("here", "elsewhere"):
        monkeypatch.setenv("MY_DOMAINS", str(tmp_path / folder))
        corpus = identified(resolve(read_corpus(preset)), tmp_path / "run")
        texts = [
            list(reading.documents(corpus, corpus.sources[0], split, seed=0, epoch=0))
            for split in ("train", "validation")
        ]
        assert texts == [TEXTS[:40], TEXTS[40:]] and corpus.files(corpus.sources[0], "train")[1][0].count(folder)
        found.append(corpus_fingerprint(corpus))
    assert found[0] == found[1]


@pytest.mark.parametrize("value", [None, ""])
def test_a_variable_without_a_value_is_named(tmp_path, monkeypatch, value):
    preset = write_domains(tmp_path / "here")
    monkeypatch.delenv("MY_DOMAINS", raising=False)
    if value is not None:
        monkeypatch.setenv("MY_DOMAINS", value)
    with pytest.raises(InputError) as error:
        read_corpus(preset)
    for wanted in (
        str(preset),
        "source news",
        "the environment variable MY_DOMAINS is not set or empty",
        "export MY_DOMAINS=",
    ):
        assert wanted in str(error.value)


def test_the_preset_of_the_reference_run_gives_the_mixture_of_its_record(root, monkeypatch):
    """The share that the run took of each source's blocks, all of which its token cache held."""
    monkeypatch.setenv("FIVE_DOMAINS", "/nowhere")
    corpus = read_corpus("presets/corpus/five_domains.yaml")
    record = json.loads((root / "results" / "roberta_mini" / "run_record.json").read_text())
    args, counts = record["resolved_args"], record["counts"]["train"]
    taken = taken_of_source(corpus.shares, args["max_steps"] * args["global_batch_size"])
    assert [source.name for source in corpus.sources] == list(counts) and sum(taken) == 224_000
    shares = [own / source["blocks"] for own, source in zip(taken, counts.values(), strict=True)]
    assert args["token_cache"] and shares == pytest.approx([*record["passes"].values()], abs=5e-5)
    assert [source.files for source in corpus.sources] == [f"/nowhere/{name}/train-*" for name in counts]
    with pytest.raises(InputError, match=r"source 'books': '/nowhere/books/train-\*' does not exist"):
        resolve(corpus)


def test_corpus_presets_of_the_repository(root, monkeypatch):
    monkeypatch.setenv("FIVE_DOMAINS", "somewhere")
    presets = {path.stem: read_corpus(path) for path in (root / "presets" / "corpus").glob("*.yaml")}
    assert set(presets) == {"bert_16gb", "docstrings", "five_domains", "roberta_160gb"}
    paper = presets["roberta_160gb"]
    assert presets["bert_16gb"].sources == paper.sources[:2]
    sizes = {source.name: source.size_gb for source in paper.sources}
    assert sizes["bookcorpus"] + sizes["wikipedia"] == pytest.approx(16)
    assert sum(size for name, size in sizes.items() if name.startswith("cc_news")) == pytest.approx(76)
    assert (sizes["openwebtext"], sizes["stories"]) == (38, 31)
    assert all(source.dataset and len(source.revision) == 40 for source in paper.sources)
