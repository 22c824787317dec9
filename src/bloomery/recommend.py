"""Which open models fit this machine, in what precision and at what speed.

A short table of well-known chat models with the shapes of their checkpoints. Memory and speed are
computed from the shapes and the hardware by the same roofline that `bloomery plan` uses. Nothing is
downloaded. Must not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from bloomery.config import resolve_device
from bloomery.families import describe_config
from bloomery.hardware import HardwareSpec, detect_hardware, usable_memory_bytes
from bloomery.roofline import (
    PRECISIONS,
    Roofline,
    WeightPrecision,
    kv_bytes,
    state_bytes,
    weights_bytes,
)
from bloomery.spec import ModelSpec

# A model "fits" with one sequence of this many tokens beside its weights.
CONTEXT_TOKENS = 8192
KV_BITS = 16.0
# Slower than this, reading along is no pleasure, so a smaller model is recommended.
COMFORTABLE_TOKENS_PER_SECOND = 8.0
# The rest of the memory is for activations, CUDA graphs, the server and, on a CPU, other programs.
GPU_MEMORY_SHARE = 0.85
CPU_MEMORY_SHARE = 0.6
# Precisions to try, best first. On a CPU 16 bits are half as fast as 8 and hardly better.
GPU_PRECISIONS = ("bf16", "int8", "int4")
CPU_PRECISIONS = ("int8", "int4")
# Experts in MXFP4 and the rest in 16 bits, as gpt-oss is stored. On a CPU a scale takes 16 bits.
GPU_MXFP4 = WeightPrecision("mxfp4", 16, expert_bits=4 + 8 / 32)
CPU_MXFP4 = WeightPrecision("mxfp4", 16, expert_bits=4 + 16 / 32)
AS_STORED = ("bf16", "mxfp4")  # precisions that need no --quantization


@dataclass(frozen=True)
class OpenModel:
    """A chat model on the Hugging Face Hub and its shape, as its config.json states it."""

    name: str
    model_type: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    vocab_size: int
    tied: bool = True  # embedding and head are one matrix
    head_dim: int = 128
    num_experts: int = 0
    num_active_experts: int = 0
    has_mxfp4_experts: bool = False
    gated: bool = False  # needs an account that its owner has approved

    def list_precisions(self, is_cpu: bool) -> list[WeightPrecision]:
        """The precisions to try, best first."""
        if self.has_mxfp4_experts:
            return [CPU_MXFP4 if is_cpu else GPU_MXFP4]
        return [PRECISIONS[name] for name in (CPU_PRECISIONS if is_cpu else GPU_PRECISIONS)]

    def describe(self) -> ModelSpec:
        config: dict[str, Any] = {
            "model_type": self.model_type,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "intermediate_size": self.intermediate_size,
            "vocab_size": self.vocab_size,
            "tie_word_embeddings": self.tied,
            "head_dim": self.head_dim,
        }
        if self.num_experts:
            config |= {
                "num_experts": self.num_experts,
                "num_experts_per_tok": self.num_active_experts,
                "moe_intermediate_size": self.intermediate_size,
            }
        return describe_config(config).model


# Smallest first. Within a size, the later one is preferred.
OPEN_MODELS = (
    OpenModel("Qwen/Qwen3-0.6B", "qwen3", 1024, 28, 16, 8, 3072, 151936),
    OpenModel("Qwen/Qwen3-1.7B", "qwen3", 2048, 28, 16, 8, 6144, 151936),
    OpenModel("HuggingFaceTB/SmolLM3-3B", "smollm3", 2048, 36, 16, 4, 11008, 128256),
    OpenModel("Qwen/Qwen3-4B-Instruct-2507", "qwen3", 2560, 36, 32, 8, 9728, 151936),
    OpenModel("Qwen/Qwen3-8B", "qwen3", 4096, 36, 32, 8, 12288, 151936, tied=False),
    OpenModel("Qwen/Qwen3-14B", "qwen3", 5120, 40, 40, 8, 17408, 151936, tied=False),
    OpenModel(
        "openai/gpt-oss-20b",
        "gpt_oss",
        2880,
        24,
        64,
        8,
        2880,
        201088,
        tied=False,
        head_dim=64,
        num_experts=32,
        num_active_experts=4,
        has_mxfp4_experts=True,
    ),
    OpenModel(
        "Qwen/Qwen3-30B-A3B-Instruct-2507",
        "qwen3_moe",
        2048,
        48,
        32,
        4,
        768,
        151936,
        tied=False,
        num_experts=128,
        num_active_experts=8,
    ),
    OpenModel("Qwen/Qwen3-32B", "qwen3", 5120, 64, 64, 8, 25600, 151936, tied=False),
    OpenModel(
        "meta-llama/Llama-3.3-70B-Instruct",
        "llama",
        8192,
        80,
        64,
        8,
        28672,
        128256,
        tied=False,
        gated=True,
    ),
    OpenModel(
        "openai/gpt-oss-120b",
        "gpt_oss",
        2880,
        36,
        64,
        8,
        2880,
        201088,
        tied=False,
        head_dim=64,
        num_experts=128,
        num_active_experts=4,
        has_mxfp4_experts=True,
    ),
)


@dataclass(frozen=True)
class ModelFit:
    """One model on one device: the best precision that fits, its memory and its speed."""

    model: str
    precision: str  # one of AS_STORED, or a value of --quantization
    gigabytes: float  # of the weights in memory
    tokens_per_second: float  # expected for one user
    fits: bool
    gated: bool = False

    @property
    def is_comfortable(self) -> bool:
        return self.tokens_per_second >= COMFORTABLE_TOKENS_PER_SECOND

    @property
    def arguments(self) -> str:
        """What follows `bloomery serve` or `bloomery run`."""
        if self.precision in AS_STORED:
            return self.model
        return f"{self.model} --quantization {self.precision}"

    def to_dict(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "arguments": self.arguments,
            "gigabytes": round(self.gigabytes, 1),
            "tokens_per_second": round(self.tokens_per_second, 1),
        }


def list_fits(hardware: HardwareSpec, memory_bytes: float) -> Iterator[ModelFit]:
    """Yield every model of the table with its best precision that fits, or else its smallest."""
    share = CPU_MEMORY_SHARE if hardware.is_cpu else GPU_MEMORY_SHARE
    for entry in OPEN_MODELS:
        model = entry.describe()
        cache_bytes = kv_bytes(model, CONTEXT_TOKENS, KV_BITS) + state_bytes(model)
        fit = None
        for precision in entry.list_precisions(hardware.is_cpu):
            num_bytes = weights_bytes(model, precision)
            roofline = Roofline(model, hardware, precision, KV_BITS)
            seconds = roofline.expected_seconds(1, CONTEXT_TOKENS // 8, 1)
            fits = num_bytes + cache_bytes <= share * memory_bytes
            speed = 1 / seconds
            fit = ModelFit(entry.name, precision.name, num_bytes / 1e9, speed, fits, entry.gated)
            if fits and fit.is_comfortable:
                break
        if fit is not None:
            yield fit


def recommend_model(device: str = "auto") -> ModelFit | None:
    """The largest model that fits this machine and answers at a comfortable speed."""
    hardware = detect_hardware(resolve_device(device))
    memory_bytes = usable_memory_bytes(hardware)
    comfortable = [
        fit
        for fit in list_fits(hardware, memory_bytes)
        if fit.fits and not fit.gated and fit.is_comfortable
    ]
    return comfortable[-1] if comfortable else None
