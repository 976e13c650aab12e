"""Starts of a command, in forked processes with everything imported or through a launcher: output, exit codes, signals.

A forked process runs the script's `main` under `exit_on_error`, and exits as an interpreter does. Two of them with a
launcher's environment variables form two ranks; if one fails, the others get SIGTERM, as from torchrun.
"""

import atexit
import contextlib
import multiprocessing.util
import os
import random
import re
import resource
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import psutil

from roberta_recipe.errors import exit_on_error

ENVIRONMENT = {
    **{"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"},
}
POLL_S = 0.003
_LINE = 100  # bytes per line of the journal of file operations
_CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.truncate")
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_GRACE_S = 5.0  # from SIGTERM to SIGKILL for the ranks that outlive a failed rank
# last lines of a launcher's own tracebacks
_OF_LAUNCHER = ("ChildFailedError", "CalledProcessError", "SignalException")
# errors of torch.distributed in a rank that lost its peer
_PEER_GONE = re.compile(
    r"closed by peer|reset by peer|Broken pipe|Connection refused|gloo|ProcessGroup|TCPStore|DistBackendError"
    r"|DistNetworkError|RendezvousConnectionError|failed to recv|Stop_waiting"
)


class Process:
    """A forked process with its output in a pipe, which a full disk does not stop."""

    def __init__(self, run: Callable[[], None], group: int, log: Path):
        read, write = os.pipe()
        self.begun, self.code, self.text = time.monotonic(), None, bytearray()  # code: as in subprocess
        self.signalled = False  # by a fault, or after a peer failed
        self.pid = os.fork()
        if self.pid == 0:
            os.setpgid(0, group)
            os.dup2(write, 1)
            os.dup2(write, 2)
            _run_and_exit(run)
        os.close(write)
        with contextlib.suppress(OSError):
            os.setpgid(self.pid, group or self.pid)
        os.set_blocking(read, False)
        self._pipe, self.log = os.fdopen(read, "rb", 0), log  # freed with this object

    def poll(self) -> bool:
        """Read new output, also that of orphan processes; returns whether the process is alive."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        while part := self._pipe.read(1 << 16):  # None: no output yet
            self.text += part
        return self.code is None

    def send(self, number: int) -> None:
        """Send a signal if the process is alive."""
        self.signalled = True
        if self.code is None:
            os.kill(self.pid, number)

    def ending(self) -> str:
        """Kind of exit: "ok", "line" (an error message), "signal" (one that was sent), "traceback", "no line"."""
        found = tracebacks(self.text.decode(errors="replace"), peer_gone=self.signalled)
        if found:
            return "traceback"
        if self.code == 0:
            return "ok"
        lines = [line for line in self.text.decode(errors="replace").splitlines() if line.strip()]
        if self.code > 0 and any(re.match(r"(\[rank\d+\]: ?)?(error: |stopped by |ended )", line) for line in lines):
            return "line"
        return "signal" if self.signalled else "no line"


def tracebacks(text: str, peer_gone: bool) -> list[str]:
    """The last lines of the tracebacks in a log, without those of launchers and, with `peer_gone`, without errors of
    torch.distributed about a lost peer."""
    found, lines = [], [re.sub(r"^\[rank\d+\]: ?", "", line) for line in text.splitlines()]
    for number, line in enumerate(lines):
        if not line.startswith("Traceback (most recent call last)"):
            continue
        rest = (later for later in lines[number + 1 :] if later and not later.startswith((" ", "\t")))
        last = next(rest, "")
        if any(name in last for name in _OF_LAUNCHER) or (peer_gone and _PEER_GONE.search(last)):
            continue
        found.append(last)
    return found


def _run_and_exit(run: Callable[[], None]) -> None:
    """Run as the main program of an interpreter: exit handlers of the child only, then exit."""
    code = 1
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    atexit._clear()
    atexit.register(multiprocessing.util._exit_function)
    multiprocessing.util._finalizer_registry.clear()
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, errors="replace") for number in (1, 2))
    try:
        run()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    try:
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Start:
    """A start of a scenario's command in `folder`, with the further `flags`. `file_bytes`: maximum size of a written
    file. `operations`: number of file operations in `out` after which all processes are killed (forks only)."""

    def __init__(
        self,
        scenario,
        folder: Path,
        name: str,
        flags: tuple[str, ...] = (),
        file_bytes: int | None = None,
        operations: int | None = None,
    ):
        self.argv, self.flags, self.folder, self.name = [*scenario.argv, *flags], flags, folder, name
        self.begun, self.ended_s, self._failed_s = time.monotonic(), None, None
        self.launched = bool(scenario.launcher)
        self.known: set[int] = set()  # descendants of the launcher, which may outlive it
        environments: list[dict[str, str]] = [{}]
        if not self.launched and scenario.processes > 1:
            shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
            size = str(scenario.processes)
            environments = [
                {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, **shared}
                for rank in map(str, range(scenario.processes))
            ]
        self.processes: list[Process] = []
        for rank, environment in enumerate(environments):
            group = self.processes[0].pid if self.processes else 0
            run = _program(scenario, self, {**ENVIRONMENT, **environment}, file_bytes, operations)
            self.processes.append(Process(run, group, folder / f"{name}-{rank}.log"))

    @property
    def journal(self) -> Path:
        """Path of the journal, a line per file operation in `out`."""
        return self.folder / f"{self.name}.journal"

    def running(self) -> bool:
        """Whether a process is alive; terminates the other ranks after one has failed."""
        alive = [process for process in self.processes if process.poll()]
        if alive and any(process.code for process in self.processes):
            self._failed_s = self._failed_s or time.monotonic()
            late = time.monotonic() - self._failed_s > _GRACE_S
            for process in alive:
                if late or not process.signalled:
                    process.send(signal.SIGKILL if late else signal.SIGTERM)
        if not alive and self.ended_s is None:
            self.ended_s = time.monotonic() - self.begun
        return bool(alive)

    @property
    def text(self) -> str:
        """Output of all processes, by rank."""
        return "".join(process.text.decode(errors="replace") for process in self.processes)

    def ranks(self) -> list[int]:
        """PIDs of the ranks: the launcher's children, or the forked processes."""
        if not self.launched:
            return [process.pid for process in self.processes if process.code is None]
        return [child.pid for child in _children(self.processes[0].pid) if _is_script(child)]

    def helpers(self) -> list[int]:
        """PIDs of data workers and packing processes."""
        return [child.pid for rank in self.ranks() for child in _children(rank) if _is_helper(child)]

    def kill(self, pids: list[int], number: int, only_a_helper: bool = False) -> None:
        """Send a signal to some processes. A rank that loses a data worker must still end with a message."""
        for process in self.processes:
            process.signalled = process.signalled or not only_a_helper
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def tree(self) -> list[int]:
        """PIDs of all living processes, orphans of a launcher included."""
        if self.launched:
            self.known |= {child.pid for child in _children(self.processes[0].pid, recursive=True)}
        groups = {process.pid for process in self.processes}
        mine = [p.pid for p in psutil.process_iter() if _group(p.pid) in groups and p.status() != "zombie"]
        return sorted({*mine, *(pid for pid in self.known if _lives(pid))})

    def end(self) -> None:
        """Kill all processes, and write their output to log files."""
        while left := self.tree():
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.running()
            time.sleep(POLL_S)
        self.running()
        for process in self.processes:
            process.log.write_bytes(process.text)

    def endings(self) -> list[str]:
        return [process.ending() for process in self.processes]


def _program(scenario, start: "Start", environment: dict[str, str], file_bytes: int | None, operations: int | None):
    """The function of a forked process: the script's `main`, or exec of the launcher."""
    argv = start.argv

    def run() -> None:
        os.chdir(start.folder)
        os.environ.update(environment)
        if file_bytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
        if scenario.launcher:
            if scenario.processes == 1:  # `set_up_process` would use all cores
                os.sched_setaffinity(0, [random.choice(sorted(os.sched_getaffinity(0)))])
            command = [sys.executable, *scenario.launcher, *argv]
            os.execv(command[0], command)
        _watch_files(start.folder / "out", start.journal, operations)
        sys.argv = [scenario.program, *argv]
        exit_on_error(lambda: scenario.main()(argv))

    return run


def _watch_files(folder: Path, journal: Path, operations: int | None) -> None:
    """Write each file operation of this process and its forks below `folder` to `journal`, by Python's audit events
    (which miss native code); kill the process group before operation number `operations`."""
    stream = os.open(journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    below = f"{folder}/"

    def hook(event: str, details: tuple) -> None:
        if (event != "open" and event not in _CHANGES) or not isinstance(details[0], str | os.PathLike):
            return
        if event == "open" and not (isinstance(details[2], int) and details[2] & _WRITES):
            return
        if (path := os.path.abspath(details[0])).startswith(below):
            at = os.fstat(stream).st_size // _LINE
            os.write(stream, f"{event} {path.removeprefix(below)}"[: _LINE - 1].ljust(_LINE - 1).encode() + b"\n")
            if operations is not None and at >= operations:
                os.killpg(0, signal.SIGKILL)

    sys.addaudithook(hook)


def _children(pid: int, recursive: bool = False) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).children(recursive)
    return []


def _is_script(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return any(word.endswith("train_mlm.py") for word in process.cmdline())
    return False


def _is_helper(process: psutil.Process) -> bool:
    """Whether a child of a rank is a data worker or packing process, and no `git`."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() != "zombie" and "git" not in process.name()
    return False


def _group(pid: int) -> int:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        return os.getpgid(pid)
    return -1


def _lives(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != "zombie"
    return False
