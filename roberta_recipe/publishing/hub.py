"""Uploads of a run to the Hugging Face Hub: weights, tokenizer, records and model card.

With `--push_to_hub`, a run is pushed at its end, and during training by `--hub_strategy`; `tools/push.py` pushes a
finished run. The token comes from `hf auth login` or HF_TOKEN; it is never printed or written.
"""

import functools
import re
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent import futures
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml
from huggingface_hub import HfApi, ModelCard, ModelCardData, get_token
from huggingface_hub import errors as hub_errors
from transformers import TrainerCallback, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, HubStrategy

from roberta_recipe import durable
from roberta_recipe import record as records
from roberta_recipe.errors import InputError, RunError, first_line
from roberta_recipe.input_files import explained
from roberta_recipe.log import logger
from roberta_recipe.model import weights
from roberta_recipe.publishing import blimp_table, card
from roberta_recipe.training.checkpoint import hash_of_weights, newest_first, step_of

RETRY_AFTER_S = (2, 8, 30)  # huggingface_hub itself retries uploads only
_RETRIED_STATUS = (408, 429, 500, 502, 503, 504)
_REFUSALS = (hub_errors.OfflineModeIsEnabled, hub_errors.LocalTokenNotFoundError, PermissionError, ValueError)
_MODEL = ("config.json", "*.safetensors", "tokenizer*")
PUBLISHED = (*_MODEL, records.CURVE_NAME, records.LOG_NAME)  # files that are uploaded as they are
_MADE_BY_HUB = {".gitattributes", "README.md", "LICENSE"}  # files of a new repository
_LAST = "last-checkpoint"
_OTHER_VERSION = "push it with that version"
_SUMMARY_FIELDS = ("settings", "picked", "dataset", "shown_args", "scored_examples")  # shown on a card
_RUN_ID = "recipe_run"  # card metadata key: the run in this repository

Result = TypeVar("Result")


@dataclass
class Publisher:
    """Uploads a run's folders to its repository, opened by `open_repo`."""

    repo: str
    run_id: str
    revision: str | None = None
    strategy: HubStrategy = HubStrategy.END
    always: bool = False  # during an upload, wait for it (True) or skip this one (False)
    pending: futures.Future | None = None  # the newest background upload
    checkpoint: Path | None = None  # the folder that it reads
    api: HfApi = field(default_factory=HfApi)  # background uploads share one thread, in order

    def announce(self) -> None:
        """Upload an "in training" card with the run's id. Raises `InputError` and `RunError`."""
        data = ModelCardData(library_name="transformers", **{_RUN_ID: self.run_id})
        text = f"---\n{data.to_yaml()}\n---\n\n# {self.repo.split('/')[-1]}\n\n**In training.**\n".encode()
        where = {"repo_id": self.repo, "revision": self.revision, "path_in_repo": "README.md"}
        upload = functools.partial(self.api.upload_file, path_or_fileobj=text, commit_message="In training", **where)
        _with_retries(upload, self.repo)

    def push(
        self, folder: Path, message: str, results: Sequence[Path] = (), replace: bool = False, **metadata: Any
    ) -> None:
        """Upload the finished run in `folder`; `replace` deletes the repository's other files. A run that its time
        limit ended keeps its last checkpoint there, by `strategy`. Raises `InputError` and `RunError`."""
        self.wait()
        published = prepare(self.repo, folder, results, revision=self.revision, **{_RUN_ID: self.run_id}, **metadata)
        ended = durable.read_json(published / records.RECORD_NAME).get("stopped_by") == records.TIME_LIMIT
        if ended and (checkpoints := newest_first(folder)):  # the same command continues
            self.push_checkpoint(checkpoints[0], step_of(checkpoints[0]))
        old = "*" if replace else None if ended else f"{_LAST}/*"
        _with_retries(lambda: self._upload(published, message, delete_patterns=old).result(), self.repo)
        logger.info(f"Pushed      {self.api.endpoint}/{self.repo}")

    def push_run(self, folder: Path, message: str) -> futures.Future | None:
        """Upload the best fine-tuning run so far in the background; returns the upload, which reads `folder`."""
        if self.strategy == HubStrategy.END:
            return None
        try:
            self._start(prepare(self.repo, folder, revision=self.revision, **{_RUN_ID: self.run_id}), message)
        except InputError as error:  # such as weights that an earlier start deleted by keep=none
            logger.warning(f"Hub         not pushed; training continues: {error}")
            return None
        return self.pending

    def push_checkpoint(self, folder: Path, step: int) -> None:
        """Upload a checkpoint in the background, by `hub_strategy`."""
        if self.strategy == HubStrategy.END or (self.checkpoint and self.is_pushing() and not self.always):
            return
        self.wait()
        message, self.checkpoint = f"Training in progress, step {step}", folder
        # patterns match across slashes
        self._start(folder, message, allow_patterns=[*_MODEL], ignore_patterns=["*/*"])
        if self.strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
            target = _LAST if self.strategy == HubStrategy.CHECKPOINT else folder.name
            # the names of DeepSpeed's files contain the step
            self._start(folder, f"{message}, checkpoint", path_in_repo=target, delete_patterns="*")

    def is_pushing(self) -> bool:
        """Whether a background upload is running."""
        return self.pending is not None and not self.pending.done()

    def wait(self) -> None:
        """Wait for the background uploads."""
        if self.is_pushing():
            logger.info("Hub         waiting for a push")
            futures.wait([self.pending])

    def _start(self, folder: Path, message: str, **others: Any) -> None:
        self.pending = self._upload(folder, message, **others)
        self.pending.add_done_callback(_warn_of_failure)

    def _upload(self, folder: Path, message: str, **others: Any) -> futures.Future:
        where = {"repo_id": self.repo, "revision": self.revision, "folder_path": folder}
        return self.api.upload_folder(**where, commit_message=message, run_as_future=True, **others)


def _warn_of_failure(upload: futures.Future) -> None:
    if error := upload.exception():
        logger.warning(f"Hub         a background push failed; training continues: {first_line(error)}")


class PublishCheckpoints(TrainerCallback):
    """Uploads each checkpoint except the last, which the final push contains. `limit`: `save_total_limit`. Add it after
    the callbacks that decide on saving."""

    def __init__(self, publisher: Publisher, limit: int | None):
        self.publisher, self.limit = publisher, limit

    def on_step_end(self, args, state, control, **kwargs):
        """Wait for the upload of a checkpoint that the next save deletes."""
        deleted = newest_first(args.output_dir, state.global_step)[self.limit - 1 :] if self.limit else []
        if control.should_save and self.publisher.checkpoint in deleted:
            self.publisher.wait()

    def on_save(self, args, state, control, **kwargs):
        if not control.should_training_stop:
            folder = Path(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
            self.publisher.push_checkpoint(folder, state.global_step)


def publisher(training_args: TrainingArguments) -> Publisher | None:
    """The publisher of a run with `push_to_hub` on rank 0, else None. Raises `InputError` for a bad token or name."""
    if not training_args.publishes or training_args.process_index:
        return None
    output_dir = Path(training_args.output_dir)
    name, revision = training_args.hub_model_id or output_dir.resolve().name, training_args.hub_revision
    own_id = run_id(output_dir)
    repo, ours = open_repo(name, own_id, training_args.hub_private_repo, revision)
    opened = Publisher(repo, own_id, revision, training_args.hub_strategy, training_args.hub_always_push)
    if not ours:
        opened.announce()
    return opened


def run_id(output_dir: Path) -> str:
    """A run's random id, stored in its folder and in the repository's card. Raises `InputError` for a damaged file."""
    path = output_dir / records.HUB_NAME
    if not path.is_file():
        durable.make_folder(output_dir)
        durable.check_output_file(path, "the run's id", "push a copy of the run's folder")
        durable.write_sealed(path, {_RUN_ID: uuid.uuid4().hex})
    fix = ': delete it, and push the finished run with make push ... ARGS="--replace"'
    with explained(f"{path} is damaged", fix):
        return durable.read_sealed(path)[_RUN_ID]


def open_repo(
    name: str, own_id: str, private: bool | None = None, revision: str | None = None, replace: bool = False
) -> tuple[str, bool]:
    """(full name of the repository, whether it contains the run `own_id`). A missing repository is created, `revision`
    as its branch. Raises `InputError` for a bad name, a missing or wrong token, one without write access, and a
    repository with other content, unless `replace`."""
    if re.search(r"[^!-~]", get_token() or ""):
        raise InputError("the token contains invalid characters; copy it again (hf auth login, or HF_TOKEN)")
    api = HfApi()
    repo = name if "/" in name else f"{_with_retries(lambda: api.whoami()['name'], name)}/{name}"

    def prepare_repo() -> bool:
        try:
            info = api.repo_info(repo)
        except hub_errors.RepositoryNotFoundError:
            api.create_repo(repo, private=private, exist_ok=True)
            info = api.repo_info(repo)
        if private and not info.private:
            raise InputError(f"{repo} exists and is public: leave private out, or name another repository")
        api.auth_check(repo, write=True)
        try:
            files = set(api.list_repo_files(repo, revision=revision))
        except hub_errors.RevisionNotFoundError:
            api.create_branch(repo, branch=revision, exist_ok=True)
            if set(api.list_repo_files(repo, revision=revision)) - _MADE_BY_HUB:  # a copy of the main branch
                api.delete_files(repo, ["*"], revision=revision, commit_message="Empty the new branch")
            return False
        ours = _run_id_in(api, repo, revision) == own_id
        if files - _MADE_BY_HUB and not ours and not replace:
            raise InputError(
                f"{repo} contains {len(files)} unrelated files; name another repository or a new branch of it "
                '(--hub_revision), or push the finished run with make push ... ARGS="--replace"'
            )
        return ours

    return repo, _with_retries(prepare_repo, repo)


def _run_id_in(api: HfApi, repo: str, revision: str | None) -> str | None:
    try:
        readme = ModelCard.load(api.hf_hub_download(repo, "README.md", revision=revision))
        return readme.data.to_dict().get(_RUN_ID)
    except (hub_errors.RemoteEntryNotFoundError, ValueError, yaml.YAMLError):
        return None


def _with_retries(call: Callable[[], Result], repo: str) -> Result:
    """`call()` with retries on connection errors and a busy Hub. Raises `InputError` if the Hub or its client refuses,
    with its message and never the token, and `RunError` after the last retry."""
    for wait_s in (*RETRY_AFTER_S, None):
        try:
            return call()
        except InputError:
            raise
        except Exception as error:
            # the client's threads wrap errors in a RuntimeError
            cause = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ else error
            status = cause.response.status_code if isinstance(cause, hub_errors.HfHubHTTPError) else None
            reason = first_line(cause) if status is None else f"{status}: {cause.server_message or first_line(cause)}"
            if isinstance(cause, _REFUSALS) or (status and status not in _RETRIED_STATUS):
                why = reason if status else " ".join(str(cause).split())  # refused metadata take several lines
                raise InputError(
                    f"the Hub refuses {repo} ({why}): pushing needs a valid name, valid metadata, and a token with "
                    "write access (hf auth login, or HF_TOKEN)"
                ) from None
            unreachable = hub_errors.HTTPError, hub_errors.LocalEntryNotFoundError, ConnectionError, TimeoutError
            if not isinstance(cause, unreachable):
                raise
        if wait_s is None:
            raise RunError(f"the Hub cannot be reached for {repo} ({reason}); make push sends a finished run later")
        logger.warning(f"Hub         {reason}; retry in {wait_s} s")
        time.sleep(wait_s)


def find_model(folder: Path) -> tuple[Path, Path, records.RunRecord, records.Summary | None]:
    """(weights folder, record folder, record, summary) of a finished run: of pretraining, of fine-tuning (its best
    run), or of one of its runs (without summary). Raises `InputError` without a finished run, and for weights that are
    damaged or newer than the record."""
    summary, run_folder = None, folder
    if (folder / records.SUMMARY_NAME).is_file():
        summary = records.read_record(folder / records.SUMMARY_NAME, _SUMMARY_FIELDS, _OTHER_VERSION)
        run_folder = folder / Path(records.picked_setting(summary)["best_run"]).name
    model = run_folder / records.BEST_NAME if (run_folder / records.BEST_NAME).is_dir() else run_folder
    if not (run_folder / records.RECORD_NAME).is_file() or not (model / "model.safetensors").is_file():
        raise InputError(f"{folder} has no finished run with weights: name a run's output_dir")
    if (model != run_folder or (model / durable.MANIFEST).is_file()) and (damage := durable.damage(model)):
        raise InputError(f"{model} is damaged and not pushed: {damage}. Copy it again, or run it again")
    needed = ("resolved_args", "shown_args", "fingerprint", "state_digests")
    record = records.read_record(run_folder / records.RECORD_NAME, needed, _OTHER_VERSION)
    if record["state_digests"]["weights"] != hash_of_weights(model):  # killed before it wrote the record
        raise InputError(f"{model} has newer weights than its {records.RECORD_NAME}: finish its run first")
    return model, run_folder, record, summary


def prepare(repo: str, folder: Path, results: Sequence[Path] = (), **metadata: Any) -> Path:
    """A temporary folder with the published files of a finished run: links to weights and tokenizer, records without
    local folders, the card for `repo` as README.md. `results`: folders of models fine-tuned from it, for the card."""
    model, run_folder, record, summary = find_model(folder)
    config = durable.read_json(model / "config.json")
    summaries = [_summary_of(path, model) for path in results]
    # a checkpoint named by a relative path looks like a Hub id
    local = ("model_name_or_path",) if "task" in record and not card.starts_from_hub(record) else ()
    record, summary, summaries = records.portable([record, summary, summaries], local=local)
    scored = None
    if "task" in record:
        readme = card.fine_tuned(repo, config, record, summary, **metadata)
    else:
        blimp = model / records.BLIMP_NAME
        scored = records.read_record(blimp, ("scores",), "run make blimp again") if blimp.is_file() else None
        if scored and blimp_table.is_stale(scored, model):
            logger.warning(f"Hub         {blimp} scores other weights and is not published: run make blimp again")
            scored = None
        readme = card.pretrained(repo, config, record, summaries, blimp_record=scored, **metadata)
    published = Path(tempfile.mkdtemp(dir=_staging().name))
    places = [place.glob(pattern) for place in (run_folder, folder, model) for pattern in PUBLISHED]
    for name, path in {path.name: path for paths in places for path in paths if path.is_file()}.items():
        (published / name).symlink_to(path.resolve())
    records.write_preset(record["resolved_args"], published)
    records.write_record(record, published / records.RECORD_NAME)
    for values, name in ((summary, records.SUMMARY_NAME), (scored, records.BLIMP_NAME)):
        if values:
            records.write_record(values, published / name)
    readme.save(published / "README.md")
    return published


def _summary_of(folder: Path, model: Path) -> records.Summary:
    """The summary of a model fine-tuned from `model`. Raises `InputError` for one of other weights."""
    summary = records.read_record(folder / records.SUMMARY_NAME, _SUMMARY_FIELDS, _OTHER_VERSION)
    run = folder / Path(records.picked_setting(summary)["best_run"]).name / records.RECORD_NAME
    start = records.read_record(run, ("fingerprint",), _OTHER_VERSION)["fingerprint"]
    if start.get("random_weights") or start["weights"] != weights.content_hash(str(model)):
        raise InputError(f"results={folder} is not fine-tuned from the weights in {model}: leave it out")
    return summary


@functools.cache
def _staging() -> tempfile.TemporaryDirectory:
    """The process's temporary folder for uploads, deleted at exit."""
    return tempfile.TemporaryDirectory(prefix="published-")
