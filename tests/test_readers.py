"""Reading files: documents of each format, damaged and truncated files, bad rows, retries of remote reads."""

import bz2
import dataclasses
import functools
import gzip
import http.server
import io
import itertools
import json
import lzma
import random
import threading

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from backports import zstd
from conftest import corpus_of, make_documents, write_parquet
from hypothesis import given, settings
from hypothesis import strategies as st
from test_corpus import TEXTS, check, texts_of

from roberta_recipe.data import corpus as corpora
from roberta_recipe.data import documents as reading
from roberta_recipe.data.chunks import TextReader
from roberta_recipe.data.corpus import Source
from roberta_recipe.data.stream import blocks_at, consumed, count_table
from roberta_recipe.errors import InputError

CHECKSUM = {zstd.CompressionParameter.checksum_flag: 1}
COMPRESS = {
    "": bytes,
    ".gz": functools.partial(gzip.compress, mtime=0),
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": functools.partial(zstd.compress, options=CHECKSUM),
}
DOCUMENTS = ["One é.", "Two.\nStill two.", "Three."]
CONTENT = {  # by suffix: a file of DOCUMENTS
    ".txt": "\n\n".join(DOCUMENTS).encode(),
    ".jsonl": "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in DOCUMENTS).encode(),
    ".json": json.dumps([{"text": text} for text in DOCUMENTS], ensure_ascii=False).encode(),
}
FORMAT = {".txt": "text", ".jsonl": "json", ".json": "json"}


def read(path, start=0):
    """The documents of a file; None for an unreadable row."""
    kind = next(FORMAT[suffix] for suffix in path.suffixes if suffix in FORMAT)
    rows = reading.read_file(Source("s", files=str(path)), kind, str(path), start)
    return [row if isinstance(row, str) else None for row in rows]


def skipped(path, start=0):
    """(row number, text) of a file's documents under `on_bad_shard: skip`, lost rows, and files that end early."""
    source = Source("s", files=str(path))
    corpus = corpus_of("c", [source], validation_share=1e-9, on_bad_shard="skip")
    rows = list(reading.file_rows(corpus, source, "train", str(path), start))
    documents = [(row.number, row.text) for row in rows if row.text is not None]
    return documents, sum(row.lost_rows for row in rows), sum(row.bad_files for row in rows)


# Formats


PIECES = ["One.", "é ", "\u200b", " ", "\t", "\u00a0", "\u2028", "\x0c", "\ufeff", *["\n", "\r\n", "\r", "\n\n"] * 2]


def documents_by_definition(text):
    """Reference: documents of a text with Python's line ends."""
    lines = ["\n" if not line.strip() else line for line in io.StringIO(text)]
    return [document for document in "".join(lines).split("\n\n") if document]


def test_random_text_files_have_the_documents_of_the_definition(tmp_path):
    """Starting from every row; without blank lines, documents equal those of `datasets`."""
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


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_documents_are_those_of_datasets(tmp_path, suffix):
    """JSON lines, lists and Parquet files that `datasets` reads correctly."""
    for seed in range(8):
        rng = random.Random(seed)
        texts = ["".join(rng.choices(PIECES, k=rng.randint(1, 9))) for _ in range(rng.randint(1, 30))]
        rows = [{"number": number, "text": text, "more": {"a": [1]}} for number, text in enumerate(texts)]
        compression = list(COMPRESS)[seed % 4] if suffix != ".parquet" else ""
        path, kind = tmp_path / f"{seed}{suffix}{compression}", "parquet" if suffix == ".parquet" else "json"
        if suffix == ".parquet":
            write_parquet(path, texts)
        else:
            lines = "\n".join(json.dumps(row, ensure_ascii=seed % 2 == 0) for row in rows)
            path.write_bytes(COMPRESS[compression]((lines if suffix == ".jsonl" else json.dumps(rows)).encode()))
        theirs = datasets.load_dataset(kind, data_files=str(path), split="train", streaming=True)
        assert list(reading.read_file(Source("s", files=str(path)), kind, str(path))) == [row["text"] for row in theirs]


def test_a_json_list_of_objects_or_strings(tmp_path):
    path = tmp_path / "a.json"
    for rows in (["One.", "", None, "Two."], [{"text": "One."}, {"text": ""}, {"other": 3}, {"text": "Two."}]):
        for content in (json.dumps(rows), "\n " + json.dumps(rows, indent=2), "\ufeff" + json.dumps(rows) + "\n\n"):
            path.write_text(content, encoding="utf-8")
            for start in range(5):
                assert read(path, start) == ["One.", "", None, "Two."][start:]
    path.write_text(json.dumps([{"text": "One."}, {"text": 5}, 7, {"text": "\ud83d"}, "Two.", []]))
    assert skipped(path) == ([(0, "One."), (4, "Two.")], 4, 0)
    with pytest.raises(InputError, match=r"element 2 holds int, not text \(row 1\)"):
        texts_of(files=str(path))
    path.write_text(json.dumps([{"text": "One."}])[:-1])
    assert skipped(path) == ([], 0, 1)


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_parquet_and_arrow_give_the_text_column_from_every_row(tmp_path, kind):
    """Next to columns of types that `datasets` lacks, or with the same name nested inside."""
    texts = [f"Document {number}" for number in range(700)]
    others = {
        "meta": pa.array([{"text": None}] * 700, pa.struct({"text": pa.string()})),
        "map": pa.array([[("a", "b")]] * 700, pa.map_(pa.string(), pa.string())),
    }
    table = pa.table({**others, "text": pa.array(texts).cast(kind), "language": ["en", "de"] * 350})
    pa.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=150)
    for name, new in (("a.arrow", pa.ipc.new_stream), ("b.arrow", pa.ipc.new_file)):
        with pa.OSFile(str(tmp_path / name), "wb") as sink, new(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=130)
    filters = [["language", "==", "en"]]
    for name, condition in (("a.parquet", None), ("a.parquet", filters), ("a.arrow", None), ("b.arrow", None)):
        source = Source("s", files=str(tmp_path / name), filters=condition)
        wanted = texts[::2] if condition else texts
        for start in (0, 1, 129, 130, 149, 150, 151, 256, len(wanted) - 1, len(wanted)):
            rows = reading.read_file(source, name.split(".")[1], str(tmp_path / name), start)
            assert list(rows) == wanted[start:], (name, start)
    with pytest.raises(InputError, match=r"row 0 holds dict, not text"):
        check(tmp_path / "a.parquet", text_column="meta")


def test_a_text_file_is_not_read_whole():
    stream = io.BytesIO(b"A line.\n \n" * 100_000)
    rows = reading.READERS["text"](stream, "text")
    assert list(itertools.islice(rows, 7)) == ["A line."] * 7 and stream.tell() < 100_000


# Truncated and damaged files


@pytest.mark.parametrize("compression", COMPRESS)
@pytest.mark.parametrize("suffix", CONTENT)
def test_a_file_cut_anywhere_is_refused_or_ends_between_two_members(tmp_path, suffix, compression):
    """At every byte. Cut between two complete members, the file is a valid shorter file."""
    content, borders, archive = CONTENT[suffix], {0: 0}, b""
    step = -(-len(content) // 3)
    for begin in range(0, len(content), step):
        archive += COMPRESS[compression](content[begin : begin + step])
        borders[len(archive)] = min(begin + step, len(content))
    path, plain = tmp_path / f"cut{suffix}{compression}", tmp_path / f"plain{suffix}"
    for cut in range(len(archive) + 1):
        path.write_bytes(archive[:cut])
        kept = borders.get(cut) if compression else cut
        plain.write_bytes(content[: kept or 0])
        try:
            rows = read(path)
        except InputError as error:
            assert f"cannot read {path}" in str(error) or "no row" in str(error)
            if kept:  # a .xz of no bytes is no archive
                with pytest.raises(InputError):
                    read(plain)
        else:
            assert kept is not None, cut
            assert rows == read(plain) and rows[:-1] == DOCUMENTS[: max(len(rows) - 1, 0)], cut
    assert rows == DOCUMENTS


@pytest.mark.parametrize("compression", [".gz", ".bz2", ".xz", ".zst"])
def test_a_flipped_bit_anywhere_is_refused_or_changes_nothing(tmp_path, compression):
    """In one member of an .xz file: lzma ignores trailing data that is no member."""
    content, split = CONTENT[".txt"], 0 if compression == ".xz" else 20
    whole = b"".join(COMPRESS[compression](part) for part in (content[:split], content[split:]) if part)
    path, refused = tmp_path / f"a.txt{compression}", 0
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        try:
            assert read(path) == DOCUMENTS, place
        except InputError as error:
            assert "cannot read" in str(error)
            refused += 1
    assert refused > 0.7 * len(whole)
    path.write_bytes(b"\0" * 512)  # what a file system leaves of a file that it had not yet written
    with pytest.raises(InputError, match="cannot read"):
        read(path)


def test_an_arrow_file_cut_anywhere_is_refused(tmp_path):
    datasets.Dataset.from_dict({"text": [f"Document {n}" for n in range(40)]}).save_to_disk(str(tmp_path / "saved"))
    (path,) = (tmp_path / "saved").glob("*.arrow")
    whole, source = path.read_bytes(), Source("s", files=str(path))
    assert len(list(reading.read_file(source, "arrow", str(path)))) == 40
    for cut in range(0, len(whole), 5):
        path.write_bytes(whole[:cut])
        with pytest.raises(InputError, match="cannot read"):
            list(reading.read_file(source, "arrow", str(path)))


# Bad rows


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just("2020-01-01"),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
BAD_ROWS = [
    (b"{broken", "is not JSON"),
    (b'{"text": "x"} {"text": "y"}', "is not JSON"),
    (b'{"text": "Caf\xe9"}', "is not UTF-8 (character 3): convert it"),
    (b'{"text": "\\ud83d"}', "is not UTF-8 (character 0): half a surrogate pair"),
    (b'{"text": 3}', "holds int, not text"),
    (b'{"text": ["x"]}', "holds list, not text"),
    (b'{"text": {"x": "y"}}', "holds dict, not text"),
    (b"[1, 2]", "holds list, not text"),
    (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "is not JSON"),
]
GOOD_ROW = st.tuples(st.text(), st.dictionaries(st.text(max_size=3).filter("text".__ne__), JSON_VALUES, max_size=3))


@settings(max_examples=40)
@given(st.lists(GOOD_ROW | st.sampled_from(BAD_ROWS), max_size=12), st.sampled_from(["\n", "\r\n", "\n \n"]))
def test_a_bad_row_loses_itself_and_other_columns_never_matter(tmp_path_factory, rows, line_end):
    """Also starting from every row. The first row keeps the file from being a single JSON list."""
    path, rows = tmp_path_factory.mktemp("rows") / "a.jsonl", [("first", {}), *rows]
    lines = [row[0] if isinstance(row[0], bytes) else json.dumps({"text": row[0], **row[1]}).encode() for row in rows]
    path.write_bytes(line_end.encode().join(lines))
    good = [(number, row[0]) for number, row in enumerate(rows) if isinstance(row[0], str) and row[0].strip()]
    bad = [(number, row) for number, row in enumerate(rows) if isinstance(row[0], bytes)]
    for start in range(len(rows) + 1):
        wanted = [document for document in good if document[0] >= start]
        assert skipped(path, start) == (wanted, sum(number >= start for number, _ in bad), 0)
    if bad:
        (row, (_, reason)), lines_per_row = bad[0], 1 + line_end.count(" ")
        with pytest.raises(InputError) as error:
            texts_of(files=str(path))
        assert f"line {row * lines_per_row + 1} {reason}" in str(error.value) and f"(row {row})" in str(error.value)


@pytest.mark.parametrize("compression", ["", ".zst"])
def test_a_bad_line_of_text_loses_its_document(tmp_path, compression, caplog):
    pieces = [*DOCUMENTS, "Caf\udce9.\nMore of it.", "Five.", "Six\udcff", "", "\udc80", "Seven."]
    content, path = "\n\n".join(pieces).encode(errors="surrogateescape"), tmp_path / f"a.txt{compression}"
    path.write_bytes(COMPRESS[compression](content))
    good = [(0, DOCUMENTS[0]), (1, DOCUMENTS[1]), (2, DOCUMENTS[2]), (4, "Five."), (7, "Seven.")]
    for start in range(9):
        wanted = [document for document in good if document[0] >= start]
        assert skipped(path, start) == (wanted, sum(row >= start for row in (3, 5, 6)), 0)
    assert caplog.text.count("at line 8 is not UTF-8 (character 3)") == 4  # once a pass that meets it
    with pytest.raises(InputError, match=r"the document at line 8 is not UTF-8 .*iconv.*\(row 3\); fix or remove"):
        check(path)


@pytest.mark.parametrize("suffix", [".txt", ".jsonl"])
def test_lost_rows_are_in_the_counts_of_a_run(tmp_path, tokenizer, suffix):
    texts, path = make_documents(60, seed=1), tmp_path / f"a{suffix}"
    rows = [json.dumps({"text": text}) for text in texts] if suffix == ".jsonl" else texts
    rows[7] = rows[30] = rows[59] = "Caf\udce9"
    path.write_bytes("\n\n".join(rows).encode(errors="surrogateescape"))
    corpus = corpus_of("c", [Source("s", files=str(path))], validation_share=1e-9, on_bad_shard="skip")
    reader = TextReader(corpus, tokenizer, packer="full_sentences", max_seq_length=512, seed=0)
    next(blocks_at(reader, [(range(1),)]))
    once = count_table(reader, "train")["s"]
    assert once["lost_rows"] == 3 and once["documents"] >= 57 and once["bad_files"] == 0
    assert consumed(reader, 2 * once["blocks"]) == ({"s": {name: 2 * n for name, n in once.items()}}, {"s": 2})


# Remote files


class Server(http.server.BaseHTTPRequestHandler):
    """A folder over HTTP; the first `failures` requests get status 503."""

    failures, modified = 0, "Mon, 06 Jan 2025 00:00:00 GMT"
    files = {  # noqa: RUF012
        "/text/": b'<a href="a.txt">a</a> <a href="b.txt">b</a> <a href=".c.txt">c</a>',
        "/text/a.txt": "\n\n".join(TEXTS[:30]).encode(),
        "/text/b.txt": "\n\n".join(TEXTS[30:]).encode(),
        "/text/.c.txt": b"Hidden.",
    }

    def do_GET(self):
        status, content = (200, self.files[self.path]) if self.path in self.files else (404, b"")
        if Server.failures:
            Server.failures -= 1
            status, content = 503, b""
        self.send_response(status)
        self.send_header("Content-Type", "text/html" if self.path.endswith("/") else "text/plain")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Last-Modified", self.modified)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    do_HEAD = do_GET

    def log_message(self, *args):
        pass


def test_files_over_http_are_listed_read_and_retried(monkeypatch, caplog, tmp_path):
    monkeypatch.setattr(reading, "RETRY_DELAYS_S", (0.01,) * 3)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/text/"
        for pattern, wanted in (("a.txt", TEXTS[:30]), ("*.txt", TEXTS), ("", TEXTS)):
            assert sorted(texts_of(files=url + pattern)) == sorted(wanted), pattern
        corpus = corpus_of("c", [Source("s", files=f"{url}a.txt")], validation_share=1e-9)
        Server.failures = 3
        assert list(reading.documents(corpus, corpus.sources[0], "train", seed=0)) == TEXTS[:30]
        assert Server.failures == 0 and "503" in caplog.text and "retry in 0.01 s" in caplog.text
        Server.failures = 1000
        for on_bad_shard in ("raise", "skip"):  # an outage is no bad file
            corpus = dataclasses.replace(corpus, on_bad_shard=on_bad_shard)
            with pytest.raises(InputError, match=rf"cannot read {url}a.txt: .*503"):
                list(reading.documents(corpus, corpus.sources[0], "train", seed=0))
        Server.failures = 0
        with pytest.raises(InputError, match=r"cannot list '.*none.txt'"):
            texts_of(files=f"{url}none.txt")

        versions = set()
        for Server.modified in ("Mon, 06 Jan 2025 00:00:00 GMT", "Tue, 07 Jan 2025 00:00:00 GMT"):
            versions.add(str(corpora.hash_files(corpus, tmp_path).file_hashes[f"{url}a.txt"].values))
        assert len(versions) == 2  # the server has no ETag


@pytest.mark.parametrize("name", ["bad.txt.gz", "bad.txt.xz", "bad.parquet"])
def test_a_damaged_file_over_http_is_a_bad_shard(monkeypatch, tmp_path, name):
    monkeypatch.setattr(reading, "RETRY_DELAYS_S", (0.01,))
    path, text = tmp_path / name, "\n\n".join(TEXTS).encode()
    if name.endswith("parquet"):
        pq.write_table(pa.table({"text": TEXTS}), path, compression="snappy")
        content = bytearray(path.read_bytes())
        content[40:80] = bytes(40)
    else:
        content = {"gz": gzip, "xz": lzma}[name[-2:]].compress(text)[:-40]
    monkeypatch.setitem(Server.files, f"/text/{name}", bytes(content))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/text/{name}"
        corpus = corpus_of("c", [Source("s", files=url)], validation_share=1e-9, on_bad_shard="skip")
        assert len(list(reading.documents(corpus, corpus.sources[0], "train", seed=0))) < len(TEXTS)
        with pytest.raises(reading.BadShard, match="on_bad_shard: skip"):
            list(reading.read_file(corpus.sources[0], corpus.files(corpus.sources[0], "train")[0], url))
        server.shutdown()
    with pytest.raises(InputError, match=r"cannot list 'gs://a/b.txt' .*gcsfs"):
        texts_of(files="gs://a/b.txt")


def test_a_local_file_that_cannot_be_opened_is_not_retried(tmp_path, monkeypatch):
    monkeypatch.setattr("time.sleep", pytest.fail)
    with pytest.raises(InputError, match=r"cannot read .*none.txt: FileNotFoundError"):
        read(tmp_path / "none.txt")
