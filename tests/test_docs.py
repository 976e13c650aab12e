"""Commands in README and docs are valid; those of docs/adapting.md and docs/answers.md run as written, in a copy of the
repository, with fewer steps."""

import contextlib
import importlib
import itertools
import json
import os
import random
import re
import runpy
import shutil
import socket
import string
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Forked, end_well, make_documents, run_python, write_jsonl, write_text

from roberta_recipe.errors import InputError
from roberta_recipe.input_files import ROOT

FEWER = ((r"--max_steps \d+", "--max_steps 4"), (r"--save_steps \d+", "--save_steps 2"))
FEWER += ((r"--warmup_steps \d+ ", "--warmup_steps 1 "), (r"--num_train_epochs 3", "--num_train_epochs 1 --seeds 1 2"))
FEWER += ((r'"num_hidden_layers": 3', '"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 64'),)
# replaces what a test has not: the Hub, a model of 124.7 M parameters, a GPU
ELSEWHERE = (("FacebookAI/roberta-base", "runs/mine"),)
SMALL = "--use_cpu --max_seq_length 128 --global_batch_size 32 --max_steps 4 --learning_rate 1e-2"
ELSEWHERE += (("--output_dir runs/roberta_mine", f"--output_dir runs/roberta_mine {SMALL}"),)


def blocks(page: Path) -> list[tuple[str, str]]:
    """(language, text) of a page's code blocks."""
    return re.findall(r"^```(\w+)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.S | re.M)


def clone(root: Path, folder: Path) -> Path:
    """Copy the files that the page's commands need; returns `folder`."""
    for name in ("roberta_recipe", "tools", "experiments", "presets", "ds_configs", "tokenizer"):
        others = shutil.ignore_patterns("__pycache__", *(p.name for p in (root / "tokenizer").iterdir() if p.is_dir()))
        shutil.copytree(root / name, folder / name, ignore=others)
    for script in root.glob("*.py"):
        shutil.copy(script, folder)
    return folder


def write_inputs(folder: Path) -> None:
    """Write my_text/ and my_task/ as described on the page, with enough words for a tokenizer of 8,192 entries."""
    rng = random.Random(0)
    words = ["".join(rng.choices(string.ascii_lowercase, k=rng.randint(3, 10))) for _ in range(3000)]
    sentences = (" ".join(rng.choices(words, k=10)).capitalize() + "." for _ in range(1500 * 20))
    texts = ["\n".join(itertools.islice(sentences, 20)) for _ in range(1500)]
    for name in ("books", "mail"):
        (folder / "my_text" / name).mkdir(parents=True)
    write_text(folder / "my_text/books/a.txt", texts[::2])
    write_jsonl(folder / "my_text/mail/a.jsonl", texts[1::2], column="body")
    (folder / "my_task").mkdir()
    for split, seed in (("train", 1), ("dev", 2)):
        pairs = [text.splitlines()[1:3] for text in make_documents(24, seed)]
        rows = ["\t".join([*pair, ("different", "same")[n % 2]]) for n, pair in enumerate(pairs)]
        (folder / "my_task" / f"{split}.tsv").write_text("text1\ttext2\tlabel\n" + "\n".join(rows) + "\n")


def apply(diff: str, folder: Path) -> list[str]:
    """Apply a unified diff of one file, by context, not by line number; returns the added lines."""
    head, *hunks = re.split(r"^@@.*@@\n", diff, flags=re.M)
    path = folder / re.search(r"^\+\+\+ (.*)$", head, re.M)[1]
    text = path.read_text(encoding="utf-8")
    for hunk in hunks:
        lines = hunk.splitlines(keepends=True)
        old, new = ("".join(line[1:] for line in lines if line[0] in kinds) for kinds in (" -", " +"))
        assert text.count(old) == 1, f"{path.name} does not hold, or not once:\n{old}"
        text = text.replace(old, new)
    path.write_text(text, encoding="utf-8")
    return [line[1:].strip() for hunk in hunks for line in hunk.splitlines() if line.startswith("+")]


NOTED = """#!{python} -IS
import json, os, sys
with open({calls!r}, "a") as stream:
    stream.write(json.dumps(sys.argv[1:]) + "\\n")
"""


def test_make_asks_for_its_variables_before_it_installs(root, tmp_path):
    def dry(*words):
        make = ["make", "-n", "-s", f"VENV={tmp_path}/venv", *words]
        return subprocess.run(make, cwd=root, capture_output=True, text=True, check=False)

    for words, said in (
        (["evaluate"], "evaluate needs MODEL: make evaluate MODEL=runs/roberta_base."),
        (["push", "MODEL=runs/a"], "push needs REPO: make push MODEL=runs/roberta_base REPO=me/roberta_base."),
        (["compare", "A=runs/a"], "compare needs B: make compare A=runs/a B=runs/b."),
    ):
        done = dry(*words)
        assert done.returncode == 2 and said in done.stderr and not done.stdout
    assert dry("compare", "A=runs/a", "B=runs/b").returncode == 0
    assert "--sweep" in dry("glue", "SWEEP=1").stdout and "--sweep" not in dry("glue", "SWEEP=0").stdout


@pytest.fixture
def typed(root, tmp_path):
    """A function: the Python command lines of a bash block, those of make targets included, without running them."""
    folder, calls, programs = clone(root, tmp_path / "typed"), tmp_path / "calls", tmp_path / "venv" / "bin"
    for name in ("Makefile", "requirements.txt", "pyproject.toml"):
        shutil.copy(root / name, folder)
    programs.mkdir(parents=True)
    (tmp_path / "venv" / ".installed").touch()  # `make setup` is done
    for name, text in (
        ("python", NOTED.format(python=sys.executable, calls=str(calls))),
        ("make", f'#!/bin/sh\nexec {shutil.which("make")} -s VENV={tmp_path / "venv"} "$@"\n'),
        *((name, NOTED.format(python=sys.executable, calls=str(calls))) for name in ("accelerate", "uv", "sbatch")),
        *((name, "#!/bin/sh\n") for name in ("pip", "git", "hf", "docker", "tensorboard")),
    ):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)

    def of(block):
        calls.unlink(missing_ok=True)
        env = {**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
        block = block.replace("source .venv/bin/activate", ":")
        done = subprocess.run(["bash", "-e", "-c", block], cwd=folder, env=env, capture_output=True, text=True)
        assert done.returncode == 0, f"{block}\n{done.stderr}"
        return [json.loads(line) for line in calls.read_text().splitlines()] if calls.exists() else []

    return of


def test_every_command_of_readme_and_docs_is_one_that_its_program_takes(root, typed, monkeypatch):
    """With an unknown flag appended, the parser must refuse only that flag, so that no command runs. Those of
    docs/adapting.md and the bash blocks of docs/answers.md run in the tests below."""
    monkeypatch.chdir(root)
    programs = set()
    pages = ("README.md", "ds_configs/README.md", "benchmarks/README.md", *sorted((root / "docs").glob("*.md")))
    for page in (root / page for page in pages):
        text = page.read_text(encoding="utf-8")
        runs = page.name in ("adapting.md", "answers.md")
        fenced = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.S | re.M)
        commands = [block for kind, block in fenced if kind in ("", "bash")[: 2 - runs] and not block.startswith("$ ")]
        prose = re.sub(r"^```.*?^```$", "", text, flags=re.S | re.M)
        inline = re.findall(r"`((?:python|accelerate launch) (?!tools/launch)[^`(]+)`", prose)
        commands += [" ".join(command.split()) for command in inline]
        for words in itertools.chain.from_iterable(map(typed, commands)):
            if "pytest" in words:
                continue
            words = [word.replace("ds_configs/slurm/two_nodes.sbatch", "train_mlm.py") for word in words]
            named = [word for word in words if word.endswith(".py") or word.startswith("bench")]
            script = next((word for word in named if word != "tools/launch.py"), None)
            assert script, f"{page.name}: {words}"
            argv = words[words.index(script) + 1 :]
            path = root / (script if script.endswith(".py") else script.replace(".", "/"))
            if "..." in argv or "benchmarks" in script:
                assert path.exists() or path.with_suffix(".py").exists(), script
                continue
            programs.add(script)
            name = script.removesuffix(".py").replace("/", ".")
            with pytest.raises(InputError) as refused:
                importlib.import_module(name).main([*argv, "--no_such_flag"])
            assert str(refused.value).startswith("unknown argument '--no_such_flag'"), f"{page.name}: {words}"
    assert len(programs) > 12, programs


def test_links_between_pages_lead_somewhere(root):
    """Links to files, and to headings by GitHub's anchors; docs/index.md links to every page."""
    pages = [
        *root.glob("*.md"),
        *(root / "docs").glob("*.md"),
        root / "ds_configs/README.md",
        root / "benchmarks/README.md",
    ]
    for page in pages:
        for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text(encoding="utf-8")):
            name, _, anchor = target.partition("#")
            path = (page.parent / name) if name else page
            assert path.exists(), f"{page.name}: {target}"
            if anchor:
                headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.M)
                slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
                assert anchor in slugs, f"{page.name}: {target}"
    index = (root / "docs/index.md").read_text(encoding="utf-8")
    assert {path.name for path in (root / "docs").glob("*.md")} - {"index.md"} <= set(
        re.findall(r"\[(\w+\.md)\]", index)
    )


def test_the_pages_keep_their_bound(root):
    pages = [page.read_text(encoding="utf-8") for page in (root / "docs").glob("*.md")]
    assert len(pages) == 10 and sum(len(text.split()) for text in pages) <= 12_000


ADDED = """
import train_mlm, finetune_glue
from roberta_recipe.data import chunks, packing
from roberta_recipe.model import objectives
argv = ["--config", "presets/mlm/roberta_small.yaml", "--objective", "mlm", "toy", "--optim", "nadam"]
(args, training_args), _ = train_mlm.read_arguments(argv)
assert args.objective == ["mlm", "toy"] and training_args.optim == "nadam" and args.global_batch_size == 2048
assert finetune_glue.read_arguments(["--label_noise", "0.1"])[0][0].label_noise == 0.1
assert "boolq" in finetune_glue.TASKS
documents = [[[5, 6], [7]]]
assert [block["input_ids"] for block in packing.single_sentences(documents, 8, 0, 2)] == [[0, 5, 6, 2], [0, 7, 2]]
(block,) = chunks.PACKERS["full_sentences toy"](documents, 8, 0, 2, ())
assert block["toy_label"] == 0 and objectives.TABLE["toy"].column in block
"""


def test_the_diffs_of_contributing_apply_and_work(root, tmp_path):
    folder = clone(root, tmp_path / "clone")
    diffs = [block for language, block in blocks(root / "CONTRIBUTING.md") if language == "diff"]
    assert len(diffs) == 7
    for diff in diffs:
        apply(diff, folder)
    done = run_python("-c", ADDED, cwd=folder)
    assert done.returncode == 0, done.stderr


def test_a_test_reaches_no_other_machine():
    with socket.socket() as other, pytest.raises(OSError, match="a test connects"):
        other.connect(("192.0.2.1", 80))  # of no machine: RFC 5737


ASKS = """#!{python} -IS
import json, os, socket, sys
words = {program!r} + sys.argv[1:]
server = socket.socket(socket.AF_UNIX)
server.connect({server!r})
program = sys.stdin.read() if words[0] == "-" else None
with server.makefile("rw") as stream:
    stream.write(json.dumps([words, program, os.getcwd(), dict(os.environ)]) + "\\n")
    stream.flush()
    code, said = json.loads(stream.readline())
sys.stdout.write(said)
sys.exit(code)
"""


@pytest.fixture
def shell(tmp_path, monkeypatch):
    """A function: run a block in bash, with `python` and `accelerate` as forks of this process, which has everything
    imported; returns the output."""
    monkeypatch.chdir(tmp_path)  # a socket's path may have 107 bytes
    (tmp_path / "bin").mkdir()
    for name, words in (("python", []), ("accelerate", ["-m", "accelerate.commands.accelerate_cli"])):
        text = ASKS.format(python=sys.executable, program=words, server=str(tmp_path / "s"))
        (program := tmp_path / "bin" / name).write_text(text)
        program.chmod(0o755)
    numbers = itertools.count()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("s")
        server.listen()
        server.settimeout(0.05)

        def run(block, folder):
            path, forks = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}", []
            with open(tmp_path / f"said-{next(numbers)}", "w+") as said:
                done = subprocess.Popen(
                    ["bash", "-e", "-c", block], cwd=folder, env={**os.environ, "PATH": path}, stdout=said, stderr=said
                )
                while done.poll() is None:
                    with contextlib.suppress(TimeoutError):
                        forks.append(answer(server.accept()[0], tmp_path / f"python-{next(numbers)}"))
                end_well(forks)
                said.seek(0)
                text = said.read()
            assert done.returncode == 0, f"{block}\n{text}"
            return text

        yield run


def answer(connection, log):
    """Run the command requested by `ASKS` and reply with exit code and output, in a child process, which is returned:
    the processes of a launcher send requests too."""

    def reply():
        with connection.makefile("rw") as stream:
            words, program, folder, environment = json.loads(stream.readline())
            child = Forked(lambda: python(words, program, folder), log, **environment)
            stream.write(json.dumps([child.end(), child.log]) + "\n")

    with connection:
        return Forked(reply, f"{log}-reply")


def python(words, program, folder):
    """Run `python WORDS` in `folder`, with the recipe's modules from there."""
    for name in [name for name in sys.modules if name.partition(".")[0] in ("roberta_recipe", "tools", "train_mlm")]:
        del sys.modules[name]
    os.chdir(folder)
    sys.executable = shutil.which("python")  # a launcher's processes are forks too
    words = words[words[0] == "-u" :]
    sys.path[:] = [folder, *(path for path in sys.path if Path(path or ".").resolve() != ROOT)]
    is_module = words[0] == "-m"
    sys.argv = words[is_module:]
    if program is not None:
        exec(program, {"__name__": "__main__"})
    elif is_module:
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
        runpy.run_path(words[0], run_name="__main__")


def test_every_command_of_the_page_runs(root, tmp_path, shell, monkeypatch, capsys):
    folder = clone(root, tmp_path / "clone")
    write_inputs(folder)
    of_page = blocks(root / "docs" / "adapting.md")
    (predict,) = (block for language, block in of_page if language == "python")
    of_page = [(language, block) for language, block in of_page if language != "python"]
    assert [language for language, _ in of_page] == ["bash"] * 7
    shown = []
    for _, block in of_page:
        for pattern, fewer in FEWER:
            block = re.sub(pattern, fewer, block)
        for wanted, there in ELSEWHERE:
            block = block.replace(wanted, there)
        block = re.sub(
            r"(presets/mlm/roberta_mini.yaml|finetune_glue.py)(?! --use_cpu| mine.py)", r"\1 --use_cpu", block
        )
        shown.append(shell(block, folder))
    assert "8,192 entries in tokenizer/mine" in shown[1] and re.search(r"tokens, [\d.]+ epochs of", shown[2])
    record = json.loads((folder / "runs/mine/run_record.json").read_text())
    assert record["steps"] == 4 and set(record["metrics_by_source"]) == {"books", "mail"}
    measured = re.findall(r"validation loss ([\d.]+) ± [\d.]+ nats", shown[4])
    last_digit = 10 ** -len(measured[0].partition(".")[2])
    assert len(measured) == 2 and float(measured[0]) != float(measured[1])
    assert float(measured[0]) == pytest.approx(record["metrics"]["eval_loss"], abs=last_digit)
    summary = json.loads((folder / "runs/my_task/summary.json").read_text())
    assert summary["task"] == "train.tsv" and set(summary["settings"][0]["medians"]) == {"accuracy", "f1"}
    assert "train.tsv, validation accuracy x 100" in shown[5] and (folder / "runs/my_task/loss_curve.png").is_file()
    card = summary["dataset"]
    assert (card["name"], card["hub_id"], card["hub_config"]) == ("train.tsv", None, None)
    assert set(card["hub_metrics"]) == {"accuracy", "f1"} and "glue" not in json.dumps(card).lower()
    assert (folder / "mine.py").is_file()

    monkeypatch.chdir(folder)
    exec(predict.replace("runs/my_task/lr0.0001-batch16-seed3", summary["settings"][0]["best_run"]), {})
    assert re.search(r"'label': '(same|different)'", capsys.readouterr().out)


ANSWERED = (  # a part of what each answer prints
    "1 of 32 shown; blocks and masks match the hash in its log",
    "Packed 1 shard, ",
    "Resuming    from runs/stopped/checkpoint-1\n",
    "same: weights and log up to step 4",
    "Skipping    blocks 32 to 63",
    "unigram entropy",
    "largest micro-batch that fits, of the powers of two that divide the batch: 32 sequences",
    "with sequences of 256 tokens",
    "1 of 32 shown; nothing is trained",
    "Preset      presets/mlm/continue.yaml",
    "[-",
    "torch.Size([2, 128])",
    "32 sequences = 2 processes x 16 x 1 accumulated",
)


def test_every_answer_runs(root, tmp_path, shell):
    """The blocks of docs/answers.md in order, with fewer steps."""
    folder = clone(root, tmp_path / "clone")
    (folder / "my_text").mkdir()
    write_text(folder / "my_text" / "a.txt", make_documents(500, seed=0))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    fewer = (*FEWER, ("_minutes 0.05", "_minutes 1e-6"), ("64-95", "32-63"), ("1024", "256"), ("1026", "258"))
    fewer += (("29500", port), (r"train_mlm.py (?!.*--use_cpu)", "train_mlm.py --use_cpu "))
    questions = (root / "docs" / "answers.md").read_text(encoding="utf-8").split("\n## ")[1:]
    for question, wanted in zip(questions, ANSWERED, strict=True):
        said = ""
        for language, block in re.findall(r"^```(bash|python)\n(.*?)^```$", question, re.S | re.M):
            for pattern, other in fewer:
                block = re.sub(pattern, other, block)
            said += shell(f"python - <<'END'\n{block}END" if language == "python" else block, folder)
        assert wanted in said, f"{question.splitlines()[0]}\n{said}"
