"""Tokenizer: RoBERTa's ids and behaviour, lossless round trip, deterministic training."""

import errno
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest
import tokenizers
from conftest import make_documents, run_python, write_parquet
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from roberta_recipe import durable
from roberta_recipe.data import documents, tokenization, tokenizer_training
from roberta_recipe.errors import InputError
from tokenizer import train_tokenizer


@pytest.fixture(scope="module")
def loaded(tokenizer_dir):
    return AutoTokenizer.from_pretrained(tokenizer_dir)


def test_ids_are_robertas(loaded):
    assert [loaded.convert_tokens_to_ids(t) for t in ("<s>", "<pad>", "</s>", "<unk>")] == [0, 1, 2, 3]
    assert loaded.mask_token_id == len(loaded) - 1 == 399
    names = ("bos_token", "eos_token", "cls_token", "sep_token", "pad_token", "unk_token", "mask_token")
    assert [getattr(loaded, n) for n in names] == ["<s>", "</s>", "<s>", "</s>", "<pad>", "<unk>", "<mask>"]
    assert type(loaded).__name__ == "RobertaTokenizer" and loaded.model_max_length == 512


def test_habits_are_robertas(loaded):
    a, b = (loaded.encode(text, add_special_tokens=False) for text in ("the cat", "a dog"))
    assert loaded("the cat", "a dog").input_ids == [0, *a, 2, 2, *b, 2]  # <s> A </s></s> B </s>
    # `<mask>` takes the space before it, not the space after it
    assert (
        loaded("the <mask> sees").input_ids == loaded("the<mask> sees").input_ids != loaded("the<mask>sees").input_ids
    )
    assert loaded("x", return_tensors="np")["attention_mask"].tolist() == [[1, 1, 1]]
    assert "token_type_ids" not in loaded("x")


MARKED = st.lists(st.sampled_from(["<s>", "</s>", "<mask>", "<unk>", "<pad>", " ", "a", "\n"]), max_size=8)


@settings(max_examples=300)
@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=200) | MARKED.map("".join))
@example("\x00\x01\x1f\x7f\x85 \U0010ffff\ufffe\ufffd")
@example("e\u0301 \u0301 \u200d\ufeff\u202e")  # combining marks, also without a base; joiners; direction marks
@example("  two  spaces  and trailing \n\n\t \r\n")
@example("word " * 20_000)
def test_any_text_comes_back(loaded, text):
    """Special tokens are encoded as text: decoding returns the text, without <unk>."""
    for ids in (
        loaded.encode(text, add_special_tokens=False, split_special_tokens=True),
        tokenization.corpus_encoder(loaded)([text])[0],
    ):
        assert not set(ids) & set(loaded.all_special_ids)
        assert loaded.decode(ids, clean_up_tokenization_spaces=False) == text


def test_the_command_writes_the_same_bytes_twice_and_prints_compression(root, tmp_path, monkeypatch, capsys):
    """On four threads and, here, on one."""
    write_parquet(tmp_path / "text.parquet", make_documents(300, seed=3))
    argv = ["--train_file", "text.parquet", "--vocab_size", "400", "--output_dir"]
    env = {"RAYON_NUM_THREADS": "4", "TOKENIZERS_PARALLELISM": "true"}
    done = run_python(root / "tokenizer" / "train_tokenizer.py", *argv, "first", cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    monkeypatch.chdir(tmp_path)
    train_tokenizer.main([*argv, "second"])
    first, second = ({p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} for name in ("first", "second"))
    assert first == second and {"tokenizer.json", "tokenizer_config.json"} <= first.keys()
    assert all(words in done.stdout for words in ("400 entries", "bytes/token", "tokens/word", "trained on"))
    assert "Reading" not in done.stderr  # no progress bar in a file
    (tmp_path / "one.txt").write_text("one document")
    train_tokenizer.main(["--train_file", "one.txt", "--vocab_size", "261", "--output_dir", "third"])
    assert capsys.readouterr().out.splitlines()[-1].split() == ["train_file", "none"]  # no text is held out


def test_statistics_are_of_the_held_out_text(tokenizer, tmp_path, capsys):
    path = write_parquet(tmp_path / "a.parquet", ["the cat", "the cat"])
    corpus = train_tokenizer.corpora.resolve(train_tokenizer.corpora.corpus_of_files([path], [path], "text"))
    train_tokenizer.print_statistics(corpus, {"ours": tokenizer}, validation_mb=1)
    tokens = len(tokenizer.encode("the cat", add_special_tokens=False))
    assert capsys.readouterr().out.split()[-3:] == ["ours", f"{7 / tokens:.3f}", f"{tokens / 2:.3f}"]


def test_a_folder_of_vocab_and_merges_is_robertas_tokenizer(tokenizer, tmp_path):
    """RoBERTa's vocabulary is often distributed as these two files, without a config."""
    tokenizer._tokenizer.model.save(str(tmp_path))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["merges.txt", "vocab.json"]
    bare = tokenization.load_tokenizer(str(tmp_path))
    text = "the cat <mask> a small dog near the sea"
    assert bare(text).input_ids == tokenizer(text).input_ids
    assert (bare.mask_token_id, bare.model_max_length) == (399, 512)


def test_the_two_files_of_another_bpe_are_refused(tmp_path):
    """`save_model` of every BPE in `tokenizers` writes them; the class of RoBERTa would drop blanks and accents."""
    other = tokenizers.CharBPETokenizer()
    special = [*tokenization.LEADING_TOKENS, "<mask>"]
    other.train_from_iterator(make_documents(20, seed=0), vocab_size=200, special_tokens=special, show_progress=False)
    other.save_model(str(tmp_path))
    with pytest.raises(InputError, match=r"vocab.json is not of a byte-level BPE; add its tokenizer.json and"):
        tokenization.load_tokenizer(str(tmp_path))


def test_sentences():
    text = "Dr. Smith went to Washington, D.C. on Jan. 5. He paid $3.50.\nA line is a sentence\n\n  \nLast one? Yes!"
    assert documents.split_sentences(text) == [
        "Dr. Smith went to Washington, D.C. on Jan. 5.",
        "He paid $3.50.",
        "A line is a sentence",
        "Last one?",
        "Yes!",
    ]


@settings(max_examples=300)
@given(st.text(alphabet=st.sampled_from("aB. ?!\xa0\u3000\u2003\x85\u2028é中。\"'()1"), max_size=12))
@example("B\xa0.")  # where sentencex 1.0.32 panics
@example("a \u3000. B.")
def test_splitting_loses_no_text(text):
    sentences = documents.split_sentences(text)
    assert "".join("".join(sentences).split()) == "".join(text.split())


def test_a_long_line_has_the_sentences_of_its_pieces():
    sentence = "这是一个句子。"
    assert documents.split_sentences(sentence * 10_000) == [sentence] * 10_000
    unbroken = "a" * 45_000
    assert "".join(documents.split_sentences(unbroken)) == unbroken


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "either --corpus or --train_file"),
        (["--corpus", "a.yaml", "--text_column", "body"], "validation_file and text_column need --train_file"),
        (["--corpus", "a.yaml", "--validation_file", "b"], "validation_file and text_column need --train_file"),
        (["--train_file", "small.txt"], "vocab_size=50265: the sample gives only"),
        (["--train_file", "small.txt", "--vocab_size", "200"], "vocab_size=200 is too small"),
        (["--train_file", "empty.txt", "--vocab_size", "261"], "the training text is empty: name other files"),
        (["--train_file", "absent.txt"], "'absent.txt' does not exist"),
        (["--corpus", "absent.yaml"], "no such file: absent.yaml"),
        (["--train_file", "small.txt", "--sample_mb", "nan"], "sample_mb=nan must be"),
        (["--train_file", "small.txt", "--output_dir", "small.txt"], "output_dir=small.txt is a file"),
        (["--train_file", "small.txt", "--output_dir", "."], "holds other files; name a new or an empty folder"),
        (["--train_file", "small.txt", "--output_dir", "/proc/x"], "output_dir=/proc/x cannot be created .No such"),
        (["--train_file", "small.txt", "--vocab", "300"], "'--vocab'; did you mean '--vocab_size'"),
    ],
)
def test_bad_input(tmp_path, monkeypatch, argv, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.txt").write_text("\n\n".join(make_documents(50, seed=1)))
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(InputError, match=message):
        train_tokenizer.main(["--output_dir", "out", *argv])
    assert not list(tmp_path.glob("out/*"))


def test_two_starts_write_one_tokenizer(tokenizer, tmp_path, monkeypatch):
    folder, seal = tmp_path / "ours", durable.seal
    monkeypatch.setattr(durable, "seal", lambda path: (seal(path), folder.mkdir(), (folder / "theirs").touch()))
    with pytest.raises(InputError, match="ours was written by another process; use it, or name another folder"):
        tokenizer_training.save_tokenizer(tokenizer, folder)
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]


def test_a_damaged_tokenizer_is_named(tokenizer, tokenizer_dir, tmp_path):
    """With a manifest, any change; without one, unreadable files, never with a traceback."""
    tokenizer_training.save_tokenizer(tokenizer, tmp_path / "ours")
    assert tokenization.load_tokenizer(tmp_path / "ours").get_vocab() == tokenizer.get_vocab()
    assert not [path for path in tmp_path.iterdir() if path.name != "ours"]
    (tmp_path / "ours" / "README.md").write_text("of the user")
    content = (tmp_path / "ours" / "tokenizer.json").read_bytes()
    (tmp_path / "ours" / "tokenizer.json").write_bytes(content.replace(b"cat", b"cta"))  # a tokenizer still
    with pytest.raises(InputError, match=r"ours' is damaged: tokenizer.json .*remove manifest.json if you changed"):
        tokenization.load_tokenizer(tmp_path / "ours")
    shutil.copytree(tokenizer_dir, tmp_path / "plain")
    rng, refused = random.Random(0), 0
    for name in ("tokenizer.json", "tokenizer_config.json"):
        content = (tmp_path / "plain" / name).read_bytes()
        for kind in ["cut"] * 3 + ["bit"] * 12 + ["zeros"]:
            damaged, position = bytearray(content), rng.randrange(len(content))
            if kind == "cut":
                del damaged[position:]
            damaged[position : position + 1] = [content[position] ^ 1 << rng.randrange(8)] if kind == "bit" else b""
            (tmp_path / "plain" / name).write_bytes(bytes(len(content)) if kind == "zeros" else damaged)
            try:
                tokenization.load_tokenizer(tmp_path / "plain")
            except InputError as error:
                refused += "no tokenizer at" in str(error) or "has no" in str(error)
        (tmp_path / "plain" / name).write_bytes(content)
    assert refused >= 8
    with pytest.raises(InputError, match=r"no tokenizer at tokenizer_name='.*nowhere'.*train_tokenizer.py"):
        tokenization.load_tokenizer(str(tmp_path / "nowhere"))
    (tmp_path / "deberta").mkdir()
    (tmp_path / "deberta" / "spm.model").write_bytes(b"pieces")
    (tmp_path / "deberta" / "tokenizer_config.json").write_text('{"vocab_type": "spm"}')
    (tmp_path / "deberta" / "config.json").write_text('{"model_type": "deberta-v2"}')
    with pytest.raises(InputError, match="needs pip install sentencepiece protobuf"):
        tokenization.load_tokenizer(tmp_path / "deberta")


def test_a_tokenizer_is_whole_or_absent(tokenizer, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("roberta_recipe.durable.write_json", full)
        with pytest.raises(OSError, match="No space left"):
            tokenizer_training.save_tokenizer(tokenizer, tmp_path / "new" / "a")
    assert not list((tmp_path / "new").iterdir())
    (tmp_path / "link").symlink_to(tmp_path / "new")
    tokenizer_training.save_tokenizer(tokenizer, tmp_path / "link")
    assert (tmp_path / "new" / "tokenizer.json").is_file() and (tmp_path / "link").is_symlink()


def test_a_word_of_a_million_characters_is_learnt_in_pieces():
    """Training time grows with the square of a word's length: whole, it would take minutes."""
    made = tokenizer_training.train_tokenizer([*make_documents(300, seed=0), "xz" * 500_000], 400)
    usual = tokenizer_training.train_tokenizer(make_documents(300, seed=0), 400)
    assert len(made) == 400 and len(set(made.get_vocab()) - set(usual.get_vocab())) < 20


LONG_TRAINING = """
import random
from roberta_recipe.data.tokenizer_training import train_tokenizer
from roberta_recipe.errors import exit_on_error

def texts():
    letters = bytes(97 + number % 26 for number in range(256))
    for number in range(6000):
        text = random.Random(number).randbytes(2400).translate(letters).decode()
        yield " ".join(text[at : at + 12] for at in range(0, 2400, 12))
    print("read", flush=True)

def main():
    try:
        train_tokenizer(texts(), 50_000)
    finally:
        print("the trainer has returned", flush=True)

exit_on_error(main)
"""


def test_a_signal_ends_training_at_once(root):
    """During half a minute in the trainer's Rust code, without waiting for it to return."""
    command = [sys.executable, "-c", LONG_TRAINING]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "read\n"
            time.sleep(0.5)
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=100) == 75
        finally:
            process.kill()
        assert process.stdout.read() == ""
        assert process.stderr.read().startswith("ended by SIGTERM; saved files are complete.")
