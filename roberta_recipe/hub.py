"""Publishing on the Hugging Face Hub: a run's files, with a model card made from its records.

    python -m roberta_recipe.hub --model runs/roberta_base --repo me/roberta_base     # or: make push MODEL=... REPO=...

`--push_to_hub` does the same at the end of a run, and while it trains as `--hub_strategy` says. The token is that of
`hf auth login` or HF_TOKEN; it is never printed and never written.
"""

import logging
import os
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub import CommitOperationAdd, HfApi, ModelCard
from huggingface_hub.errors import (
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

from roberta_recipe import card, durable, run
from roberta_recipe.args import InputError, RecipeParser, RunError, exit_on_error

logger = logging.getLogger("recipe")

RETRY_AFTER_S = (2, 8, 30)  # on top of the Hub client's own patience with large files
_PATIENCE = (408, 429, 500, 502, 503, 504)
_MODEL = ("config.json", "*.safetensors", "model.safetensors.index.json", "tokenizer*", "special_tokens_map.json")
_MODEL += ("vocab.*", "merges.txt", "added_tokens.json")
_OF_RUN = (run.PRESET_NAME, run.RECORD_NAME, run.CURVE_NAME)
_NOBODYS = {".gitattributes", "README.md", "LICENSE"}  # what the Hub's own form makes
_ASIDE = ".push-"
_MARK = "recipe_run"  # in the card's head: which run a repository holds

Result = TypeVar("Result")


def run_id(resolved: dict[str, Any]) -> str:
    """What tells a run's repository from another's: its resolved arguments, but for those about publishing."""
    return durable.fingerprint({k: v for k, v in resolved.items() if not k.startswith(("hub_", "push_to_hub"))})


@dataclass
class Publisher:
    """Pushes of one run to one repository, which is there and may be written to (`open_repo`)."""

    repo: str
    mark: str  # `run_id`
    token: str | None = None
    revision: str | None = None
    strategy: HubStrategy = HubStrategy.END
    always: bool = False  # also while a push goes on
    _pending: Future | None = None

    def push(self, folder: Path, message: str, results: Sequence[Path] = (), **metadata: Any) -> None:
        """Push the finished run in `folder`; see `contents`. Raises `RunError`."""
        self.wait()
        files, model_card = contents(self.repo, folder, results, **metadata)
        url = self._upload(files, model_card, message)
        logger.info(f"Pushed      {url}")

    def push_checkpoint(self, folder: Path, step: int, max_steps: int) -> None:
        """Push a whole checkpoint in the background, as `hub_strategy` says; one at a time, unless `always`.
        What fails is said and does not end the run."""
        busy = self._pending is not None and not self._pending.done()
        if self.strategy == HubStrategy.END or (busy and not self.always):
            return
        self.wait()
        files = {path.name: path for pattern in _MODEL for path in folder.glob(pattern)}
        if self.strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
            place = "last-checkpoint" if self.strategy == HubStrategy.CHECKPOINT else folder.name
            paths = [path for path in folder.rglob("*") if path.is_file()]
            files |= {f"{place}/{path.relative_to(folder).as_posix()}": path for path in paths}
        aside = folder.parent / f"{_ASIDE}{step}"
        files = _linked(files, aside)  # `save_total_limit` may delete the checkpoint meanwhile
        files[run.PRESET_NAME] = folder.parent / run.PRESET_NAME
        shown = card.in_progress(self.repo, durable.read_json(folder / "config.json"), step, max_steps)

        def push() -> None:
            try:
                self._upload(files, shown, f"Training in progress, step {step}")
            finally:
                shutil.rmtree(aside, ignore_errors=True)

        self._pending = HfApi().run_as_future(push)

    def wait(self) -> None:
        """Until the push in progress has ended."""
        if self._pending is not None:
            if error := self._pending.exception():
                logger.warning(f"Hub         a push while training failed, and training goes on: {error}")
            self._pending = None

    def _upload(self, files: dict[str, Path], model_card: ModelCard, message: str) -> str:
        """One commit of `files` (by name in the repository) and the card; returns the repository's address.

        What is there already is not sent again, so another try goes on where one was cut off.
        """
        api = HfApi(token=self.token)
        setattr(model_card.data, _MARK, self.mark)
        text = f"---\n{model_card.data.to_yaml()}\n---\n{model_card.text}"

        def commit() -> str:
            operations = [CommitOperationAdd(name, path) for name, path in sorted(files.items())]
            operations.append(CommitOperationAdd("README.md", text.encode()))
            api.create_commit(self.repo, operations, commit_message=message, revision=self.revision)
            return f"{api.endpoint}/{self.repo}"

        return _patiently(commit, self.repo)


def publisher(training_args: TrainingArguments, resolved: dict[str, Any]) -> Publisher | None:
    """With `push_to_hub`, on the first process, before anything is trained; None elsewhere. Raises `InputError` where
    the Hub, the token or the name would not do."""
    if not training_args.push_to_hub or training_args.process_index:
        return None
    output_dir, mark = Path(training_args.output_dir), run_id(resolved)
    for left in output_dir.glob(f"{_ASIDE}*"):  # by a run that was killed while it pushed
        shutil.rmtree(left, ignore_errors=True)
    name = training_args.hub_model_id or output_dir.resolve().name
    token, revision = training_args.hub_token, training_args.hub_revision
    repo = open_repo(name, mark, token, training_args.hub_private_repo, revision)
    return Publisher(repo, mark, token, revision, training_args.hub_strategy, training_args.hub_always_push)


def open_repo(
    name: str, mark: str, token: str | None, private: bool | None, revision: str | None, replace: bool = False
) -> str:
    """The full name of the repository `name`, made where there is none; `revision` becomes a branch of it.

    Raises `InputError` for a bad name, a token that is missing, wrong or may not write there, and a repository that
    already holds something else than the run `mark`, unless `replace`.
    """
    api = HfApi(token=token)
    repo = name if "/" in name else f"{_patiently(lambda: api.whoami()['name'], name)}/{name}"

    def make() -> None:
        try:
            files = set(api.list_repo_files(repo, revision=revision))
        except RevisionNotFoundError:
            files = set()
        except RepositoryNotFoundError:
            api.create_repo(repo, private=private, exist_ok=True)
            files = set()
        if files - _NOBODYS and not replace and _mark_of(api, repo, revision) != mark:
            raise InputError(
                f"the name {repo} is taken: the repository holds {len(files)} files of something else; name another "
                "(--hub_model_id), a branch of it (--hub_revision), or push the finished run with make push ... "
                'ARGS="--replace"'
            )
        if revision:
            api.create_branch(repo, branch=revision, exist_ok=True)

    _patiently(make, repo)
    return repo


def _mark_of(api: HfApi, repo: str, revision: str | None) -> str | None:
    try:
        return ModelCard.load(api.hf_hub_download(repo, "README.md", revision=revision)).data.to_dict().get(_MARK)
    except (HfHubHTTPError, ValueError):
        return None


def _patiently(call: Callable[[], Result], repo: str) -> Result:
    """`call()`, again after each of `RETRY_AFTER_S` where the connection broke or the Hub was busy; its refusals as
    `InputError`."""
    for wait_s in (*RETRY_AFTER_S, None):
        try:
            return call()
        except (HFValidationError, LocalTokenNotFoundError, OfflineModeIsEnabled) as error:
            raise InputError(_refusal(error, repo)) from None
        except HfHubHTTPError as error:
            if error.response.status_code not in _PATIENCE:
                raise InputError(_refusal(error, repo)) from None
            failure = f"the Hub answers {error.response.status_code}"
        except (HTTPError, ConnectionError, TimeoutError) as error:
            failure = f"{type(error).__name__}: {error}"
        except RuntimeError as error:  # of a large file's thread
            if not isinstance(error.__cause__, HTTPError):
                raise
            failure = f"{error} ({type(error.__cause__).__name__})"
        if wait_s is None:
            raise RunError(f"the Hub cannot be reached for {repo} ({failure}); nothing here is lost: make push later")
        logger.warning(f"Hub         {failure}; trying again in {wait_s} s")
        time.sleep(wait_s)


def _refusal(error: Exception, repo: str) -> str:
    """What the Hub's refusal means; never the token."""
    if isinstance(error, OfflineModeIsEnabled):
        return f"HF_HUB_OFFLINE is set, so nothing can be pushed to {repo}: unset it, or leave push_to_hub out"
    if isinstance(error, HFValidationError):
        return f"{repo!r} is no name for a repository: {str(error).splitlines()[0]}"
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else 401
    said = (getattr(error, "server_message", None) or str(error)).strip().splitlines()[0]
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


def contents(repo: str, folder: Path, results: Sequence[Path], **metadata: Any) -> tuple[dict[str, Path], ModelCard]:
    """What goes to `repo` of the finished run in `folder`, and its card, with the summaries of what was fine-tuned from
    it in the folders `results`."""
    files, record, summary = files_of(folder)
    config = durable.read_json(files["config.json"])
    if "task" in record:
        return files, card.fine_tuned(repo, config, record, summary, **metadata)
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
    parser.add_argument("--replace", action="store_true", help="push although the repository holds something else")
    parser.add_argument("--dry_run", action="store_true", help="print files and card, and push nothing")
    args = parser.parse_args(argv)
    metadata = {name: value for name in ("license", "language") if (value := getattr(args, name))}
    if args.dry_run:
        files, model_card = contents(args.repo, args.model, args.results, **metadata)
        sizes = "\n".join(f"{path.stat().st_size:>14,}  {name}" for name, path in sorted(files.items()))
        print(f"{model_card}\n{sizes}")
        return
    _, record, summary = files_of(args.model)
    mark = run_id((summary or record)["resolved_args"])
    repo = open_repo(args.repo, mark, None, args.private or None, args.revision, replace=args.replace)
    Publisher(repo, mark, revision=args.revision).push(
        args.model, f"Upload {args.model.name}", args.results, **metadata
    )


if __name__ == "__main__":
    exit_on_error(main)
