"""Credentials and markup in names: no password or token in files, log lines or errors; no injected markup or paths."""

import json
import re
import sys
from pathlib import Path

import pytest
import yaml
from conftest import run_python
from hub_server import HubServer
from huggingface_hub import ModelCard, constants
from markdown_it import MarkdownIt

import train_mlm
from roberta_recipe import credentials, durable
from roberta_recipe.data import tokenization
from roberta_recipe.errors import InputError
from roberta_recipe.model import weights
from roberta_recipe.publishing import card, hub, tables

TOKEN = "hf_aVerySecretTokenOfNobody"
SECRET = "http://bob:hunter22@example.org/a.parquet?download=true&X-Amz-Signature=0123abc"


# Credentials


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("no file http://bob:hunter22@h/a, b", "no file http://***@h/a, b"),
        ("s3+x://k%20y:p@ss@h:9/a 'https://t0ken@h/b'", "s3+x://***@h:9/a 'https://***@h/b'"),
        ("https://h/a?sig=12/3+4%3D&b=c#d and so on", "https://h/a?sig=***&b=***#d and so on"),
        ("login hf_aVerySecretTokenOfNobodyAtAll01234 failed", "login *** failed"),
        ("a=1&b=2, who@example.org, c:d@e, http://h/@user/x", "a=1&b=2, who@example.org, c:d@e, http://h/@user/x"),
        ("aws says s3cr3ts3cr3t no", "aws says *** no"),
    ],
)
def test_what_is_redacted(text, shown, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s3cr3ts3cr3t")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "who@example.org")  # no secret, by its name
    assert credentials.redact(text) == shown


@pytest.mark.parametrize(
    "name", ["train_file", "validation_file", "output_dir", "tokenizer_name", "model_name_or_path"]
)
def test_credentials_in_a_flag_that_is_saved_are_refused(preset, name, tmp_path):
    for value in (SECRET, "https://tok3n@h/a", "s3://h/a?AWSAccessKeyId=12", "hf_aVerySecretTokenOfNobodyAtAll01234"):
        with pytest.raises(InputError, match=r"holds a password or a token.*\$\{NAME\}") as error:
            train_mlm.read_arguments(["--config", preset, f"--{name}", value])
        assert not re.search("hunter22|0123abc|tok3n|=12|hf_aVery", str(error.value))
    values = yaml.safe_load(Path(preset).read_text()) | {"train_file": [SECRET]}
    (tmp_path / "secret.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(InputError, match=r"train_file=.*holds a password"):
        train_mlm.read_arguments(["--config", str(tmp_path / "secret.yaml")])
    for public in ("https://h/a.parquet?download=true", "/data/hf_checkpoint", "runs/hf_roberta_base", "hf_converted"):
        (args, _), _ = train_mlm.read_arguments(["--config", preset, "--train_file", public])
        assert args.train_file == [public]


def test_nothing_that_a_command_prints_holds_credentials(root, tmp_path):
    """Log lines, an error message, and a traceback, in a subprocess."""
    script = f"""
import logging, sys
sys.path.insert(0, {str(root)!r})
from roberta_recipe.errors import InputError, exit_on_error
from roberta_recipe.log import logger, set_up_logging
import datasets
def main():
    set_up_logging()
    set_up_logging()
    logger.info("reading %s", {SECRET!r})
    logging.getLogger("fsspec").warning({SECRET!r})
    datasets.utils.logging.get_logger("datasets.x").warning({SECRET!r})
    raise (InputError if "line" in sys.argv else KeyError)("cannot read " + {SECRET!r})
exit_on_error(main)
"""
    (tmp_path / "says.py").write_text(script)
    for word, code in (("line", 2), ("traceback", 1)):
        done = run_python(tmp_path / "says.py", word, cwd=tmp_path)
        said = done.stdout + done.stderr
        assert done.returncode == code and said.count("http://***@example.org/a.parquet") >= 4, said
        assert "Traceback" in said or word == "line"
        # the source line that a traceback quotes is this test's own
        others = [line for line in said.splitlines() if "raise (" not in line]
        assert not re.search("bob|hunter22|0123abc", "\n".join(others)), said


def all_bytes(folder):
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 8
    return b"".join(path.read_bytes() + str(path).encode() for path in files)


def test_a_token_is_in_no_file_of_a_run_and_of_what_is_pushed(preset, tmp_path, monkeypatch, capfd):
    with HubServer({TOKEN: "me"}) as server:
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setattr(hub, "RETRY_AFTER_S", (0, 0, 0))
        saving = ["--save_strategy", "steps", "--save_steps", "2"]
        train_mlm.main(["--config", preset, *saving, "--output_dir", str(tmp_path / "alone")])
        pushing = ["--push_to_hub", "true", "--hub_model_id", "me/small", "--hub_strategy", "all_checkpoints"]
        pushing += ["--hub_always_push", "true", "--output_dir", str(tmp_path / "pushed")]
        train_mlm.main(["--config", preset, *saving, *pushing])
        files = [content for branch in server.repositories["me/small"].values() for content in branch.values()]
        assert len(files) > 10 and len(server.commits) >= 3
        received = b"".join([*files, *server.large.values(), repr([server.commits, server.log]).encode()])
    said = "".join(capfd.readouterr())
    assert TOKEN.encode() not in all_bytes(tmp_path) + received and TOKEN not in said
    monkeypatch.setattr(durable, "fingerprint", lambda values: TOKEN)  # the search finds it where it is
    train_mlm.records.write_preset({"a": TOKEN}, tmp_path)
    assert TOKEN.encode() in all_bytes(tmp_path)


# Code


def test_code_of_a_checkpoint_never_runs(tmp_path, monkeypatch):
    """Not even if a prompt of transformers' is answered with yes."""
    monkeypatch.setattr("builtins.input", lambda prompt: "y")
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    auto_map = {"AutoConfig": "own.Own", "AutoTokenizer": [None, "own.Own"]}
    for name, key in (("config.json", "model_type"), ("tokenizer_config.json", "tokenizer_class")):
        (tmp_path / name).write_text(json.dumps({key: "own", "auto_map": auto_map}))
    for load in (weights.read_config, tokenization.load_tokenizer):
        with pytest.raises(InputError, match=r"no (model config|tokenizer) at .* contains custom code"):
            load(str(tmp_path))
    assert not (tmp_path / "ran").exists()


# Names in Markdown and HTML

HOSTILE = [
    "<script>alert(1)</script>",
    "a | b <b>x</b>",
    "a | b | c",
    "line\n# heading\n<img src=x>",
    "x\n---\nlicense: evil\n---\n",
    "---",
    "{{evil}} {% evil %}",
    "[x](javascript:alert(1))",
]


def opened(text):
    """(HTML tokens, titles, columns of each table row) of a Markdown text."""
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    inline = [child for token in tokens for child in (token.children or [])]
    raw = [t.content for t in [*tokens, *inline] if t.type in ("html_block", "html_inline")]
    titles = [tokens[n + 1].content for n, token in enumerate(tokens) if token.type == "heading_open"]
    columns = [t.type for t in tokens if t.type in ("tr_open", "td_open", "th_open")]
    return raw, titles, columns


@pytest.mark.parametrize("text", HOSTILE)
def test_a_cell_of_a_table_is_one_cell_without_html(text):
    raw, _, columns = opened(tables.markdown_table(("a", "b"), [(text, "c"), (text, "d")]))
    assert not raw and columns.count("td_open") == 4 and columns.count("tr_open") == 3
    assert tables.plain("**a** `<b|c>` (d) - e, 3 %") == "**a** `<b|c>` (d) - e, 3 %"


def cards(text):
    """The model cards of a pretraining run and a fine-tuning with `text` as every external name."""
    args = {"max_seq_length": 64, "learning_rate": 1e-3, "global_batch_size": 8, "seed": 1, "corpus": None}
    args |= {"train_file": [text], "model_name_or_path": text, "optim": text}
    machine = {"gpus": [], "cpu_cores": 2, "machine": "x86_64", "processor": text}
    run = {"parameters": 10, "steps": 4, "tokens_seen": 100, "train_seconds": 1.0, "tokens_per_second": 9}
    run |= {"versions": {"torch": text}, "commit": text, "hardware": machine, "resolved_args": args}
    measured = {"loss": 1.0, "perplexity": 2.7, "bits": 1.4, "unigram_entropy": 3.0, "blocks": 3, "tokens": 9}
    counts = {text: {"documents": 3, "tokens": 9, "blocks": 3, "lost_rows": 0}}
    pretraining = {
        **{**run, "shown_args": ["optim", "learning_rate"], "stopped_by": text, "unigram_entropy": 3.0},
        **{
            "metrics": {"eval_loss": 1.0, "eval_perplexity": 2.7, "eval_bits": 1.4, "eval_blocks": 3},
            "passes": {text: 1.0},
        },
        **{"fingerprint": {"language": "en", "shares": [1.0]}, "metrics_by_source": {text: measured}},
        **{"counts": {"train": counts, "validation": counts}},
    }
    dataset = dict.fromkeys(("name", "hub_id", "hub_config", "note", "loading_note"), text)
    dataset |= {"split": "validation", "task_type": "text-classification", "hub_metrics": {"accuracy": "accuracy"}}
    tuned = {
        **{**run, "task": text, "metric": "accuracy", "dataset": dataset, "scored_examples": {"validation": 9}},
        **{"baseline": {"answer": text, "metrics": {"accuracy": 0.5}}, "shown_args": ["optim"], "degenerate": False},
        **{"metrics": {"accuracy": 0.6}, "examples": {"train": 8}, "fingerprint": {"weights": "0" * 40}},
    }
    config = {"architectures": ["RobertaForMaskedLM"], "model_type": "roberta", "vocab_size": 400, "hidden_size": 32}
    return card.pretrained("me/x", config, pretraining, []), card.fine_tuned("me/x", config, tuned, None)


@pytest.mark.parametrize("text", HOSTILE)
def test_a_card_shows_hostile_names_as_words(text):
    for plain, shown in zip(cards("plain"), cards(text), strict=True):
        again = ModelCard(str(shown))  # the head ends where it should
        assert again.data.to_dict() == shown.data.to_dict() and again.data.get("license") is None
        assert opened(again.text) == ([], *opened(plain.text)[1:])


@pytest.mark.parametrize("text", HOSTILE)
def test_the_page_of_results_shows_hostile_names_as_words(text, root):
    sys.path.insert(0, str(root / "results"))
    import report

    section = report.Section("Title", [text], ("a", "b"), [(text, "c")], [text])
    raw, titles, columns = opened(report.as_markdown([section]))
    assert not raw and titles == ["Results", "Title"] and columns.count("td_open") == 2


# Names that become paths


@pytest.mark.parametrize("name", ["../../x", "a/b", "/tmp/x", "..", ".hidden", "", "a\nb", "a\\b"])
def test_a_name_in_the_ledger_is_no_path(name, root, tmp_path):
    sys.path.insert(0, str(root / "results"))
    import report

    run = tmp_path / "run"
    run.mkdir()
    durable.write_sealed(run / "run_record.json", {"shown_args": []})
    (run / "loss_curve.png").write_bytes(b"")
    folder = tmp_path / "deep" / "er" / "results"
    if name:
        with pytest.raises(InputError, match="becomes a name in the ledger"):
            report.add(folder, run, name)
    else:
        assert report.add(folder, run, name) == folder / "run"  # without a name, the folder's
    assert {path.name for path in tmp_path.iterdir()} <= {"run", "deep"}
