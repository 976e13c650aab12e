"""Publishing on the Hugging Face Hub: a run's files, with a model card made from its records.

With `--push_to_hub`, a run is pushed at its end, and while it trains by `--hub_strategy`; `tools/push.py` pushes a
finished run. The token is that of `hf auth login` or HF_TOKEN; it is never printed and never written.
"""

import re
import shutil
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent import futures
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml
from huggingface_hub import HfApi, ModelCard, get_token
from huggingface_hub import errors as hub_errors
from transformers import TrainerCallback, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, HubStrategy

from roberta_recipe import durable
from roberta_recipe import record as records
from roberta_recipe.errors import InputError, RunError, first_line
from roberta_recipe.log import logger
from roberta_recipe.publishing import card
from roberta_recipe.training.checkpoint import newest_first

RETRY_AFTER_S = (2, 8, 30)  # on top of the Hub client's own retries of large files
_RETRIED = (408, 429, 500, 502, 503, 504)
_MODEL = ("config.json", "*.safetensors", "model.safetensors.index.json", "tokenizer*", "special_tokens_map.json")
_MODEL += ("vocab.*", "merges.txt", "added_tokens.json")
_OF_RUN = (records.PRESET_NAME, records.RECORD_NAME, records.CURVE_NAME, records.LOG_NAME, records.BLIMP_NAME)
PUBLISHED = (*_MODEL, *_OF_RUN, records.SUMMARY_NAME, "README.md")  # patterns of a finished run's files
_MADE_BY_HUB = {".gitattributes", "README.md", "LICENSE"}  # made by the Hub's form for a new repository
_LAST = "last-checkpoint"
_ADVICE = "push it with that version"
_OF_SUMMARY = ("settings", "picked", "dataset", "shown_args", "scored_examples")  # shown on a card
_OF_RECORD = ("resolved_args", "shown_args", "fingerprint")
_MARK = "recipe_run"  # key in the card's head: the run that a repository belongs to

_REFUSALS = {
    401: "the Hub does not know the token, or there is none ({said}): run hf auth login, or set HF_TOKEN, with a token "
    "that may write to {repo}",
    403: "the token may not write to {repo} ({said}): name a repository of your own, or take another token",
}

Result = TypeVar("Result")


@dataclass
class Publisher:
    """Uploads a run's folders to its repository, which exists and may be written to (`open_repo`)."""

    repo: str
    mark: str  # `mark_of`
    revision: str | None = None
    strategy: HubStrategy = HubStrategy.END
    always: bool = False  # if True and an upload is under way, wait for it, then upload; if False, skip
    pending: futures.Future | None = None  # the newest upload in the background
    checkpoint: Path | None = None  # that it reads
    api: HfApi = field(default_factory=HfApi)  # uploads in the background run in its only thread, in order

    def announce(self) -> None:
        """Put up a card that marks the repository as this run's. Raises `InputError` and `RunError`."""
        text = str(card.announced(self.repo, **{_MARK: self.mark})).encode()
        where = {"repo_id": self.repo, "revision": self.revision, "path_in_repo": "README.md"}
        _patiently(lambda: self.api.upload_file(path_or_fileobj=text, commit_message="In training", **where), self.repo)

    def push(
        self, folder: Path, message: str, results: Sequence[Path] = (), replace: bool = False, **metadata: Any
    ) -> None:
        """Upload the finished run in `folder` (`prepare`); `replace` deletes the repository's other files. A file that
        the Hub has already is not sent again. Raises `InputError` and `RunError`."""
        self.wait()
        model = prepare(self.repo, folder, results, revision=self.revision, **{_MARK: self.mark}, **metadata)
        others = {**_of_model(PUBLISHED), "delete_patterns": "*" if replace else f"{_LAST}/*"}
        _patiently(lambda: self._upload(model, message, **others).result(), self.repo)
        logger.info(f"Pushed      {self.api.endpoint}/{self.repo}")

    def push_run(self, folder: Path, message: str) -> futures.Future | None:
        """Upload the best run of a protocol so far in the background; returns the upload, which reads `folder`."""
        if self.strategy == HubStrategy.END:
            return None
        model = prepare(self.repo, folder, revision=self.revision, **{_MARK: self.mark})
        self._start(model, message, **_of_model(PUBLISHED))
        return self.pending

    def push_preset(self, output_dir: Path) -> None:
        """Upload the run's settings in the background."""
        if self.strategy != HubStrategy.END:
            self._start(output_dir, "Settings", allow_patterns=records.PRESET_NAME)

    def push_checkpoint(self, folder: Path, step: int) -> None:
        """Upload a whole checkpoint in the background, by `hub_strategy`."""
        if self.strategy == HubStrategy.END or (self.checkpoint and self.is_pushing() and not self.always):
            return
        self.wait()
        message, self.checkpoint = f"Training in progress, step {step}", folder
        self._start(folder, message, **_of_model(_MODEL))
        if self.strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
            target = _LAST if self.strategy == HubStrategy.CHECKPOINT else folder.name
            self._start(folder, f"{message}, checkpoint", path_in_repo=target)

    def is_pushing(self) -> bool:
        """Whether an upload in the background is under way; the process ends after it."""
        return self.pending is not None and not self.pending.done()

    def wait(self) -> None:
        """Wait for the uploads in the background."""
        if self.pending:
            futures.wait([self.pending])

    def _start(self, folder: Path, message: str, **others: Any) -> None:
        self.pending = self._upload(folder, message, **others)
        self.pending.add_done_callback(_warn_of_failure)

    def _upload(self, folder: Path, message: str, **others: Any) -> futures.Future:
        where = {"repo_id": self.repo, "revision": self.revision, "folder_path": folder}
        return self.api.upload_folder(**where, commit_message=message, run_as_future=True, **others)


def _of_model(patterns: Sequence[str]) -> dict[str, list[str]]:
    """Arguments of `upload_folder` for the files of a folder itself; its patterns match across slashes."""
    return {"allow_patterns": [*patterns], "ignore_patterns": ["*/*"]}


def _warn_of_failure(upload: futures.Future) -> None:
    if error := upload.exception():
        logger.warning(f"Hub         a push while training failed, and training continues: {first_line(error)}")


class PublishCheckpoints(TrainerCallback):
    """Uploads each checkpoint when it is whole, except the last: the push at the end of the run has all of it. Listed
    after the callbacks that decide on saving; `limit`: `save_total_limit`."""

    def __init__(self, publisher: Publisher, limit: int | None):
        self.publisher, self.limit = publisher, limit

    def on_train_begin(self, args, state, control, **kwargs):
        self.publisher.push_preset(Path(args.output_dir))

    def on_step_end(self, args, state, control, **kwargs):
        """Before a save that rotates away the checkpoint of an upload: wait for the upload."""
        deleted = newest_first(args.output_dir)[self.limit - 1 :] if self.limit else []
        if control.should_save and self.publisher.checkpoint in deleted:
            self.publisher.wait()

    def on_save(self, args, state, control, **kwargs):
        if not control.should_training_stop:
            folder = Path(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
            self.publisher.push_checkpoint(folder, state.global_step)


def publisher(training_args: TrainingArguments) -> Publisher | None:
    """The publisher of a run with `push_to_hub`, on the first process, before anything is trained; None elsewhere.
    Raises `InputError` where the Hub refuses, or the token or the name is wrong."""
    if not training_args.publishes or training_args.process_index:
        return None
    output_dir = Path(training_args.output_dir)
    name, revision = training_args.hub_model_id or output_dir.resolve().name, training_args.hub_revision
    mark = mark_of(output_dir)
    repo, ours = open_repo(name, mark, training_args.hub_private_repo, revision)
    opened = Publisher(repo, mark, revision, training_args.hub_strategy, training_args.hub_always_push)
    if not ours:
        opened.announce()
    return opened


def mark_of(output_dir: Path) -> str:
    """The id of a run in its repository, kept in the run's folder; drawn at random the first time. Raises `InputError`
    where it is damaged or cannot be kept."""
    path = output_dir / records.HUB_NAME
    if not path.is_file():
        durable.make_folder(output_dir)
        durable.check_output_file(path, "output_dir", "make the folder writable, or push a copy of it")
        durable.write_sealed(path, {_MARK: uuid.uuid4().hex})
    try:
        return durable.read_sealed(path)[_MARK]
    except (ValueError, KeyError) as error:
        raise InputError(
            f'{path} is damaged ({error}): delete it, and push the finished run with make push ... ARGS="--replace"'
        ) from None


def open_repo(
    name: str, mark: str, private: bool | None = None, revision: str | None = None, replace: bool = False
) -> tuple[str, bool]:
    """(full name of the repository `name`, whether it holds the run `mark`). The repository is made where there is
    none; `revision` becomes a branch of it.

    Raises `InputError` for a bad name, a token that is missing, wrong or may not write there, and a repository that
    already holds something else, unless `replace`.
    """
    if re.search(r"[^!-~]", get_token() or ""):
        raise InputError("the token contains invalid characters; copy it again (hf auth login, or HF_TOKEN)")
    api = HfApi()
    repo = name if "/" in name else f"{_patiently(lambda: api.whoami()['name'], name)}/{name}"

    def make() -> bool:
        try:
            info = api.repo_info(repo)
        except hub_errors.RepositoryNotFoundError:
            api.create_repo(repo, private=private, exist_ok=True)
            info = api.repo_info(repo)
        if private and not info.private:
            raise InputError(f"{repo} is there already, and public: leave private out, or name another repository")
        api.auth_check(repo, write=True)
        try:
            files = set(api.list_repo_files(repo, revision=revision))
        except hub_errors.RevisionNotFoundError:
            api.create_branch(repo, branch=revision, exist_ok=True)
            if set(api.list_repo_files(repo, revision=revision)) - _MADE_BY_HUB:  # a copy of the main branch
                api.delete_files(repo, ["*"], revision=revision, commit_message="Empty the new branch")
            return False
        ours = _mark_in(api, repo, revision) == mark
        if files - _MADE_BY_HUB and not ours and not replace:
            raise InputError(
                f"the name {repo} is taken: the repository holds {len(files)} files of something else; name another, "
                'or a new branch of it (--hub_revision), or push the finished run with make push ... ARGS="--replace"'
            )
        return ours

    return repo, _patiently(make, repo)


def _mark_in(api: HfApi, repo: str, revision: str | None) -> str | None:
    try:
        return ModelCard.load(api.hf_hub_download(repo, "README.md", revision=revision)).data.to_dict().get(_MARK)
    except (hub_errors.EntryNotFoundError, ValueError, yaml.YAMLError):
        return None


def _patiently(call: Callable[[], Result], repo: str) -> Result:
    """`call()`, again after each of `RETRY_AFTER_S` where the connection broke or the Hub was busy; the Hub's refusals
    become `InputError`."""
    for wait_s in (*RETRY_AFTER_S, None):
        try:
            return call()
        except InputError:
            raise
        except Exception as error:  # the Hub client raises a dozen kinds; any other is raised again
            # an error in a thread of the client is the cause of a RuntimeError
            cause = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ else error
            failure = _refused_or_broken(cause, repo)
        if wait_s is None:
            raise RunError(f"the Hub cannot be reached for {repo} ({failure}); nothing here is lost: make push later")
        logger.warning(f"Hub         {failure}; trying again in {wait_s} s")
        time.sleep(wait_s)


def _refused_or_broken(error: Exception, repo: str) -> str:
    """What broke, where trying again may help. Raises `InputError` where the Hub has refused, which says why and never
    names the token; and `error` itself where it is something else."""
    if isinstance(error, hub_errors.OfflineModeIsEnabled):
        raise InputError(
            f"HF_HUB_OFFLINE is set, so nothing can be pushed to {repo}: unset it, or leave push_to_hub out"
        )
    if isinstance(error, hub_errors.HFValidationError):
        raise InputError(f"{repo!r} is no name for a repository: {first_line(error)}")
    # hf_xet raises plain ConnectionError and PermissionError, with the status in the text
    found = re.search(r"\((4\d\d|5\d\d)\b", str(error)) if isinstance(error, OSError) else None
    status = int(found[1]) if found else None
    if isinstance(error, hub_errors.HfHubHTTPError):
        status = error.response.status_code
    elif isinstance(error, (hub_errors.LocalTokenNotFoundError, PermissionError)):
        status = status or 401
    if status in _RETRIED:
        return f"the Hub answers {status}"
    if status is not None:
        said = (getattr(error, "server_message", None) or str(error)).strip().splitlines()[0]
        refusal = _REFUSALS.get(status, "the Hub refuses {repo} ({status}: {said})")
        raise InputError(refusal.format(repo=repo, status=status, said=said))
    if isinstance(error, ValueError):  # the client's checks of a card's head, of large files
        raise InputError(f"the Hub refuses {repo}: {' '.join(str(error).split())}")
    if isinstance(error, (hub_errors.HTTPError, ConnectionError, TimeoutError)):
        return f"{type(error).__name__}: {error}"
    raise error


def find_model(folder: Path) -> tuple[Path, Path, records.Summary | None]:
    """(folder of the weights, folder of the record, summary of a protocol) of a finished run.

    `folder` is that of a pretraining run, of a fine-tuning (its best run is taken), or of a single run of it. Raises
    `InputError` where the folder has no finished run.
    """
    summary, of_run = None, folder
    if (folder / records.SUMMARY_NAME).is_file():
        summary = records.read_record(folder / records.SUMMARY_NAME, _OF_SUMMARY, _ADVICE)
        of_run = folder / Path(records.picked_setting(summary)["best_run"]).name
    model = of_run / records.BEST_NAME if (of_run / records.BEST_NAME).is_dir() else of_run
    if not (of_run / records.RECORD_NAME).is_file() or not (model / "model.safetensors").is_file():
        raise InputError(
            f"{folder} holds no finished run ({records.RECORD_NAME} and weights, or {records.SUMMARY_NAME} and the "
            "best run's weights): name a run's output_dir"
        )
    if (model != of_run or (model / durable.MANIFEST).is_file()) and (fault := durable.fault(model)):
        raise InputError(f"{model} is damaged, and is not pushed: {fault}. Copy it again, or have it run again")
    return model, of_run, summary


def prepare(repo: str, folder: Path, results: Sequence[Path] = (), **metadata: Any) -> Path:
    """The model folder of the finished run in `folder`, completed for `repo`: its records beside the weights, and its
    card as README.md, with the summaries of fine-tunings from it in the folders `results`."""
    model, of_run, summary = find_model(folder)
    config = durable.read_json(model / "config.json")
    record = records.read_record(of_run / records.RECORD_NAME, _OF_RECORD, _ADVICE)
    if missing := [path for path in results if not (path / records.SUMMARY_NAME).is_file()]:
        raise InputError(f"{missing[0]} has no {records.SUMMARY_NAME}: name the folder of a finished fine-tuning")
    if model != of_run:
        for path in (*(of_run / name for name in _OF_RUN), folder / records.SUMMARY_NAME, folder / records.CURVE_NAME):
            if path.is_file():
                shutil.copyfile(path, model / path.name)
    if "task" in record:
        shown = card.fine_tuned(repo, config, record, summary, **metadata)
    else:
        summaries = [records.read_record(path / records.SUMMARY_NAME, _OF_SUMMARY, _ADVICE) for path in results]
        blimp = model / records.BLIMP_NAME
        scored = records.read_record(blimp, ("scores",), "run make blimp again") if blimp.is_file() else None
        shown = card.pretrained(repo, config, record, summaries, blimp_record=scored, **metadata)
    shown.save(model / "README.md")
    return model
