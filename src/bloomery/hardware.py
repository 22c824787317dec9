"""Hardware: the table of known devices, and the detection of this machine's device.

A HardwareSpec holds the memory, bandwidth and arithmetic rates of one device, and the constants
(StepCalibration) that tell how much slower Bloomery's own code is. roofline.py computes step times
from it. Rates come from data sheets unless `bloomery plan --measure` measured this machine, which
saves them in the user's cache folder.

Reads the GPU's name from the CUDA driver and the CPU's name from Linux. Must not import torch.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bloomery.config import cache_directory, count_physical_cores
from bloomery.errors import ConfigError
from bloomery.measurement_cache import load_measurements, save_measurement

# With less memory a server loads what structured output needs, about 50 MB for a small vocabulary
# and 120 MB for one of 150,000 tokens, only when the first request asks for it. Chosen.
AMPLE_MEMORY_BYTES = 4 << 30
MIN_SPARE_CORES = 4  # chosen
CGROUP_MEMORY_LIMIT = Path("/sys/fs/cgroup/memory.max")

# Share of `memory_efficiency` that matrix products with packed weights reach on an H200, by weight
# format: with one token in the step, and with more. Fitted by benchmarks/plan_check.py.
PACKED_EFFICIENCY: Mapping[str, tuple[float, float]] = {
    "fp8": (0.74, 0.57),
    "int8": (0.95, 0.7),
    "int4": (0.94, 0.5),
    "nf4": (0.5, 0.29),
}


@dataclass(frozen=True)
class StepCalibration:
    """Overheads of our code above the roofline floor, fitted to steps measured on an H200.

    Pairs hold one value for steps of a single token and one for all larger steps.
    """

    memory_efficiency: float = 0.99  # share of the bandwidth that matrix products reach
    compute_efficiency: float = 0.8  # share of the rate that large matrix products reach
    fused_unpack_efficiency: float = 0.93  # share of that when weights are unpacked on the fly
    packed_efficiency: Mapping[str, tuple[float, float]] = field(
        default_factory=lambda: dict(PACKED_EFFICIENCY)
    )
    unpack_seconds_per_layer: tuple[float, float] = (4e-6, 7e-6)  # added by packed weights
    attention_efficiency: float = 1.0  # share of `memory_efficiency` when reading the KV cache
    logits_reads_per_sample: float = 0.0  # how often the sampler reads a row of logits
    kernel_gap_seconds: float = 3.4e-6  # lost between two consecutive kernels
    kernels_per_layer: tuple[int, int] = (5, 10)
    step_overhead_seconds: float = 4e-6  # per step, besides its layers
    eager_launch_seconds: float = 45e-6  # to launch a kernel without a CUDA graph
    max_captured_tokens: int = 2048  # prefill steps up to this size replay a CUDA graph
    mixed_seconds_per_layer: float = 20e-6  # added when a step mixes prefill and decode
    sequence_seconds_per_layer: float = 0.052e-6  # added by each sequence


@dataclass(frozen=True)
class HardwareSpec:
    """One device. Bandwidths are bytes per second, rates are dense operations per second."""

    name: str
    title: str
    memory_bytes: float
    bandwidth: float
    rates: Mapping[str, float]  # by number format, with a suffix for special kernels
    link_bandwidth: float = 25e9  # from the device to its neighbours
    link_latency: float = 20e-6  # seconds of a small message to all ranks
    measured: bool = False  # bandwidth and rates were measured, not read from a data sheet
    calibration: StepCalibration = field(default=StepCalibration())

    @property
    def is_cpu(self) -> bool:
        """Whether this is a CPU. Only the CPUs of the table have no bf16 rate."""
        return "bf16" not in self.rates

    def rate(self, number_format: str, kernel: str = "") -> float:
        """Operations per second in a format; formats without units use the next wider one.

        `kernel` is the suffix of a special kernel, such as SINGLE_ROW.
        """
        used_format = number_format
        while used_format + kernel not in self.rates:
            if used_format not in WIDER_FORMATS:
                raise ConfigError(
                    f"hardware {self.name!r}: no rate for {number_format}; "
                    f"known: {', '.join(self.rates)}"
                )
            used_format = WIDER_FORMATS[used_format]
        return self.rates[used_format + kernel]

    def mean_rate(self, shares: Mapping[str, float], kernel: str = "") -> float:
        """The rate for weights in several formats, given the share of values in each."""
        seconds = sum(share / self.rate(name, kernel) for name, share in shares.items())
        return 1 / seconds


WIDER_FORMATS: Mapping[str, str] = {
    "nf4": "int4",
    "Q4_K": "int4",
    "int4": "int8",
    "Q6_K": "int8",
    "fp8": "int8",
    "int8": "bf16",
    "bf16": "fp32",
}

# ---- the table -----------------------------------------------------------------------------------

# Suffixes of CPU rates: one row times a matrix that no cache holds, a few rows times any matrix.
SINGLE_ROW = ", a row"
FEW_ROWS = ", few rows"
# Rates of a CPU are measured with our own kernels, so most efficiencies are 1 and overheads 0.
CPU_CALIBRATION = StepCalibration(
    memory_efficiency=1.0,
    compute_efficiency=1.0,
    unpack_seconds_per_layer=(0.0, 0.0),
    kernel_gap_seconds=1.5e-6,
    kernels_per_layer=(10, 10),
    step_overhead_seconds=150e-6,
    eager_launch_seconds=50e-6,
    max_captured_tokens=0,
    mixed_seconds_per_layer=0.0,
    sequence_seconds_per_layer=2e-6,
    logits_reads_per_sample=1.0,
)
# Rates of a CPU relative to fp32, measured on an AMD Zen 3. Q4_K and Q6_K are GGUF's own formats of
# 4 and 8 bits. Decode attention has single queries, prefill attention has many.
CPU_RATE_RATIOS = {
    "fp32": 1.0,
    "int4": 2.0,
    "Q4_K": 1.4,
    "int8": 1.3,
    "Q6_K": 1.2,
    "decode attention": 0.2,
    "prefill attention": 0.35,
    "fp32" + FEW_ROWS: 0.4,
    "fp32" + SINGLE_ROW: 0.07,
    "bf16" + SINGLE_ROW: 0.14,
    "int4" + SINGLE_ROW: 0.38,
    "Q4_K" + SINGLE_ROW: 0.32,
    "int8" + SINGLE_ROW: 0.25,
    "Q6_K" + SINGLE_ROW: 0.22,
}


def _cpu(
    name: str,
    title: str,
    memory_gib: int,
    gigabytes_per_second: float,
    gigaflops: float,
    measured: bool = False,
) -> HardwareSpec:
    """A CPU. Its ranks communicate through memory, at the cost of system calls."""
    return HardwareSpec(
        name,
        title,
        memory_bytes=memory_gib * 2**30,
        bandwidth=gigabytes_per_second * 1e9,
        rates={name: ratio * gigaflops * 1e9 for name, ratio in CPU_RATE_RATIOS.items()},
        link_bandwidth=10e9,
        link_latency=50e-6,
        measured=measured,
        calibration=CPU_CALIBRATION,
    )


def _gpu(
    name: str,
    title: str,
    memory_mib: int,
    gigabytes_per_second: float,
    teraflops: Mapping[str, float],
    **more: float,
) -> HardwareSpec:
    return HardwareSpec(
        name,
        title,
        memory_bytes=memory_mib * 2**20,
        bandwidth=gigabytes_per_second * 1e9,
        rates={name: value * 1e12 for name, value in teraflops.items()},
        **more,  # type: ignore[arg-type]
    )


NVLINK3: Mapping[str, float] = {"link_bandwidth": 300e9, "link_latency": 9e-6}
NVLINK4: Mapping[str, float] = {"link_bandwidth": 450e9, "link_latency": 7e-6}
NVLINK5: Mapping[str, float] = {"link_bandwidth": 900e9, "link_latency": 6e-6}
PCIE3: Mapping[str, float] = {"link_bandwidth": 12e9, "link_latency": 30e-6}
_ALL_SPECS = (
    _gpu("b200", "NVIDIA B200", 183359, 8000, {"fp32": 75, "bf16": 2250, "fp8": 4500}, **NVLINK5),
    # Measured: copies at 4.25 TB/s, multiplies at 800 TFLOP/s. Its data sheet says 4.8 and 989.
    _gpu(
        "h200",
        "NVIDIA H200",
        143771,
        4250,
        {"fp32": 67, "bf16": 800, "fp8": 1424},
        **NVLINK4,
        measured=True,
    ),
    _gpu("h100", "NVIDIA H100 SXM", 81559, 3350, {"fp32": 67, "bf16": 989, "fp8": 1979}, **NVLINK4),
    _gpu("a100-80", "NVIDIA A100 80 GB", 81920, 2039, {"fp32": 19.5, "bf16": 312}, **NVLINK3),
    _gpu("a100-40", "NVIDIA A100 40 GB", 40960, 1555, {"fp32": 19.5, "bf16": 312}, **NVLINK3),
    _gpu("l40s", "NVIDIA L40S", 46068, 864, {"fp32": 91.6, "bf16": 362, "fp8": 733}),
    _gpu("l4", "NVIDIA L4", 23034, 300, {"fp32": 30.3, "bf16": 121, "fp8": 242}),
    _gpu("a10", "NVIDIA A10", 23028, 600, {"fp32": 31.2, "bf16": 125}),
    _gpu("rtx4090", "NVIDIA RTX 4090", 24564, 1008, {"fp32": 82.6, "bf16": 165, "fp8": 330}),
    _gpu("rtx3090", "NVIDIA RTX 3090", 24576, 936, {"fp32": 35.6, "bf16": 71}),
    _gpu("t4", "NVIDIA T4", 15360, 320, {"fp32": 8.1, "bf16": 65}, **PCIE3),
    _cpu("zen3-2", "2 cores of AMD Zen 3", 24, 25.5, 180, measured=True),
    _cpu("apple-m2", "Apple M2, CPU", 16, 100, 1100),
)
HARDWARE_SPECS: Mapping[str, HardwareSpec] = {spec.name: spec for spec in _ALL_SPECS}


def find_hardware(name: str) -> HardwareSpec:
    """The device of this name in the table, or the first whose name begins with it."""
    lower_name = name.lower()
    if lower_name in HARDWARE_SPECS:
        return HARDWARE_SPECS[lower_name]
    for spec in HARDWARE_SPECS.values():
        if spec.name.startswith(lower_name):
            return spec
    raise ConfigError(f"unknown hardware {name!r}; known: {', '.join(HARDWARE_SPECS)}")


# ---- this machine --------------------------------------------------------------------------------


def detect_hardware(device: str, path: Path | None = None) -> HardwareSpec:
    """The hardware behind `cpu` or `cuda`, with measured rates where there are any."""
    if device == "cpu":
        spec = _detect_cpu()
    else:
        spec = hardware_by_title(_gpu_title() or "a100-80")
    return with_measured_rates(spec, load_measured_rates(path).get(spec.title))


def hardware_by_title(title: str) -> HardwareSpec:
    """The table's row for the driver's name of a device: "NVIDIA H100 80GB HBM3" is h100."""
    letters = _letters_and_digits(title)
    if "a100" in letters:
        return find_hardware("a100-40" if "40gb" in letters else "a100-80")
    # Longest names first: "l40s" must match before "l4".
    for spec in sorted(HARDWARE_SPECS.values(), key=lambda spec: -len(spec.name)):
        if _letters_and_digits(spec.name) in letters:
            return spec
    return replace(find_hardware("a100-80"), name="unknown", title=title)


def _letters_and_digits(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


def with_measured_rates(spec: HardwareSpec, measured: Mapping[str, Any] | None) -> HardwareSpec:
    """Replace the bandwidth and rates by measured ones, if there are any."""
    if not measured:
        return spec
    rates = {**spec.rates, **measured["rates"]}
    return replace(spec, bandwidth=measured["bandwidth"], rates=rates, measured=True)


def rates_file() -> Path:
    return cache_directory() / "machines.json"


def load_measured_rates(path: Path | None = None) -> dict[str, Any]:
    """Saved measurements: device title -> {"bandwidth": ..., "rates": ...}."""
    return load_measurements(path or rates_file())


def save_measured_rates(
    title: str, bandwidth: float, rates: Mapping[str, float], path: Path | None = None
) -> Path:
    return save_measurement(
        path or rates_file(), title, {"bandwidth": bandwidth, "rates": dict(rates)}
    )


def usable_memory_bytes(hardware: HardwareSpec) -> float:
    """The device's memory; of a CPU no more than this container may use."""
    if not hardware.is_cpu:
        return hardware.memory_bytes
    try:
        return min(hardware.memory_bytes, int(CGROUP_MEMORY_LIMIT.read_text()))
    except (OSError, ValueError):  # there is no limit, or Linux states none
        return hardware.memory_bytes


def has_ample_memory() -> bool:
    """Whether this machine may hold in memory what only some requests need."""
    return usable_memory_bytes(_detect_cpu()) >= AMPLE_MEMORY_BYTES


def has_spare_cores() -> bool:
    """Whether this machine can do other work while it loads a model."""
    return (os.cpu_count() or 1) >= MIN_SPARE_CORES


def _detect_cpu() -> HardwareSpec:
    """This machine's CPU: Zen 3's figures, scaled to its number of cores."""
    num_cores = count_physical_cores()
    try:
        model_name = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
        memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        return find_hardware("apple-m2")
    two_cores = find_hardware("zen3-2")
    cpu_name = model_name[1].strip() if model_name else "this CPU"
    return HardwareSpec(
        name="cpu",
        title=f"{cpu_name}, {num_cores} cores",
        memory_bytes=memory_bytes,
        bandwidth=two_cores.bandwidth,
        rates={name: rate / 2 * num_cores for name, rate in two_cores.rates.items()},
        link_bandwidth=two_cores.link_bandwidth,
        link_latency=two_cores.link_latency,
        calibration=CPU_CALIBRATION,
    )


def _gpu_title() -> str | None:
    """The first GPU's name, from the CUDA driver; None without a GPU."""
    title = ctypes.create_string_buffer(256)
    device = ctypes.c_int(0)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        failed = (
            driver.cuInit(0)
            or driver.cuDeviceGet(ctypes.byref(device), 0)
            or driver.cuDeviceGetName(title, 256, device)
        )
    except (OSError, AttributeError):
        return None
    return None if failed else title.value.decode(errors="replace")
