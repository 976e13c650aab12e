"""Publishing to a local Hub server: uploaded files, refusals, and no token in any file."""

import functools
import os
import re
import shutil
import signal
import socket
import time
from pathlib import Path

import hub_server
import huggingface_hub
import pytest
import yaml
from conftest import forked_ranks, run_python, train
from hub_server import HubServer
from huggingface_hub import HfApi, ModelCard
from huggingface_hub.errors import LocalEntryNotFoundError
from transformers import AutoModelForMaskedLM, AutoTokenizer
from transformers.trainer_utils import HubStrategy

import finetune_glue
import train_mlm
from roberta_recipe import durable, errors
from roberta_recipe import record as records
from roberta_recipe.data import corpus as corpora
from roberta_recipe.errors import InputError, RunError, Stopped
from roberta_recipe.input_files import HUB_COMMIT
from roberta_recipe.model import weights
from roberta_recipe.publishing import card as cards
from roberta_recipe.publishing import hub
from tools import push as push_tool

TOKEN = "hf_aVerySecretTokenOfNobody"


@pytest.fixture
def server(monkeypatch):
    """A Hub server with two users, for this process and its children."""
    with HubServer({TOKEN: "me", "hf_another": "you"}) as server:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.url)
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setattr(hub, "RETRY_AFTER_S", (0, 0, 0))
        yield server


def card_of(files):
    return ModelCard(files["README.md"].decode())


def read_all(folder):
    return b"".join(path.read_bytes() for path in Path(folder).rglob("*") if path.is_file())


LOAD = """
from transformers import AutoModelForMaskedLM, AutoTokenizer
from transformers.trainer_utils import HubStrategy
tokenizer = AutoTokenizer.from_pretrained("me/small")
model = AutoModelForMaskedLM.from_pretrained("me/small")
print(model(**tokenizer("the cat", return_tensors="pt")).logits.sum().item())
"""


def test_a_run_is_pushed_while_it_trains_and_at_the_end(server, preset, tmp_path, root, monkeypatch):
    """By the command line; a process without this repository downloads and loads the files."""
    done = run_python(
        *[root / "train_mlm.py", "--config", preset, "--max_steps", "4", "--save_strategy", "steps"],
        *["--save_steps", "2", "--push_to_hub", "true", "--hub_model_id", "small", "--hub_strategy", "checkpoint"],
        *["--hub_always_push", "true"],
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    files, out = server.repositories["me/small"]["main"], tmp_path / "run"
    messages = [message for _, _, message in server.commits]
    step_2 = "Training in progress, step 2"
    assert messages == ["In training", step_2, f"{step_2}, checkpoint", "Trained for 4 steps"]
    whole = {"last-checkpoint/optimizer.pt", "last-checkpoint/recipe_state.json", "last-checkpoint/manifest.json"}
    assert {*whole, "model.safetensors"} <= server.held[2]
    wanted = {"model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json", "README.md"}
    wanted |= {"preset.yaml", "run_record.json", "loss_curve.png"}
    assert wanted <= set(files) and not [name for name in files if "training_args" in name or "checkpoint" in name]
    for name in ("model.safetensors", "loss_curve.png", "config.json", "tokenizer_config.json", "log.jsonl"):
        assert files[name] == (out / name).read_bytes()
    (tmp_path / "run_record.json").write_bytes(files["run_record.json"])
    there, here = (durable.read_sealed(folder / "run_record.json") for folder in (tmp_path, out))
    assert yaml.safe_load(files["preset.yaml"]) == there["resolved_args"] == records.portable(here["resolved_args"])
    assert there["resolved_args"]["train_file"] == ["train.parquet"] and there["metrics"] == here["metrics"]
    texts = b"".join(files[name] for name in wanted if name.endswith((".json", ".yaml", ".md")))
    for private in (tmp_path, Path.home(), socket.gethostname() + "/"):
        assert str(private).encode() not in texts, private
    assert any(line.startswith("PUT /large/") for line in server.log)  # the large file protocol
    assert TOKEN not in done.stdout + done.stderr
    assert TOKEN.encode() not in read_all(tmp_path) and TOKEN.encode() not in b"".join(files.values())

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "load.py").write_text(LOAD)
    loaded = run_python(elsewhere / "load.py", cwd=elsewhere, env={"HF_HOME": str(elsewhere / "hf")})
    assert loaded.returncode == 0, loaded.stderr
    text = AutoTokenizer.from_pretrained(out)("the cat", return_tensors="pt")
    total = AutoModelForMaskedLM.from_pretrained(out)(**text).logits.sum().item()
    assert float(loaded.stdout) == pytest.approx(total, rel=1e-5)


def test_the_card_says_what_the_record_says(server, preset, tmp_path):
    blanks = ["--fill_mask_examples", "the <mask> sees"]
    record = train(preset, "--push_to_hub", "true", "--hub_model_id", "me/small", *blanks)
    card = card_of(server.repositories["me/small"]["main"])
    head = yaml.safe_load(str(card).split("---")[1])
    assert (head["library_name"], head["pipeline_tag"]) == ("transformers", "fill-mask")
    (index,) = head["model-index"]
    measured = {m["type"]: m["value"] for result in index["results"] for m in result["metrics"]}
    assert index["name"] == "small"
    assert measured["loss"] == pytest.approx(record["metrics"]["eval_loss"], abs=1e-4)
    assert measured["perplexity"] == pytest.approx(record["metrics"]["eval_perplexity"], abs=1e-4)
    for wanted in (
        f"{record['parameters']:,} parameters",
        f"It saw {record['tokens_seen']:,} tokens",
        "| global_batch_size | 8 |",
        "| hidden size | 32 |",
        f"| train_file | 100.0% | {record['counts']['train']['train_file']['tokens']:,} | "
        f"{record['passes']['train_file']:.2f} |\n",
        f"| all held-out text | {sum(counts['blocks'] for counts in record['counts']['validation'].values()):,} | ",
        'AutoModelForMaskedLM.from_pretrained("me/small")',
        "![loss over steps](loss_curve.png)",
    ):
        assert wanted in card.text, wanted
    assert [message for _, _, message in server.commits] == ["In training", "Trained for 4 steps"]
    assert "num_train_epochs" not in card.text and "| held-out text | blocks |" in card.text
    assert head["widget"] == [{"text": "the <mask> sees"}] and "license" not in head and "datasets" not in head
    assert head["language"] == "en" and "recipe on train.parquet: " in card.text
    assert str(tmp_path) not in str(card)  # no path of this machine


def test_a_finished_run_is_pushed_once_more_or_elsewhere(server, preset, tmp_path, capsys):
    train(preset)
    push = ["--model", str(tmp_path / "run"), "--repo", "small", "--license", "mit", "--language", "en"]
    push_tool.main([*push, "--dry_run"])
    shown = capsys.readouterr().out
    assert "license: mit" in shown and "model.safetensors" in shown and not server.repositories
    push_tool.main([*push, "--private"])
    push_tool.main(push)  # the same run
    push_tool.main([*push, "--revision", "second"])
    assert server.private == {"me/small"} and set(server.repositories["me/small"]) == {"main", "second"}
    assert 'from_pretrained("me/small", revision="second")' in card_of(server.repositories["me/small"]["second"]).text
    server.private.clear()
    with pytest.raises(InputError, match="me/small exists and is public"):
        push_tool.main([*push, "--private"])
    head = card_of(server.repositories["me/small"]["main"]).data.to_dict()
    assert (head["license"], head["language"]) == ("mit", ["en"])


def test_dropped_connections_are_tried_again(server, preset, tmp_path, capsys):
    """For every request of a push: queries, the large file, the commit."""
    train(preset)
    kinds = [("POST", "/preupload/"), ("POST", "objects/batch"), ("PUT", "/large/"), ("POST", "/commit/")]
    server.drops = [("GET", "/tree/"), ("POST", "repos/create"), *kinds]
    push_tool.main(["--model", str(tmp_path / "run"), "--repo", "me/small"])
    assert server.drops == [] and sum(line.endswith("dropped") for line in server.log) == 6
    assert len(server.commits) == 1
    files = server.repositories["me/small"]["main"]
    assert files["model.safetensors"] == (tmp_path / "run/model.safetensors").read_bytes()
    assert "retry in" in capsys.readouterr().err

    server.drops = [("POST", "/commit/")] * 4
    with pytest.raises(RunError, match=r"cannot be reached for me/small .*sends a finished run later"):
        push_tool.main(["--model", str(tmp_path / "run"), "--repo", "me/small", "--license", "mit"])


def test_local_paths_are_published_by_their_name():
    values = {
        "train_file": ["/data/a.txt", "client/b.txt", "hf://datasets/me/c.txt"],
        "answer": "a/b",
        "x": "/d/roberta/",
    }
    names = {"train_file": ["a.txt", "b.txt", "hf://datasets/me/c.txt"], "answer": "a/b", "x": "roberta"}
    assert records.portable([values]) == [names]


def test_what_is_of_other_weights_is_not_published(server, preset, tmp_path, capsys):
    """BLiMP scores from before a run was continued, and weights that are newer than the record."""
    saving, run = ["--save_strategy", "steps", "--save_steps", "2"], tmp_path / "run"
    train(preset, *saving)
    before = (run / "run_record.json").read_bytes()
    interval = {
        f"mean_of_{kind}{end}": [0.7, 0.8] if end else 0.777
        for kind in ("paradigms", "phenomena")
        for end in ("", "_interval")
    }
    blimp = {"scores": {"pll": interval}, "random_weights": [], "pairs": 100, "partial": ""}
    durable.write_sealed(run / "blimp.json", {**blimp, "weights": weights.content_hash(str(run))})
    published = hub.prepare("me/small", run)
    assert "77.7" in (published / "README.md").read_text() and (published / "blimp.json").is_file()
    train(preset, *saving, "--max_steps", "6", "--resume_despite_changes", "true")
    published = hub.prepare("me/small", run)
    assert "77.7" not in (published / "README.md").read_text() and not (published / "blimp.json").exists()
    assert "blimp.json scores other weights and is not published: run make blimp again" in capsys.readouterr().err
    (run / "run_record.json").write_bytes(before)
    with pytest.raises(InputError, match=r"run has newer weights than its run_record.json: finish its run first"):
        push_tool.main(["--model", str(run), "--repo", "me/small"])


def test_a_pushed_checkpoint_replaces_the_last_one(server, tmp_path):
    """DeepSpeed's folder has the step in its name."""
    server.repositories["me/small"] = {"main": {".gitattributes": b""}}
    publisher = hub.Publisher("me/small", "id", None, HubStrategy.CHECKPOINT, True)
    for step in (2, 4):
        shard = tmp_path / f"checkpoint-{step}" / f"global_step{step}" / "optim_states.pt"
        shard.parent.mkdir(parents=True)
        shard.write_bytes(b"shard")
        (tmp_path / f"checkpoint-{step}" / "config.json").write_text("{}")
        publisher.push_checkpoint(tmp_path / f"checkpoint-{step}", step)
        publisher.wait()
    files = server.repositories["me/small"]["main"]
    assert [name for name in files if "optim" in name] == ["last-checkpoint/global_step4/optim_states.pt"]


def test_a_run_that_its_time_limit_ends_keeps_its_last_checkpoint_on_the_hub(server, preset, tmp_path):
    """A finished run has none."""
    push = ["--push_to_hub", "true", "--hub_model_id", "me/small", "--hub_strategy", "checkpoint"]
    train(preset, *push, "--max_train_minutes", 1e-6)
    files = server.repositories["me/small"]["main"]
    saved = {path.name: path.read_bytes() for path in (tmp_path / "run" / "checkpoint-1").iterdir()}
    on_hub = {name: data for name, data in files.items() if name.startswith("last-checkpoint/")}
    assert on_hub == {f"last-checkpoint/{name}": data for name, data in saved.items()} and "run_record.json" in files
    push_tool.main(["--model", str(tmp_path / "run"), "--repo", "me/small"])
    assert on_hub.items() <= files.items()
    assert train(preset, *push)["resumes"] == 1 and not on_hub.keys() & files.keys()


def test_a_local_start_is_not_published_as_a_model_of_the_hub(server, preset, model_dir, tmp_path, monkeypatch):
    """Neither from another folder, where its relative path is none."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(model_dir, "me/start")
    train(preset, "--model_name_or_path", "me/start", "--config_name", "", "--tokenizer_name", model_dir)
    resolved = train_mlm.read_arguments(["--model_name_or_path", "me/start", "--train_file", "x"])[1]
    assert resolved["model_name_or_path"] == resolved["tokenizer_name"] == str(tmp_path / "me" / "start")
    monkeypatch.chdir("me")
    card = cards.ModelCard.load(hub.prepare("me/small", tmp_path / "run") / "README.md")
    assert card.data.to_dict().get("base_model") is None and "continued from `start`" in card.text


def test_a_model_of_the_hub_is_identified_by_its_commit(server, preset, tmp_path):
    train(preset)
    push_tool.main(["--model", str(tmp_path / "run"), "--repo", "me/identified"])
    before = weights.content_hash("me/identified")
    assert re.fullmatch(HUB_COMMIT, before)
    push_tool.main(["--model", str(tmp_path / "run"), "--repo", "me/identified", "--license", "mit"])
    assert weights.content_hash("me/identified") != before


def test_a_model_that_a_wrong_token_hides_is_refused_with_the_status(server, monkeypatch):
    answer = {"error": "Invalid credentials in Authorization header"}  # the Hub's, also for public models
    monkeypatch.setattr(hub_server._Handler, "_user", lambda handler: handler._answer(401, answer))
    with pytest.raises(InputError, match=r"no model config at .*me/unseen.*401 Unauthorized"):
        weights.read_config("me/unseen")


def test_an_outage_and_refused_metadata_are_told_apart(server, preset, tmp_path, monkeypatch):
    train(preset)
    monkeypatch.setattr(hub, "RETRY_AFTER_S", ())
    argv = ["--model", str(tmp_path / "run"), "--repo", "me/small"]
    push_tool.main(argv)
    with monkeypatch.context() as patch:
        patch.setattr(HfApi, "hf_hub_download", functools.partial(_raise, LocalEntryNotFoundError("no connection")))
        with pytest.raises(RunError, match=r"cannot be reached for me/small \(no connection\)"):
            push_tool.main(argv)
    refusal = ValueError("Invalid metadata in README.md.\n- license must be one of mit")
    monkeypatch.setattr(HfApi, "create_commit", functools.partial(_raise, refusal))
    with pytest.raises(InputError, match=r"refuses me/small \(Invalid metadata in README.md. - license must be one of"):
        push_tool.main(argv)


def _raise(error, *args, **kwargs):
    raise error


def test_a_push_that_fails_while_training_ends_nothing(server, preset, capsys, monkeypatch):
    push = hub.Publisher.push_checkpoint

    def dropping(publisher, folder, step):
        publisher.wait()
        server.drops = [("POST", "/commit/")] if step == 1 else []
        push(publisher, folder, step)

    monkeypatch.setattr(hub.Publisher, "push_checkpoint", dropping)
    saving = ["--save_strategy", "steps", "--save_steps", "1", "--hub_always_push", "true", "--max_steps", "3"]
    record = train(preset, "--push_to_hub", "true", "--hub_model_id", "me/small", *saving)
    assert record["steps"] == 3 and "a background push failed; training continues" in capsys.readouterr().err
    assert [message for _, _, message in server.commits][1:] == ["Training in progress, step 2", "Trained for 3 steps"]


@pytest.fixture
def slow_push(server, monkeypatch):
    """A function: the first push of a checkpoint takes this many seconds, and a SIGTERM comes after its start."""
    push, commit = hub.Publisher.push_checkpoint, huggingface_hub.HfApi.create_commit

    def set_up(seconds):
        def preempting(*args):
            monkeypatch.setattr(huggingface_hub.HfApi, "create_commit", slow)
            push(*args)
            os.kill(os.getpid(), signal.SIGTERM)

        def slow(*args, **others):
            time.sleep(seconds)
            return commit(*args, **others)

        monkeypatch.setattr(hub.Publisher, "push_checkpoint", preempting)
        return ["--push_to_hub", "true", "--hub_model_id", "me/small", "--save_strategy", "steps", "--save_steps", "2"]

    return set_up


def test_a_push_that_a_signal_meets_is_waited_for(server, preset, slow_push):
    with pytest.raises(Stopped, match=r"by SIGTERM: step 3 of 4 is saved "):
        train(preset, *slow_push(1))
    assert "Training in progress, step 2" in [message for _, _, message in server.commits]


def test_no_rank_ends_before_the_push_of_rank_0(server, preset, tmp_path, slow_push):
    """A launcher would end rank 0, which pushes, as soon as another rank has ended with an exit code."""
    flags = [*slow_push(errors._HEAD_START_S + 3), "--per_device_train_batch_size", "4"]
    ranks = forked_ranks(lambda rank: train(preset, *flags), tmp_path)
    assert ranks[1].end() == 75
    assert "Training in progress, step 2" in [message for _, _, message in server.commits]
    assert ranks[0].end() == 75 and "Hub         waiting for a push" in ranks[0].log


def test_no_checkpoint_is_rotated_away_in_the_middle_of_its_push(server, preset, monkeypatch, capsys):
    """The connection is slower than training, and only one checkpoint is kept."""
    commit = huggingface_hub.HfApi.create_commit

    def slow(*args, **others):
        time.sleep(0.5)
        return commit(*args, **others)

    monkeypatch.setattr(huggingface_hub.HfApi, "create_commit", slow)
    saving = ["--save_strategy", "steps", "--save_steps", "1", "--save_total_limit", "1"]
    saving += ["--hub_strategy", "all_checkpoints", "--hub_always_push", "false"]
    train(preset, "--push_to_hub", "true", "--hub_model_id", "me/small", *saving)
    files = server.repositories["me/small"]["main"]
    for step in (1, 2, 3):
        names = {"optimizer.pt", "model.safetensors", "recipe_state.json", "manifest.json"}
        assert {f"checkpoint-{step}/{name}" for name in names} <= set(files)
    assert "a background push failed" not in capsys.readouterr().err


def test_what_the_hub_refuses_is_said_before_anything_is_trained(server, preset, tmp_path, monkeypatch):
    push = ("--push_to_hub", "true", "--hub_model_id")
    with pytest.raises(InputError, match=r"the Hub refuses you/small \(403: You don.t have .*with write access"):
        train(preset, *push, "you/small")
    with pytest.raises(InputError, match=r"the Hub refuses me/small/er .*Repo id must be"):
        train(preset, *push, "me/small/er")
    server.repositories["you/theirs"] = {"main": {}}
    with pytest.raises(InputError, match="the Hub refuses you/theirs"):
        train(preset, *push, "you/theirs")
    server.repositories["me/taken"] = {"main": {"model.safetensors": b"of somebody", "config.json": b"{}"}}
    with pytest.raises(InputError, match=r"me/taken contains.*2 unrelated files"):
        train(preset, *push, "me/taken")
    for token, message in (("hf_wrongSecret", "401: Invalid user.*with write access"), ("", "the Hub refuses"),
                           ("hf_Sécret", "contains invalid characters")):  # fmt: skip
        monkeypatch.setenv("HF_TOKEN", token)
        for name in ("me/small", "small"):
            with pytest.raises(InputError, match=message) as refused:
                train(preset, *push, name)
            assert "cret" not in str(refused.value)
    with pytest.raises(InputError, match="hub_token") as refused:
        train(preset, "--hub_token=hf_Secret", "--output_dir", tmp_path / "other")
    assert "Secret" not in str(refused.value) and not (tmp_path / "other").exists()
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match="HF_HUB_OFFLINE"):
        train(preset, *push, "me/small")
    assert not (tmp_path / "run" / "run_record.json").exists() and server.commits == []
    assert server.repositories["me/taken"]["main"]["model.safetensors"] == b"of somebody"


def test_a_run_keeps_its_repository_after_a_restart(server, preset, tmp_path):
    """The id in folder and card identifies the run; another run is refused, unless it may replace the first."""
    push = ("--push_to_hub", "true", "--hub_model_id", "me/small", "--save_strategy", "steps", "--save_steps", "2")
    push += ("--hub_revision", "exp")
    train(preset, *push)
    for path in (tmp_path / "run").glob("*"):  # the state of a run killed after step 2
        if path.is_file() and path.name not in ("hub.json", "preset.yaml"):
            path.unlink()
    shutil.rmtree(tmp_path / "run" / "checkpoint-4")
    record = train(preset, *push, "--per_device_train_batch_size", "4", "--logging_steps", "2")
    assert record["resumes"] == 1 and server.commits[-1] == ("me/small", "exp", "Trained for 4 steps")
    (tmp_path / "run").rename(tmp_path / "moved")
    push_tool.main(["--model", str(tmp_path / "moved"), "--repo", "me/small", "--revision", "exp"])
    with pytest.raises(InputError, match="me/small contains"):
        train(preset, *push)
    shutil.rmtree(tmp_path / "run")
    server.repositories["me/small"]["main"]["vocab.txt"] = b"of another model"
    train(preset, "--learning_rate", "1e-2")
    model = ["--model", str(tmp_path / "run"), "--repo", "me/small"]
    with pytest.raises(InputError, match="unrelated files"):
        push_tool.main(model)
    push_tool.main([*model, "--replace"])
    preset_there = yaml.safe_load(server.repositories["me/small"]["main"]["preset.yaml"])
    assert preset_there["learning_rate"] == 1e-2 and not [name for name in preset_there if "hub" in name]
    assert "vocab.txt" not in server.repositories["me/small"]["main"]
    server.repositories["me/new"] = {"main": {"LICENSE": b"MIT", "README.md": b""}}  # as made on the website
    push_tool.main([*model[:-1], "me/new"])
    files = server.repositories["me/new"]["main"]
    assert files["LICENSE"] == b"MIT" and files["README.md"] and "model.safetensors" in files


def test_fine_tuning_pushes_its_best_run(server, model_dir, tmp_path, monkeypatch):
    folder = tmp_path / "RTE"
    folder.mkdir()
    answers = ("not_entailment", "entailment")
    rows = [f"{n}\tThe cat sees a dog.\tA dog is {['red', 'seen'][n % 2]}.\t{answers[n % 2]}" for n in range(24)]
    for split, some in (("train", rows), ("dev", rows[::-1])):
        (folder / f"{split}.tsv").write_text("index\tsentence1\tsentence2\tlabel\n" + "\n".join(some) + "\n")
    argv = ["--task_name", "rte", "--data_dir", str(tmp_path), "--other_rows", "true"]
    argv += ["--model_name_or_path", model_dir]
    argv += ["--max_steps", "-1", "--num_train_epochs", "1", "--warmup_steps", "0", "--use_cpu", "--seeds", "1", "2"]
    argv += ["--max_seq_length", "32", "--output_dir", str(tmp_path / "rte"), "--push_to_hub", "true"]
    argv += ["--disable_tqdm", "true"]
    summary = finetune_glue.main([*argv, "--hub_model_id", "me/rte"])
    messages = ["In training", "Best of 1 run of 2", "Best of 2 runs"]
    assert [message for _, _, message in server.commits] == messages
    kept = (tmp_path / "rte" / "summary.json").read_bytes()
    server.drops = [("POST", "/commit/")]
    finetune_glue.main([*argv, "--hub_model_id", "me/rte", "--hub_strategy", "end"])  # finished: pushed once more
    assert [message for _, _, message in server.commits] == [*messages, "Best of 2 runs"]
    assert (tmp_path / "rte" / "summary.json").read_bytes() == kept
    files = server.repositories["me/rte"]["main"]
    best = Path(summary["settings"][0]["best_run"])
    assert files["model.safetensors"] == (best / "best" / "model.safetensors").read_bytes()
    assert {"summary.json", "run_record.json", "preset.yaml", "loss_curve.png", "tokenizer.json"} <= set(files)
    assert "validation_scores.npy" not in files
    assert "| rte (other_rows) | validation, 24 examples | accuracy |" in card_of(files).text
    assert "| 2 | 50.0 (always entailment) | accuracy " in card_of(files).text
    head = card_of(files).data.to_dict()
    (result,) = head["model-index"][0]["results"]
    # with other_rows the card does not claim GLUE's rows
    assert result["dataset"] == {"name": "rte (other_rows)", "type": "local/rte_other_rows", "split": "validation"}
    (metric,) = result["metrics"]
    assert metric["value"] == round(summary["settings"][0]["median"], 4) and "median of 2 seeds" in metric["name"]
    assert head["pipeline_tag"] == "text-classification"
    assert weights.content_hash(model_dir) == durable.read_sealed(best / "run_record.json")["fingerprint"]["weights"]
    monkeypatch.chdir(Path(model_dir).parent)
    relative = [*argv, "--model_name_or_path", f"../{tmp_path.name}/model", "--push_to_hub", "false", "--seeds", "1"]
    finetune_glue.main([*relative, "--output_dir", "relative"])
    published = hub.prepare("me/rte", Path("relative"))
    for name in ("preset.yaml", "run_record.json", "summary.json"):
        named = re.findall(r'model_name_or_path"?: (.*)', (published / name).read_text())
        assert {words.strip('",') for words in named} == {"model"}, name
    (tmp_path / "rte" / "run_record.json").write_text("{}")
    with pytest.raises(InputError, match=r"output_dir=.*rte is the folder of another run: it has run_record"):
        finetune_glue.main(argv)
    with pytest.raises(InputError, match="keep=none leaves no weights to push"):
        finetune_glue.main([*argv, "--keep", "none"])


def made_up_summary(**dataset):
    """The summary of two seeds of fine-tuning on an unknown task."""
    scores = {"learning_rate": 1e-5, "global_batch_size": 16, "median": 0.5, "mean": 0.5, "lowest": 0.4, "highest": 0.6}
    scores |= {"seeds": {"1": 0.4, "2": 0.6}, "degenerate_seeds": [], "best_run": "lr1e-05-batch16-seed2"}
    medians = {"kappa": 0.5, "total": 100}
    described = {"name": "Same sense?", "hub_id": None, "hub_config": None, "split": "validation"}
    described |= {"task_type": "text-classification", "hub_metrics": {"kappa": "cohen_kappa"}, "note": "", **dataset}
    return {
        **{"task": "same sense", "metric": "kappa", "picked": 0, "settings": [{**scores, "medians": medians}]},
        **{"scored_examples": {"validation": 277}, "baseline": {"answer": "same", "metrics": {"kappa": 0.25}}},
        **{"dataset": described, "resolved_args": {"level": "all"}, "shown_args": ["level"]},
    }


def test_results_of_fine_tuning_stand_on_the_card_of_the_pretrained_model(server, preset, tmp_path):
    train(preset)
    best = tmp_path / "sense" / "lr1e-05-batch16-seed2"
    best.mkdir(parents=True)
    start = {"weights": weights.content_hash(str(tmp_path / "run"))}
    durable.write_sealed(tmp_path / "sense" / "summary.json", made_up_summary(hub_id="me/sense", hub_config="all"))
    durable.write_sealed(best / "run_record.json", {"fingerprint": start})
    push = ["--model", str(tmp_path / "run"), "--repo", "me/small", "--results"]
    push_tool.main([*push, str(tmp_path / "sense")])
    card = card_of(server.repositories["me/small"]["main"])
    scored = (
        "| Same sense? | validation, 277 examples | kappa | 50.0 | 40.0 to 60.0 | 2 | 25.0 (always same) | kappa 50.0 |"
    )
    assert scored in card.text and "Majority answer: the score of the most frequent right answer" in card.text
    assert [result.dataset_type for result in card.data.eval_results].count("me/sense") == 1
    for other in ({"weights": "0123"}, {**start, "random_weights": True}):
        durable.write_sealed(best / "run_record.json", {"fingerprint": other})
        with pytest.raises(InputError, match=r"sense is not fine-tuned from the weights in .*run: leave it out"):
            push_tool.main([*push, str(tmp_path / "sense")])
    with pytest.raises(InputError, match=r"summary\.json is missing"):
        push_tool.main([*push, str(tmp_path / "none")])
    with pytest.raises(InputError, match="has no finished run"):
        push_tool.main(["--model", str(tmp_path / "none"), "--repo", "me/small"])


def test_the_card_lists_datasets_of_the_hub(preset, tmp_path):
    sources = [("wiki", "wikimedia/wikipedia"), ("news", "stanford-oval/ccnews"), ("here", str(tmp_path))]
    corpus = corpora.Corpus("c", [corpora.Source(name, path, revision="a", weight=1) for name, path in sources])
    ids = ["stanford-oval/ccnews", "wikimedia/wikipedia"]
    assert corpora.hub_ids(corpus) == ids
    record = train(preset)
    shown = cards.pretrained(
        "me/small", {**CONFIG, "architectures": ["RoFormerForMaskedLM"]}, record | {"datasets": ids}, []
    )
    assert "AutoModelForMaskedLM" in shown.text and shown.data.pipeline_tag == "fill-mask"
    assert shown.data.to_dict()["datasets"] == ids and record["datasets"] == []


CONFIG = {"architectures": ["RobertaForSequenceClassification"], "model_type": "roberta", "num_hidden_layers": 2}


def test_the_card_of_a_new_task_says_what_its_job_says(tmp_path):
    """Name, data, task type and metrics come from the job, settings from the declarations of flags."""
    summary = made_up_summary(note="with labels of our own")
    settings = {"model_name_or_path": str(tmp_path), "max_seq_length": 64, "seed": 2, "learning_rate": 1e-5}
    settings |= {
        "dataset_name": "someone/sense",
        "temperature": 0.7,
        "hidden": "x",
        "layer_decay": None,
        "max_grad_norm": 0.0,
        "bf16": False,
        "global_batch_size": 16,
    }
    record = {
        **{"task": "same sense", "metric": "kappa", "metrics": {"kappa": 0.6, "total": 100}, "degenerate": False},
        **{"dataset": summary["dataset"], "examples": {"train": 1000}, "parameters": 5_000_000, "steps": 10},
        **{"scored_examples": {"validation_a": 1250, "validation_b": 30}, "baseline": None},
        **{"resolved_args": settings, "tokens_seen": 1000, "tokens_per_second": 10, "train_seconds": 100.0},
        **{"shown_args": ["max_seq_length", "seed", "temperature", "layer_decay", "max_grad_norm", "bf16"]},
        **{"versions": {"torch": "2"}, "commit": "abc", "fingerprint": {"weights": "a" * 16}},
        **{"hardware": {"gpus": ["NVIDIA H200"] * 8, "cpu_cores": 16, "machine": "x86_64", "system": "Linux"}},
    }
    shown = cards.fine_tuned("me/sense", CONFIG, record, summary)
    head = shown.data.to_dict()
    (result,) = head["model-index"][0]["results"]
    assert result["dataset"] == {"name": "Same sense?", "type": "local/same_sense", "split": "validation"}
    assert result["metrics"] == [{"type": "cohen_kappa", "value": 0.5, "name": "kappa, median of 2 seeds"}]
    assert head["datasets"] == ["someone/sense"] and "language" not in head and "license" not in head
    on_hub = {"dataset_name": "someone/sense", "dataset_config_name": "short"}
    on_its_own = cards.fine_tuned("me/sense", CONFIG, record, made_up_summary() | {"resolved_args": on_hub})
    (result,) = on_its_own.data.eval_results
    assert (result.dataset_type, result.dataset_config) == ("someone/sense", "short")
    assert "fine-tuned on Same sense?, with labels of our own, by the protocol" in shown.text
    assert "8 x NVIDIA H200" in shown.text
    assert str(tmp_path) not in str(shown) and "base_model" not in head and "hidden" not in shown.text.split("size")[0]
    table = shown.text.split("## Training")[1].split("10 steps")[0]
    names = [line.split(" | ")[0].removeprefix("| ") for line in table.splitlines() if line.startswith("| ")]
    assert names == ["", "---", "max_seq_length", "seed", "temperature", "max_grad_norm"]
    loading = {
        "MaxPooled": "with the class `MaxPooled`",
        "PooledForSequenceClassification": "with the class `PooledForSequenceClassification`",
        "XLNetForQuestionAnsweringSimple": "AutoModelForQuestionAnswering,",
    }
    for architecture, said in loading.items():  # a head of one's own; one of transformers' with another name
        text = cards.fine_tuned("me/sense", CONFIG | {"architectures": [architecture]}, record, summary).text
        assert said in text and ("from transformers import AutoModel" in text) == ("Simple" in architecture)
    alone = cards.fine_tuned("me/sense", CONFIG, record, None)  # other seeds are still training
    splits = "validation_a, 1,250 examples; validation_b, 30 examples"
    assert f"| {splits} | kappa | 60.0 | 60.0 to 60.0 | 1 | - |" in alone.text
