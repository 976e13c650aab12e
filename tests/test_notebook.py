"""notebooks/demonstration.ipynb: the code cells run in order in a copy of the repository; outputs are not committed."""

import json
import shutil

from conftest import run_python
from test_docs import clone

RUN = """
import json, sys
from roberta_recipe.data import docstrings
import matplotlib.pyplot as plt
docstrings.MAX_BYTES = 600_000
namespace = {}
for cell in json.loads(sys.argv[1]):
    exec(cell, namespace)
curves = {line.get_label(): list(line.get_xdata()) for line in plt.gca().get_lines()}
assert curves["training"] == [1, 2, 3] and curves["validation"] == [1, 2, 3] and "unigram entropy" in curves
assert all(len(words) == 5 for words in namespace["predictions"].values())
block, masked = namespace["original"], namespace["shown"] != namespace["original"]
assert len(block) <= 64 and block[0] == 0 and 0.1 < masked.mean() < 0.5
print("steps", namespace["record"]["steps"])
"""


def test_its_cells_run_in_order(root, tmp_path):
    folder = clone(root, tmp_path / "clone")
    shutil.copytree(root / "notebooks", folder / "notebooks")
    shutil.copy(root / "requirements.txt", folder)  # whose docstrings are the text
    cells = json.loads((folder / "notebooks/demonstration.ipynb").read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert len(code) >= 6 and not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)
    assert code[0].startswith("STEPS = 300\n")
    code[0] = code[0].replace("300", "3")
    env = {
        "HF_HOME": str(tmp_path / "cache"),
        "PYTHONPATH": str(folder),
        "MPLBACKEND": "Agg",
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = run_python("-c", RUN, json.dumps(code), cwd=folder / "notebooks", env=env)
    assert done.returncode == 0, done.stderr
    assert "steps 3" in done.stdout and " → <mask>]" in done.stdout
    assert done.stdout.count("Whether or <mask> to return") == 2
