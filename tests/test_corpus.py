"""Corpora: presets, files of every kind of source, held-out split, content hashes, mixtures, errors before training."""

import dataclasses
import itertools
import json
import os
import re
import shutil
import types
from collections import Counter
from datetime import date

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
from roberta_recipe.data.corpus import Corpus, Source, corpus_fingerprint, hash_files, in_words, read_corpus, resolve
from roberta_recipe.data.order import blocks_by_source, interleave
from roberta_recipe.data.stream import blocks_at
from roberta_recipe.errors import InputError, RunError
from roberta_recipe.record import HASHES_NAME
from roberta_recipe.training import checkpoint, pretraining

TEXTS = make_documents(60, seed=4)


def texts_of(of_split="train", seed=0, share=1e-9, **source):
    corpus = resolve(Corpus("c", [Source("s", **source)], validation_share=share))
    return list(reading.documents(corpus, corpus.sources[0], of_split, seed=seed))


def check(files, **source):
    reading.check_sources(resolve(Corpus("c", [Source("s", files=str(files), **source)])))


# Sources


def test_file_folder_glob_and_list(tmp_path, caplog):
    """Names with glob characters are literal names; a folder's files of other formats are logged and skipped."""
    caplog.set_level("INFO", logger="recipe")
    folder = tmp_path / ".mine" / "b[1]"
    (folder / "deep").mkdir(parents=True)
    names = ["part*.parquet", "part1.parquet", "deep/c.parquet"]
    for number, name in enumerate(names):
        write_parquet(folder / name, TEXTS[number * 20 : number * 20 + 20])
    (folder / "README.md").write_text("not data")
    (folder / ".git").mkdir()
    for name in (".git/a.parquet", "._part1.parquet"):
        write_parquet(folder / name, ["Hidden."])
    assert sorted(texts_of(files=str(folder))) == sorted(TEXTS)
    left_out = f"Ignored     1 file of {folder} in other formats, such as {folder / 'README.md'}"
    assert caplog.messages == [left_out]
    assert sorted(texts_of(files=[str(folder / name) for name in names])) == sorted(TEXTS)
    assert len(texts_of(files=f"{tmp_path}/.mine/*/p*.parquet")) == 40
    assert texts_of(files=str(folder / "._part1.parquet")) == ["Hidden."]


def test_a_folder_has_the_files_behind_its_links_once(tmp_path):
    for number, place in enumerate(("text", "disk/wiki", "disk/wiki/deep")):
        (tmp_path / place).mkdir(parents=True)
        write_parquet(tmp_path / place / "a.parquet", TEXTS[number * 20 : number * 20 + 20])
    for name, target in (("wiki", "disk/wiki"), ("again", "disk/wiki"), (".hidden", "text")):
        (tmp_path / "text" / name).symlink_to(tmp_path / target)
    (tmp_path / "text" / "b.parquet").symlink_to(tmp_path / "nowhere.parquet")
    assert sorted(texts_of(files=str(tmp_path / "text"))) == sorted(TEXTS)


def test_a_dataset_folder_is_read_by_config_and_split(tmp_path):
    """As for a dataset on the Hub, the card maps files to configs and splits."""
    (tmp_path / "card").mkdir()
    write_parquet(tmp_path / "card" / "first.parquet", TEXTS[:20], column="body")
    write_parquet(tmp_path / "card" / "second.parquet", TEXTS[20:], column="body")
    (tmp_path / "card" / "README.md").write_text(
        "---\nconfigs:\n- config_name: en\n  data_files:\n  - {split: train, path: first.parquet}\n"
        "  - {split: test, path: second.parquet}\n---\n"
    )
    source = dict(dataset=str(tmp_path / "card"), config="en", text_column="body")
    assert texts_of(**source) == TEXTS[:20]
    assert texts_of(**source, split="test") == TEXTS[20:]
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "a.csv").write_text("text\nOne.\n")
    with pytest.raises(InputError, match=r"is csv data; convert it to one of text, json"):
        texts_of(dataset=str(tmp_path / "tables"))
    with pytest.raises(InputError, match=r"has no split 'dev'; it has \['test', 'train'\]"):
        texts_of(**source, split="dev")
    with pytest.raises(InputError, match=r"config 'fr'.* cannot be opened"):
        texts_of(**{**source, "config": "fr"})


def test_a_table_in_the_cache_does_not_replace_a_dataset_of_the_hub(tmp_path, monkeypatch):
    """`load_dataset` falls back to it, without a network or access; it has no list of files."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    datasets.load_dataset("text", data_files=write_text(tmp_path / "a.txt", TEXTS))
    (tmp_path / "text").rename(tmp_path / "me___text")
    with pytest.raises(InputError, match=r"'me/text' .*cannot be opened .*: Couldn't reach 'me/text' on the Hub"):
        texts_of(dataset="me/text", revision="0123")


def test_a_folder_of_save_to_disk_is_its_rows(tmp_path):
    """Metadata and caches of `map` are ignored; a missing shard and a folder of splits are refused."""
    saved = datasets.Dataset.from_dict({"text": TEXTS})
    saved.save_to_disk(str(tmp_path / "saved"), num_shards=3)
    shutil.copy(tmp_path / "saved" / "data-00000-of-00003.arrow", tmp_path / "saved" / "cache-0123456789abcdef.arrow")
    assert sorted(texts_of(files=str(tmp_path / "saved"))) == sorted(TEXTS)
    (tmp_path / "saved" / "data-00001-of-00003.arrow").unlink()
    with pytest.raises(InputError, match=r"saved is not a folder of save_to_disk .*data-00001-of-00003.arrow"):
        texts_of(files=str(tmp_path / "saved"))
    datasets.DatasetDict({"train": saved, "test": saved}).save_to_disk(str(tmp_path / "splits"))
    with pytest.raises(InputError, match=r"splits has several splits: name one, such as .*splits/train, and"):
        texts_of(files=str(tmp_path / "splits"))
    assert texts_of(files=str(tmp_path / "splits" / "train")) == TEXTS


def test_filters(tmp_path):
    languages = ["en" if number % 3 else "de" for number in range(60)]
    dates = [f"2019-{number % 12 + 1:02d}-15" for number in range(60)]
    path = write_parquet(tmp_path / "a.parquet", TEXTS, language=languages, date=dates)
    kept = texts_of(files=path, filters=[["language", "==", "en"], ["date", "<", "2019-03-01"]])
    rows = zip(TEXTS, languages, dates, strict=True)
    wanted = [text for text, language, date in rows if language == "en" and date < "2019-03-01"]
    assert kept == wanted and 0 < len(wanted) < 60
    for wrong in (["lang", "==", "en"], ["language", "==", False]):  # `no` in YAML
        with pytest.raises(
            InputError, match=r"a.parquet does not fit filters=.*; it has \['text', 'language', 'date'\]$"
        ):
            texts_of(files=path, filters=[wrong])
    with pytest.raises(InputError, match=r"filters work on Parquet only"):
        check(write_text(tmp_path / "c.txt", TEXTS), filters=[["language", "==", "en"]])


def test_a_filter_of_a_column_of_dates(tmp_path):
    """YAML gives `date` for 2019-03-01 without quotes."""
    days = [date(2019, number % 12 + 1, 15) for number in range(60)]
    path, preset = write_parquet(tmp_path / "a.parquet", TEXTS, day=days), tmp_path / "corpus.yaml"
    preset.write_text(f"sources: [{{name: s, files: {path}, filters: [[day, <, 2019-03-01]]}}]")
    corpus = hash_files(resolve(read_corpus(preset)), tmp_path)
    rows = list(reading.file_rows(corpus, corpus.sources[0], "train", str(path)))
    assert rows[-1].number == sum(day < date(2019, 3, 1) for day in days) == 10
    other = dataclasses.replace(corpus.sources[0], filters=[["day", "<", date(2019, 4, 1)]])
    assert corpus_fingerprint(corpus) != corpus_fingerprint(dataclasses.replace(corpus, sources=[other]))


def test_held_out_documents_are_no_training_documents(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", TEXTS + TEXTS[:30])  # half of the texts twice
    train, validation = (texts_of(of_split=name, files=path, share=0.3) for name in ("train", "validation"))
    assert not set(train) & set(validation)  # copies are in the same split
    assert set(train) | set(validation) == set(TEXTS) and len(train) + len(validation) == 90
    assert 5 < len(set(validation)) < 35
    assert texts_of(of_split="validation", files=path, share=0.3, seed=9) == validation


def test_docstrings_are_documents(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path))
    monkeypatch.setattr("roberta_recipe.data.docstrings.MAX_BYTES", 300_000)
    texts = texts_of(builtin="docstrings")
    assert 300_000 <= sum(len(text.encode()) for text in texts) < 400_000
    assert len(set(texts)) == len(texts) and all(text.strip() for text in texts)
    assert any("Abstract Base Classes" in text for text in texts)  # abc.py's: the standard library comes first
    monkeypatch.setattr("roberta_recipe.data.docstrings._collect", pytest.fail)
    assert texts_of(builtin="docstrings") == texts  # cached


# Content


@pytest.fixture
def big_file(tmp_path):
    """(JSONL file of about 900 KB, function that makes its corpus)."""
    path = tmp_path / "a.jsonl"
    write_jsonl(path, make_documents(3000, seed=1))
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


def test_a_fingerprint_says_how_text_files_are_read(tmp_path):
    """Blocks from before blank lines were handled are refused; those of other formats are not."""
    for kind, write in {"jsonl": write_jsonl, "txt": write_text, "parquet": write_parquet}.items():
        corpus = corpus_of("c", [Source("s", files=write(tmp_path / f"a.{kind}", TEXTS))])
        assert ("text_files" in corpus_fingerprint(corpus)) == (kind == "txt")


def test_a_file_is_hashed_once_for_a_run_until_it_changes(big_file, tmp_path, monkeypatch):
    path, kept = big_file[0], tmp_path / "run" / HASHES_NAME
    hashed, sha256 = [], durable.sha256
    monkeypatch.setattr(durable, "sha256", lambda name: hashed.append(name) or sha256(name))
    corpus = resolve(Corpus("c", [Source("s", files=str(path))]))

    def fingerprint(folder="run"):
        return corpus_fingerprint(hash_files(corpus, tmp_path / folder))

    young = fingerprint()
    assert fingerprint() == young and len(hashed) == 2  # a file so young may change and keep its times
    monkeypatch.setattr(corpora, "_MTIME_RESOLUTION_NS", -(10**9))
    first = fingerprint()
    assert fingerprint() == first == young and len(hashed) == 3 and kept.exists()
    assert fingerprint("another") == first and len(hashed) == 4  # of another run
    checkpoint._prepare_folder(tmp_path / "run", max_steps=1)  # a run that was killed so early begins there,
    assert token_cache.create_or_check(tmp_path / "another", {})  # and so does a token cache
    kept.write_bytes(kept.read_bytes().replace(b"sum", b"sun"))
    assert fingerprint() == first and len(hashed) == 5
    known = durable.read_sealed(kept)["files"]
    changed = {name: [[*values[:-1], "0" * 32], stamp] for name, (values, stamp) in known.items()}
    durable.write_sealed(kept, {"files": changed})
    assert fingerprint() != first and len(hashed) == 5  # it is really taken from there
    change_the_middle(path)
    assert fingerprint() != first and len(hashed) == 6


def test_a_file_that_changes_in_mid_run_is_named(big_file, tokenizer):
    path, make = big_file
    content = path.read_bytes()
    reader = TextReader(make(), tokenizer, packer="full_sentences", max_seq_length=512, seed=0)
    os.utime(path, ns=(0, 0))  # other times, the same content
    corpora.check_unchanged(reader.corpus)
    change_the_middle(path)
    with pytest.raises(RunError, match=r"a.jsonl was changed, replaced or removed during this run.*Restore"):
        corpora.check_unchanged(reader.corpus)
    with pytest.raises(RunError, match=r"a.jsonl was changed"):  # when it is read to its end
        list(blocks_at(reader, [(range(2000),)]))
    path.unlink()
    with pytest.raises(RunError, match=r"a.jsonl was changed, replaced or removed"):
        corpora.check_unchanged(reader.corpus)
    path.write_bytes(content)
    corpora.check_unchanged(reader.corpus)


def test_other_times_are_looked_into_once(big_file, monkeypatch):
    path, make = big_file
    corpus, hashed, sha256 = make(), [], durable.sha256
    monkeypatch.setattr(durable, "sha256", lambda name: hashed.append(name) or sha256(name))
    path.chmod(0o600)
    for _ in range(3):
        corpora.check_unchanged(corpus)
    assert hashed == [str(path)]


def test_a_file_that_cannot_be_hashed_is_named(big_file, monkeypatch):
    """Also with `on_bad_shard: skip`, with which reading it is a warning."""
    monkeypatch.setattr(durable, "sha256", lambda name: os.stat(f"{name}.absent"))
    with pytest.raises(InputError, match=r"cannot be hashed: .* No such file or directory: .*a.jsonl.absent"):
        big_file[1](on_bad_shard="skip")


def test_a_file_that_is_cut_in_mid_run_is_not_skipped(big_file):
    """`on_bad_shard: skip` is for files that were bad at the start of the run."""
    path, make = big_file
    corpus = make(on_bad_shard="skip")
    path.write_bytes(path.read_bytes()[:400_000])  # ends within a line
    with pytest.raises(RunError, match=r"a.jsonl was changed"):
        list(reading.documents(corpus, corpus.sources[0], "train", seed=0))


def test_a_remote_file_is_known_by_size_and_version(monkeypatch):
    with fsspec.open("memory://identity/a.txt", "w") as stream:
        stream.write("One.")
    corpus = corpus_of("c", [Source("s", files="memory://identity/a.txt")])
    ((path, identity),) = corpus.file_hashes.items()
    assert identity == ([path, 4, None], None) and path.startswith("memory://")
    corpora.check_unchanged(corpus)
    hub = f"hf://datasets/org/data@{'0123' * 10}/a.parquet"
    assert corpora._hash_file(hub).values == [hub]
    system = types.SimpleNamespace(info=lambda name: {"size": 4, "blob_id": "ab", "last_commit": None})
    monkeypatch.setattr(fsspec.core, "url_to_fs", lambda path: (system, path))
    for branch in ("", "@main", "@~parquet"):  # whose files may change
        hub = f"hf://datasets/org/data{branch}/a.parquet"
        assert corpora._hash_file(hub).values == [hub, 4, "ab"]


@pytest.mark.parametrize("own_source", [True, False])
def test_a_validation_file_that_is_trained_on_is_refused(tmp_path, own_source):
    """By content, under any name."""
    train, other = (write_parquet(tmp_path / f"{n}.parquet", make_documents(20, seed=n)) for n in (1, 2))
    copy = shutil.copy(train, tmp_path / "held_out.parquet")
    sources = [
        Source("a", files=train, weight=1.0, validation_files=str(copy) if own_source else None),
        Source("b", files=other, weight=1.0, validation_files=None if own_source else str(copy)),
    ]
    with pytest.raises(InputError, match=r"validation file .*held_out.parquet is the training file .*1.parquet"):
        corpus_of("c", sources)
    write_parquet(copy, TEXTS)
    corpus_of("c", sources)
    for number in (1, 2):  # empty shards are alike
        (tmp_path / f"{number}").mkdir()
        write_text(tmp_path / f"{number}" / "a.txt", TEXTS[number::2])
        (tmp_path / f"{number}" / "empty.txt").touch()
    corpus_of("c", [Source("a", files=str(tmp_path / "1"), validation_files=str(tmp_path / "2"))])


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
    for name, text in reading.sample_documents(resolve(Corpus("c", sources)), "train", max_bytes=40_000, seed=0):
        sizes[name] += len(text.encode())
    assert 40_000 <= sum(sizes.values()) < 41_000 and abs(sizes["a"] / sum(sizes.values()) - 0.75) < 0.03


# Presets


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sources: []", "`sources:` must be a list"),
        ("sources: [{name: a}]", "source 'a' must have exactly one of dataset, files, builtin"),
        ("sources: [{name: a, files: x, builtin: docstrings}]", "exactly one of"),
        ("sources: [{name: a, fils: x}]", "unknown key 'fils'; did you mean 'files'"),
        ("sources: [{files: x}]", "has no name"),
        ("sources: [{name: a, files: x, size_gb: big}]", "size_gb is 'big', and must be a valid number"),
        ("sources: [{name: a, files: x, weight: 0}]", "weight is 0, and must be greater than 0"),
        ("sources: [{name: a, files: x, weight: .inf}]", "weight is inf, and must be a finite number"),
        ("sources: [{name: a, dataset: org/data}]", "pin the dataset 'org/data' with `revision:`"),
        ("sources: [{name: a, files: x, weight: 1.0e-9}, {name: b, files: y, weight: 1}]", "has a share of 1e-09"),
        ("sources: [{name: a, files: x, filters: [[lang, en]]}]", "filters=[['lang', 'en']] is not a list of [column"),
        ("sources: [{name: a, files: x, filters: [[lang, is, en]]}]", '"is" is not a valid operator'),
        ("sources: [{name: ../../escaped, files: x}]", "a name must be 1 to 60 letters, digits"),
        ('sources: [{name: "a\\n", files: x}]', "a name must be 1 to 60 letters, digits"),
        ("sources: [{name: a, files: x, weight: 1}, {name: b, files: y}]", "every source needs a share"),
        ("sources: [{name: a, files: x, weight: 1}, {name: b, files: y, size_gb: 1}]", "every source needs a share"),
        ("sources: [{name: a, files: x, weight: 1}, {name: a, files: y, weight: 1}]", "two sources are named 'a'"),
        ("validation_share: 1.5\nsources: [{name: a, files: x}]", "validation_share is 1.5"),
        ("language: english\nsources: [{name: a, files: x}]", "language is 'english'"),
        (
            "language: no\nsources: [{name: a, files: x}]",
            "language is False, and must be a valid string; put it in quotes",
        ),
        ("sources: [{name: a, dataset: x/y, config: 2022-03-01, revision: a}]", "put it in quotes"),
        ("sources: [{name: a, files: '${NO_SUCH_FOLDER}/*.txt'}]", "environment variable NO_SUCH_FOLDER is not set"),
    ],
)
def test_bad_corpus_presets(tmp_path, text, message):
    path = tmp_path / "corpus.yaml"
    path.write_text(text)
    with pytest.raises(InputError) as error:
        read_corpus(path)
    assert message in str(error.value)


def test_a_preset_may_name_a_source_train_file():
    """The name that the command line gives its files; this source has none."""
    assert in_words(Corpus("mine", [Source("train_file", builtin="docstrings")])) == "mine: train_file 100.0%"


def test_a_preset_names_its_folder_by_a_variable(tmp_path, monkeypatch):
    """The same files in another folder are the same corpus."""
    preset, found = tmp_path / "domains.yaml", []
    preset.write_text("sources: [{name: a, files: ['${MY_DOMAINS}/train-*'], validation_files: '${MY_DOMAINS}/valid'}]")
    for folder in ("here", "elsewhere"):
        for name, texts in (("train-0.parquet", TEXTS[:40]), ("valid/a.parquet", TEXTS[40:])):
            (tmp_path / folder / name).parent.mkdir(exist_ok=True, parents=True)
            write_parquet(tmp_path / folder / name, texts)
        monkeypatch.setenv("MY_DOMAINS", str(tmp_path / folder))
        corpus = hash_files(resolve(read_corpus(preset)), tmp_path / "run")
        splits = [
            list(reading.documents(corpus, corpus.sources[0], split, seed=0)) for split in ("train", "validation")
        ]
        assert splits == [TEXTS[:40], TEXTS[40:]] and folder in corpus.files(corpus.sources[0], "train")[1][0]
        found.append(corpus_fingerprint(corpus))
    assert found[0] == found[1]


def test_the_preset_of_the_reference_runs_gives_the_mixture_of_their_records(root, monkeypatch):
    """Each source's blocks are those of the mixture, and those that are left of its last chunk."""
    monkeypatch.setenv("FIVE_DOMAINS", "/nowhere")
    corpus = read_corpus("presets/corpus/five_domains.yaml")
    for name, blocks in (("roberta_mini", 416_000), ("roberta_h100", 2_996_736)):
        record = json.loads((root / "results" / name / "run_record.json").read_text())
        counts = record["counts"]["train"]
        taken = blocks_by_source(corpus.shares, record["steps"] * record["resolved_args"]["global_batch_size"])
        assert [source.name for source in corpus.sources] == list(counts) and sum(taken) == blocks
        left = [source["blocks"] - own for own, source in zip(taken, counts.values(), strict=True)]
        assert all(0 <= one < 20_000 for one in left), left  # a chunk has 8 MB
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


# Errors before training


@pytest.mark.parametrize(
    "row", ['{"body": "%s", "html": "' + "x" * 900 + '"}', '{"body": "%s"}', '{"text": "%s"}', "[", ""]
)
def test_the_size_of_json_lines_is_that_of_their_text(tmp_path, row):
    """Other columns and escaped characters do not count; a file without the column counts as it is."""
    text = "\u4e2d\u6587" * 20
    line = row % json.dumps(text)[1:-1] if "%s" in row else row
    (tmp_path / "a.jsonl").write_text(f"{line}\n" * 30 if row else "")
    size = corpora.text_bytes(corpus_of("c", [Source("s", files=str(tmp_path / "a.jsonl"), text_column="body")]))
    assert size == (30 * len(text.encode()) if "body" in row else (tmp_path / "a.jsonl").stat().st_size)


def test_small_files_are_warned_of(tmp_path, caplog):
    (tmp_path / "many").mkdir()
    for number in range(20):
        write_text(tmp_path / "many" / f"{number}.txt", TEXTS)
    write_text(tmp_path / "one.txt", TEXTS)
    length = len(TEXTS) * max(map(len, TEXTS))  # more than all of a file's tokens
    for files, expected in ((tmp_path / "many", 1), (tmp_path / "one.txt", 0)):
        corpus = corpus_of("c", [Source("s", files=str(files))])
        pretraining.warn_of_small_files(corpus, corpora.text_bytes(corpus), length)
        assert caplog.text.count("20 files of") == expected
        caplog.clear()
    corpus = corpus_of("c", [Source("s", files=str(tmp_path / "many"))])
    pretraining.warn_of_small_files(corpus, corpora.text_bytes(corpus), 1)
    assert not caplog.text


def test_a_text_file_without_blank_lines_is_warned_of(tmp_path, caplog, monkeypatch):
    """Also where a validation file is named: all of it is packed at once."""
    monkeypatch.setattr(reading, "_HUGE", 2000)
    for name, separator in (("lines.txt", "\n"), ("documents.txt", "\n\n")):
        (tmp_path / name).write_text(separator.join(TEXTS))
    write_text(tmp_path / "held_out.txt", make_documents(20, seed=1))
    write_parquet(tmp_path / "one.parquet", ["\n".join(TEXTS)])
    for name, expected in (("lines.txt", 1), ("documents.txt", 0), ("one.parquet", 0)):
        caplog.clear()
        check(tmp_path / name, validation_files=str(tmp_path / "held_out.txt"))
        assert caplog.text.count("Only blank lines separate documents in .txt") == expected


def test_files_that_cannot_be_read_are_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_text(tmp_path / "a.txt", TEXTS)
    with pytest.raises(InputError, match="'' does not exist, or has no file"):  # of an unset variable of the shell
        resolve(corpora.corpus_of_files([""], None, "text"))
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a.docx").write_text("x")
    for where in (tmp_path / "absent.parquet", folder):
        with pytest.raises(InputError, match=r"does not exist, or has no file that can be read: .parquet, .jsonl"):
            check(where)
    write_text(folder / "a.txt", TEXTS)
    write_jsonl(folder / "b.jsonl", TEXTS)
    with pytest.raises(InputError, match=r"mixes formats \(json, text\)"):
        check(folder)


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_a_column_that_is_not_there(tmp_path, kind):
    """In one file of several; an empty file is no error."""
    write = write_parquet if kind == "parquet" else write_jsonl
    write(tmp_path / f"a.{kind}", TEXTS)
    write(tmp_path / f"b.{kind}", pa.array([], pa.string()) if kind == "parquet" else [])
    check(tmp_path)
    path = write(tmp_path / f"c.{kind}", TEXTS, column="body")
    with pytest.raises(InputError, match=rf"{path}.*text_column"):
        check(tmp_path)
    check(path, text_column="body")


def test_a_source_without_text_is_empty(tmp_path):
    write_parquet(tmp_path / "blank.parquet", ["", " ", None])
    (tmp_path / "none.txt").write_text("")
    for name in ("blank.parquet", "none.txt"):
        with pytest.raises(InputError, match=r"source 's' is empty"):
            check(tmp_path / name)
    write_parquet(tmp_path / "null.parquet", pa.array([None] * 20, pa.string()))
    with pytest.raises(InputError, match=r"no row of .*null.parquet has a 'text'"):
        check(tmp_path / "null.parquet")


def test_a_corpus_must_hold_out_a_document(tmp_path, caplog):
    few, many = (write_parquet(tmp_path / f"{count}.parquet", make_documents(count, seed=1)) for count in (2, 600))
    with pytest.raises(InputError, match="no document is held out of s"):
        check(few)
    sources = [Source(name, files=path, weight=1.0) for name, path in (("few", few), ("many", many))]
    reading.check_sources(resolve(Corpus("mixture", sources)))
    assert "no document is held out of few" in caplog.text


@pytest.mark.parametrize(
    "names",
    [
        ["train-0.txt", "test-0.txt"],
        ["train/test.txt", "validation/b.txt"],
        ["data/train.txt", "data/dev.txt"],
        ["train-data/a.txt", "test-data/b.txt"],
    ],
)
def test_a_folder_with_several_splits_is_refused(tmp_path, names):
    """As a data set downloaded from the Hub has, whose test set would be trained on."""
    for name in [*names, "README.md"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_text(tmp_path / name, make_documents(3, seed=0))
    with pytest.raises(InputError, match=r"has files of several splits \(") as refused:
        corpora.resolve(corpora.corpus_of_files([str(tmp_path)], None, "text"))
    for named, files in zip(re.findall("'(.*?)'", str(refused.value)), (1, 2), strict=True):  # as it advises
        corpus = corpora.resolve(corpora.corpus_of_files([named], None, "text"))
        assert len(corpus.files(corpus.sources[0], "train")[1]) == files
    (tmp_path / names[1]).rename(tmp_path / "latest-test-results.txt")
    corpora.resolve(corpora.corpus_of_files([str(tmp_path)], None, "text"))
