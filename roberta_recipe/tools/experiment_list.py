"""A list of experiments: what the YAML says, what becomes of it (rows, commands), and the check of all of it before
anything runs. `roberta_recipe.tools.experiments` runs it, `experiment_table` makes its table (docs/statistics.md)."""

import argparse
import importlib
import importlib.util
import json
import multiprocessing
import os
import re
import shlex
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple

import torch

from roberta_recipe import durable
from roberta_recipe.errors import InputError, first_line
from roberta_recipe.hardware import end_with_parent
from roberta_recipe.input_files import resolve_path, taken_apart
from roberta_recipe.record import RECORD_NAME, SUMMARY_NAME, TIME_LIMIT, picked_setting, read_record
from roberta_recipe.settings import NUMBERS_END, check_mapping, did_you_mean, flags_of, load_yaml
from roberta_recipe.significance import MOST_SEEDS
from roberta_recipe.tools.experiment_scale import at_scale
from roberta_recipe.training import optimization, pretraining
from roberta_recipe.training.checkpoint import newest_first

RUN_FOLDER, ROW_NAME, FAILED_NAME, LOG_FILE = "run", "row.json", "failed.json", "log.txt"
TABLE_FILES = ("table.md", "table.json")  # in the list's folder
SEED = "{seed}"  # in the value of a row's flag: its seed
_OF_RUNNER = {  # flag: what to write in its place
    "output_dir": "output_dir belongs to the list",
    "config": "write config: PRESET beside the flags",
    "seed": "write seeds: [1, 2, ...] in the list, or in its file of scales",
    "seeds": "write seeds: [1, 2, ...] in the list, or in its file of scales",
    "max_train_minutes": "stop the runner, and start it again",
    "sweep": "write a row for each setting",
    "push_to_hub": "push a finished row with make push",
    "help": "give it to the script itself",
}
_MEASURED = ("max_eval_samples",)  # flags that change no bit of a run, but what its loss is of
_CHOSEN = ("attn_implementation",)  # flags whose value a run chooses, and records, where they are not set
_CONTENT = "content of "
_OF_MEASURE = ("model_name_or_path", "output", "output_dir", "help")  # flags of the tools that are the runner's
_LONGEST_NAME = 100
_HASHED_BYTES = 1 << 20  # files up to this size are compared by content, larger ones by path
AGAIN = "move its folder away to have it run again, or give the changed row another name"


class Measure(NamedTuple):
    """A figure of a finished run."""

    title: str  # with its unit
    better: Literal["lower", "higher"]
    of: Literal["pretraining", "fine-tuning"]
    tool: str | None  # of roberta_recipe.tools, which writes --output FILE; None: the run's own record has it
    keys: tuple[str, ...]  # of the figure in that file
    times: float = 1.0
    beside: str | None = None  # the measure in whose file it stands, for one without a tool
    count: str | None = None  # the key of how many it is the mean of, where models are asked different ones


MEASURES = {
    "loss": Measure("validation loss, nats", "lower", "pretraining", None, ("metrics", "eval_loss")),
    "words": Measure("masked words, bits a word", "lower", "pretraining", "words", ("bits_per_word",)),
    "short_words": Measure(
        *("masked words of one piece, bits a word", "lower", "pretraining", None, ("bits_per_short_word",)),
        beside="words",
        count="short_words",
    ),
    "blimp": Measure("BLiMP, %", "higher", "pretraining", "blimp", ("scores", "pll", "mean_of_paradigms"), 100.0),
    "score": Measure("validation score x 100", "higher", "fine-tuning", None, ("median",), 100.0),
}


@dataclass
class Setting:
    """A name of the list: a preset and what differs from it."""

    name: str
    config: str = ""
    flags: dict[str, Any] = field(default_factory=dict)
    script: str = ""
    claim: Literal["better", "worse"] | None = None  # what the source says of it, against the first
    published: dict[str, str | int | float] = field(default_factory=dict)  # figures of the source, by what they are


@dataclass
class _Written:
    """The keys of the YAML."""

    output_dir: str
    seeds: list[int]
    measures: dict[str, Any]
    rows: list[Any]
    config: str = ""
    flags: dict[str, Any] = field(default_factory=dict)
    script: str = "train_mlm.py"
    search: bool = False
    source: str = ""  # of the comparison, its claims and published figures


class Resolved(NamedTuple):
    """What a script's own parser makes of a setting."""

    values: dict[str, Any]  # what makes its runs what they are; no seed, no folder, no flag that changes no bit
    seed_flag: str  # "seed", or "seeds" of the fine-tuning scripts


@dataclass(frozen=True)
class Row:
    """A setting with a seed: a folder, and commands."""

    name: str
    seed: int
    folder: Path
    train: list[str]  # command
    measures: dict[str, list[str]]  # flags of each measure that has a tool
    settings: dict[str, Any]  # what must not change

    @property
    def run(self) -> Path:
        """The output folder of the script."""
        return self.folder / RUN_FOLDER

    @property
    def title(self) -> str:
        return f"{self.name}, seed {self.seed}"

    @property
    def log(self) -> Path:
        return self.folder / LOG_FILE

    def stored(self) -> dict[str, Any]:
        """`row.json`: what was run, and how long it took; empty before. Raises `InputError`."""
        return self._read(ROW_NAME) or {"settings": None, "measures": {}, "seconds": 0.0}

    def failure(self) -> dict[str, Any] | None:
        """How the last start failed: its exit code and last line; None where it did not."""
        return self._read(FAILED_NAME)

    def _read(self, name: str) -> Any:
        try:
            return durable.read_sealed(self.folder / name)
        except (FileNotFoundError, NotADirectoryError):  # an output_dir that is a file is told where it is made
            return None
        except (OSError, ValueError) as error:
            raise InputError(f"{self.folder / name} cannot be read ({error}); {AGAIN}") from None

    def is_trained(self) -> bool:
        return bool(self.record())

    def record(self) -> dict[str, Any]:
        """The record of the finished run, or the summary of a fine-tuning; empty before. Raises `InputError`."""
        if (self.run / SUMMARY_NAME).is_file():
            return read_record(self.run / SUMMARY_NAME, ("settings", "picked"), AGAIN)
        if not (self.run / RECORD_NAME).is_file():
            return {}
        record = read_record(self.run / RECORD_NAME, ("steps", "metrics"), AGAIN)
        return record if record.get("stopped_by") != TIME_LIMIT else {}

    def output_of(self, measure: str) -> Path:
        """The file that a measure's tool writes."""
        return self.folder / f"{measure}.json"

    def to_do(self) -> dict[str, list[str]]:
        """The commands that have not been run to their end, by what they give: "run", or a measure."""
        left = {} if self.is_trained() else {"run": self.train}
        for name, words in self.measures.items():
            if "run" in left or not self.output_of(name).is_file():
                tool = [sys.executable, "-m", f"roberta_recipe.tools.{MEASURES[name].tool}"]
                model = ["--model_name_or_path", str(self.run)]
                left[name] = [*tool, *model, *words, *_written_to(name, self.output_of(name))]
        return left

    def step(self) -> int:
        """The step of the newest checkpoint; 0 without one."""
        found = newest_first(self.run) or [path for folder in self.run.glob("*/") for path in newest_first(folder)]
        return max((int(path.name.split("-")[1]) for path in found), default=0)

    def state(self) -> str:
        """In words, what a start of the row would find."""
        if changed := self.changes():
            return "changed: " + "; ".join(changed)
        missing = list(self.to_do())
        if not missing:
            return "finished"
        if failure := self.failure():
            at = f"; to be resumed at step {self.step()}" if "run" in missing and self.step() else ""
            return f"failed (exit code {failure['exit_code']}): {failure['line']}{at}"
        if "run" not in missing:
            return f"trained; to be measured: {', '.join(missing)}"
        return f"to be resumed at step {self.step()}" if self.step() else "not begun"

    def changes(self) -> list[str]:
        """What differs between the list and what the row was run with."""
        stored, record = self.stored(), self.record()
        now, ran_with = self.settings_of_seed(), record.get("resolved_args", {})
        # what the run itself says comes first: a preset may have changed between the list's reading and the run's
        before = self._with_seed(stored["settings"] or {}) | {name: ran_with[name] for name in now if name in ran_with}
        if not stored["settings"]:  # not begun, or run by hand: a record has the flags alone
            flags = [name for name in now if name != "script" and not name.startswith(_CONTENT)] if record else []
            now = {name: now[name] for name in flags}
        seeds = ran_with.get("seeds", [ran_with.get("seed", self.seed)])  # of fine-tuning, of pretraining
        found = [f"seed was {', '.join(map(str, seeds))}, is {self.seed}"] if seeds != [self.seed] else []
        different = durable.differences(before, now)
        if "bf16" in different:
            value = str(before.get("bf16")).lower()
            different["bf16"] += f" (the machine's choice where it is not set: --set bf16={value})"
        found += different.values()
        for name, words in self.measures.items():
            path, given = self.output_of(name), stored["measures"].get(name)
            if path.is_file() and given is None and record:
                found.append(f"{ROW_NAME} does not say how {path.name} was measured")
            elif path.is_file() and given not in (None, words):
                found.append(f"measure {name} was `{shlex.join(given)}`, is `{shlex.join(words)}`")
        return found

    def settings_of_seed(self) -> dict[str, Any]:
        """The settings as the row's command has them."""
        return self._with_seed(self.settings)

    def _with_seed(self, settings: dict[str, Any]) -> dict[str, Any]:
        return json.loads(json.dumps(settings).replace(SEED, str(self.seed)))

    def measured(self, measure: str) -> dict[str, Any]:
        """What a measure's tool wrote. Raises `InputError`."""
        path = self.output_of(measure)
        try:
            return durable.read_sealed(path)
        except (OSError, ValueError, TypeError) as error:
            raise InputError(f"{path} cannot be read ({error}); move it away to have it measured again") from None

    def figure(self, measure: str) -> float | None:
        """A figure of the finished row, times `Measure.times`; nan for one that is no number, None where it is missing.
        Raises `InputError` for a record that is not what was written."""
        of = MEASURES[measure]
        file = of.beside or (measure if of.tool else None)
        found = self.record()
        if not found or (file and not self.output_of(file).is_file()):
            return None
        if file:
            found = self.measured(file)
        if of.of == "fine-tuning":
            found = picked_setting(found)
        for key in of.keys:
            if key not in found:
                path = self.output_of(file) if file else self.run
                raise InputError(f"{path} has no {key}, as of an older version; move it away to have it measured again")
            found = found[key]
        return float("nan") if found is None else of.times * found


class Experiments(NamedTuple):
    """A checked list."""

    path: Path
    folder: Path
    settings: list[Setting]
    seeds: list[int]
    measures: list[str]
    search: bool
    rows: list[Row]  # seed by seed, so that an unfinished list has as many of each name as can be
    source: str = ""
    note: str = ""  # on the scale
    estimate: bool = False  # whether a run begins with what it will cost
    changes: tuple[str, ...] = ()  # flag=value for all rows, on top of the file


def read(path: str, scale: str | None = None, changes: list[str] | None = None) -> Experiments:
    """The list of a YAML file, at a scale of it and with changed flags, all of it checked. Raises `InputError` that
    names the row, the value and the fix."""
    values, of_scale = at_scale(load_yaml(path), path, scale, changes or [])
    written = _Written(**_checked(values, _Written, path))
    _check_seeds(written.seeds, path)
    settings = [_setting(entry, number, written, path) for number, entry in enumerate(written.rows, 1)]
    _check_names(settings, path)
    tools = _measure_words(written.measures, path)
    try:
        folder = Path(written.output_dir).expanduser()
    except RuntimeError as error:  # a ~user of nobody
        raise InputError(f"{path}: output_dir={written.output_dir}: {first_line(error)}; name another folder") from None
    resolved = in_child(_resolve_all, settings, written.measures, tools, path)
    rows = [
        _row(setting, seed, folder, of_setting, tools)
        for seed in written.seeds
        for setting, of_setting in zip(settings, resolved, strict=True)
    ]
    return Experiments(
        *(Path(path), folder, settings, written.seeds, list(written.measures), written.search, rows),
        *(written.source, of_scale.note, of_scale.estimate, tuple(changes or ())),
    )


def _checked(values: Any, cls: type, where: str) -> dict[str, Any]:
    """`values` by the fields of `cls`, each of its type and none missing."""
    if not isinstance(values, dict):
        raise InputError(f"{where} must be `key: value` lines, not {values!r}")
    checked = check_mapping(values, [cls], where)
    needed = [name for name in ("output_dir", "seeds", "measures", "rows", "name") if name in cls.__annotations__]
    if missing := [name for name in needed if not checked.get(name)]:
        raise InputError(f"{where}: {missing[0]} is missing or empty")
    return checked


def _check_seeds(seeds: list[int], path: str) -> None:
    if len(set(seeds)) != len(seeds) or not all(0 <= seed < NUMBERS_END for seed in seeds) or len(seeds) > MOST_SEEDS:
        raise InputError(
            f"{path}: seeds={seeds} must be different numbers from 0 on, below 2^32, at most {MOST_SEEDS} of them"
        )


def _setting(entry: Any, number: int, written: _Written, path: str) -> Setting:
    """An entry of `rows`, with what the list says for all rows."""
    setting = Setting(**_checked(entry, Setting, f"{path}, row {number}"))
    setting.config, setting.script = setting.config or written.config, setting.script or written.script
    setting.flags = {**written.flags, **setting.flags}
    where = f"{path}, row {setting.name!r}"
    for name in setting.flags:
        if name in _OF_RUNNER:
            raise InputError(f"{where}: flag {name}={setting.flags[name]} is the runner's: {_OF_RUNNER[name]}")
    if not re.fullmatch(r"\w[\w.+-]*", setting.name) or len(setting.name) > _LONGEST_NAME:
        raise InputError(
            f"{where}: a name becomes a folder: letters, digits and _ . + - only, a letter or digit first, at most "
            f"{_LONGEST_NAME} of them"
        )
    if setting.name in TABLE_FILES:
        raise InputError(f"{where}: the table is written to a file of this name; rename the row")
    if number == 1 and setting.claim:
        raise InputError(f"{where}: claim={setting.claim}: the first row is what the others are compared with; drop it")
    return setting


def _check_names(settings: list[Setting], path: str) -> None:
    names = [setting.name for setting in settings]
    if twice := [name for name in names if names.count(name) > 1]:
        raise InputError(f"{path}: two rows have the name {twice[0]!r}: each has a folder of its own; rename one")


def words_of(flags: dict[str, Any], where: str) -> list[str]:
    """Flags as a command line has them."""
    words = []
    for name, value in flags.items():
        if "-" in name:
            raise InputError(f"{where}: flag {name}: write {name.replace('-', '_')}")
        if value is None or value == []:
            raise InputError(f"{where}: flag {name} has no value; leave it out")
        values = value if isinstance(value, list) else [json.dumps(value) if isinstance(value, dict) else value]
        words += [f"--{name}", *(str(item).lower() if isinstance(item, bool) else str(item) for item in values)]
    return words


def _measure_words(measures: dict[str, Any], path: str) -> dict[str, list[str]]:
    """The flags of each measure that has a tool."""
    words = {}
    for name, flags in measures.items():
        where = f"{path}, measure {name!r}"
        if name not in MEASURES:
            raise InputError(f"{where} is none of {', '.join(MEASURES)}{did_you_mean(str(name), MEASURES)}")
        given = flags or {}
        mapped = isinstance(given, dict) and all(isinstance(flag, str) for flag in given)
        if not mapped or (given and not MEASURES[name].tool):
            takes = "flags of its tool, as `key: value` lines" if MEASURES[name].tool else "no flags: write null"
            raise InputError(f"{where} is {flags!r}, and takes {takes}")
        if of_runner := [flag for flag in given if flag.replace("-", "_") in _OF_MEASURE]:
            raise InputError(f"{where}: flag {of_runner[0]} is the runner's: it measures each row; leave it out")
        if (beside := MEASURES[name].beside) and beside not in measures:
            raise InputError(f"{where} is a figure of the measure {beside!r}, which the list has not")
        if MEASURES[name].tool:  # whose parsers have switches, not flags that are true or false
            if off := [flag for flag, value in given.items() if value is False]:
                raise InputError(f"{where}: flag {off[0]}=false: leave it out")
            switches = [f"--{flag}" for flag, value in given.items() if value is True]
            words[name] = [*words_of({flag: of for flag, of in given.items() if of is not True}, where), *switches]
        methods = given.get("methods", "pll")
        if name == "blimp" and "pll" not in (methods if isinstance(methods, list) else [methods]):
            raise InputError(f"{where}: methods={methods}: pll, whose accuracy the table has, must be among them")
    return words


def _row(setting: Setting, seed: int, folder: Path, resolved: Resolved, tools: dict[str, list[str]]) -> Row:
    folder = folder / setting.name / f"seed-{seed}"
    of_seed = [word.replace(SEED, str(seed)) for word in words_of(setting.flags, setting.name)]
    flags = [*(["--config", setting.config] if setting.config else []), *of_seed]
    launcher = ["-m", "roberta_recipe.tools.launch"] if torch.cuda.device_count() > 1 else []  # on all GPUs
    command = [sys.executable, *launcher, str(resolve_path(setting.script)), *flags]
    command += [f"--{resolved.seed_flag}", str(seed)]
    command += ["--output_dir", str(folder / RUN_FOLDER)]
    return Row(setting.name, seed, folder, command, tools, resolved.values)


def in_child(call: Callable, *args: Any) -> Any:
    """`call(*args)` in a child: the libraries' state that flags set, in the environment too, would reach every run."""
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(1, context, initializer=_begin_child, initargs=(os.getpid(),)) as pool:
        return pool.submit(call, *args).result()


def _begin_child(parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's is for the parent
    end_with_parent(parent, signal.SIGKILL)


def _written_to(measure: str, path: Path) -> list[str]:
    """The flag that has a measure's tool write `path`; `tools/blimp.py` names the file itself, in a folder."""
    return ["--output_dir", str(path.parent)] if measure == "blimp" else ["--output", str(path)]


def tool_of(measure: str, words: list[str]) -> tuple[ModuleType, argparse.Namespace]:
    """A measure's tool, and what its parser makes of the measure's flags. Raises `InputError`."""
    tool = importlib.import_module(f"roberta_recipe.tools.{MEASURES[measure].tool}")
    written_to = _written_to(measure, Path("run", f"{measure}.json"))
    return tool, tool.parse(["--model_name_or_path", "run", *words, *written_to])


def _resolve_all(settings: list[Setting], measures: dict, tools: dict[str, list[str]], path: str) -> list[Resolved]:
    """What the scripts' parsers make of all settings; the tools' parsers take the measures' flags."""
    for name, words in tools.items():
        named(f"{path}, measure {name!r}", tool_of, name, words)
    found = []
    for setting in settings:
        where = f"{path}, row {setting.name!r}"
        found.append(named(where, _resolve, setting, where))
        kind = "fine-tuning" if found[-1].seed_flag == "seeds" else "pretraining"
        if wrong := [name for name in measures if MEASURES[name].of != kind]:
            raise InputError(f"{where}: measure {wrong[0]} is of {MEASURES[wrong[0]].of}, and {setting.script} is not")
    return found


def named(where: str, call: Callable, *args: Any) -> Any:
    """`call(*args)`, where an error says where in the list its cause stands."""
    try:
        return call(*args)
    except InputError as error:
        text = str(error)
        raise InputError(text if text.startswith(where) else f"{where}: {text}") from None


def _resolve(setting: Setting, where: str) -> Resolved:
    path = resolve_path(setting.script)
    if not path.is_file():
        raise InputError(f"script={setting.script}: no such file")
    with taken_apart(f"script={setting.script}", "a script of this recipe"):
        spec = importlib.util.spec_from_file_location(path.stem, path)  # None for a name that is not *.py
        script = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = script  # dataclasses look their module up
        spec.loader.exec_module(script)
    if not hasattr(script, "read_arguments"):
        raise InputError(f"script={setting.script} has no read_arguments: name train_mlm.py or a fine-tuning script")
    argv = ["--config", setting.config] if setting.config else []
    try:
        filled, resolved = script.read_arguments([*argv, *words_of(setting.flags, where), "--output_dir", "run"])
    except InputError as error:
        for name, value in setting.flags.items():
            if isinstance(value, list) and len(value) > 1 and f"unknown argument {str(value[1])!r}" in str(error):
                raise InputError(f"flag {name}={value} is of one value: write a row for each") from None
        raise
    if isinstance(filled[0], pretraining.MlmArguments):
        pretraining.check_data(filled[0])
        pretraining.check_model(filled[0])
        pretraining.check_cooldown(*filled)
    optimization.check(filled[-1])
    flags = {name: flag for args in filled for name, flag in flags_of(type(args)).items()}
    if (minutes := resolved.get("max_train_minutes")) is not None:
        raise InputError(f"max_train_minutes={minutes} in the preset: {_OF_RUNNER['max_train_minutes']}")
    of_seed = {"output_dir", "seed", "seeds"}
    values = {
        name: resolved.get(name)
        for name, flag in flags.items()
        if (flag.resume not in ("start", "free") or name in _MEASURED)
        and name not in of_seed
        and (name in resolved or name not in _CHOSEN)
    }
    for name in [name for name in values if flags[name].resume == "content"]:
        values |= {f"{_CONTENT}{file}": durable.sha256(resolve_path(file)) for file in _small_files(values[name])}
    as_stored = json.loads(json.dumps({"script": path.name, **values}))
    return Resolved(as_stored, "seeds" if "seeds" in flags else "seed")


def _small_files(value: Any) -> list[str]:
    """The local files that a flag names, such as a corpus preset or a model's config, as it names them, if they are
    small."""
    named = [str(item) for item in (value if isinstance(value, list) else [value]) if item]
    paths = {name: resolve_path(name) for name in named}
    return [name for name, path in paths.items() if path.is_file() and path.stat().st_size <= _HASHED_BYTES]
