"""The step meter: the roofline it compares steps with, and the work it counts in a step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bloomery.families import describe_config
from bloomery.hardware import HARDWARE_SPECS
from bloomery.messages import ScheduledRequest, ScheduledStep
from bloomery.roofline import Roofline, count_parameters
from bloomery.runtime.meter import build_roofline, count_scheduled_work

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "hidden_act": "silu",
}
SHAPES_FOLDER = Path(__file__).parents[2] / "benchmarks" / "shapes"
GPT_OSS = json.loads((SHAPES_FOLDER / "gpt-oss-20b.json").read_text())


@pytest.mark.parametrize("extra_bytes", [0, 1 << 10, 1 << 26, -(1 << 26)])
def test_tables_beside_the_weights_do_not_change_their_precision(extra_bytes: int) -> None:
    """A step of thousands of tokens is bound by bfloat16 arithmetic."""
    model = describe_config(LLAMA).model
    hardware = HARDWARE_SPECS["h200"]
    exact = Roofline(model, hardware)
    weights_bytes = 2 * count_parameters(model).total + extra_bytes
    loaded = build_roofline(model, hardware, weights_bytes, torch.bfloat16, torch.bfloat16, 1, 1)
    for step in ((1, 100, 1, 100), (4096, 4096, 1, 8_000_000)):
        assert loaded.floor_seconds(*step) == exact.floor_seconds(*step)
        assert loaded.expected_seconds(*step) == exact.expected_seconds(*step)


def test_the_floor_of_quantized_weights_counts_their_own_bytes() -> None:
    model = describe_config(LLAMA).model
    hardware = HARDWARE_SPECS["h200"]
    parameters = count_parameters(model)
    weights_bytes = round(parameters.total * 4.5 / 8)
    loaded = build_roofline(model, hardware, weights_bytes, torch.bfloat16, torch.bfloat16, 1, 1)
    # A step reads only one row of the embedding.
    read_bytes = (parameters.matrices + parameters.head) * 4.5 / 8
    floor = loaded.floor_seconds(1, 100, 1)
    assert floor == pytest.approx(read_bytes / hardware.bandwidth, rel=0.02)


def test_quantized_experts_count_apart_from_the_other_matrices() -> None:
    """Each token reads 4 of the 32 experts, whose weights have 4.25 bits."""
    model = describe_config(GPT_OSS).model
    hardware = HARDWARE_SPECS["h200"]
    counts = count_parameters(model)
    assert 20.9e9 < counts.total < 20.95e9
    expert_bytes = counts.experts * 17 // 32
    weights_bytes = 2 * (counts.total - counts.experts) + expert_bytes
    loaded = build_roofline(
        model, hardware, weights_bytes, torch.bfloat16, torch.bfloat16, 1, 1, expert_bytes
    )
    read_bytes = 2 * (counts.matrices + counts.head) + expert_bytes * 4 / 32
    floor = loaded.floor_seconds(1, 100, 1)
    assert floor == pytest.approx(read_bytes / hardware.bandwidth, rel=0.02)


def test_decodes_count_as_much_as_the_same_scheduled_requests() -> None:
    chunk = ScheduledRequest(8, 4, 6, (2,), None, (), False)
    step = ScheduledStep((chunk,), (1,), (5, 6), (3, 7), ((6, (4,)),))
    decodes = (
        ScheduledRequest(5, 3, 1, (), None, (), True),
        ScheduledRequest(6, 7, 1, (4,), None, (), True),
    )
    assert step.requests == (*decodes, chunk)
    explicit = ScheduledStep(step.requests, step.finished)
    work = (8, 4 + 8 + 10, 2, 4 + 8 + 45)
    assert count_scheduled_work(step) == count_scheduled_work(explicit) == work
