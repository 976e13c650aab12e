"""`accelerate launch` with the script's exit code, and with no lines but the script's.

    python tools/launch.py train_mlm.py --config presets/mlm/roberta_base.yaml
    python tools/launch.py --config_file ds_configs/accelerate/zero2.yaml train_mlm.py ...

The flags are accelerate's, and accelerate starts the processes. By itself it would print which defaults it took, print
its own traceback behind a script's error, make an exit code of 1 of any other, and leave the script alone at Ctrl-C.
"""

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: modules come from the repository, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import psutil
from accelerate.commands.launch import launch_command, launch_command_parser
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from roberta_recipe.errors import InputError, RunError, Stopped, exit_on_error, first_line
from roberta_recipe.started import continue_with

_TO_SAVE_S = 600  # that the processes of a run have to finish and save their step; torchrun's 30 are too few
_OF_SIGNAL = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "Ctrl-C"}


def main(argv: list[str] | None = None) -> None:
    """Launch what the command line `argv` says. Raises `InputError` for what accelerate refuses, `RunError` where a
    process was killed, and else `SystemExit` with the script's exit code."""
    logging.disable(logging.ERROR)  # what accelerate and torchrun say of every run; what ends one is an exception
    parser = launch_command_parser()
    parser.usage = "python tools/launch.py [accelerate's flags] SCRIPT [its flags]"
    parser.description = __doc__.splitlines()[0]
    args = parser.parse_args(argv)
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, lambda *_: None)  # the terminal has sent it to the script too
    signal.signal(signal.SIGTERM, _pass_on)
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(_TO_SAVE_S))
    try:
        launch_command(args)
    except subprocess.CalledProcessError as error:
        _end(error.returncode, "the process")
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        _end(failure.exitcode, f"process {rank}")
    except SignalException as error:
        raise SystemExit(Stopped.EXIT_CODES[_OF_SIGNAL.get(error.sigval, "SIGTERM")]) from None
    except Exception as error:
        raise InputError(f"accelerate cannot launch this: {first_line(error)}") from None


def _pass_on(number: int, _: Any) -> None:
    for child in psutil.Process().children():
        child.send_signal(number)


def _end(code: int, which: str) -> None:
    """End as the script did, which has said why; it could not where a signal killed it."""
    if code >= 0:
        raise SystemExit(code)
    error = RunError(
        f"{which} was killed by {signal.Signals(-code).name}; the system's log says why (often memory). What was saved "
        f"is whole. {continue_with()}"
    )
    error.exit_code = 128 - code
    raise error


if __name__ == "__main__":
    exit_on_error(lambda: main(sys.argv[1:]))
