"""Publishing on the Hugging Face Hub: a run's files, with a model card made from its records.

    python -m roberta_recipe.hub --model runs/roberta_base --repo me/roberta_base     # or: make push MODEL=... REPO=...

`--push_to_hub` does the same at the end of a run, and while it trains as `--hub_strategy` says. The token is that of
`hf auth login` or HF_TOKEN; it is never printed and never written.
"""

import logging
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
from transformers import TrainingArguments
from transformers.trainer_utils import HubStrategy

from roberta_recipe import answerability, card, durable, run
from roberta_recipe.args import InputError, RecipeParser, RunError, exit_on_error

logger = logging.getLogger("recipe")

RETRY_AFTER_S = (2, 8, 30)  # on top of the Hub client's own patience with large files
_PATIENCE = (408, 429, 500, 502, 503, 504)
_MODEL = ("config.json", "*.safetensors", "model.safetensors.index.json", "tokenizer*", "special_tokens_map.json")
_MODEL += ("vocab.*", "merges.txt", "added_tokens.json")
_OF_RUN = (run.PRESET_NAME, run.RECORD_NAME, run.CURVE_NAME)
_NOBODYS = {".gitattributes", "README.md", "LICENSE"}  # what the Hub's own form makes
_ASIDE = ".push-"  # folders of a push in progress
_LAST = "last-checkpoint"
_MARK = "recipe_run"  # in the card's head: which run a repository holds

Result = TypeVar("Result")


@dataclass
class Publisher:
    """Pushes of one run to one repository, which is there and may be written to (`open_repo`)."""

    repo: str
    mark: str  # `mark_of`
    revision: str | None = None
    clean: bool = False  # the next commit deletes what it does not bring
    strategy: HubStrategy = HubStrategy.END
    always: bool = False  # also while a push goes on
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
            place = _LAST if self.strategy == HubStrategy.CHECKPOINT else folder.name
            paths = [path for path in folder.rglob("*") if path.is_file()]
            files |= {f"{place}/{path.relative_to(folder).as_posix()}": path for path in paths}
        files[run.PRESET_NAME] = folder.parent / run.PRESET_NAME
        config = durable.read_json(folder / "config.json")
        shown = card.in_progress(self.repo, config, step, max_steps, revision=self.revision)
        self._start(files, shown, f"Training in progress, step {step}", folder.parent / f"{_ASIDE}{step}")

    def push_run(self, folder: Path, message: str) -> None:
        """Push one finished run of a protocol in the background, until there is a better one."""
        self._start(*contents(self.repo, folder, revision=self.revision), message, folder.parent / f"{_ASIDE}best")

    def is_pushing(self) -> bool:
        """Whether a push in the background is under way, which ends with the process."""
        return self._pending is not None and self._pending.is_alive()

    def _start(self, files: dict[str, Path], shown: ModelCard, message: str, aside: Path) -> None:
        """One at a time, unless `always`; what fails is said and ends nothing. The files are linked `aside`, as
        training may delete them meanwhile; the thread does not keep the process alive."""
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
            except Exception as error:  # whatever it is, training goes on
                logger.warning(f"Hub         a push while training failed, and training goes on: {error}")
            finally:
                shutil.rmtree(aside, ignore_errors=True)

        self._pending = threading.Thread(target=work, daemon=True)
        self._pending.start()

    def commit(self, files: dict[str, Path], model_card: ModelCard, message: str, without: str | None = None) -> str:
        """One commit of `files` (by name in the repository) and the card; returns the repository's address. What begins
        with `without` is deleted.

        What is there already is not sent again, so another try goes on where one was cut off.
        """
        api = HfApi()
        setattr(model_card.data, _MARK, self.mark)
        text = f"---\n{model_card.data.to_yaml()}\n---\n{model_card.text}"

        def commit() -> str:
            operations: list = [CommitOperationAdd(name, path) for name, path in sorted(files.items())]
            operations.append(CommitOperationAdd("README.md", text.encode()))
            others = set(api.list_repo_files(self.repo, revision=self.revision)) - {*files, *_NOBODYS}
            gone = sorted(name for name in others if self.clean or (without and name.startswith(without)))
            operations += [CommitOperationDelete(name, is_folder=False) for name in gone]
            api.create_commit(self.repo, operations, commit_message=message, revision=self.revision)
            return f"{api.endpoint}/{self.repo}"

        url = _patiently(commit, self.repo)
        self.clean = False
        return url


def publisher(training_args: TrainingArguments) -> Publisher | None:
    """With `push_to_hub`, on the first process, before anything is trained; None elsewhere. Raises `InputError` where
    the Hub, the token or the name would not do."""
    if training_args.hub_token:
        raise InputError(
            "hub_token would stand in process lists and in launchers' messages: leave it out, and run hf auth login or "
            "set HF_TOKEN"
        )
    if not training_args.push_to_hub or training_args.process_index:
        return None
    output_dir = Path(training_args.output_dir)
    for left in output_dir.glob(f"{_ASIDE}*"):  # by a run that was killed while it pushed
        shutil.rmtree(left, ignore_errors=True)
    name, revision = training_args.hub_model_id or output_dir.resolve().name, training_args.hub_revision
    mark = mark_of(output_dir)
    repo, ours = open_repo(name, mark, training_args.hub_private_repo, revision)
    one = Publisher(repo, mark, revision, not ours, training_args.hub_strategy, training_args.hub_always_push)
    if not ours:
        one.commit({}, card.announced(repo), "In training")
    return one


def mark_of(output_dir: Path) -> str:
    """What tells a run's repository from another's, kept in its folder; drawn at random the first time."""
    path = output_dir / run.HUB_NAME
    if not path.is_file():
        output_dir.mkdir(parents=True, exist_ok=True)
        durable.write_json(path, {_MARK: uuid.uuid4().hex})
    return durable.read_json(path)[_MARK]


def open_repo(
    name: str, mark: str, private: bool | None = None, revision: str | None = None, replace: bool = False
) -> tuple[str, bool]:
    """(full name of the repository `name`, whether it holds the run `mark`). It is made where there is none; `revision`
    becomes a branch of it.

    Raises `InputError` for a bad name, a token that is missing, wrong or may not write there, and a repository that
    already holds something else, unless `replace`.
    """
    if re.search(r"[^!-~]", get_token() or ""):
        raise InputError("the token has characters that no token has: copy it anew (hf auth login, or HF_TOKEN)")
    api = HfApi()
    repo = name if "/" in name else f"{_patiently(lambda: api.whoami()['name'], name)}/{name}"

    def make() -> bool:
        try:
            there = api.repo_info(repo)
        except RepositoryNotFoundError:
            api.create_repo(repo, private=private, exist_ok=True)
            there = api.repo_info(repo)
        if private and not there.private:
            raise InputError(f"{repo} is there already, and public: leave private out, or name another repository")
        api.auth_check(repo, write=True)
        try:
            files = set(api.list_repo_files(repo, revision=revision))
        except RevisionNotFoundError:  # a branch begins as a copy of the main one
            api.create_branch(repo, branch=revision, exist_ok=True)
            return False
        ours = _mark_in(api, repo, revision) == mark
        if files - _NOBODYS and not ours and not replace:
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
    """`call()`, again after each of `RETRY_AFTER_S` where the connection broke or the Hub was busy; its refusals as
    `InputError`."""
    for wait_s in (*RETRY_AFTER_S, None):
        try:
            return call()
        except InputError:
            raise
        except Exception as error:
            cause = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ else error  # of a thread
            failure = _refused_or_broken(cause, repo)
        if wait_s is None:
            raise RunError(f"the Hub cannot be reached for {repo} ({failure}); nothing here is lost: make push later")
        logger.warning(f"Hub         {failure}; trying again in {wait_s} s")
        time.sleep(wait_s)


def _refused_or_broken(error: Exception, repo: str) -> str:
    """What broke, where trying again may help. Raises `InputError` where the Hub has refused, which says why and never
    the token, and `error` itself where it is something else."""
    if isinstance(error, OfflineModeIsEnabled):
        raise InputError(
            f"HF_HUB_OFFLINE is set, so nothing can be pushed to {repo}: unset it, or leave push_to_hub out"
        )
    if isinstance(error, HFValidationError):
        raise InputError(f"{repo!r} is no name for a repository: {str(error).splitlines()[0]}")
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
    if isinstance(error, ValueError):  # the Hub's checks of a card's head, of large files
        raise InputError(f"the Hub refuses {repo}: {' '.join(str(error).split())}")
    if isinstance(error, (HTTPError, ConnectionError, TimeoutError)):
        return f"{type(error).__name__}: {error}"
    raise error


def _refusal(status: int, said: str, repo: str) -> str:
    if status == 401:
        return (
            f"the Hub does not know the token, or there is none ({said}): run hf auth login, or set HF_TOKEN, with one "
            f"that may write to {repo}"
        )
    if status == 403:
        return f"the token may not write to {repo} ({said}): name a repository of your own, or take a token that may"
    return f"the Hub refuses {repo} ({status}: {said})"


def _linked(files: dict[str, Path], aside: Path) -> dict[str, Path]:
    """The same files under `aside`, as hard links or, where there are none, copies."""
    shutil.rmtree(aside, ignore_errors=True)
    linked = {name: aside / name for name in files}
    for name, path in files.items():
        linked[name].parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(path, linked[name])
        except OSError:
            shutil.copyfile(path, linked[name])
    return linked


def files_of(folder: Path) -> tuple[dict[str, Path], dict[str, Any], dict[str, Any] | None]:
    """(what is published of a finished run, by name; its record; its summary, if it is a protocol of several runs).

    `folder` is a pretraining run's, a fine-tuning's (the best run's weights go), or one run's of it. Raises
    `InputError` where nothing in it is finished.
    """
    summary, of_run = None, folder
    if (folder / run.SUMMARY_NAME).is_file():
        summary = durable.read_json(folder / run.SUMMARY_NAME)
        of_run = folder / Path(summary["settings"][summary["picked"]]["best_run"]).name
    weights = of_run / run.BEST_NAME if (of_run / run.BEST_NAME).is_dir() else of_run
    if not (of_run / run.RECORD_NAME).is_file() or not (weights / "model.safetensors").is_file():
        raise InputError(
            f"{folder} holds no finished run ({run.RECORD_NAME} and weights, or {run.SUMMARY_NAME} and the best run's "
            "weights): name a run's output_dir"
        )
    files = {path.name: path for pattern in _MODEL for path in weights.glob(pattern)}
    files |= {name: of_run / name for name in _OF_RUN if (of_run / name).is_file()}
    if summary:
        files |= {name: folder / name for name in (run.SUMMARY_NAME, run.CURVE_NAME) if (folder / name).is_file()}
    return files, durable.read_json(of_run / run.RECORD_NAME), summary


def contents(
    repo: str, folder: Path, results: Sequence[Path] = (), **metadata: Any
) -> tuple[dict[str, Path], ModelCard]:
    """What goes to `repo` of the finished run in `folder`, and its card, with the summaries of what was fine-tuned from
    it in the folders `results`."""
    files, record, summary = files_of(folder)
    config = durable.read_json(files["config.json"])
    if "task" in record:
        return files, card.fine_tuned(repo, config, record, summary, answerability.FILE in files, **metadata)
    if missing := [path for path in results if not (path / run.SUMMARY_NAME).is_file()]:
        raise InputError(f"{missing[0]} has no {run.SUMMARY_NAME}: name the folder of a finished fine-tuning")
    summaries = [durable.read_json(path / run.SUMMARY_NAME) for path in results]
    return files, card.pretrained(repo, config, record, summaries, **metadata)


def main(argv: list[str] | None = None) -> None:
    """`make push`: a finished run's files and card, to a repository that is made where there is none."""
    run.set_up_logging()
    parser = RecipeParser((), description=__doc__)
    parser.add_argument("--model", required=True, type=Path, help="output_dir of a finished run")
    parser.add_argument("--repo", required=True, help="name on the Hub; without a slash, one of your own")
    parser.add_argument("--results", nargs="*", type=Path, default=[], help="folders fine-tuned from it, for its card")
    parser.add_argument("--private", action="store_true", help="make the repository private")
    parser.add_argument("--revision", help="branch to push to")
    parser.add_argument("--license", help="of the weights, as the Hub abbreviates it: mit, apache-2.0, ...")
    parser.add_argument("--language", nargs="+", help="of the text, as two letters: en")
    parser.add_argument("--replace", action="store_true", help="delete what the repository holds of something else")
    parser.add_argument("--dry_run", action="store_true", help="print files and card, and push nothing")
    args = parser.parse_args(argv)
    metadata = {name: value for name in ("license", "language") if (value := getattr(args, name))}
    if args.dry_run:
        files, model_card = contents(args.repo, args.model, args.results, revision=args.revision, **metadata)
        sizes = "\n".join(f"{path.stat().st_size:>14,}  {name}" for name, path in sorted(files.items()))
        print(f"{model_card}\n{sizes}")
        return
    files_of(args.model)  # or say that there is no run, before anything is asked of the Hub
    mark = mark_of(args.model)
    repo, ours = open_repo(args.repo, mark, args.private or None, args.revision, replace=args.replace)
    one = Publisher(repo, mark, args.revision, clean=not ours)
    one.push(args.model, f"Upload {args.model.resolve().name}", args.results, **metadata)


if __name__ == "__main__":
    exit_on_error(main)
