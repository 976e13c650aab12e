"""The three fine-tuning scripts are one skeleton: what they share has one home, and what differs means something."""

import ast
import dataclasses
import re

import finetune_glue
import finetune_race
import finetune_squad
from roberta_recipe import protocol

SCRIPTS = (finetune_glue, finetune_squad, finetune_race)
ARGUMENTS = (finetune_glue.GlueArguments, finetune_squad.SquadArguments, finetune_race.RaceArguments)


def sources():
    return [open(script.__file__, encoding="utf-8").read() for script in SCRIPTS]


def functions(source):
    return {node.name: node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}


def test_main_has_the_same_steps_in_the_same_order():
    steps = [re.findall(r"^    # (\d\. .*)$", source, re.M) for source in sources()]
    assert [len(one) for one in steps] == [6, 6, 6]
    assert steps[0][:5] == steps[1][:5] == steps[2][:5]
    assert len({one[5] for one in steps}) == 3  # what is written at the end is the task's own


def test_the_same_functions_have_the_same_names_and_order():
    names = [list(functions(source)) for source in sources()]
    shared = [name for name in names[0] if name in names[1] and name in names[2]]
    wanted = "main read_arguments check_arguments read_split announce job_of build_model measure"
    assert set(wanted.split()) <= set(shared)
    for of in names[1:]:
        assert sorted(shared, key=of.index) == shared


def test_nothing_of_more_than_two_statements_is_written_twice():
    seen, compared = {}, 0
    for script, source in zip(SCRIPTS, sources(), strict=True):
        for name, node in functions(source).items():
            body = node.body[1:] if ast.get_docstring(node) else node.body
            if len(body) < 3:
                continue
            compared += 1
            text = "\n".join(map(ast.dump, body))
            assert text not in seen, f"{script.__name__}.{name} is {seen.get(text)}"
            seen[text] = f"{script.__name__}.{name}"
    assert compared > 25


def test_lines_of_main_that_mean_the_same_are_the_same():
    """Arguments, tokenizer, runs, summary: word for word, so that a reader of one has read the others."""
    mains = [[line.strip() for line in ast.get_source_segment(s, functions(s)["main"]).splitlines()] for s in sources()]
    same = [line for line in mains[0] if line in mains[1] and line in mains[2] and len(line) > 20]
    for wanted in (
        "(args, training_args), resolved = read_arguments(argv)",
        "tokenizer = tokenization.load_tokenizer(",
    ):
        assert any(line.startswith(wanted) for line in same), wanted
    assert len(same) >= 14, same


def test_arguments_of_all_three_have_one_home():
    shared = {field.name for field in dataclasses.fields(protocol.FinetuneArguments)}
    own = [{field.name: field for field in dataclasses.fields(cls) if field.name not in shared} for cls in ARGUMENTS]
    assert all(issubclass(cls, protocol.FinetuneArguments) for cls in ARGUMENTS) and len(shared) == 10
    assert set(own[0]) & set(own[1]) & set(own[2]) == {"data_dir"}  # each says what lies there
    helps = {one["data_dir"].metadata["help"] for one in own}
    assert len(helps) == 3
