"""GPU data sheet: memory, peak FLOP/s, price."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """A GPU: memory in bytes (GB as 10^9), peak FLOP/s, bf16 support, price in USD per hour."""

    memory_bytes: float
    peak_flops: float
    bf16: bool
    gpu_hour_price: float


# Dense tensor-core FLOP/s in bf16 or fp16, from NVIDIA's data sheets. Prices are assumptions: they change weekly and
# differ threefold between providers: AWS, US, instance price / GPUs (H200, H100, A100-40GB: capacity blocks of 2025;
# A10G, L40S, L4, V100, T4: on demand), RunPod, spring 2026 (H100-PCIe, A100-80GB, RTX), Lambda (A10).
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
