"""Hardware: description of the machine, memory, matrix rate; detection of out-of-memory and lost processes."""

import contextlib
import ctypes
import os
import platform
import re
import resource
import sys
import time
import traceback
from pathlib import Path
from typing import NotRequired, TypedDict

import torch

_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # cgroup v2: quota and period in microseconds
_PR_SET_PDEATHSIG = 1  # of Linux's prctl
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
_HEAP_BYTES = 1 << 30  # glibc serves smaller allocations from the heap
_PROBE_S, _PROBE_REPEATS = 2.0, 12  # upper limits


class Machine(TypedDict):
    """The machine of a run, as in its record."""

    machine: str  # architecture of the processor: x86_64, ...
    processor: NotRequired[str | None]  # its name, where known; older records have none
    system: str
    cpu_cores: int
    gpus: list[str]


def describe_machine() -> Machine:
    """Processor, usable cores, GPUs."""
    cpus = Path("/proc/cpuinfo")
    name = re.search(r"^model name\s*: *(.+)$", cpus.read_text(), re.MULTILINE) if cpus.is_file() else None
    return {
        "machine": platform.machine(),
        "processor": name[1].strip() if name else platform.processor() or None,
        "system": platform.system(),
        "cpu_cores": cpu_cores(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }


def cpu_cores() -> int:
    """Cores that this process may use, by its affinity and its container's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):  # "max 100000": no quota
        quota, period = map(int, _CPU_QUOTA.read_text().split())
        cores = max(1, min(cores, quota // period))
    return cores


def local_processes() -> int:
    """Processes of this run on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def peak_memory_bytes() -> int:
    """Peak memory: of the GPU since `torch.cuda.reset_peak_memory_stats`, or of this process if it has not used one."""
    if torch.cuda.is_available() and (allocated := torch.cuda.max_memory_allocated()):  # 0 with use_cpu
        return allocated
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes on macOS, KiB on Linux


def keep_freed_memory() -> bool:
    """Configure glibc's malloc to reuse freed memory for large allocations; returns whether it does. User settings
    stay. By default, allocations above a threshold (128 KiB to 32 MiB) get fresh pages, which the kernel clears."""
    has_settings = any(name.startswith(("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")) for name in os.environ)
    if has_settings or platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_M_MMAP_THRESHOLD, _HEAP_BYTES) and mallopt(_M_TRIM_THRESHOLD, 2**31 - 1))


def has_bf16(use_cpu: bool = False) -> bool:
    """Whether the training device has bf16 matrix products in hardware: a GPU from Ampere on or, without a GPU or with
    `use_cpu`, a processor with AVX-512 BF16 or AMX."""
    if torch.cuda.is_available() and not use_cpu:
        return torch.cuda.is_bf16_supported(including_emulation=False)
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


def matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a product of two large square matrices with this process's threads: the fastest of several, so that
    other processes do not distort the measurement. Takes at most two seconds."""
    size = 8192 if device.type == "cuda" else 1024
    # drawn on the device, as the CPU would take more than a second
    a, b = torch.randn(2, size, size, generator=torch.Generator(device).manual_seed(0), device=device).to(dtype)
    out, seconds, begun_s = torch.empty_like(a), [], time.perf_counter()
    while not seconds or (len(seconds) <= _PROBE_REPEATS and time.perf_counter() - begun_s < _PROBE_S):
        start_s = time.perf_counter()
        torch.mm(a, b, out=out)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start_s)
    return 2 * size**3 / min(seconds[1:] or seconds)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception means out of memory: of torch's allocators, oneDNN, CUDA, cuBLAS or NCCL."""
    kinds = "DefaultCPUAllocator|could not create a (primitive|memory object)|CUDA error: out of memory"
    kinds += "|CUBLAS_STATUS_ALLOC_FAILED|Cuda failure (2 )?'out of memory'|Failed to CUDA (host )?[cm]?alloc"
    return isinstance(error, torch.OutOfMemoryError) or bool(re.search(kinds, str(error)))


def end_with_parent(parent: int, number: int) -> None:
    """On Linux, send this process the signal `number` when its parent dies, or at once if it is dead already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
        if os.getppid() != parent:  # the parent ended before the line above: no signal will come
            os.kill(os.getpid(), number)


def lost_process(error: BaseException) -> str | None:
    """Description of the lost process that `error` reports, a rank or a data worker; None for other errors.

    NCCL and the store have exception types; gloo and `DataLoader` raise plain RuntimeErrors, the latter in a signal
    handler, so that it may be the context of another error.
    """
    if isinstance(error, torch.distributed.DistError) and re.search("ncclInvalid|ncclUnhandledCuda", str(error)):
        return None  # two ranks on a GPU, a CUDA error: the message ends with NCCL's reason
    if isinstance(error, torch.distributed.DistError) or (isinstance(error, RuntimeError) and "/gloo/" in str(error)):
        return "another process of this run is gone, or cannot be reached"
    if isinstance(error, ConnectionError | EOFError):
        modules = [frame.f_globals["__name__"] for frame, _ in traceback.walk_tb(error.__traceback__)]
        if modules and modules[-1].startswith("multiprocessing."):
            return "a data worker is gone"  # killed while it sends a batch
    if isinstance(error, RuntimeError) and str(error).startswith("DataLoader worker"):
        return "a data worker is gone"
    return lost_process(error.__context__) if error.__context__ else None
