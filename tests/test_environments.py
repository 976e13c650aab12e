"""PEP 723 headers, Dockerfile and pyproject.toml: version ranges are stated once and include the pinned versions."""

import re
import tomllib
from importlib.metadata import version

import pytest
from packaging.requirements import Requirement

PROJECT = "pyproject.toml"


@pytest.mark.parametrize(
    "script", ["train_mlm.py", "finetune_glue.py", "finetune_squad.py", "finetune_race.py", "finetune_ner.py"]
)
def test_the_header_of_a_script_names_this_project_alone(root, script):
    text = (root / script).read_text(encoding="utf-8")
    header = re.match(r"# /// script\n((?:# .*\n)+?)# ///\n\"\"\"", text)  # the docstring follows
    metadata = tomllib.loads(re.sub(r"^# ", "", header[1], flags=re.M))
    project = tomllib.loads((root / PROJECT).read_text(encoding="utf-8"))
    assert metadata["dependencies"] == [project["project"]["name"]]
    assert metadata["requires-python"] == project["project"]["requires-python"]
    assert metadata["tool"]["uv"]["sources"] == {project["project"]["name"]: {"path": ".", "editable": True}}


def test_the_ranges_hold_the_exact_versions_of_requirements_txt(root):
    project = tomllib.loads((root / PROJECT).read_text(encoding="utf-8"))["project"]
    extra = project["optional-dependencies"]["deepspeed"]
    ranges = {one.name: one.specifier for one in map(Requirement, project["dependencies"] + extra)}
    runtime = (root / "requirements.txt").read_text(encoding="utf-8").split("# Tests and lint")[0]
    pins = [Requirement(line.partition("#")[0]) for line in runtime.splitlines() if line[:1] not in ("#", "")]
    assert ranges.keys() == {pin.name for pin in pins} | {"huggingface_hub"}  # transformers sets its version
    versions = [(pin.name, exact.version) for pin in pins for exact in pin.specifier]
    assert len(versions) > 10 and [(name, exact) for name, exact in versions if exact not in ranges[name]] == []
    assert [name for name in ranges if version(name) not in ranges[name]] == []


def test_the_image_installs_requirements_txt_for_a_user_without_rights(root):
    text = (root / "Dockerfile").read_text(encoding="utf-8")
    steps = re.findall(r"^([A-Z]+) (.*(?:\\\n.*)*)$", re.sub(r"^#.*\n", "", text, flags=re.M), re.M)
    installs = [words for step, words in steps if step == "RUN" and "pip install" in words]
    assert installs[0].endswith("-r requirements.txt") and installs[1].endswith("--no-deps -e .") and len(installs) == 2
    assert "==" not in text  # its pins are those of requirements.txt
    (python,) = [re.search(r"python:(3\.\d+)-slim", words)[1] for step, words in steps if step == "FROM"]
    assert python in ("3.11", "3.12", "3.13") and "Python 3.11 to 3.13" in (root / "requirements.txt").read_text()
    names = [step for step, _ in steps]
    assert names.index("USER") > names.index("COPY") and dict(steps)["USER"] != "root"
    assert dict(steps)["ENTRYPOINT"] == '["python", "tools/launch.py"]' and (root / "tools/launch.py").is_file()
    ignored = (root / ".dockerignore").read_text().split()
    assert {".venv", "runs", "my_*"} <= set(ignored)
