"""The machine that a run is on: processor, GPUs and their peaks, memory taken."""

import ctypes
import gc
import os
import platform
import re
import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NotRequired, TypedDict

import torch

_PR_SET_PDEATHSIG = 1  # of Linux's prctl
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
_KEPT_BYTES = 1 << 30  # an allocation below this size is served from memory that was freed before
_PROBE_S = 2.0  # at most; a CPU is done sooner
_PROBE_REPEATS = 12
_PROBE_SIZES = {"cpu": 1024, "cuda": 8192}  # rows and columns of the matrices


class Machine(TypedDict):
    """Where a run ran, as its record says it."""

    machine: str  # of the processor: x86_64, ...
    processor: NotRequired[str | None]  # its name, where the system tells it; older records have none
    system: str
    cpu_cores: int
    gpus: list[str]


def describe_machine() -> Machine:
    """Processor, cores that this process may use, GPUs."""
    return {
        "machine": platform.machine(),
        "processor": processor_name(),
        "system": platform.system(),
        "cpu_cores": cpu_cores(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }


def processor_name() -> str | None:
    """What the system calls the processor; None where it does not say."""
    path = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*: *(.+)$", path.read_text(), re.MULTILINE) if path.is_file() else None
    return found[1].strip() if found else platform.processor() or None


def cpu_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def local_processes() -> int:
    """Processes of this run on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def peak_memory_bytes() -> int:
    """Most memory taken so far: of the GPU since `forget_peak_memory`, where this process has used one, else resident
    memory of this process."""
    if torch.cuda.is_available() and (allocated := torch.cuda.max_memory_allocated()):  # 0: it trains with use_cpu
        return allocated
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes there, KiB elsewhere


def forget_peak_memory() -> None:
    """Count the peak of a GPU from what is allocated now: what was measured or tried before belongs to no run."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def keep_freed_memory() -> bool:
    """Have glibc keep memory that is freed, and serve large allocations from it; returns whether it does. Where the
    user has set up an allocator, nothing is changed.

    By default each activation above 128 KiB to 32 MiB comes as fresh pages, which the kernel clears one by one.
    """
    theirs = any(name.startswith("MALLOC_") for name in os.environ) or {"GLIBC_TUNABLES", "LD_PRELOAD"} & set(
        os.environ
    )
    if theirs or platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES) and mallopt(_M_TRIM_THRESHOLD, 2**31 - 1))


def has_bf16(use_cpu: bool = False) -> bool:
    """Whether the device that trains, a GPU or with `use_cpu` the processor, multiplies matrices in bf16 by itself:
    GPUs from Ampere on, AVX-512 BF16, AMX."""
    if torch.cuda.is_available() and not use_cpu:
        return torch.cuda.is_bf16_supported(including_emulation=False)
    has = torch.cpu.get_capabilities()
    return bool(has.get("avx512_bf16") or has.get("amx_bf16"))


def matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a product of two large square matrices on this machine, with this process's threads: the fastest of
    several, so that what else runs here does not count. Takes at most two seconds."""
    size = _PROBE_SIZES.get(device.type, 1024)
    # drawn on the device: a processor takes more than a second for so many numbers
    a, b = torch.randn(2, size, size, generator=torch.Generator(device).manual_seed(0), device=device).to(dtype)
    out, seconds, begun_s = torch.empty_like(a), [], time.perf_counter()
    while not seconds or (len(seconds) <= _PROBE_REPEATS and time.perf_counter() - begun_s < _PROBE_S):
        start_s = time.perf_counter()
        torch.mm(a, b, out=out)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start_s)
    return 2 * size**3 / min(seconds[1:] or seconds)


def give_back_freed_memory() -> None:
    """Return to the system what was freed, as far as glibc can: for what does not allocate through it."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def free_memory() -> None:
    """Free what a run held, trainers with their cycles of references, before the next run of the same process."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, of a GPU or of the machine; oneDNN, which maps memory for its kernels' code, says only
    that a primitive could not be created."""
    cpu = ("DefaultCPUAllocator", "could not create a primitive", "could not create a memory object")
    return isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in cpu)


def end_with_parent(parent: int, number: int) -> None:
    """Have Linux send this process the signal `number` when `parent`, which started it, ends, however that ends; at
    once where it has ended already. Elsewhere nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
        if os.getppid() != parent:  # since before the line above, so that no signal comes
            os.kill(os.getpid(), number)


def lost_process(error: BaseException) -> str | None:
    """What has ended that a run needs, where `error` says so: another process of it, or a data worker; else None.

    NCCL's and the store's errors have a type; gloo's and those of `DataLoader` are plain RuntimeErrors. The last is
    raised by the handler of a signal, wherever the process is, so that another error may be raised on its way.
    """
    if isinstance(error, torch.distributed.DistError) or (isinstance(error, RuntimeError) and "/gloo/" in str(error)):
        return "another process of this run is gone, or cannot be reached"
    if isinstance(error, RuntimeError) and str(error).startswith("DataLoader worker"):
        return "a data worker is gone"
    return lost_process(error.__context__) if error.__context__ else None


@dataclass(frozen=True)
class Device:
    """A GPU: memory in bytes (the data sheet's GB as 10^9), peak FLOP/s, whether it has bf16, price in USD an hour."""

    memory_bytes: float
    peak_flops: float
    bf16: bool
    gpu_hour_price: float


# Dense FLOP/s of the tensor cores in bf16 or fp16, from NVIDIA's data sheets. Prices are an assumption, they change
# weekly and differ threefold between providers: AWS list prices of an instance / its GPUs, in the US (H200, H100,
# A100-40GB: capacity blocks of 2025; A10G, L40S, L4, V100, T4: on demand), RunPod's of spring 2026 where AWS has no
# such card by itself (H100-PCIe, A100-80GB, RTX), Lambda's for A10.
DEVICES = {
    "H200": Device(141e9, 989e12, True, 5.41),
    "H100": Device(80e9, 989e12, True, 4.92),
    "H100-PCIe": Device(80e9, 756e12, True, 2.79),
    "A100-80GB": Device(80e9, 312e12, True, 2.45),
    "A100-40GB": Device(40e9, 312e12, True, 1.84),
    "L40S": Device(48e9, 362e12, True, 1.86),
    "L4": Device(24e9, 121e12, True, 0.80),
    "A10G": Device(24e9, 70e12, True, 1.01),
    "A10": Device(24e9, 125e12, True, 0.75),
    "V100-32GB": Device(32e9, 125e12, False, 3.90),
    "V100-16GB": Device(16e9, 125e12, False, 3.06),
    "T4": Device(16e9, 65e12, False, 0.53),
    "RTX-4090": Device(24e9, 165e12, True, 0.60),
    "RTX-3090": Device(24e9, 71e12, True, 0.39),
}
