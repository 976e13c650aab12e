"""Launcher: `accelerate launch` with the script's exit code, clean output, and signal forwarding.

    python tools/launch.py train_mlm.py --config presets/mlm/roberta_base.yaml
    python tools/launch.py --config_file ds_configs/accelerate/zero2.yaml train_mlm.py ...

The flags are accelerate's. Plain `accelerate launch` prints its defaults and a traceback after a script's error, turns
every exit code but 0 into 1, and orphans the script at Ctrl-C.
"""

import contextlib
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
from roberta_recipe.launcher import resume_hint

_EXIT_CODES = {signal.SIGTERM: Stopped.EXIT_CODES["SIGTERM"]}
_SHUTDOWN_TIMEOUT_S = 600  # for saving a checkpoint; torchrun's default is 30


def main(argv: list[str] | None = None) -> None:
    """Launch the command line `argv`. Raises `InputError` if accelerate fails, `RunError` if a process was killed, and
    `SystemExit` with the script's exit code."""
    logging.disable(logging.ERROR)  # accelerate and torchrun raise their fatal errors
    parser = launch_command_parser()
    parser.usage = "python tools/launch.py [accelerate's flags] SCRIPT [its flags]"
    parser.description = __doc__.splitlines()[0]
    args = parser.parse_args(argv)
    args.quiet = False  # accelerate would exit with 1 for any exit code
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _pass_on)
        elif number == signal.SIGHUP:  # nohup; torchrun would forward it
            args.signals_to_handle = "SIGTERM,SIGINT,SIGQUIT"
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(_SHUTDOWN_TIMEOUT_S))
    try:
        launch_command(args)
    except subprocess.CalledProcessError as error:
        _end(error.returncode, "the process")
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        _end(failure.exitcode, f"process {rank}")
    except SignalException as error:
        raise SystemExit(_EXIT_CODES.get(error.sigval, 128 + error.sigval)) from None
    except Exception as error:
        raise InputError(f"accelerate cannot launch this: {first_line(error)}") from None


def _pass_on(number: int, _: Any) -> None:
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            child.send_signal(number)


def _end(code: int, which: str) -> None:
    """Exit with the script's exit code, or raise `RunError` for a process killed by a signal."""
    if code >= 0:
        raise SystemExit(code)
    why = ", often out of memory (see the system log)" if -code == signal.SIGKILL else ""
    error = RunError(
        f"{which} was killed by {signal.Signals(-code).name}{why}. Checkpoints are complete. {resume_hint()}"
    )
    error.exit_code = _EXIT_CODES.get(-code, 128 - code)
    raise error


if __name__ == "__main__":
    exit_on_error(lambda: main(sys.argv[1:]))
