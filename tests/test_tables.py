"""The papers' comparisons as experiment lists at several scales: claims, and columns beside the figures."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from test_experiments import forked  # noqa: F401

from experiments import lists
from experiments import run as experiments
from roberta_recipe import durable
from roberta_recipe.errors import InputError

ROOT = Path(__file__).parents[1]
TABLES = ("masking", "formats", "batch", "data", "spans", "sbo", "embedding", "sharing", "sop")
SCALES = ("demo", "mini", "paper")


@pytest.fixture(autouse=True)
def in_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def read(table, scale, *changes):
    return lists.read(f"presets/tables/{table}.yaml", scale, list(changes))


def test_there_is_a_list_for_each_table():
    assert {path.stem for path in (ROOT / "presets/tables").glob("*.yaml")} == {*TABLES, "scales"}


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("table", TABLES)
def test_every_table_is_a_list_at_every_scale(table, scale):
    """The parsers of scripts and tools accept it; the claims of a table hold for its rows."""
    listed = read(table, scale)
    values = {row.name: row.settings for row in listed.rows}
    assert len(listed.variants) >= 2 and all(setting.published for setting in listed.variants) and listed.source
    seeds = {"demo": 2, "mini": 8 if table == "masking" else 5, "paper": 5}  # eight: a seed is a pair
    assert len(listed.seeds) == seeds[scale] and listed.estimate == (scale == "paper")
    assert listed.measures[0] == "words" and "loss" not in listed.measures  # which formats do not share
    assert f"/{table}/{scale}/" in str(listed.rows[0].folder)
    assert len({str(of) for of in values.values()}) == len(values)  # no two rows are the same run
    assert ("demonstration" in listed.note) == (scale == "demo")
    if table == "batch":
        seen = [of["global_batch_size"] * of["max_steps"] for of in values.values()]
        assert max(seen) / min(seen) < 1.01
    if table == "masking":
        for of in values.values():
            assert of["max_steps"] * of["global_batch_size"] >= 40 * of["max_train_samples"]
    if table == "data" and scale != "paper":
        text, steps = ([of[name] for of in values.values()] for name in ("max_train_samples", "max_steps"))
        assert text[1:] == [10 * text[0]] * 3 and [step / steps[0] for step in steps] == [1, 1, 3, 5]
    if table == "spans":
        assert ("entity" in values) == (scale == "paper")


@pytest.fixture
def small(tmp_path, preset):
    """A function: write a list of two rows and two scales; returns its path."""

    def of(**others):
        scales = {
            "one": {"config": preset, "seeds": [1], "note": "Of the small one.", "measures": {"loss": None}},
            "two": {"config": preset, "seeds": [1, 2], "measures": {"loss": None}, "flags": {"max_steps": 2}},
        }
        scales["two"]["estimate"] = True
        (tmp_path / "scales.yaml").write_text(yaml.safe_dump(scales, sort_keys=False))
        rows = [
            {"name": "low", "published": {"F1": 90.25}},
            {"name": "high", "at": {"one": {"learning_rate": 5e-3}}, "claim": "better", "published": {"EM": "80"}},
            {"name": "other", "only": ["two"]},
        ]
        values = {"scales": str(tmp_path / "scales.yaml"), "output_dir": str(tmp_path / "out"), "rows": rows}
        values |= {"source": "a paper, Table 9", "at": {"one": {"max_steps": 3, "mlm_probability": 0.2}}, **others}
        (tmp_path / "list.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
        return str(tmp_path / "list.yaml")

    return of


def test_a_table_has_tokens_parameters_and_what_was_published(small, tmp_path, forked, capsys, config):  # noqa: F811
    config.num_hidden_layers = 1
    config.to_json_file(tmp_path / "one_layer.json")
    rows = [{"name": "low", "published": {"F1": 90.25}}]
    rows += [{"name": "high", "flags": {"config_name": str(tmp_path / "one_layer.json")}, "published": {"EM": "80"}}]
    path = small(rows=rows)
    experiments.main([path, "--scale", "one", "--set", "adam_beta2=0.97", "logging_steps=2"])
    records = [
        durable.read_json(tmp_path / "out" / "one" / name / "seed-1/run/run_record.json") for name in ("low", "high")
    ]
    assert {record["steps"] for record in records} == {3}
    tokens = [f"{record['tokens_seen'] / 1e6:,.2f}" for record in records]
    parameters = [f"{record['parameters'] / 1e6:.3g}" for record in records]
    assert parameters[0] != parameters[1]
    head, _, *lines, _, notes = capsys.readouterr().out.splitlines()
    assert head.startswith("| name | seeds | tokens seen, M | parameters, M | validation loss, nats |")
    assert head.endswith("| published: F1 | published: EM |")
    assert lines[0].startswith(f"| low | 1 | {tokens[0]} | {parameters[0]} |") and lines[0].endswith("| 90.25 | - |")
    assert lines[1].startswith(f"| high | 1 | {tokens[1]} | {parameters[1]} |") and lines[1].endswith("| - | 80 |")
    assert "| too few seeds |" in lines[1]
    assert (
        notes.startswith("Of the small one. ")
        and "Changed in all rows: adam_beta2=0.97, logging_steps=2. Source" in notes
    )
    commit, hardware = records[0]["commit"], records[0]["hardware"]
    commit = commit[:7] + "-dirty" * commit.endswith("-dirty") if commit else "unknown"
    cores = f"{hardware['cpu_cores']} core{'s' * (hardware['cpu_cores'] > 1)} of "
    assert f" Runs: commit {commit}; {cores}" in notes and "; median time of a row " in notes
    assert notes.endswith("published results: a paper, Table 9.")


def test_flags_come_from_row_list_and_scale_in_this_order(small):
    one, two = lists.read(small(), "one"), lists.read(small(), "two")
    settings = {(row.name, row.seed): row.settings for row in one.rows}
    assert [of["learning_rate"] for of in settings.values()] == [1e-3, 5e-3]
    assert {of["max_steps"] for of in settings.values()} == {3}
    assert len(two.rows) == 6 and {row.settings["max_steps"] for row in two.rows} == {2}
    assert {row.settings["mlm_probability"] for row in two.rows} == {0.15}
    args = experiments.parse([small(), "--set", "mlm_probability=0.3", "--set", "objective=[mlm]", "max_steps=7"])
    changed = lists.read(args.list, "one", args.set)
    assert {(row.settings["mlm_probability"], row.settings["max_steps"]) for row in changed.rows} == {(0.3, 7)}


def test_a_flag_of_a_measure_is_set_by_its_name():
    listed = read("spans", "mini", "blimp.data_dir=my_blimp", "words.max_documents=7")
    for row in listed.rows:
        assert row.measures["blimp"][-2:] == ["--data_dir", "my_blimp"]
        words = row.measures["words"]
        assert words[words.index("--max_documents") + 1] == "7" and "--data_dir" not in row.train
    assert listed.measures == ["words", "short_words", "blimp"]
    assert {row.measures["blimp"][-1] for row in read("spans", "mini", "blimp.bf16=true").rows} == {"--bf16"}
    assert not {"--bf16", "false"} & set(read("spans", "mini", "blimp.bf16=false").rows[0].measures["blimp"])
    with pytest.raises(InputError, match=r"--set blim.pairs=7: the list measures words, short_words, blimp, not blim"):
        read("spans", "mini", "blim.pairs=7")
    with pytest.raises(InputError, match="measure 'blimp': unknown argument '--pair'"):
        read("spans", "mini", "blimp.pair=7")


@pytest.mark.parametrize(
    ("changed", "argv", "said"),
    [
        ({}, [], "list.yaml: --scale None: name one with --scale one or two"),
        ({}, ["--scale", "tow"], "name one with --scale one or two; did you mean 'two'"),
        ({"scales": ""}, ["--scale", "one"], "list.yaml: --scale one: the list has no scales"),
        ({"at": {"one": 3}}, ["--scale", "one"], "at is {'one': 3}, and must be"),
        ({"at": {"three": {}}}, ["--scale", "one"], "'three' is not a scale of .*scales.yaml: one, two"),
        ({"rows": ["low"]}, ["--scale", "one"], "rows is .'low'., and must be a valid dictionary"),
        ({"rows": [{"name": "a", "only": ["six"]}]}, ["--scale", "one"], "'six' is not a scale of"),
        ({"rows": [{"name": "a", "published": 3}]}, ["--scale", "one"], "row 1: published is 3, and must be"),
        ({"rows": [{"name": "a", "only": ["two"]}]}, ["--scale", "one"], "rows is missing or empty"),
        ({}, ["--scale", "one", "--set", "max_steps"], "--set 'max_steps': write flag=value"),
        ({}, ["--scale", "one", "--set", "learning_rate=1e-3"], "rows differ in learning_rate .row 'high'"),
        ({}, ["--scale", "one", "--set", "steps=1"], "row 'low': .*steps"),
        ({}, ["--scale", "two"], "takes days on GPUs at this scale: name them .--hardware 8xH100"),
    ],
)
def test_bad_input(small, changed, argv, said):
    with pytest.raises(InputError, match=said):
        experiments.main([small(**changed), *argv])


def test_on_several_gpus_a_row_is_launched_on_all(monkeypatch):
    alone = read("sop", "paper").rows[0].train
    # in `lists` alone: the child that parses the flags would take CUDA for available
    monkeypatch.setattr(lists, "torch", SimpleNamespace(cuda=SimpleNamespace(device_count=lambda: 8)))
    launched = read("sop", "paper").rows[0].train
    assert launched == [alone[0], str(ROOT / "tools" / "launch.py"), *alone[1:]]
