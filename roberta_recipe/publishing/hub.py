"""Publishing on the Hugging Face Hub: a run's files, with a model card made from its records.

With `--push_to_hub`, a run is pushed at its end, and while it trains as `--hub_strategy` says; `tools/push.py` pushes a
finished run. The token is that of `hf auth login` or HF_TOKEN; it is never printed and never written.
"""

import os
import re
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, ModelCard, get_token
from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from transformers import TrainerCallback, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, HubStrategy

from roberta_recipe import durable
from roberta_recipe.errors import InputError, RunError, first_line
from roberta_recipe.log import logger
from roberta_recipe.publishing import card
from roberta_recipe.record import (
    BEST_NAME,
    BLIMP_NAME,
    CURVE_NAME,
    HUB_NAME,
    LOG_NAME,
    PRESET_NAME,
    RECORD_NAME,
    SUMMARY_NAME,
    FinetuneRecord,
    PretrainingRecord,
    Summary,
    picked_setting,
    read_record,
)

RETRY_AFTER_S = (2, 8, 30)  # on top of the Hub client's own patience with large files
_PATIENCE = (408, 429, 500, 502, 503, 504)
_MODEL = ("config.json", "*.safetensors", "model.safetensors.index.json", "tokenizer*", "special_tokens_map.json")
_MODEL += ("vocab.*", "merges.txt", "added_tokens.json")
_OF_RUN = (PRESET_NAME, RECORD_NAME, CURVE_NAME, LOG_NAME, BLIMP_NAME)
_MADE_BY_HUB = {".gitattributes", "README.md", "LICENSE"}  # made by the Hub's form for a new repository
_ASIDE = ".push-"  # folders of a push in progress
_LAST = "last-checkpoint"
_ADVICE = "push it with that version"
_OF_SUMMARY = ("settings", "picked", "dataset", "shown_args", "scored_examples")  # what a card shows of it
_OF_RECORD = ("resolved_args", "shown_args", "fingerprint")
_MARK = "recipe_run"  # key in the card's head: which run a repository holds

Result = TypeVar("Result")


@dataclass
class Publisher:
    """Pushes a run to its repository, which exists and may be written to (`open_repo`)."""

    repo: str
    mark: str  # `mark_of`
    revision: str | None = None
    clean: bool = False  # the next commit deletes the files that it does not bring
    strategy: HubStrategy = HubStrategy.END
    always: bool = False  # if True and a push is under way, wait for it, then push; if False, skip
    _pending: threading.Thread | None = None

    def push(self, folder: Path, message: str, results: Sequence[Path] = (), **metadata: Any) -> None:
        """Push the finished run in `folder`; see `contents`. Raises `InputError` and `RunError`."""
        if self._pending:
            self._pending.join()
        files, model_card = contents(self.repo, folder, results, revision=self.revision, **metadata)
        url = self.commit(files, model_card, message, without=f"{_LAST}/")
        logger.info(f"Pushed      {url}")

    def push_checkpoint(self, folder: Path, step: int, max_steps: int) -> None:
        """Push a whole checkpoint in the background, as `hub_strategy` says."""
        files = {path.name: path for pattern in _MODEL for path in folder.glob(pattern)}
        if self.strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
            target = _LAST if self.strategy == HubStrategy.CHECKPOINT else folder.name
            paths = [path for path in folder.rglob("*") if path.is_file()]
            files |= {f"{target}/{path.relative_to(folder).as_posix()}": path for path in paths}
        files[PRESET_NAME] = folder.parent / PRESET_NAME
        config = durable.read_json(folder / "config.json")
        shown = card.in_progress(self.repo, config, step, max_steps, revision=self.revision)
        self._start(files, shown, f"Training in progress, step {step}", folder.parent / f"{_ASIDE}{step}")

    def push_run(self, folder: Path, message: str) -> None:
        """Push the best run of a protocol so far, in the background; the push of a better run replaces it."""
        self._start(*contents(self.repo, folder, revision=self.revision), message, folder.parent / f"{_ASIDE}best")

    def is_pushing(self) -> bool:
        """Whether a push in the background is under way, which ends with the process."""
        return self._pending is not None and self._pending.is_alive()

    def _start(self, files: dict[str, Path], shown: ModelCard, message: str, aside: Path) -> None:
        """Push in a thread, one push at a time. A push that fails is logged, and ends nothing. The files are
        linked `aside`, as training may delete them meanwhile; the thread does not keep the process alive."""
        if self.strategy == HubStrategy.END:
            return
        if self.is_pushing():
            if not self.always:
                return
            self._pending.join()
        files = _linked(files, aside)

        def work() -> None:
            try:
                self.commit(files, shown, message)
            except (InputError, RunError) as error:
                logger.warning(f"Hub         a push while training failed, and training continues: {error}")
            finally:
                shutil.rmtree(aside, ignore_errors=True)

        self._pending = threading.Thread(target=work, daemon=True)
        self._pending.start()

    def commit(self, files: dict[str, Path], model_card: ModelCard, message: str, without: str | None = None) -> str:
        """One commit of `files` (by name in the repository) and the card; returns the repository's address. Files whose
        names begin with `without` are deleted.

        A file that the Hub has already is not sent again, so a second try resumes where the first was cut off.
        """
        api = HfApi()
        setattr(model_card.data, _MARK, self.mark)
        text = f"---\n{model_card.data.to_yaml()}\n---\n{model_card.text}"

        def commit() -> str:
            operations: list = [CommitOperationAdd(name, path) for name, path in sorted(files.items())]
            operations.append(CommitOperationAdd("README.md", text.encode()))
            others = set(api.list_repo_files(self.repo, revision=self.revision)) - {*files, *_MADE_BY_HUB}
            gone = sorted(name for name in others if self.clean or (without and name.startswith(without)))
            operations += [CommitOperationDelete(name, is_folder=False) for name in gone]
            api.create_commit(self.repo, operations, commit_message=message, revision=self.revision)
            return f"{api.endpoint}/{self.repo}"

        url = _patiently(commit, self.repo)
        self.clean = False
        return url


class PublishCheckpoints(TrainerCallback):
    """Pushes each checkpoint when it is whole, except the last: the push at the end of the run has all that it has."""

    def __init__(self, publisher: Publisher):
        self.publisher = publisher

    def on_save(self, args, state, control, **kwargs):
        if not control.should_training_stop:
            folder = Path(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
            self.publisher.push_checkpoint(folder, state.global_step, state.max_steps)


def publisher(training_args: TrainingArguments) -> Publisher | None:
    """The publisher of a run with `push_to_hub`, on the first process, before anything is trained; None elsewhere.
    Raises `InputError` where the Hub refuses, or the token or the name is wrong."""
    if not training_args.push_to_hub or training_args.process_index:
        return None
    output_dir = Path(training_args.output_dir)
    for left in output_dir.glob(f"{_ASIDE}*"):  # left by a run that was killed while it pushed
        shutil.rmtree(left, ignore_errors=True)
    name, revision = training_args.hub_model_id or output_dir.resolve().name, training_args.hub_revision
    mark = mark_of(output_dir)
    repo, ours = open_repo(name, mark, training_args.hub_private_repo, revision)
    opened = Publisher(repo, mark, revision, not ours, training_args.hub_strategy, training_args.hub_always_push)
    if not ours:
        opened.commit({}, card.announced(repo), "In training")
    return opened


def mark_of(output_dir: Path) -> str:
    """What tells the run's repository from any other, kept in the run's folder; drawn at random the first time.
    Raises `InputError` where it is damaged or cannot be kept."""
    path = output_dir / HUB_NAME
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
        raise InputError("the token has characters that no token has: copy it anew (hf auth login, or HF_TOKEN)")
    api = HfApi()
    repo = name if "/" in name else f"{_patiently(lambda: api.whoami()['name'], name)}/{name}"

    def make() -> bool:
        try:
            info = api.repo_info(repo)
        except RepositoryNotFoundError:
            api.create_repo(repo, private=private, exist_ok=True)
            info = api.repo_info(repo)
        if private and not info.private:
            raise InputError(f"{repo} is there already, and public: leave private out, or name another repository")
        api.auth_check(repo, write=True)
        try:
            files = set(api.list_repo_files(repo, revision=revision))
        except RevisionNotFoundError:  # a new branch is a copy of the main branch
            api.create_branch(repo, branch=revision, exist_ok=True)
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
    except (EntryNotFoundError, ValueError, yaml.YAMLError):
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
    if isinstance(error, OfflineModeIsEnabled):
        raise InputError(
            f"HF_HUB_OFFLINE is set, so nothing can be pushed to {repo}: unset it, or leave push_to_hub out"
        )
    if isinstance(error, HFValidationError):
        raise InputError(f"{repo!r} is no name for a repository: {first_line(error)}")
    # hf_xet raises plain ConnectionError and PermissionError, with the status in the text
    found = re.search(r"\((4\d\d|5\d\d)\b", str(error)) if isinstance(error, OSError) else None
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else int(found[1]) if found else None
    if isinstance(error, (LocalTokenNotFoundError, PermissionError)) and status is None:
        status = 401
    if status in _PATIENCE:
        return f"the Hub answers {status}"
    if status is not None:
        said = (getattr(error, "server_message", None) or str(error)).strip().splitlines()[0]
        raise InputError(_refusal(status, said, repo))
    if isinstance(error, ValueError):  # the client's checks of a card's head, of large files
        raise InputError(f"the Hub refuses {repo}: {' '.join(str(error).split())}")
    if isinstance(error, (HTTPError, ConnectionError, TimeoutError)):
        return f"{type(error).__name__}: {error}"
    raise error


def _refusal(status: int, said: str, repo: str) -> str:
    if status == 401:
        return (
            f"the Hub does not know the token, or there is none ({said}): run hf auth login, or set HF_TOKEN, with a "
            f"token that may write to {repo}"
        )
    if status == 403:
        return f"the token may not write to {repo} ({said}): name a repository of your own, or take another token"
    return f"the Hub refuses {repo} ({status}: {said})"


def _linked(files: dict[str, Path], aside: Path) -> dict[str, Path]:
    """The same files under `aside`, as hard links or, where the file system has no hard links, copies."""
    shutil.rmtree(aside, ignore_errors=True)
    linked = {name: aside / name for name in files}
    for name, path in files.items():
        linked[name].parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(path, linked[name])
        except OSError:
            shutil.copyfile(path, linked[name])
    return linked


def files_of(folder: Path) -> tuple[dict[str, Path], PretrainingRecord | FinetuneRecord, Summary | None]:
    """(files of a finished run that are published, by name; its record; its summary, if it is a protocol of several
    runs).

    `folder` is that of a pretraining run, of a fine-tuning (whose best run is taken), or of a single run of it. Raises
    `InputError` where the folder has no finished run.
    """
    summary, of_run = None, folder
    if (folder / SUMMARY_NAME).is_file():
        summary = read_record(folder / SUMMARY_NAME, _OF_SUMMARY, _ADVICE)
        of_run = folder / Path(picked_setting(summary)["best_run"]).name
    weights = of_run / BEST_NAME if (of_run / BEST_NAME).is_dir() else of_run
    if not (of_run / RECORD_NAME).is_file() or not (weights / "model.safetensors").is_file():
        raise InputError(
            f"{folder} holds no finished run ({RECORD_NAME} and weights, or {SUMMARY_NAME} and the best run's "
            "weights): name a run's output_dir"
        )
    own = weights != of_run or (weights / durable.MANIFEST).is_file()
    if own and (fault := durable.fault(weights)):
        raise InputError(f"{weights} is damaged, and is not pushed: {fault}. Copy it again, or have it run again")
    files = {path.name: path for pattern in _MODEL for path in weights.glob(pattern)}
    files |= {name: of_run / name for name in _OF_RUN if (of_run / name).is_file()}
    if summary:
        files |= {name: folder / name for name in (SUMMARY_NAME, CURVE_NAME) if (folder / name).is_file()}
    return files, read_record(of_run / RECORD_NAME, _OF_RECORD, _ADVICE), summary


def contents(
    repo: str, folder: Path, results: Sequence[Path] = (), **metadata: Any
) -> tuple[dict[str, Path], ModelCard]:
    """The files of the finished run in `folder` that go to `repo`, and its card, with the summaries of what was
    fine-tuned from it in the folders `results`."""
    files, record, summary = files_of(folder)
    config = durable.read_json(files["config.json"])
    if "task" in record:
        return files, card.fine_tuned(repo, config, record, summary, **metadata)
    if missing := [path for path in results if not (path / SUMMARY_NAME).is_file()]:
        raise InputError(f"{missing[0]} has no {SUMMARY_NAME}: name the folder of a finished fine-tuning")
    summaries = [read_record(path / SUMMARY_NAME, _OF_SUMMARY, _ADVICE) for path in results]
    scored = read_record(files[BLIMP_NAME], ("scores",), "run make blimp again") if BLIMP_NAME in files else None
    return files, card.pretrained(repo, config, record, summaries, blimp_record=scored, **metadata)
