"""GLUE runs: the same curve for any accumulation and number of processes, killed or stopped at any point."""

import os
import signal
import time
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from conftest import end_well, forked_ranks, losses
from glue_runs import data_dir, flags, record_of, special, wsc_dir  # noqa: F401
from safetensors.torch import load_file, save_file

import finetune_glue
from roberta_recipe import durable
from roberta_recipe.errors import InputError, RunError, Stopped
from roberta_recipe.tasks import protocol, summaries
from roberta_recipe.training import checkpoint, finetune_trainer


@pytest.mark.parametrize("name", ["rte", "stsb", "qnli", "wnli"])
def test_any_accumulation_gives_one_curve(flags, wsc_dir, tmp_path, name):
    form = ["--qnli_form", "ranking"] if name == "qnli" else []
    curves = []
    for micro_batch in (8, 1):
        out = tmp_path / str(micro_batch)
        others = ["--per_device_train_batch_size", micro_batch, "--output_dir", out, *form, *special(name, wsc_dir)]
        finetune_glue.main(flags(name, *others))
        curves.append(losses(durable.read_json(out / "lr0.001-batch8-seed1" / "run_record.json")))
    assert len(curves[0]) == 6 and curves[0][-1] != curves[0][0]
    assert curves[1] == pytest.approx(curves[0], rel=1e-4)


def test_two_processes_give_the_curve_of_one_process_also_when_resumed(flags, tmp_path, monkeypatch):
    """Killed within an epoch, two processes resume with its remaining batches."""
    saving = ["--save_strategy", "steps", "--save_steps", 5, "--max_steps", 8]
    finetune_glue.main(flags("rte", *saving, "--output_dir", tmp_path / "a"))
    batches = ["--per_device_train_batch_size", 2, "--per_device_eval_batch_size", 2]
    argv = flags("rte", *saving, *batches, "--do_predict")
    step = finetune_trainer.FinetuneTrainer.training_step

    def killed(self, *args, **kwargs):
        if self.state.global_step == 6:
            os._exit(9)
        return step(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(finetune_trainer.FinetuneTrainer, "training_step", killed)
        ranks = forked_ranks(lambda rank: finetune_glue.main(argv), tmp_path)
        assert [rank.end() for rank in ranks] == [9, 9]
    assert (tmp_path / "glue/rte/lr0.001-batch8-seed1/checkpoint-5").is_dir()
    ranks = forked_ranks(lambda rank: finetune_glue.main(argv), tmp_path)
    end_well(ranks)
    two, single = record_of(tmp_path), durable.read_json(tmp_path / "a" / "lr0.001-batch8-seed1" / "run_record.json")
    assert losses(two) == pytest.approx(losses(single), rel=1e-4) and len(losses(two)) == 8 and two["resumes"] == 1
    assert two["metrics"] == pytest.approx(single["metrics"]) and two["tokens_seen"] == single["tokens_seen"]
    assert "".join(rank.log for rank in ranks).count("rte, validation accuracy") == 1


def test_ranks_with_different_settings_are_refused(flags, tmp_path):
    argv = flags("rte", "--per_device_train_batch_size", 4, "--weight_decay")
    ranks = forked_ranks(lambda rank: finetune_glue.main([*argv, ("0.1", "0.2")[rank]]), tmp_path)
    assert [rank.end() for rank in ranks] == [2, 2], ranks[0].log
    assert "different settings: weight_decay=0.1 on rank 0, 0.2 on rank 1; " in ranks[0].log


def test_files_that_change_between_two_seeds(flags, model_dir, tmp_path, monkeypatch, root):
    """Every seed has the preset of the start; a start model that has changed is refused, also by the next start."""
    own, train = tmp_path / "own.yaml", finetune_trainer.FinetuneTrainer.train
    own.write_text(text := (root / "presets/glue/rte.yaml").read_text())
    argv = flags("rte", "--config", own, "--seeds", 1, 2, "--output_dir")

    def then(change):
        def patched(self, *args, **kwargs):
            train(self, *args, **kwargs)
            change()

        monkeypatch.setattr(finetune_trainer.FinetuneTrainer, "train", patched)

    then(lambda: own.write_text(text.replace("adam_beta1: 0.9", "adam_beta1: 0.5")))
    finetune_glue.main([*argv, str(tmp_path / "preset")])
    first, second = (tmp_path / "preset" / f"lr0.001-batch8-seed{seed}/run_record.json" for seed in (1, 2))
    assert "adam_beta1 was" not in str(
        durable.differences(*(durable.read_json(p)["fingerprint"] for p in (first, second)))
    )
    stored = load_file(start := f"{model_dir}/model.safetensors")
    then(lambda: save_file({name: weight + 1 for name, weight in stored.items()}, start, {"format": "pt"}))
    with pytest.raises(InputError, match=r"model_name_or_path=.* has changed since this command began: "):
        finetune_glue.main([*argv, str(tmp_path / "model")])
    with pytest.raises(InputError, match=r"seed1 has a run with other settings: weights was "):
        finetune_glue.main([*argv, str(tmp_path / "model")])


def test_the_best_epoch_is_kept_and_of_equal_ones_the_first(flags, tmp_path, monkeypatch):
    accuracy = {3: 0.5, 6: 0.9, 9: 0.9, 12: 0.7}  # by the step that `scores` stands for
    monkeypatch.setattr(
        finetune_trainer.FinetuneTrainer,
        "scores",
        lambda self, features: np.full((len(features), 2), self.state.global_step, dtype=np.float32),
    )
    monkeypatch.setattr(
        finetune_glue, "measure", lambda task, form, split, of, *_: {"accuracy": accuracy[int(of[0, 0])]}
    )
    summary = finetune_glue.main(flags("rte", "--max_steps", 12))
    record, best = record_of(tmp_path), tmp_path / "glue" / "rte" / "lr0.001-batch8-seed1" / "best"
    assert record["best_step"] == 6 and [step for step, _ in record["score_at_steps"]] == [3, 6, 9, 12]
    assert (np.load(best / finetune_trainer.SCORES) == 6).all() and summary["settings"][0]["median"] == 0.9


def test_rank_0_alone_reads_the_scores_that_it_deletes(monkeypatch):
    """Another rank would find a manifest without the files that rank 0 has deleted."""
    monkeypatch.setattr(summaries, "summarise", lambda *_: {"settings": [{"best_run": "run"}], "picked": 0})
    monkeypatch.setattr(summaries, "summarise_tests", lambda *_: pytest.fail("rank 1 reads"))
    job = SimpleNamespace(metric="accuracy", about=lambda *_: {}, tests={"test": 3})
    args = SimpleNamespace(keep="best"), SimpleNamespace(do_predict=True, process_index=1)
    assert protocol.finish(args, {}, [], [], job)["settings"] == [{"best_run": "run"}]


def test_killed_before_the_first_checkpoint_is_sealed(flags, tmp_path, monkeypatch, capsys):
    def killed(*args):
        raise RunError("killed")

    saving = ["--save_strategy", "epoch", "--max_steps", 6]
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "state_hashes", killed)
        with pytest.raises(RunError):
            finetune_glue.main(flags("rte", *saving))
    assert list((tmp_path / "glue/rte/lr0.001-batch8-seed1").glob("checkpoint-*"))
    finetune_glue.main(flags("rte", *saving))
    assert "Skipped" in capsys.readouterr().err and record_of(tmp_path)["steps"] == 6


def test_stopped_with_data_workers_and_in_the_last_evaluation(flags, tmp_path, monkeypatch):
    """A signal to all processes of a run saves the step; after the last step, it ends the protocol after that run."""
    step = finetune_trainer.FinetuneTrainer.training_step

    def told(self, *args, **kwargs):
        if self.state.global_step == 3:
            for process in [*psutil.Process().children(), psutil.Process()]:
                process.send_signal(signal.SIGTERM)
            time.sleep(0.2)
        return step(self, *args, **kwargs)

    workers = ["--dataloader_num_workers", 1, "--save_strategy", "epoch", "--seeds", 1, 2]
    with monkeypatch.context() as patch:
        patch.setattr(finetune_trainer.FinetuneTrainer, "training_step", told)
        with pytest.raises(Stopped, match="stopped by SIGTERM: step 4 of 6 is saved"):
            finetune_glue.main(flags("rte", *workers))
    evaluate = finetune_trainer.FinetuneTrainer.evaluate

    def last(self, *args, **kwargs):
        if self.state.global_step == 6:
            os.kill(os.getpid(), signal.SIGINT)
        return evaluate(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(finetune_trainer.FinetuneTrainer, "evaluate", last)
        with pytest.raises(Stopped, match=r"stopped by Ctrl-C: the run in .*seed1 is finished\. Continue with: "):
            finetune_glue.main(flags("rte", *workers))
    assert record_of(tmp_path)["steps"] == 6 and not (tmp_path / "glue/rte/lr0.001-batch8-seed2").exists()
    finetune_glue.main(flags("rte", *workers))
    assert record_of(tmp_path)["resumes"] == 1
    assert record_of(tmp_path, run="lr0.001-batch8-seed2")["resumes"] == 0


def test_killed_behind_the_last_step(flags, tmp_path, monkeypatch):
    """The second start writes scores and record, and repeats no step; the third removes a checkpoint that is left."""

    def killed(self):
        raise RunError("killed")

    saving = ["--save_strategy", "steps", "--save_steps", 7, "--max_steps", 7]
    with monkeypatch.context() as patch:
        patch.setattr(finetune_trainer.FinetuneTrainer, "load_best", killed)
        with pytest.raises(RunError):
            finetune_glue.main(flags("rte", *saving))
    finetune_glue.main(flags("rte", *saving))
    record = record_of(tmp_path)
    assert record["steps"] == 7 and len(losses(record)) == 7 and record["resumes"] == 1
    left = tmp_path / "glue" / "rte" / "lr0.001-batch8-seed1" / "checkpoint-7"  # killed as it removed them
    assert not left.exists()
    left.mkdir()
    finetune_glue.main(flags("rte", *saving))
    assert not left.exists()
