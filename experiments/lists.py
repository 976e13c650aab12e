"""Experiment lists: the YAML format, and its rows (a variant with a seed) with their commands and states.

A list is checked by the parsers of its scripts and tools before a row starts. It may have several scales: `scales:` is
a file of `Scale` entries, `at: {<scale>: {<flags>}}` sets flags at one scale, for the list (`config` and `seeds` too)
or for a row, and `only: [<scale>]` limits a row to some scales (docs/statistics.md).
"""

import importlib
import importlib.util
import json
import multiprocessing
import re
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from roberta_recipe import durable
from roberta_recipe.errors import InputError
from roberta_recipe.input_files import ROOT, resolve_path
from roberta_recipe.record import RECORD_NAME, SUMMARY_NAME, TIME_LIMIT, picked_setting, read_record
from roberta_recipe.settings import NUMBERS_END, check_mapping, did_you_mean, flags_of, load_yaml, parse_yaml
from roberta_recipe.training import optimizers, pretraining
from tools.significance import MOST_SEEDS

ROW_NAME = "row.json"
SEED = "{seed}"  # placeholder for the row's seed in the value of a flag
_RUN = "{run}"  # placeholder for the row's output_dir, in the folder of its own tokenizer
AGAIN = "move its folder away to run it again, or rename the changed row"
_SET_BY_RUNNER = ("output_dir", "config", "seed", "seeds", "max_train_minutes", "sweep", "push_to_hub", "help")
_SET_FOR_MEASURES = ("model_name_or_path", "output", "output_dir", "help")
# may change in a resumed run, but change the evaluated text or the training data
_COMPARED = ("max_eval_samples", "skip_blocks", "rewind_on_spike")
_CHOSEN = ("attn_implementation",)  # chosen and recorded by the run unless set
_DERIVED = ("max_steps", "max_seq_length")  # by a run, from its epochs and its model
_CONTENT = "content of "
_STARTS = ("model_name_or_path", "tokenizer_name")  # a pretraining run records their folders as absolute paths
_HASHED_BYTES = 1 << 20  # larger files are compared by path, not by content


class Measure(NamedTuple):
    """A metric of a finished row."""

    title: str  # with its unit
    better: Literal["lower", "higher"]
    kind: Literal["pretraining", "fine-tuning"]
    tool: str | None  # in tools/, run for the measure of its name, writes --output FILE; None: read the run record
    keys: tuple[str, ...]  # path of the value in that file
    times: float = 1.0
    count: str | None = None  # key of the sample size, if that differs between models


MEASURES = {
    "loss": Measure("validation loss, nats", "lower", "pretraining", None, ("metrics", "eval_loss")),
    "words": Measure("masked words, bits a word", "lower", "pretraining", "words", ("bits_per_word",)),
    "short_words": Measure(
        *("masked words of one piece, bits a word", "lower", "pretraining", "words", ("bits_per_short_word",)),
        count="short_words",
    ),
    "blimp": Measure("BLiMP, %", "higher", "pretraining", "blimp", ("scores", "pll", "mean_of_paradigms"), 100.0),
    "score": Measure("validation score x 100", "higher", "fine-tuning", None, ("median",), 100.0),
}


@dataclass
class Variant:
    """An entry of `rows`: a preset and flags that override it."""

    name: str
    config: str = ""
    flags: dict[str, Any] = field(default_factory=dict)
    script: str = ""
    claim: Literal["better", "worse"] | None = None  # the source's, compared with the first row
    published: dict[str, str | int | float] = field(default_factory=dict)  # the source's results
    at: dict[str, dict[str, Any]] = field(default_factory=dict)
    only: list[str] = field(default_factory=list)

    @property
    def preset(self) -> list[str]:
        """The words of a command line that name the preset, if any."""
        return ["--config", self.config] if self.config else []


@dataclass
class Scale:
    """A scale of a list: defaults for the keys that the list does not set; flags are merged."""

    config: str = ""
    seeds: list[int] = field(default_factory=list)
    measures: dict[str, dict[str, Any] | None] = field(default_factory=dict)
    flags: dict[str, Any] = field(default_factory=dict)
    note: str = ""  # printed below the table
    estimate: bool = False  # print the cost before the first run


@dataclass
class _ListFile:
    """Keys of the YAML file."""

    output_dir: str
    rows: list[dict[str, Any]]
    config: str = ""
    seeds: list[int] = field(default_factory=list)
    measures: dict[str, dict[str, Any] | None] = field(default_factory=dict)
    flags: dict[str, Any] = field(default_factory=dict)
    script: str = "train_mlm.py"
    search: bool = False
    source: str = ""  # of claims and published results
    scales: str = ""
    at: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Experiment:
    """A row: a variant with a seed, its folder and commands."""

    name: str
    seed: int
    folder: Path
    train: list[str]  # command
    measures: dict[str, list[str]]  # flags of each tool
    settings: dict[str, Any]  # must not change between runs; {seed} not replaced

    @property
    def run(self) -> Path:
        """The script's output_dir."""
        return self.folder / "run"

    @property
    def title(self) -> str:
        return f"{self.name}, seed {self.seed}"

    @property
    def log(self) -> Path:
        return self.folder / "log.txt"

    def stored(self) -> dict[str, Any]:
        """`row.json`: settings and measures of the last run, and the time spent. Raises `InputError`."""
        path = self.folder / ROW_NAME
        if not path.is_file():
            return {"settings": None, "measures": {}, "seconds": 0.0}
        return read_record(path, ("settings", "measures", "seconds"), AGAIN)

    def record(self) -> dict[str, Any]:
        """The run record, or the fine-tuning summary; empty until the run has finished. Raises `InputError`."""
        if (self.run / SUMMARY_NAME).is_file():
            return read_record(self.run / SUMMARY_NAME, ("settings", "picked"), AGAIN)
        if not (self.run / RECORD_NAME).is_file():
            return {}
        record = read_record(self.run / RECORD_NAME, ("steps", "metrics"), AGAIN)
        return record if record.get("stopped_by") != TIME_LIMIT else {}

    def output_of(self, measure: str) -> Path:
        """Output file of a measure's tool."""
        return self.folder / f"{measure}.json"

    def to_do(self) -> dict[str, list[str]]:
        """The unfinished commands, by result: "run", or a measure."""
        left = {} if self.record() else {"run": self.train}
        for name, words in self.measures.items():
            if "run" in left or not self.output_of(name).is_file():
                tool = [sys.executable, str(ROOT / "tools" / f"{name}.py")]
                model = ["--model_name_or_path", str(self.run)]
                left[name] = [*tool, *model, *words, *output_flag(name, self.output_of(name))]
        return left

    def step(self) -> int:
        """The step of the newest checkpoint, 0 without one."""
        folders = [path.parent.name for path in self.run.glob(f"**/checkpoint-*/{durable.MANIFEST}")]
        return max((int(name.split("-")[1]) for name in folders), default=0)

    def state(self) -> str:
        """The state, for the console."""
        if changed := self.changes():
            return "changed: " + "; ".join(changed)
        missing = list(self.to_do())
        if not missing:
            return "finished"
        if "run" not in missing:
            return f"trained; not measured: {', '.join(missing)}"
        return f"to be resumed at step {self.step()}" if self.step() else "not started"

    def changes(self) -> list[str]:
        """Differences between the list and the settings of the last run, which come from the run record and, for the
        rest, from `row.json`."""
        stored, record = self.stored(), self.record()
        now, ran_with = self._comparable(self.settings), record.get("resolved_args", {})
        compared = ran_with.keys() - (_DERIVED if stored["settings"] else ())
        ran = {name: ran_with[name] for name in now if name in compared}
        before = self._comparable({**(stored["settings"] or {}), **ran})
        if not stored["settings"]:  # not started, or run by hand: the record has only flags
            flags = [name for name in now if name != "script" and not name.startswith(_CONTENT)] if record else []
            now = {name: now[name] for name in flags}
        seeds = ran_with.get("seeds", [ran_with.get("seed", self.seed)])  # fine-tuning, pretraining
        found = [f"seed was {', '.join(map(str, seeds))}, is {self.seed}"] if seeds != [self.seed] else []
        found += durable.differences(before, now).values()
        for name, words in self.measures.items():
            before = stored["measures"].get(name)
            if record and self.output_of(name).is_file() and before != words:
                was = "not known" if before is None else f"`{shlex.join(before)}`"
                found.append(f"measure {name} was {was}, is `{shlex.join(words)}`")
        return found

    def _comparable(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Settings of this seed, with absolute folders to start from."""
        values = json.loads(json.dumps(settings).replace(SEED, str(self.seed)).replace(_RUN, str(self.run)))
        folders = {name: resolve_path(values[name]) for name in _STARTS if values.get(name)}
        return values | {name: str(path.resolve()) for name, path in folders.items() if path.is_dir()}

    def measured(self, measure: str, *needed: str) -> dict[str, Any]:
        """The output of a measure's tool. Raises `InputError`."""
        return read_record(self.output_of(measure), needed, "move it away to repeat the measurement")

    def figure(self, measure: str) -> float | None:
        """The value of a measure, times `Measure.times`; nan if it is not a number, None until the row has finished.
        Raises `InputError` for a damaged record."""
        chosen, value = MEASURES[measure], self.record()
        if chosen.tool and value:
            value = self.measured(chosen.tool, chosen.keys[0]) if self.output_of(chosen.tool).is_file() else {}
        if not value:
            return None
        if chosen.kind == "fine-tuning":
            value = picked_setting(value)
        for key in chosen.keys:
            value = value[key]
        return float("nan") if value is None else chosen.times * value


class ExperimentList(NamedTuple):
    """An experiment list, checked and resolved."""

    path: Path
    folder: Path
    variants: list[Variant]
    seeds: list[int]
    measures: list[str]
    search: bool
    rows: list[Experiment]  # sorted by seed, so that an unfinished list has about equally many rows of each name
    source: str = ""
    note: str = ""
    estimate: bool = False
    changes: tuple[str, ...] = ()  # --set


def read(path: str, scale_name: str | None = None, changes: Sequence[str] = ()) -> ExperimentList:
    """Read and check a YAML list, at one of its scales and with the `changes` of `--set`. Raises `InputError` with the
    row, the value and the fix."""
    listed = _ListFile(**_checked(load_yaml(path), _ListFile, ("output_dir", "rows"), path))
    variants = [
        Variant(**_checked(row, Variant, ("name",), f"{path}, row {number}"))
        for number, row in enumerate(listed.rows, 1)
    ]
    scale = _read_scale(listed, variants, path, scale_name)
    at = dict(listed.at.get(scale_name, {}))
    own = {key: at.pop(key, getattr(listed, key) or getattr(scale, key)) for key in ("config", "seeds")}
    own["measures"] = listed.measures or scale.measures
    own = _checked(own, _ListFile, ("seeds", "measures"), path)
    variants = [variant for variant in variants if scale_name in (variant.only or [scale_name])]
    for variant in variants:
        variant.flags |= variant.at.get(scale_name, {})
    flags = {**scale.flags, **listed.flags, **at}
    for change in changes:
        _change(change, variants, flags, own["measures"])
    for variant in variants:
        variant.config, variant.script = variant.config or own["config"], variant.script or listed.script
        variant.flags = {**flags, **variant.flags}
    _check_variants(variants, own["seeds"], path)
    tools = _measure_words(own["measures"], path)
    resolved = in_child(_resolve_all, variants, own["measures"], tools, path)
    folder = Path(listed.output_dir, scale_name or "").expanduser()
    rows = [
        _row(variant, seed, folder, *of_variant, tools)
        for seed in own["seeds"]
        for variant, of_variant in zip(variants, resolved, strict=True)
    ]
    return ExperimentList(
        *(Path(path), folder, variants, own["seeds"], list(own["measures"]), listed.search, rows),
        *(listed.source, scale.note, scale.estimate, tuple(changes)),
    )


def _checked(values: Any, cls: type, needed: tuple[str, ...], where: str) -> dict[str, Any]:
    """`values` checked against the fields of `cls`. Raises `InputError`, also without a value for `needed` keys."""
    if not isinstance(values, dict):
        raise InputError(f"{where} must be `key: value` lines, not {values!r}")
    checked = check_mapping(values, [cls], where)
    if missing := [name for name in needed if not checked.get(name)]:
        raise InputError(f"{where}: {missing[0]} is missing or empty")
    return checked


def _read_scale(listed: _ListFile, variants: list[Variant], path: str, name: str | None) -> Scale:
    """The scale `name` of the list's file of scales; an empty scale for a list without. Raises `InputError`."""
    scales = load_yaml(listed.scales) if listed.scales else {}
    if name not in scales and (name or scales):
        names = f"name one with --scale {' or '.join(map(str, scales))}" if scales else "the list has no scales"
        raise InputError(f"{path}: --scale {name}: {names}{did_you_mean(name or '', scales)}")
    used = {scale for variant in variants for scale in (*variant.at, *variant.only)} | set(listed.at)
    if unknown := used - scales.keys():
        raise InputError(f"{path}: {min(unknown)!r} is not a scale of {listed.scales}: {', '.join(scales)}")
    return Scale(**_checked(scales[name], Scale, (), f"{listed.scales}, {name}")) if scales else Scale()


def _change(change: str, variants: list[Variant], flags: dict[str, Any], measures: dict[str, Any]) -> None:
    """Apply `--set flag=value` to all rows and to measures with this flag, or `--set measure.flag=value` to a measure.
    Raises `InputError` if a row sets the flag."""
    name, equals, text = change.partition("=")
    if not (name and equals):
        raise InputError(f"--set {change!r}: write flag=value")
    value = parse_yaml(text, f"--set {change}")
    measure, dot, flag = name.partition(".")
    if dot:
        if measure not in measures:
            raise InputError(f"--set {change}: the list measures {', '.join(measures)}, not {measure}")
        measures[measure] = {**(measures[measure] or {}), flag: value}
        return
    if differing := [variant.name for variant in variants if name in variant.flags]:
        raise InputError(f"--set {change}: rows differ in {name} (row {differing[0]!r}); change it in the list")
    flags[name] = value
    for measure_flags in measures.values():
        if measure_flags and name in measure_flags:
            measure_flags[name] = value


def _check_variants(variants: list[Variant], seeds: list[int], path: str) -> None:
    if len(set(seeds)) != len(seeds) or not all(0 <= seed < NUMBERS_END for seed in seeds) or len(seeds) > MOST_SEEDS:
        raise InputError(
            f"{path}: seeds={seeds} must be different numbers from 0 on, below 2^32, at most {MOST_SEEDS} of them"
        )
    names = [variant.name for variant in variants]
    if not names:
        raise InputError(f"{path}: rows is missing or empty")
    for number, variant in enumerate(variants):
        where = f"{path}, row {variant.name!r}"
        for name in variant.flags:
            if name in _SET_BY_RUNNER:
                raise InputError(f"{where}: flag {name} is set by the runner; remove it (seeds are a key of the list)")
        if not re.fullmatch(r"\w[\w.+-]*", variant.name):
            raise InputError(f"{where}: a name becomes a folder: letters, digits and _ . + - only, a letter first")
        if names.count(variant.name) > 1:
            raise InputError(f"{where}: two rows have this name; rename one")
        if variant.claim and not number:
            raise InputError(f"{where}: claim={variant.claim} on the first row, the baseline of the others; remove it")


def words_of(flags: dict[str, Any], where: str) -> list[str]:
    """Flags as command-line arguments."""
    words = []
    for name, value in flags.items():
        if "-" in name:
            raise InputError(f"{where}: flag {name}: write {name.replace('-', '_')}")
        if value is None or value == []:
            raise InputError(f"{where}: flag {name} has no value; leave it out")
        values = value if isinstance(value, list) else [json.dumps(value) if isinstance(value, dict) else value]
        words += [f"--{name}", *(str(item).lower() if isinstance(item, bool) else str(item) for item in values)]
    return words


def _measure_words(measures: dict[str, dict[str, Any] | None], path: str) -> dict[str, list[str]]:
    """The command-line arguments of each tool; a flag that is true is a switch."""
    words = {}
    for name, flags in measures.items():
        where, flags = f"{path}, measure {name!r}", flags or {}
        if name not in MEASURES:
            raise InputError(f"{where} is not one of {', '.join(MEASURES)}{did_you_mean(name, MEASURES)}")
        tool = MEASURES[name].tool
        if tool and tool not in measures:
            raise InputError(f"{where} needs the measure {tool!r}: add it")
        if refused := [flag for flag in flags if flag in _SET_FOR_MEASURES or tool != name]:
            raise InputError(f"{where}: flag {refused[0]} is set by the runner, or not supported here; remove it")
        if name == "blimp" and "pll" not in (flags.get("methods") or "pll"):
            raise InputError(f"{where}: its score needs pll: add pll to methods, or leave methods out")
        if tool == name:
            switches = [f"--{flag}" for flag, value in flags.items() if value is True]
            others = {flag: value for flag, value in flags.items() if not isinstance(value, bool)}
            words[name] = [*words_of(others, where), *switches]
    return words


def _row(
    variant: Variant, seed: int, folder: Path, values: dict[str, Any], seed_flag: str, tools: dict[str, list[str]]
) -> Experiment:
    folder = folder / variant.name / f"seed-{seed}"
    flags = [word.replace(SEED, str(seed)) for word in words_of(variant.flags, variant.name)]
    launcher = [str(ROOT / "tools" / "launch.py")] if torch.cuda.device_count() > 1 else []  # on all GPUs
    command = [sys.executable, *launcher, str(resolve_path(variant.script)), *variant.preset, *flags]
    command += [f"--{seed_flag}", str(seed), "--output_dir", str(folder / "run")]
    return Experiment(variant.name, seed, folder, command, tools, values)


def in_child(call: Callable, *args: Any) -> Any:
    """`call(*args)` in a child process: parsing flags changes library state and the environment, which runs inherit."""
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(1, context, initializer=signal.signal, initargs=(signal.SIGINT, signal.SIG_IGN)) as pool:
        return pool.submit(call, *args).result()


def output_flag(measure: str, path: Path) -> list[str]:
    """The output flag of a measure's tool; `tools/blimp.py` takes a folder."""
    return ["--output_dir", str(path.parent)] if measure == "blimp" else ["--output", str(path)]


def _resolve_all(
    variants: list[Variant], measures: dict[str, Any], tools: dict[str, list[str]], path: str
) -> list[tuple[dict[str, Any], str]]:
    """`_resolve` for all variants, after a check of the measures' flags by their tools' parsers."""
    for name, words in tools.items():
        tool = importlib.import_module(f"tools.{name}")
        argv = ["--model_name_or_path", "run", *words, *output_flag(name, Path("run", f"{name}.json"))]
        prefix_errors(f"{path}, measure {name!r}", tool.parse, argv)
    resolved = []
    for variant in variants:
        where = f"{path}, row {variant.name!r}"
        resolved.append(prefix_errors(where, _resolve, variant, where))
        kind = "fine-tuning" if resolved[-1][1] == "seeds" else "pretraining"
        if wrong := [name for name in measures if MEASURES[name].kind != kind]:
            raise InputError(f"{where}: measure {wrong[0]} is for {MEASURES[wrong[0]].kind}, not for {variant.script}")
    return resolved


def prefix_errors(where: str, call: Callable, *args: Any) -> Any:
    """`call(*args)`; an `InputError` is prefixed with `where`."""
    try:
        return call(*args)
    except InputError as error:
        text = str(error)
        raise InputError(text if text.startswith(where) else f"{where}: {text}") from None


def _resolve(variant: Variant, where: str) -> tuple[dict[str, Any], str]:
    """(settings of a variant that must not change, as parsed by its script, without seed, folder, and flags that do not
    affect results; name of the seed flag, "seeds" for fine-tuning). Raises `InputError`."""
    path = resolve_path(variant.script)
    if path.suffix != ".py" or not path.is_file():
        raise InputError(f"script={variant.script} is not a Python script: name train_mlm.py, finetune_glue.py, ...")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    script = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = script  # dataclasses look up their module
    spec.loader.exec_module(script)
    filled, resolved = script.read_arguments([*variant.preset, *words_of(variant.flags, where), "--output_dir", _RUN])
    if isinstance(filled[0], pretraining.MlmArguments):
        pretraining.check_data(filled[0])
        pretraining.check_model(filled[0])
        pretraining.check_cooldown(*filled)
    optimizers.check(filled[-1])
    if (minutes := resolved.get("max_train_minutes")) is not None:
        raise InputError(f"max_train_minutes={minutes} in the preset: remove it; the runner can be stopped instead")
    flags = {name: flag for args in filled for name, flag in flags_of(type(args)).items()}
    values = {
        name: resolved.get(name)
        for name, flag in flags.items()
        if (flag.scope not in ("start", "free") or name in _COMPARED)
        and name not in ("output_dir", "seed", "seeds")
        and (name in resolved or name not in _CHOSEN)
        and not (name == "bf16" and filled[-1].picks_bf16)  # by the machine
    }
    if epochs := filled[-1].num_train_epochs:
        values["num_train_epochs"] = epochs
    for name in [name for name in values if flags[name].scope == "content"]:
        values |= {f"{_CONTENT}{file}": durable.sha256(resolve_path(file)) for file in _small_files(values[name])}
    return json.loads(json.dumps({"script": path.name, **values})), "seeds" if "seeds" in flags else "seed"


def _small_files(value: Any) -> list[str]:
    """Local files up to `_HASHED_BYTES` in a flag's value, such as a corpus preset or a model's config."""
    names = [str(item) for item in (value if isinstance(value, list) else [value]) if item]
    paths = {name: resolve_path(name) for name in names}
    return [name for name, path in paths.items() if path.is_file() and path.stat().st_size <= _HASHED_BYTES]
