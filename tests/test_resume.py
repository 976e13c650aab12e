"""Runs that are killed, stopped, out of disk or memory, with real faults: what is kept, and how they resume."""

import json
import multiprocessing
import os
import re
import resource
import shutil
import signal
import time
from pathlib import Path

import psutil
import pytest
import torch
from conftest import Forked, corpus_of, forked_ranks, make_documents, run_python, write_jsonl, write_parquet
from fsspec.implementations.local import LocalFileSystem
from safetensors.torch import save_file

import train_mlm
from roberta_recipe import durable
from roberta_recipe.data import chunks
from roberta_recipe.data import documents as reading
from roberta_recipe.data.corpus import Source
from roberta_recipe.errors import InputError, says_no_room
from roberta_recipe.record import INDEX_NAME
from roberta_recipe.tools import compare
from roberta_recipe.training import checkpoint
from roberta_recipe.training.durable_trainer import is_write_failure
from roberta_recipe.training.mlm_trainer import MlmTrainer

SAVING = ["--save_strategy", "steps", "--save_steps", "3", "--max_steps", "12"]
WORKER = ["--dataloader_num_workers", "1"]
KEYS = ("step", "loss", "grad_norm", "tokens_seen", "blocks_digest", "digest")


def train(preset, *argv):
    return train_mlm.main(["--config", str(preset), *map(str, argv)])


def history(output_dir, step=12):
    log = durable.read_json(Path(output_dir) / f"checkpoint-{step}" / "trainer_state.json")["log_history"]
    return [{key: entry[key] for key in KEYS} for entry in log if "loss" in entry]


@pytest.fixture
def dropout(config, preset, tmp_path):
    """The preset with dropout, so that a checkpoint must hold the random state."""
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.1
    config.to_json_file(tmp_path / "config.json")
    return preset


def wait_for_line(run, line, times):
    """Wait until a forked run has logged so many lines with these words."""
    deadline_s = time.monotonic() + 100
    while run.log.count(line) < times and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert run.log.count(line) >= times, run.log


def test_killed_twice_and_started_again_a_run_is_the_same_run(dropout, tmp_path, monkeypatch):
    """Two processes, a data worker each, over many chunks, bit for bit; the second time without the chunk index. At
    random moments: benchmarks/faults."""
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 4_000)
    flags = [*SAVING, "--per_device_train_batch_size", "2", "--dataloader_num_workers", "1", "--output_dir"]

    def start_ranks(name):
        return forked_ranks(lambda rank: train(dropout, *flags, tmp_path / name), tmp_path)

    ranks = start_ranks("alone")
    assert [rank.end() for rank in ranks] == [0, 0], ranks[0].log
    for index in ("kept", "lost"):
        ranks = start_ranks("killed")
        wait_for_line(ranks[0], "  loss ", 5)
        processes = [psutil.Process(rank.pid) for rank in ranks]
        for victim in [worker for rank in processes for worker in rank.children(recursive=True)] + processes:
            victim.kill()
        assert [rank.end() for rank in ranks] == [-signal.SIGKILL] * 2
        assert not (tmp_path / "killed" / "run_record.json").exists()
        if index == "lost":
            (tmp_path / "killed" / INDEX_NAME).unlink()
    ranks = start_ranks("killed")
    assert [rank.end() for rank in ranks] == [0, 0] and "Resuming" in ranks[0].log
    assert history(tmp_path / "killed") == history(tmp_path / "alone") and len(history(tmp_path / "alone")) == 12
    assert compare.main([str(tmp_path / "killed"), str(tmp_path / "alone")])  # weights, optimizer, scheduler


@pytest.mark.parametrize("cached", [False, True])
def test_another_layout_takes_the_same_blocks_after_the_checkpoint(preset, tmp_path, cached):
    flags = [*SAVING, *(["--token_cache", tmp_path / "cache"] if cached else [])]
    train(preset, *flags, "--output_dir", tmp_path / "a")
    elsewhere = ["--resume_from_checkpoint", tmp_path / "a" / "checkpoint-6", "--output_dir", tmp_path / "b"]
    train(preset, *flags, *elsewhere, "--per_device_train_batch_size", 2, "--dataloader_num_workers", 2)
    whole, other = history(tmp_path / "a"), history(tmp_path / "b")
    assert [entry["digest"] for entry in other] == [entry["digest"] for entry in whole] and len(whole) == 12
    assert [entry["loss"] for entry in other] == pytest.approx([entry["loss"] for entry in whole], rel=1e-5)


def test_a_checkpoint_between_two_log_lines(dropout, tmp_path):
    """A step that is saved is logged first, so that the next logged mean begins there, resumed or not."""
    flags = [*SAVING, "--logging_steps", 4, "--output_dir"]
    train(dropout, *flags, tmp_path / "a")
    train(dropout, *flags, tmp_path / "b", "--resume_from_checkpoint", tmp_path / "a" / "checkpoint-3")
    assert history(tmp_path / "b") == history(tmp_path / "a")
    assert [entry["step"] for entry in history(tmp_path / "a")] == [1, 3, 4, 6, 8, 9, 12]


def damage(path, fault):
    if fault == "missing":
        path.unlink()
    elif fault == "truncated":
        path.write_bytes(path.read_bytes()[:-10])
    elif fault == "bit":
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)


@pytest.mark.parametrize("name", ["optimizer.pt", "model.safetensors", "recipe_state.json", "manifest.json"])
@pytest.mark.parametrize("fault", ["missing", "truncated", "bit"])
def test_a_bad_newest_checkpoint_is_passed_over(tmp_path, name, fault, caplog):
    for step in (3, 6):
        aside = tmp_path / "aside"
        aside.mkdir()
        for file in ("optimizer.pt", "model.safetensors", "recipe_state.json"):
            (aside / file).write_bytes(os.urandom(1000))
        durable.move_into_place(aside, tmp_path / f"checkpoint-{step}")
    assert checkpoint._find(str(tmp_path), None) == str(tmp_path / "checkpoint-6")
    damage(tmp_path / "checkpoint-6" / name, fault)
    assert checkpoint._find(str(tmp_path), None) == str(tmp_path / "checkpoint-3")
    assert "Passed over" in caplog.text and "checkpoint-6" in caplog.text
    assert name in caplog.text or name == durable.MANIFEST
    shutil.rmtree(tmp_path / "checkpoint-3")
    if (name, fault) == (durable.MANIFEST, "missing"):
        with pytest.raises(InputError, match=r"checkpoints of another program \(checkpoint-6\)"):
            checkpoint._find(str(tmp_path), None)
        (tmp_path / "log.jsonl").touch()  # of a start that was killed as it wrote its first checkpoint
        assert checkpoint._find(str(tmp_path), None) is None and checkpoint.newest_first(tmp_path) == []
        return
    with pytest.raises(InputError, match=r"no checkpoint in output_dir=.* is whole \(passed over: checkpoint-6\)"):
        checkpoint._find(str(tmp_path), None)


def test_what_is_resumed_is_what_was_started(preset, tmp_path, root):
    train(preset, *SAVING, "--output_dir", tmp_path / "a")
    (tmp_path / "a" / "run_record.json").unlink()
    changes = {"global_batch_size": 16, "mlm_probability": 0.2, "seed": 7, "max_seq_length": 32, "learning_rate": 2e-3}
    for name, value in changes.items():
        with pytest.raises(InputError, match=rf"{name} was [\d.]+, is {value}.*--resume_despite_changes"):
            train(preset, *SAVING, "--output_dir", tmp_path / "a", f"--{name}", value)
    flags = ["--max_steps", 15, "--learning_rate", 2e-3, "--resume_despite_changes", "--output_dir", tmp_path / "a"]
    record = train(preset, *SAVING, *flags)
    assert record["steps"] == 15 and record["resumes"] == 1
    rates = durable.read_json(tmp_path / "a" / "checkpoint-15" / "trainer_state.json")["log_history"]
    assert [e["learning_rate"] for e in rates if e.get("step") == 13] == [pytest.approx(2e-3 * 3 / 15)]


def test_checkpoint_and_token_cache_of_a_former_version_are_refused(preset, tmp_path, monkeypatch):
    """Their fingerprints have no "chunks"; shards had other facts."""
    cache, now = tmp_path / "cache", chunks.TextReader.fingerprint
    with monkeypatch.context() as patch:
        former = lambda reader: {name: value for name, value in now(reader).items() if name != "chunks"}  # noqa: E731
        patch.setattr(chunks.TextReader, "fingerprint", former)
        train(preset, *SAVING, "--token_cache", cache)
    (tmp_path / "run" / "run_record.json").unlink()
    with pytest.raises(
        InputError, match=r"checkpoint-12 belongs to: chunks was None, is 'chunks.*, or name another outp"
    ):
        train(preset, *SAVING)
    shard = cache / "train_file" / "train-00000.json"
    durable.write_sealed(shard, {name: value for name, value in durable.read_sealed(shard).items() if name != "chunks"})
    with pytest.raises(
        InputError, match=r"token_cache=.*cache was made from .*: chunks was None, .* Name another folder"
    ):
        train(preset, "--token_cache", cache, "--output_dir", tmp_path / "other")


def test_another_file_of_the_tokenizer_is_another_run(preset, tokenizer_dir, tmp_path):
    """No id depends on it, but it is saved with the model."""
    folder = shutil.copytree(tokenizer_dir, tmp_path / "tokenizer")
    flags = [*SAVING, "--tokenizer_name", folder]
    train(preset, *flags)
    (tmp_path / "run" / "run_record.json").unlink()
    config = durable.read_json(folder / "tokenizer_config.json")
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "model_max_length": 63}))
    with pytest.raises(InputError, match="tokenizer_files was"):
        train(preset, *flags)


def test_killed_behind_the_last_step_a_run_only_finishes(preset, tmp_path):
    first = train(preset, *SAVING)
    (tmp_path / "run" / "run_record.json").unlink()
    again = train(preset, *SAVING)
    assert again["steps"] == 12 and again["digest"] == first["digest"] and again["resumes"] == 1
    assert again["metrics"]["eval_loss"] == first["metrics"]["eval_loss"]


@pytest.mark.parametrize("processes", [1, 2])
def test_sigterm_saves_the_step_and_ends_with_the_documented_code(preset, tmp_path, processes):
    flags = ["--max_steps", "100000", "--per_device_train_batch_size", "2", "--dataloader_num_workers", "1"]
    ranks = forked_ranks(lambda rank: train(preset, *flags), tmp_path, processes)
    wait_for_line(ranks[0], "  loss ", 4)
    for rank in ranks:
        os.kill(rank.pid, signal.SIGTERM)
    assert [rank.end() for rank in ranks] == [75] * processes, ranks[0].log
    (saved,) = checkpoint.newest_first(tmp_path / "run")
    step = durable.read_json(saved / "recipe_state.json")["step"]
    assert durable.fault(saved) is None and saved.name == f"checkpoint-{step}" and step >= 4
    assert f"stopped by SIGTERM: step {step} of 100,000 is saved in" in ranks[0].log and "Traceback" not in ranks[0].log


def kill_at(monkeypatch, method, step):
    """From now on, `MlmTrainer`'s `method` ends its process at a step as `kill -9` would."""
    original = getattr(MlmTrainer, method)

    def killed(self, *args, **kwargs):
        if self.state.global_step == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(MlmTrainer, method, killed)


@pytest.mark.parametrize(
    ("method", "step", "victim", "kept"),
    [("training_step", 5, 1, "The last complete checkpoint is .*checkpoint-3"), ("evaluate", 12, 0, "is whole")],
)
def test_a_process_that_is_killed_is_named_in_a_line_by_the_others(
    preset, tmp_path, monkeypatch, method, step, victim, kept
):
    def call(rank):
        if rank == victim:
            kill_at(monkeypatch, method, step)
        train(preset, *SAVING, "--per_device_train_batch_size", 4)

    ranks = forked_ranks(call, tmp_path)
    assert ranks[victim].end() == -signal.SIGKILL
    other = ranks[1 - victim]
    assert other.end() == 1, other.log
    said = rf"error: another process of this run is gone.* \(.*by peer.*\): .* {kept}.* Continue with: .*"
    assert any(re.fullmatch(said, line) for line in other.log.splitlines()), other.log
    assert "Traceback" not in other.log


def test_a_full_disk_leaves_the_last_checkpoint(preset, tmp_path, monkeypatch):
    """A limit of the process stands for the full disk: no file above 200 KB, from the second checkpoint on."""
    save = MlmTrainer.save_model

    def with_quota(self, *args, **kwargs):
        if self.state.global_step == 6:
            resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
        save(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(MlmTrainer, "save_model", with_quota)
        run = Forked(lambda: train(preset, *SAVING), tmp_path / "log")
        assert run.end() == 1, run.log
    last = run.log.splitlines()[-1]
    assert last.startswith("error: checkpoint-6 could not be written") and "checkpoint-3" in last
    assert not (tmp_path / "run" / "checkpoint-6").exists()
    train(preset, *SAVING)
    assert len(history(tmp_path / "run")) == 12


@pytest.mark.parametrize("writer", ["tokenizers", "torch", "shared memory", "safetensors", "python"])
def test_a_file_for_which_there_is_no_room_is_known_whoever_writes_it(tokenizer, tmp_path, writer):
    tensor, path = torch.zeros(100_000), tmp_path / "file"

    def write():
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        try:
            if writer == "tokenizers":
                tokenizer.save_pretrained(tmp_path)
            elif writer == "torch":
                torch.save({"tensor": tensor}, path)
            elif writer == "shared memory":
                tensor.share_memory_()
            elif writer == "safetensors":
                save_file({"tensor": tensor}, path)
            else:
                path.write_bytes(bytes(10_000))
        except Exception as error:
            if not is_write_failure(error):
                raise
            os._exit(0 if writer == "safetensors" or says_no_room(error) else 1)
        os._exit(2)

    process = multiprocessing.get_context("fork").Process(target=write)
    process.start()
    process.join(60)
    assert process.exitcode == 0


@pytest.mark.parametrize(("behind", "what"), [("train", "the model"), ("evaluate", "File too large")])
def test_a_disk_that_is_full_at_the_end_loses_no_step(preset, tmp_path, root, behind, what):
    """The last checkpoint is kept; the error says in a line what to do, and the next start writes model and record."""
    script = f"""
import resource, sys
sys.path.insert(0, {str(root)!r})
import train_mlm
from roberta_recipe.errors import exit_on_error
from roberta_recipe.training.mlm_trainer import MlmTrainer
method = MlmTrainer.{behind}
def then_quota(self, *args, **kwargs):
    value = method(self, *args, **kwargs)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
    return value
MlmTrainer.{behind} = then_quota
exit_on_error(train_mlm.main)
"""
    (tmp_path / "quota.py").write_text(script)
    done = run_python(tmp_path / "quota.py", "--config", preset, *SAVING, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: ") and what in last and "Continue with: " in last
    assert train(preset, *SAVING)["steps"] == 12


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_hidden_layers": 3}, r"Missing key.*roberta\.encoder\.layer\.2"),
        ({"num_hidden_layers": 1}, r"Unexpected key.*roberta\.encoder\.layer\.1"),
        ({"intermediate_size": 48}, "size mismatch for roberta.encoder.layer.0.intermediate.dense.weight"),
    ],
)
def test_weights_of_another_shape_are_not_resumed(preset, config, tmp_path, changes, said):
    """Also where changes are allowed."""
    train(preset, *SAVING)
    shutil.rmtree(tmp_path / "run" / "checkpoint-12")
    (tmp_path / "run" / "run_record.json").unlink()
    config.update(changes)
    config.to_json_file(tmp_path / "config.json")
    with pytest.raises(InputError, match=rf"has the state of another model \(.*{said}.* --model_name_or_path "):
        train(preset, *SAVING, "--resume_despite_changes")


def test_a_run_that_was_killed_before_its_first_checkpoint_starts_again(preset, tmp_path):
    """What trackers have written beside the log is in nobody's way, nor is the chunk index; a checkpoint moved aside is
    none."""
    (tmp_path / "run" / "runs" / "Nov23_host").mkdir(parents=True)
    (tmp_path / "run" / INDEX_NAME).write_text("0 damaged\n")
    assert train(preset, *SAVING)["steps"] == 12
    (tmp_path / "run" / "checkpoint-12").rename(tmp_path / "run" / "checkpoint-99-bad")
    assert [path.name for path in checkpoint.newest_first(tmp_path / "run")] == [
        *("checkpoint-9", "checkpoint-6", "checkpoint-3")
    ]


def test_out_of_memory_says_what_to_lower(preset, tmp_path, monkeypatch):
    """A real limit: the process may take 100 MB more than it has after loading."""

    def limited(function):
        def within(*args, **kwargs):
            size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (size + 100_000_000, resource.RLIM_INFINITY))
            try:
                return function(*args, **kwargs)
            finally:
                resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

        return within

    big = ["--global_batch_size", "1024", "--per_device_train_batch_size", "1024", "--max_steps", "1"]
    monkeypatch.setattr(MlmTrainer, "training_step", limited(MlmTrainer.training_step))
    run = Forked(lambda: train(preset, *big), tmp_path / "log")
    assert run.end() == 1 and "lower per_device_train_batch_size=1024" in run.log, run.log


# Reading


class FailsAtFirst(LocalFileSystem):
    """A local file system whose first reads fail, as a network's do."""

    protocol, cachable, failures = "shaky", False, 0

    def _open(self, path, mode="rb", **kwargs):
        if FailsAtFirst.failures > 0 and "r" in mode:
            FailsAtFirst.failures -= 1
            raise OSError(5, "Input/output error", path)
        return super()._open(path, mode, **kwargs)

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol("/" + str(path).removeprefix("shaky://").lstrip("/"))

    def unstrip_protocol(self, name):
        return f"shaky://{name}"


def texts_of(files, on_bad_shard="stop"):
    source = Source("s", files=files)
    whole = corpus_of("c", [source], validation_share=1e-9, on_bad_shard=on_bad_shard)
    return list(reading.documents(whole, source, "train", seed=0))


def test_reads_that_fail_at_first_are_tried_again(tmp_path, monkeypatch, caplog):
    import fsspec

    fsspec.register_implementation("shaky", FailsAtFirst, clobber=True)
    monkeypatch.setattr("roberta_recipe.data.readers.RETRY_DELAYS_S", (0.01,) * 5)
    texts = make_documents(30, seed=1)
    for path in (write_jsonl(tmp_path / "a.jsonl", texts), write_parquet(tmp_path / "a.parquet", texts)):
        caplog.clear()
        FailsAtFirst.failures = 3
        assert texts_of(f"shaky://{path}") == texts
        assert FailsAtFirst.failures == 0 and caplog.text.count("Input/output error") == 3
        FailsAtFirst.failures = 100
        with pytest.raises(InputError, match=rf"cannot read shaky://{path}"):
            texts_of(f"shaky://{path}")
    FailsAtFirst.failures = 0


def test_a_shard_that_breaks_off_is_named_or_skipped_and_counted(preset, tmp_path, tokenizer):
    folder = tmp_path / "shards"
    folder.mkdir()
    for number in range(3):
        write_parquet(folder / f"{number}.parquet", make_documents(30, seed=number))
    (folder / "1.parquet").write_bytes((folder / "1.parquet").read_bytes()[:-2000])
    with pytest.raises(InputError, match=r"cannot read .*1.parquet.*`on_bad_shard: skip` in a corpus preset"):
        texts_of(str(folder))
    assert texts_of(str(folder), "skip") and len(texts_of(str(folder), "skip")) == 60
    sources = f"sources:\n  - {{name: shards, files: {folder}}}\n"
    (tmp_path / "corpus.yaml").write_text(f"on_bad_shard: skip\nvalidation_share: 0.2\n{sources}")
    record = train(preset, "--corpus", tmp_path / "corpus.yaml", "--max_steps", 60)
    counts = record["counts"]["train"]["shards"]
    assert counts["bad_files"] >= 1 and json.loads(json.dumps(counts)) == counts


def test_the_estimate_prints_and_trains_nothing(root, tmp_path):
    done = run_python(
        *["-m", "roberta_recipe.tools.estimate", "--config", "presets/mlm/roberta_base.yaml"],
        *["--hardware", "8xA100-40GB"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(root)},
    )
    assert done.returncode == 0, done.stderr
    assert "124,727,424 parameters" in done.stdout and "8 processes x 32 x 32 accumulated" in done.stdout
    assert "58.62 epochs" in done.stdout and not list(tmp_path.iterdir())
