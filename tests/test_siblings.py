"""The skeleton that fine-tuning scripts share: shared code is in one place."""

import ast
import dataclasses
import inspect
import re

import finetune_glue
import finetune_ner
import finetune_race
import finetune_squad
from roberta_recipe.tasks import protocol

SCRIPTS = (finetune_glue, finetune_squad, finetune_race, finetune_ner)
OF_THE_PAPER = (finetune_glue.GlueArguments, finetune_squad.SquadArguments, finetune_race.RaceArguments)
ARGUMENTS = (*OF_THE_PAPER, finetune_ner.NerArguments)


def functions(script):
    return {node.name: node for node in ast.parse(inspect.getsource(script)).body if isinstance(node, ast.FunctionDef)}


def calls_into_the_library(node):
    """Calls such as `protocol.run_all`, in source order, without calls to the task's own module."""
    shared = ("set_up_logging", "launching", "hub", "tokenization", "protocol", "plots", "publisher")
    found = [call for call in ast.walk(node) if isinstance(call, ast.Call)]
    names = [ast.unparse(call.func) for call in sorted(found, key=lambda call: (call.lineno, call.col_offset))]
    return [name for name in names if name.partition(".")[0] in shared]


def test_main_has_the_same_steps_in_the_same_order():
    steps = [re.findall(r"^    # (\d)\. (.*)$", inspect.getsource(script.main), re.M) for script in SCRIPTS]
    numbers = [[number for number, _ in of_script] for of_script in steps]
    assert sorted(numbers) == [["1", "2", "3", "4", "5"]] + [["1", "2", "3", "4", "5", "6"]] * (len(SCRIPTS) - 1)
    for shared in list(zip(*(of_script[:5] for of_script in steps), strict=True)):
        assert len(set(shared)) == 1, shared
    # step 6 writes what only this task has; RACE has nothing of the kind
    assert len({of_script[5] for of_script in steps if len(of_script) > 5}) == len(SCRIPTS) - 1


def test_main_calls_the_library_in_the_same_order():
    first, *others = [calls_into_the_library(functions(script)["main"]) for script in SCRIPTS]
    assert {"hub.publisher", "protocol.preset_runs", "protocol.run_all", "protocol.finish", "plots.plot_runs"} <= set(
        first
    )
    for called in others:
        assert called == first


def test_the_same_functions_have_the_same_names_and_order():
    names = [list(functions(script)) for script in SCRIPTS]
    shared = [name for name in names[0] if all(name in of_script for of_script in names)]
    wanted = "main read_arguments check_arguments read_split announce job_of build_model measure"
    assert set(wanted.split()) <= set(shared)
    for of_script in names[1:]:
        assert sorted(shared, key=of_script.index) == shared


def test_nothing_of_more_than_two_statements_is_written_twice():
    seen = {}
    for script in SCRIPTS:
        compared = 0
        for name, node in functions(script).items():
            body = node.body[1:] if ast.get_docstring(node) else node.body
            if len(body) < 3:
                continue
            compared += 1
            text = "\n".join(map(ast.dump, body))
            assert text not in seen, f"{script.__name__}.{name} is {seen.get(text)}"
            seen[text] = f"{script.__name__}.{name}"
        assert compared, script.__name__


def test_a_flag_of_all_scripts_has_one_home():
    shared = {field.name for field in dataclasses.fields(protocol.FinetuneArguments)}
    own = [{field.name: field for field in dataclasses.fields(cls) if field.name not in shared} for cls in ARGUMENTS]
    assert all(issubclass(cls, protocol.FinetuneArguments) for cls in ARGUMENTS) and all(own)
    assert not set.intersection(*map(set, own))
    of_paper = own[: len(OF_THE_PAPER)]  # each script's help names the files that it reads there
    assert set.intersection(*map(set, of_paper)) == {"data_dir"}
    assert len({fields["data_dir"].metadata["help"] for fields in of_paper}) == len(OF_THE_PAPER)
