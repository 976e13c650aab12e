"""`train_mlm.py` with arguments of `GradScaler`, as a JSON object, in front of its flags.

python benchmarks/gpu/inside.py '{"init_scale": 1099511627776.0}' --fp16 true ...
"""

import functools
import json
import os
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent.parent)
os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # for determinism

import accelerate

import train_mlm
from roberta_recipe.errors import exit_on_error

if __name__ == "__main__":
    scaler = json.loads(sys.argv[1])
    accelerate.accelerator.get_grad_scaler = functools.partial(accelerate.accelerator.get_grad_scaler, **scaler)
    sys.argv = ["train_mlm.py", *sys.argv[2:]]
    exit_on_error(train_mlm.main)
