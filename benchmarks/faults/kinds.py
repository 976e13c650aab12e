"""Kinds of faults and the random plans of cases. A plan names the fault, its time and its target; the damaged file is
picked, by a drawn number, from those that exist at that time.

    plan = {"kind", "scenario", "moment": time in the first start, "kill" or "damage" or "second" or ...}

Changes that start a different run (a new corpus before the old one was read) are not drawn.
"""

import dataclasses
import enum
import random
import typing
from collections.abc import Callable, Sequence
from typing import Any

import finetune_glue
import train_mlm
from benchmarks.faults.scenarios import LAUNCHED, SCENARIOS, WARM, Scenario
from roberta_recipe.settings import flags_of
from roberta_recipe.training.arguments import FinetuneTrainingArguments, MlmTrainingArguments

Plan = dict[str, Any]  # JSON values

KILL_ALL = {"who": "all", "signal": "SIGKILL", "which": 0}
OTHER_SEED = ("--seed", "43")
# flags of a different run, or that need a server or minutes
NOT_DRAWN = {
    **dict.fromkeys(("output_dir", "logging_dir"), "another run"),
    **dict.fromkeys(("max_train_minutes",), "an earlier end"),
    **dict.fromkeys(("torch_compile", "torch_compile_backend", "torch_compile_mode"), "slow compilation"),
    **dict.fromkeys(("corpus",), "the docstrings of this machine"),
    **dict.fromkeys(("push_to_hub", "hub_always_push", "report_to"), "a server"),
    **dict.fromkeys(("seeds", "sweep"), "other runs of a protocol"),
    **dict.fromkeys(("keep",), "other saved weights"),
}
# each value is a separate run of the fine-tuning protocol, with its own folder
NAMES_A_RUN = ("learning_rate", "global_batch_size", "seed")
# another split of the same batch: equal data, weights equal up to rounding
LAYOUT = ("per_device_train_batch_size", "gradient_accumulation_steps")
VALUES = {
    **{"optim": ["adamw_torch", "adafactor", "sgd"], "optim_args": ["momentum=0.5"], "learning_rate": ["5e-4"]},
    **{"lr_scheduler_type": ["cosine", "constant_with_warmup", "polynomial"], "neftune_noise_alpha": ["5"]},
    **{"lr_scheduler_kwargs": ['{"num_cycles": 0.3}', '{"power": 2.0}'], "tokenizer_name": ["inputs/weights"]},
    **{"train_file": ["inputs/text/validation.parquet"], "validation_file": ["inputs/text/train0.parquet"]},
    **{"config_name": ["inputs/weights"], "model_name_or_path": ["inputs/weights"], "task_name": ["mrpc"]},
    **{"token_cache": ["out/another_cache"], "fill_mask_examples": ["The <mask> sees."]},
    **{"data_dir": ["inputs"], "ddp_backend": ["gloo"], "ddp_timeout": ["600"]},
    **{"max_steps": ["9", "15"], "weight_decay": ["0.1"], "warmup_steps": ["0", "4"], "adam_beta1": ["0.8"]},
    **{"save_total_limit": ["1", "2"], "dataloader_prefetch_factor": ["1", "3"], "save_steps": ["2", "5"]},
    **{"eval_delay": ["2"], "log_level": ["debug", "error"], "log_level_replica": ["info"]},
}


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of fault, a row of the table."""

    draw: Callable[[random.Random, Scenario], Plan]
    weight: float
    applies: Callable[[Scenario], bool] = lambda scenario: True
    launched: bool = False  # also drawn for launchers


def any_moment(rng: random.Random, scenario: Scenario) -> Plan:
    """A uniform time of the run (60%), or a time at which a file is being written."""
    return {"share": rng.random()} if rng.random() < 0.6 else writing(rng, scenario)


def writing(rng: random.Random, scenario: Scenario) -> Plan:
    return {"appears": rng.choice(scenario.writes), "then_s": rng.choice([0, rng.uniform(0, 0.03)])}


def evaluating(rng: random.Random, scenario: Scenario) -> Plan:
    return {"steps": rng.choice([4, 8, 12]), "then_s": rng.uniform(0, 0.2)}


def killed(who: str, moment: Callable = any_moment, number: str = "SIGKILL") -> Callable:
    """A signal to `who`: "all", "rank", "helper" or "launcher"; in 30% of plans the second start gets one too."""

    def draw(rng, scenario):
        plan = {"moment": moment(rng, scenario), "kill": {"who": who, "signal": number, "which": rng.random()}}
        return plan | ({"again": moment(rng, scenario)} if rng.random() < 0.3 else {})

    return draw


def killed_at_operation(rng: random.Random, scenario: Scenario) -> Plan:
    """SIGKILL to all after `operation`, a share of the file operations of a run without a fault."""
    plan = {"operation": rng.random(), "kill": dict(KILL_ALL)}
    return plan | ({"again": any_moment(rng, scenario)} if rng.random() < 0.2 else {})


def first_start_killed(rng: random.Random, scenario: Scenario) -> Plan:
    """A signal to all in the first start: at a file operation (half of the forked runs) or at any moment."""
    if not scenario.launcher and rng.random() < 0.5:
        return {"operation": rng.random(), "kill": dict(KILL_ALL)}
    signals = ["SIGKILL", "SIGKILL", "SIGTERM"]
    return {"moment": any_moment(rng, scenario), "kill": {**KILL_ALL, "signal": rng.choice(signals)}}


def damaged(how: tuple[str, ...], when: str, what: str) -> Callable:
    """File damage. `when`: "before" the first start (to the output of another command), "between" two starts, or
    "during" the first. `what`: "inputs", "output" or "any". During a run, inputs are damaged once their names were
    logged, and only output files that may be read again."""

    def draw(rng, scenario):
        target = {"before": "output", "during": "lasting"}.get(when, "output")
        if what == "inputs" or (what == "any" and rng.random() < 0.3):
            target = "inputs"
        damage = {"what": target, "how": rng.choice(how), "when": when, "file": rng.random(), "number": rng.random()}
        damage["places"] = [[rng.random(), rng.randrange(8)] for _ in range(rng.choice([1, 1, 1, 2, 3]))]
        plan = {"damage": damage}
        if when == "between":
            plan |= first_start_killed(rng, scenario)
        elif when == "during":
            plan["moment"] = {"share": rng.random(), "announced": target == "inputs"}
        return plan

    return draw


def full(what: str) -> Callable:
    """A limit, drawn around the size that a run needs: `file_share` of its largest file, `disk_share` of its output."""

    def draw(rng, scenario):
        return {what: rng.choice([rng.random(), rng.uniform(0, 1.05), 10 ** rng.uniform(-4, 0)])}

    return draw


def second_start(*flags: str) -> Callable:
    """A concurrent second start of the command, with further flags."""

    def draw(rng, scenario):
        delay = rng.choice([0.0, rng.uniform(0, 0.1), rng.uniform(0, 0.9)])
        return {"second": {"flags": list(flags), "delay_share": delay}}

    return draw


def flag_changed(rng: random.Random, scenario: Scenario) -> Plan:
    """A flag of any scope but "layout" and "locked", changed from the second start on."""
    name, words = another_flag(rng, scenario, scopes=("start", "free", "content", "fixed", "data"))
    compare = "digest" if name in LAYOUT else "weights"
    return {**first_start_killed(rng, scenario), "flags": words, "compare": compare}


def free_flag(rng: random.Random, scenario: Scenario) -> Plan:
    """A flag of scope "free" in all starts, the first of which is killed."""
    name, words = another_flag(rng, scenario, scopes=("free",))
    return {
        **killed("all")(rng, scenario),
        **{"all_flags": words, "compare": "digest" if name in LAYOUT else "weights"},
    }


def another_flag(rng: random.Random, scenario: Scenario, scopes: tuple[str, ...]) -> tuple[str, list[str]]:
    """A random flag of the scenario's parser: (name, command-line words with a random value)."""
    own = train_mlm.MlmArguments if scenario.pretrains else finetune_glue.GlueArguments
    trainers = MlmTrainingArguments if scenario.pretrains else FinetuneTrainingArguments
    cls = rng.choice([own, trainers, trainers])
    not_drawn = [*NOT_DRAWN, *(() if scenario.pretrains else NAMES_A_RUN)]
    names = [name for name, flag in flags_of(cls).items() if flag.scope in scopes and name not in not_drawn]
    name = rng.choice(names)
    return name, [f"--{name}", rng.choice(VALUES.get(name) or _values(typing.get_type_hints(cls)[name]))]


def _values(hint: Any) -> list[str]:
    """Command-line values of a type."""
    options = [option for option in typing.get_args(hint) if option is not type(None)]
    if typing.get_origin(hint) is typing.Literal:
        return [str(option) for option in options]
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return [option.value for option in hint]
    if hint is bool:
        return ["true", "false"]
    if hint is int:
        return ["1", "2", "3", "7"]
    if hint is float:
        return ["0.0", "0.05", "0.3", "2.0"]
    if hint is str:
        return ["something"]
    if hint is dict:
        return ['{"something": 1}']
    return [value for option in options for value in _values(option)] or ["something"]


def _resumes(scenario: Scenario) -> bool:
    """Whether a restart can resume; tokenizer training saves no partial state."""
    return scenario.name != "tokenizer"


def _trains(scenario: Scenario) -> bool:
    return scenario.pretrains or scenario.name.startswith("GLUE")


_CUT = ("cut", "empty", "gone", "zeros")
KINDS = {
    "control: no fault": Kind(lambda rng, scenario: {}, 2),
    "kill all": Kind(killed("all"), 12, launched=True),
    "kill one rank": Kind(killed("rank"), 6, lambda scenario: scenario.processes > 1, launched=True),
    "kill a worker": Kind(killed("helper"), 6, lambda scenario: scenario.helpers, launched=True),
    "kill the launcher": Kind(killed("launcher"), 8, lambda scenario: bool(scenario.launcher), launched=True),
    "kill while writing": Kind(killed("all", writing), 8, launched=True),
    "kill at a file operation": Kind(killed_at_operation, 12),
    "kill while evaluating": Kind(killed("all", evaluating), 4, lambda scenario: scenario.pretrains),
    "SIGTERM": Kind(killed("all", any_moment, "SIGTERM"), 6, launched=True),
    "bits flipped, between starts": Kind(damaged(("bits",), "between", "any"), 14, _resumes, launched=True),
    "bits flipped, in mid-run": Kind(damaged(("bits",), "during", "any"), 6, _resumes),
    "ready cache damaged": Kind(damaged(("bits", *_CUT), "before", "output"), 6, lambda s: bool(s.prepared)),
    "file cut or gone, between starts": Kind(damaged(_CUT, "between", "any"), 8, _resumes, launched=True),
    "file cut or gone, in mid-run": Kind(damaged(_CUT, "during", "any"), 4, _resumes),
    "text changed, between starts": Kind(damaged(("word",), "between", "inputs"), 5, _resumes),
    "text changed, in mid-run": Kind(damaged(("word",), "during", "inputs"), 3, _resumes),
    "full disk": Kind(full("disk_share"), 7, launched=True),
    "file size limit": Kind(full("file_share"), 5),
    "two starts": Kind(second_start(), 5, launched=True),
    "two starts, other seed": Kind(second_start(*OTHER_SEED), 4, lambda scenario: scenario.pretrains),
    "two runs, one cache": Kind(
        second_start("--output_dir", "out/second"), 3, lambda s: s.pretrains and "--token_cache" in s.argv
    ),
    "flag changed": Kind(flag_changed, 6, _trains),
    "free flag from the start": Kind(free_flag, 5, _trains),
}
# a check of the census itself, drawn only by name: it must be counted as a silent difference
SABOTAGE = {"sabotage": Kind(lambda rng, scenario: {"all_flags": list(OTHER_SEED)}, 1, lambda s: s.pretrains)}


def draw_plan(
    seed: int, number: int, only: Sequence[str] = (), scenarios: Sequence[str] = (), no_launcher: bool = False
) -> Plan:
    """The plan of a case, a pure function; every tenth case uses a launcher. `only`: filter of the names of kinds."""
    rng = random.Random(f"{seed}/{number}")
    among = LAUNCHED if number % 10 == 9 and not no_launcher else WARM
    among = [SCENARIOS[name] for name in scenarios] or among
    table = {name: kind for name, kind in KINDS.items() if kind.launched or among is not LAUNCHED}
    if only:
        table = {name: kind for name, kind in {**KINDS, **SABOTAGE}.items() if any(part in name for part in only)}
    fitting = {name: [one for one in among if kind.applies(one)] for name, kind in table.items()}
    if not any(fitting.values()):  # `only` names kinds for other scenarios
        fitting = {name: [one for one in SCENARIOS.values() if kind.applies(one)] for name, kind in table.items()}
    names = [name for name in table if fitting[name]]
    (name,) = rng.choices(names, [table[name].weight for name in names])
    chosen = rng.choice(fitting[name])
    return {"kind": name, "scenario": chosen.name, **table[name].draw(rng, chosen)}
