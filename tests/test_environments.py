"""PEP 723 headers and Dockerfile: the environment is that of pyproject.toml and requirements.txt, pinned once."""

import re
import tomllib

import pytest

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
    assert project["tool"]["setuptools"]["dynamic"]["dependencies"] == {"file": ["requirements.txt"]}


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
