"""Reading files: cut and damaged archives, bad rows, types that change, hidden files, saved datasets."""

import bz2
import errno
import functools
import gzip
import http.server
import io
import itertools
import json
import lzma
import random
import struct
import tarfile
import threading
import zlib

import datasets
import fsspec
import pyarrow as pa
import pytest
from backports import zstd
from conftest import corpus_of, make_documents, write_jsonl, write_parquet, write_text
from hypothesis import given
from hypothesis import strategies as st
from test_corpus import PIECES, TEXTS, check, texts_of

from roberta_recipe.data import documents as reading
from roberta_recipe.data.chunks import TextReader
from roberta_recipe.data.corpus import Corpus, Source, identified, read_corpus, resolve
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


def read(path, start=0, **source):
    """The documents of a file; a row that cannot be read is None."""
    kind = next(FORMAT[suffix] for suffix in path.suffixes if suffix in FORMAT)
    rows = reading.read_file(Source("s", files=str(path), **source), kind, str(path), start)
    return [row if isinstance(row, str) else None for row in rows]


def skipped(path, start=0, **source):
    """(row number, text) of the documents of a file under `on_bad_shard: skip`, lost rows, and files that broke off."""
    source = Source("s", files=str(path), **source)
    corpus = corpus_of("c", [source], validation_share=1e-9, on_bad_shard="skip")
    rows = list(reading.file_rows(corpus, source, "train", str(path), start))
    documents = [(row.number, row.text) for row in rows if row.text is not None]
    return documents, sum(row.lost_rows for row in rows), sum(row.bad_files for row in rows)


# Cut and damaged files


@pytest.mark.parametrize("members", [1, 3])
@pytest.mark.parametrize("compression", COMPRESS)
@pytest.mark.parametrize("suffix", CONTENT)
def test_a_file_cut_anywhere_is_refused_or_ends_between_two_members(tmp_path, suffix, compression, members):
    """At every byte. Between two complete members, the file is the file of the members before."""
    content, borders, archive = CONTENT[suffix], {0: 0}, b""
    step = -(-len(content) // members)
    for begin in range(0, len(content), step):
        archive += COMPRESS[compression](content[begin : begin + step])
        borders[len(archive)] = min(begin + step, len(content))
    path, plain = tmp_path / f"cut{suffix}{compression}", tmp_path / f"plain{suffix}"
    outcomes = {"read": 0, "refused": 0}
    for cut in range(len(archive) + 1):
        path.write_bytes(archive[:cut])
        kept = borders.get(cut) if compression else cut
        plain.write_bytes(content[: kept or 0])
        try:
            rows = read(path)
        except InputError as error:
            assert f"cannot read {path}" in str(error) or "no value" in str(error)
            if kept is not None:
                with pytest.raises(InputError):
                    read(plain)
            outcomes["refused"] += 1
            continue
        assert kept is not None, cut
        assert rows == read(plain) and rows[:-1] == DOCUMENTS[: max(len(rows) - 1, 0)], cut
        outcomes["read"] += 1
    assert rows == DOCUMENTS and sum(outcomes.values()) > len(content) * (not compression)
    assert not compression or outcomes["read"] <= members + 1


@pytest.mark.parametrize("compression", [".gz", ".bz2", ".xz", ".zst"])
def test_a_flipped_bit_anywhere_is_refused_or_changes_nothing(tmp_path, compression):
    content = CONTENT[".txt"]
    whole = COMPRESS[compression](content[:20]) + COMPRESS[compression](content[20:])
    path, refused = tmp_path / f"a.txt{compression}", 0
    for place, bit in itertools.product(range(len(whole)), range(8)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << bit
        path.write_bytes(damaged)
        try:
            assert read(path) == DOCUMENTS, (place, bit)
        except InputError as error:
            assert "cannot read" in str(error)
            refused += 1
    assert refused > 0.7 * 8 * len(whole)


@pytest.mark.parametrize("compression", [".gz", ".bz2", ".xz", ".zst"])
def test_what_follows_the_last_member_is_a_member_or_padding_or_refused(tmp_path, compression):
    member, path = COMPRESS[compression](CONTENT[".txt"]), tmp_path / f"a.txt{compression}"
    for rubbish in (b"x", b"\0x", b"Some text that was appended.", member[3:], b"\0" * 8 + b"x" + member):
        path.write_bytes(member + rubbish)
        with pytest.raises(InputError, match="cannot read"):
            read(path)
    path.write_bytes(b"\0" * 512)  # what a file system leaves of a file that it had not yet written
    with pytest.raises(InputError, match="cannot read"):
        read(path)
    path.write_bytes(member + b"\0" * 512)
    if compression in (".gz", ".xz"):
        assert read(path) == DOCUMENTS
        path.write_bytes(member + b"\0" * 200_000 + COMPRESS[compression](b"\n\nFour."))
        assert read(path) == [*DOCUMENTS, "Four."]
    else:
        with pytest.raises(InputError, match="cannot read"):
            read(path)


def test_frames_of_pzstd_and_skippable_frames(tmp_path):
    """pzstd announces the size of each frame in a skippable frame; a file that ends in such a one was cut."""
    path, archive = tmp_path / "a.txt.zst", b""
    for piece in (b"One.\n\n", b"Two.\n\nThr", b"ee."):
        frame = COMPRESS[".zst"](piece)
        archive += struct.pack("<III", 0x184D2A50, 4, len(frame)) + frame
    path.write_bytes(archive)
    assert read(path) == ["One.", "Two.", "Three."]
    path.write_bytes(archive + struct.pack("<II", 0x184D2A5E, 20) + b"x" * 20)  # such as a seek table
    assert read(path) == ["One.", "Two.", "Three."]
    path.write_bytes(archive[: -len(frame)])
    with pytest.raises(InputError, match="ends before a member that must follow"):
        read(path)


def test_a_file_of_bgzip_ends_with_its_empty_member(tmp_path):
    """So that one cut between two members is not a shorter file."""
    path, archive = tmp_path / "a.txt.gz", b""
    for piece in (b"One.\n\n", b"Two.\n\nThr", b"ee.", b""):
        deflated = zlib.compress(piece, wbits=-15)
        head = struct.pack("<4BI2BH2sHH", 31, 139, 8, 4, 0, 0, 255, 6, b"BC", 2, len(deflated) + 25)
        member = head + deflated + struct.pack("<II", zlib.crc32(piece), len(piece))
        archive += member
    path.write_bytes(archive)
    assert len(member) == 28 and read(path) == ["One.", "Two.", "Three."]
    path.write_bytes(archive[: -len(member)])
    with pytest.raises(InputError, match="ends before a member that must follow"):
        read(path)


def test_a_tar_archive_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_text("Text.")
    with tarfile.open(tmp_path / "b.txt.gz", "w:gz") as archive:
        archive.add(tmp_path / "a.txt", "a.txt")
    with pytest.raises(InputError, match=r"cannot read .*b.txt.gz: .*it is a tar archive; unpack it"):
        read(tmp_path / "b.txt.gz")


@pytest.mark.parametrize("compression", COMPRESS)
@pytest.mark.parametrize("suffix", [*CONTENT, ".parquet", ".arrow"])
def test_an_empty_file_is_empty(tmp_path, suffix, compression):
    if suffix in (".parquet", ".arrow") and compression:
        return  # these compress inside
    for name, content in (("a", b""), ("b", COMPRESS[compression](b""))):
        (tmp_path / f"{name}{suffix}{compression}").write_bytes(content)
    assert texts_of(files=str(tmp_path), share=1e-9) == []


def test_a_line_of_30_mb_and_content_that_compresses_a_thousandfold(tmp_path):
    for text, compressions in (("é" * 15_000_000, ("", ".gz")), ("x" * 30_000_000, COMPRESS)):
        for compression in compressions:
            (tmp_path / f"a.jsonl{compression}").write_bytes(COMPRESS[compression](json.dumps({"text": text}).encode()))
            assert read(tmp_path / f"a.jsonl{compression}") == [text]


def test_a_text_file_is_not_read_whole():
    stream = io.BytesIO(b"A line.\n \n" * 100_000)
    rows = reading.READERS["text"](stream, "text")
    assert list(itertools.islice(rows, 7)) == ["A line."] * 7 and stream.tell() < 100_000


# Rows


STRINGS = ["a long number", "2020-01-01", "null"]  # the first stands for 5,000 digits
JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.just("a long number")
    | st.just("2020-01-01"),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
BAD_ROWS = [
    (b"{broken", "is not JSON"),
    (b'{"text": "half a row', "is not JSON"),
    (b'{"text": "x"} {"text": "y"}', "is not JSON"),
    (b'{"text": "Caf\xe9"}', "is not UTF-8 (byte 0xe9)"),
    (b'{"text": "x", "other": "Caf\xe9"}', "is not UTF-8 (byte 0xe9)"),
    (b'{"text": "\\ud83d"}', "half of a surrogate pair"),
    (b'{"text": "x\\udc00x"}', "half of a surrogate pair"),
    (b'{"text": 3}', "is int, not text"),
    (b'{"text": 1.5}', "is float, not text"),
    (b'{"text": ["x"]}', "is list, not text"),
    (b'{"text": {"x": "y"}}', "is dict, not text"),
    (b'{"text": true}', "is bool, not text"),
    (b"[1, 2]", "is list, not text"),
    (b"17", "is int, not text"),
    (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "is not JSON"),
]
GOOD_ROW = st.tuples(st.text(), st.dictionaries(st.text(max_size=3).filter("text".__ne__), JSON_VALUES, max_size=3))


@given(st.lists(GOOD_ROW | st.sampled_from(BAD_ROWS), max_size=12), st.sampled_from(["\n", "\r\n", "\n \n"]))
def test_a_bad_row_loses_itself_and_other_columns_never_matter(tmp_path_factory, rows, line_end):
    """From every row on, too. A first row keeps the file from being one JSON list."""
    path, rows = tmp_path_factory.mktemp("rows") / "a.jsonl", [("first", {}), *rows]
    lines = [row[0] if isinstance(row[0], bytes) else json.dumps({"text": row[0], **row[1]}).encode() for row in rows]
    lines = [line.replace(b'"a long number"', b"1" * 5000) for line in lines]
    path.write_bytes(line_end.encode().join(lines))
    good = [(number, row[0]) for number, row in enumerate(rows) if isinstance(row[0], str) and row[0].strip()]
    bad = [(number, row) for number, row in enumerate(rows) if isinstance(row[0], bytes)]
    for start in range(len(rows) + 1):
        wanted = [document for document in good if document[0] >= start]
        assert skipped(path, start) == (wanted, sum(number >= start for number, _ in bad), 0)
    if bad:
        (row, (_, reason)), lines_per_row = bad[0], 1 + line_end.count(" ")
        with pytest.raises(InputError) as error:
            texts_of(files=str(path), share=1e-9)
        assert f"line {row * lines_per_row + 1} " in str(error.value) and reason in str(error.value)
        assert f"(row {row})" in str(error.value)


def test_a_column_that_changes_its_type_after_the_first_chunk(tmp_path):
    """Null for 12,000 rows and text after, as in metadata of the web, and what other types do to others."""
    texts = [f"Document {number}. " + "word " * 180 for number in range(14_000)]
    others = (None, "text", 7, [1], {"a": None}, "2020-01-01", {"b": 1.5}, True)
    for change in range(1, len(others)):
        with open(tmp_path / "a.jsonl", "w") as stream:
            for number, text in enumerate(texts[: 14_000 if change == 1 else 60]):
                other = others[0] if number < (12_000 if change == 1 else 50) else others[change]
                stream.write(json.dumps({"text": text, "other": other}) + "\n")
        assert read(tmp_path / "a.jsonl") == texts[: 14_000 if change == 1 else 60]
    write_jsonl(tmp_path / "dates.jsonl", ["2020-01-01", "2021-02-03T00:00:00Z", "12:30:00"])
    assert read(tmp_path / "dates.jsonl") == ["2020-01-01", "2021-02-03T00:00:00Z", "12:30:00"]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_parquet_and_arrow_read_the_text_column_alone(tmp_path, kind):
    """Beside columns that `datasets` has no type for, or that have its name inside; a row that is not UTF-8 is lost
    alone (a dictionary's values are checked together)."""
    texts = [f"Document {number}".encode() for number in range(301)]
    bad = not pa.types.is_dictionary(kind)
    texts[150] = b"caf\xe9" if bad else b"Document 150"
    binary = pa.large_binary() if kind == pa.large_string() else pa.binary()
    column = pa.array(texts, binary).view(kind) if bad else pa.array([t.decode() for t in texts]).cast(kind)
    inner = pa.array([{"text": None}] * 301, pa.struct({"text": pa.string()}))
    others = {"meta": inner, "map": pa.array([[("a", "b")]] * 301, pa.map_(pa.string(), pa.string()))}
    table = pa.table({**others, "text": column})
    pa.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=200)
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=100)
    for suffix in ("parquet", "arrow"):
        documents, lost, broken = skipped(tmp_path / f"a.{suffix}")
        assert [number for number, _ in documents] == [n for n in range(301) if n != 150 or not bad]
        assert documents[-1] == (300, "Document 300") and (lost, broken) == (int(bad), 0)
    if not bad:
        corpus = corpus_of("c", [Source("s", files=str(tmp_path / "a.parquet"))], validation_share=0.5)
        reading.check_sources(corpus)


def test_rows_without_the_column_at_the_beginning_are_said_to_be_that(tmp_path):
    rows = [{"meta": 1}] * 1001 + [{"text": "Text."}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(InputError, match=r"rows 0 to 999 of .* have no value in column 'text'"):
        check(tmp_path / "a.jsonl")
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows[:7])))
    with pytest.raises(InputError, match=r"has no column 'text'; it has \['meta'\]"):
        check(tmp_path / "a.jsonl")


@pytest.mark.parametrize("code", [errno.EACCES, errno.EISDIR, errno.ELOOP])
def test_a_permanent_error_is_not_retried(tmp_path, monkeypatch, code):
    def refuse(path):
        raise OSError(code, "refused", path)

    monkeypatch.setattr("roberta_recipe.data.documents.open_file", refuse)
    monkeypatch.setattr("time.sleep", pytest.fail)
    (tmp_path / "a.txt").write_text("Text.")
    with pytest.raises(InputError, match="refused"):
        read(tmp_path / "a.txt")


@pytest.mark.parametrize("compression", COMPRESS)
def test_a_bad_line_loses_its_document(tmp_path, compression, caplog):
    pieces = [*DOCUMENTS, "Caf\udce9.\nMore of it.", "Five.", "Six\udcff", "", "\udc80", "Seven."]
    content, path = "\n\n".join(pieces).encode(errors="surrogateescape"), tmp_path / f"a.txt{compression}"
    path.write_bytes(COMPRESS[compression](content))
    good = [(0, DOCUMENTS[0]), (1, DOCUMENTS[1]), (2, DOCUMENTS[2]), (4, "Five."), (7, "Seven.")]
    for start in range(9):
        wanted = [document for document in good if document[0] >= start]
        assert skipped(path, start) == (wanted, sum(row >= start for row in (3, 5, 6)), 0)
    assert "line 8 is not UTF-8 (byte 0xe9); convert it, e.g. with iconv -t UTF-8 (row 3)" in caplog.text
    assert caplog.text.splitlines()[0].count("row 3 is skipped") == 1
    with pytest.raises(InputError, match=r"line 8 is not UTF-8 \(byte 0xe9\).*\(row 3\); fix or remove"):
        check(path)


@pytest.mark.parametrize("suffix", [".txt", ".jsonl"])
def test_lost_rows_are_in_the_counts_of_a_run(tmp_path, tokenizer, suffix):
    texts, path = make_documents(60, seed=1), tmp_path / f"a{suffix}"
    rows = [json.dumps({"text": text}) for text in texts] if suffix == ".jsonl" else texts
    rows[7] = rows[30] = rows[59] = "Caf\udce9"
    path.write_bytes("\n\n".join(rows).encode(errors="surrogateescape"))
    corpus = corpus_of("c", [Source("s", files=str(path))], validation_share=1e-9, on_bad_shard="skip")
    reader = TextReader(corpus, tokenizer, input_format="full_sentences", max_seq_length=512, seed=0)
    next(blocks_at(reader, [(range(1),)]))
    once = count_table(reader, "train")["s"]
    assert once["lost_rows"] == 3 and once["documents"] >= 57 and once["bad_files"] == 0
    assert consumed(reader, 2 * once["blocks"]) == ({"s": {name: 2 * n for name, n in once.items()}}, {"s": 2})


def test_what_is_checked_before_training_is_what_is_read(tmp_path):
    """Also of compressed files; the row and the line are those of the fault."""
    content = b'{"text": "Fine."}\n\n{"text": "\\ud83d half"}\n'
    for compression in COMPRESS:
        path = tmp_path / f"a.jsonl{compression}"
        path.write_bytes(COMPRESS[compression](content))
        for attempt in (lambda path=path: check(path), lambda path=path: texts_of(files=str(path))):
            with pytest.raises(InputError, match=r"column 'text' of line 3 holds '\\ud83d', half of .* \(row 1\)"):
                attempt()
        assert skipped(path) == ([(0, "Fine.")], 1, 0)


def test_a_json_list_of_objects_or_strings(tmp_path):
    path = tmp_path / "a.json"
    for rows in (["One.", "", None, "Two."], [{"text": "One."}, {"text": ""}, {"other": 3}, {"text": "Two."}]):
        for content in (json.dumps(rows), "\n \ufeff\n"[:2] + json.dumps(rows, indent=2), json.dumps(rows) + "\n\n"):
            path.write_text(content, encoding="utf-8")
            for start in range(5):
                assert read(path, start) == ["One.", "", None, "Two."][start:]
    path.write_text(json.dumps([{"text": "One."}, {"text": 5}, 7, {"text": "\ud83d"}, "Two.", []]))
    assert skipped(path) == ([(0, "One."), (4, "Two.")], 4, 0)
    with pytest.raises(InputError, match=r"column 'text' of element 2 is int, not text \(row 1\)"):
        read_all = texts_of(files=str(path))
        assert not read_all
    for content in (
        json.dumps({"text": "One."}, indent=2),
        '{\n "text":\n "One."}\n\n{"a": [], "text": "Two."}{"a": 1}',
    ):
        path.write_text(content)  # as `jq` writes
        wanted = ["One.", "Two.", None][: 1 if "Two" not in content else 3]
        for start in range(4):
            assert read(path, start) == wanted[start:]
    path.write_text(json.dumps([{"text": "One."}])[:-1])
    assert skipped(path) == ([], 0, 1)


def test_documents_are_those_of_datasets(tmp_path):
    """JSON lines, lists and Parquet that `datasets` reads as they were meant; text files have a test of their own."""
    compared = 0
    for seed in range(24):
        rng = random.Random(seed)
        texts = ["".join(rng.choices(PIECES, k=rng.randint(1, 9))) for _ in range(rng.randint(1, 30))]
        rows = [{"number": number, "text": text, "more": {"a": [1]}} for number, text in enumerate(texts)]
        suffix = [".jsonl", ".json", ".parquet"][seed % 3]
        compression = list(COMPRESS)[seed % 4] if suffix != ".parquet" else ""
        path, kind = tmp_path / f"{seed}{suffix}{compression}", "parquet" if suffix == ".parquet" else "json"
        if suffix == ".parquet":
            write_parquet(path, texts)
        else:
            lines = "\n".join(json.dumps(row, ensure_ascii=seed % 2 == 0) for row in rows)
            path.write_bytes(COMPRESS[compression]((lines if suffix == ".jsonl" else json.dumps(rows)).encode()))
        theirs = datasets.load_dataset(kind, data_files=str(path), split="train", streaming=True)
        assert list(reading.read_file(Source("s", files=str(path)), kind, str(path))) == [row["text"] for row in theirs]
        compared += len(texts)
    assert compared > 200


def test_parquet_and_arrow_resume_at_every_row(tmp_path):
    texts = [f"Document {number}" for number in range(700)]
    table = pa.table({"text": texts, "language": ["en", "de"] * 350})
    pa.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=150)
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=130)
    with pa.OSFile(str(tmp_path / "b.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=130)
    for name, filters in (
        ("a.parquet", None),
        ("a.parquet", [["language", "==", "en"]]),
        *[(f"{n}.arrow", None) for n in "ab"],
    ):
        source = Source("s", files=str(tmp_path / name), filters=filters)
        read = functools.partial(reading.read_file, source, name.split(".")[1], str(tmp_path / name))
        wanted = texts[::2] if filters else texts
        for start in (0, 1, 129, 130, 149, 150, 151, 256, len(wanted) - 1, len(wanted)):
            assert list(read(start)) == wanted[start:], (name, start)


# Caches, networks


@pytest.mark.parametrize("suffix", [*CONTENT, ".parquet", ".arrow"])
def test_local_text_needs_no_cache(tmp_path, monkeypatch, suffix):
    (tmp_path / "file").touch()
    for name in ("HF_CACHE_HOME", "HF_DATASETS_CACHE", "HF_MODULES_CACHE", "DOWNLOADED_DATASETS_PATH"):
        monkeypatch.setattr(f"datasets.config.{name}", str(tmp_path / "file" / "x"))
    monkeypatch.setattr("roberta_recipe.data.readers.RETRY_DELAYS_S", (), raising=False)
    path = tmp_path / f"a{suffix}"
    if suffix in CONTENT:
        path.write_bytes(CONTENT[suffix])
    elif suffix == ".parquet":
        write_parquet(path, DOCUMENTS)
    else:
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, pa.schema({"text": pa.string()})) as writer:
            writer.write_table(pa.table({"text": DOCUMENTS}))
    assert texts_of(files=str(path), share=1e-9) == DOCUMENTS


class Failing(http.server.BaseHTTPRequestHandler):
    """A folder over HTTP; the first `failures` requests get `status`."""

    failures, status = 0, 503
    files = {  # noqa: RUF012
        "/text/": b'<a href="a.txt">a</a> <a href="b.jsonl.gz">b</a> <a href=".c.txt">c</a>',
        "/text/a.txt": b"One.\n\nTwo.",
        "/text/b.jsonl.gz": gzip.compress(b'{"text": "Three."}'),
        "/text/.c.txt": b"Hidden.",
    }

    def do_GET(self):
        content = self.files.get(self.path)
        status, content = (200, content) if content is not None else (404, b"")
        if Failing.failures:
            Failing.failures -= 1
            status, content = Failing.status, b""
        self.send_response(status)
        self.send_header("Content-Type", "text/html" if self.path.endswith("/") else "text/plain")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    do_HEAD = do_GET

    def log_message(self, *args):
        pass


@pytest.fixture
def url(monkeypatch):
    monkeypatch.setattr("roberta_recipe.data.readers.RETRY_DELAYS_S", (0.01,) * 5)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Failing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/text/"
        server.shutdown()
    Failing.failures = 0


@pytest.mark.parametrize(("pattern", "name"), [("*.txt", "a.txt"), ("a.txt", "a.txt"), ("b.jsonl.gz", "b.jsonl.gz")])
def test_a_server_that_is_not_there_for_a_moment_is_asked_again(url, pattern, name, caplog, tmp_path):
    for status, failures in ((503, 2), (429, 1), (500, 3)):
        Failing.status, Failing.failures = status, failures
        corpus = resolve(Corpus("c", [Source("s", files=url + pattern)]))
        assert corpus.files(corpus.sources[0], "train")[1] == [url + name]
        Failing.failures = failures
        assert len(identified(corpus, tmp_path).identities) == 1
        Failing.failures = failures
        assert len(texts_of(files=url + pattern, share=1e-9)) == (2 if name == "a.txt" else 1)
    assert "503" in caplog.text and "again in 0.01 s" in caplog.text
    caplog.clear()
    for status, pattern_that_is_not_there in ((403, pattern), (404, "none.txt")):
        Failing.status, Failing.failures = status, 10
        with pytest.raises(
            InputError, match=rf"source 's': listing '{url}.*' failed: .*{status if status == 403 else ''}"
        ):
            texts_of(files=url + pattern_that_is_not_there)
    for protocol, reason in (("nosuch", "Protocol not known"), ("gs", "gcsfs")):
        with pytest.raises(InputError, match=f"listing '{protocol}://a/b.txt' failed: .*{reason}"):
            texts_of(files=f"{protocol}://a/b.txt")
    assert "again in" not in caplog.text
    Failing.status, Failing.failures = 503, 1000
    with pytest.raises(InputError, match=r"listing .* failed: ClientResponseError: 503"):
        texts_of(files=url + pattern)


# Hidden files, saved datasets


HIDDEN = [".ipynb_checkpoints/a-checkpoint.txt", ".git/objects/b.txt", "._a.txt", "deep/.x/y/c.txt", "deep/.d.txt.gz"]


def test_hidden_files_of_a_folder_are_passed_over(tmp_path):
    memory, folder = fsspec.filesystem("memory"), tmp_path / ".of_a_user" / "text"
    for number, name in enumerate(["a.txt", "deep/b.txt", *HIDDEN]):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(f"Text {number}.".encode())
        memory.pipe(f"/.of_a_user/text/{name}", f"Text {number}.".encode())
    for where in (str(folder), f"{folder}/", "memory://.of_a_user/text", "memory://.of_a_user/text/"):
        assert sorted(texts_of(files=where, share=1e-9)) == ["Text 0.", "Text 1."], where
        validation = texts_of(files=where, validation_files=where, of_split="validation")
        assert sorted(validation) == ["Text 0.", "Text 1."]
    for where in (folder, "memory://.of_a_user/text"):
        assert sorted(texts_of(files=f"{where}/**/*.txt", share=1e-9)) == ["Text 0.", "Text 1."]
        assert texts_of(files=f"{where}/*.txt", share=1e-9) == ["Text 0."]
        assert texts_of(files=f"{where}/._*", share=1e-9) == ["Text 4."]  # which asks for them
        assert texts_of(files=f"{where}/.git/objects", share=1e-9) == ["Text 3."]
        assert texts_of(files=f"{where}/._a.txt", share=1e-9) == ["Text 4."]
    with pytest.raises(InputError, match=r"does not exist, or is empty; .*hidden files of a folder are passed over"):
        (tmp_path / "none" / ".x").mkdir(parents=True)
        (tmp_path / "none" / ".x" / "a.txt").touch()
        texts_of(files=str(tmp_path / "none"))


def test_a_hidden_link_hides_nothing(tmp_path):
    """The folder that it leads to is read where it stands."""
    write_text(tmp_path / "z.txt", ["One."])
    (tmp_path / "text" / "a").mkdir(parents=True)
    write_text(tmp_path / "text" / "a" / "b.txt", ["Two."])
    (tmp_path / "text" / ".a").symlink_to(tmp_path / "text" / "a")
    (tmp_path / "text" / ".up").symlink_to(tmp_path)
    assert texts_of(files=str(tmp_path / "text"), share=1e-9) == ["Two.\n"]


def test_a_folder_of_save_to_disk_is_its_rows(tmp_path):
    """Not its metadata, nor a cache of `map` or shards of a former save in it."""
    saved = datasets.Dataset.from_dict({"text": TEXTS, "number": [*range(60)]})
    saved.save_to_disk(str(tmp_path / "saved"), num_shards=3)
    part = datasets.Dataset.from_dict({"text": ["Another."] * 9})
    part.save_to_disk(str(tmp_path / "other"))
    (tmp_path / "other" / "data-00000-of-00001.arrow").rename(tmp_path / "saved" / "cache-0123456789abcdef.arrow")
    patterns = ("saved", "saved/*", "saved/*.arrow", "saved/data-*")
    for where in [*(f"{tmp_path}/{pattern}" for pattern in patterns), f"file://{tmp_path}/saved"]:
        assert sorted(texts_of(files=where, share=1e-9)) == sorted(TEXTS), where
        check(where)
    with pytest.raises(
        InputError, match=r"data-00000-of-00003.arrow has no column 'body'; it has \['text', 'number'\]"
    ):
        check(tmp_path / "saved", text_column="body")
    with pytest.raises(InputError, match=r"column 'number' of .* holds int, not text"):
        check(tmp_path / "saved", text_column="number")


def test_a_saved_dataset_without_one_of_its_shards_is_refused(tmp_path):
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(str(tmp_path / "saved"), num_shards=3)
    (tmp_path / "saved" / "data-00001-of-00003.arrow").unlink()
    for where in (tmp_path / "saved", tmp_path, f"file://{tmp_path}/saved"):
        with pytest.raises(InputError, match=r"data-00001-of-00003.arrow is missing, and .*state.json lists it"):
            texts_of(files=str(where))


def test_a_saved_dataset_of_splits_is_refused(tmp_path):
    splits = {name: datasets.Dataset.from_dict({"text": TEXTS[:30]}) for name in ("train", "test")}
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "saved"))
    for where in (tmp_path / "saved", tmp_path, f"file://{tmp_path}/saved"):
        with pytest.raises(InputError, match=r"saved is a DatasetDict; name the folder of one of its splits"):
            texts_of(files=str(where))
    assert texts_of(files=str(tmp_path / "saved" / "train"), share=1e-9) == TEXTS[:30]


def test_an_arrow_file_cut_anywhere_is_refused_or_has_fewer_rows_to_read(tmp_path):
    saved = datasets.Dataset.from_dict({"text": [f"Document {number}" for number in range(40)]})
    saved.save_to_disk(str(tmp_path / "saved"))
    (path,) = (tmp_path / "saved").glob("*.arrow")
    whole = path.read_bytes()
    source = Source("s", files=str(path))
    assert len(list(reading.read_file(source, "arrow", str(path)))) == 40
    for cut in range(1, len(whole)):
        path.write_bytes(whole[:cut])
        with pytest.raises(InputError, match="cannot read"):
            list(reading.read_file(source, "arrow", str(path)))


# Presets


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("language: no", "language is False, and must be a valid string; put it in quotes"),
        ("language: on", "language is True, and must be a valid string; put it in quotes"),
        ("sources: [{name: no, files: x}]", "name is False, and must be a valid string; put it in quotes"),
        (
            "sources: [{name: a, files: x, text_column: 7}]",
            "text_column is 7, and must be a valid string; put it",
        ),
        (
            "sources: [{name: a, dataset: x/y, config: 20220301, revision: a}]",
            "config is 20220301, and must be a valid string;",
        ),
        ("sources: [{name: a, dataset: x/y, config: 2022-03-01, revision: a}]", "put it in quotes"),
        ("validation_share: no", "validation_share is False, and must be a valid number"),
    ],
)
def test_words_that_yaml_takes_for_something_else(tmp_path, line, said):
    preset = tmp_path / "corpus.yaml"
    preset.write_text("\n".join([line, *["sources: [{name: a, files: x}]"] * ("sources" not in line)]))
    with pytest.raises(InputError) as error:
        read_corpus(preset)
    assert said in str(error.value) and ("quotes" in str(error.value)) == ("share" not in line)
    preset.write_text("language: 'no'\nsources: [{name: a, files: x}]")
    assert read_corpus(preset).language == "no"
