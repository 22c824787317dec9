"""What the live meter holds a step against."""

from __future__ import annotations

import pytest
import torch

from bloomery.families import describe
from bloomery.roofline import MACHINES, Roofline, parameters
from bloomery.runtime.meter import roofline

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


@pytest.mark.parametrize("more", [0, 1 << 10, 1 << 26, -(1 << 26)])
def test_tables_beside_the_weights_do_not_change_their_kind(more: int) -> None:
    """A step of thousands of positions is bound by arithmetic: bfloat16's, whatever else was loaded."""
    model = describe(LLAMA).model
    card = MACHINES["h200"]
    exact = Roofline(model, card)
    loaded = 2 * parameters(model).total + more
    seen = roofline(model, card, loaded, torch.bfloat16, torch.bfloat16, 1, 1)
    for step in ((1, 100, 1, 100), (4096, 4096, 1, 8_000_000)):
        assert seen.step(*step) == exact.step(*step)
        assert seen.expected(*step) == exact.expected(*step)


def test_packed_weights_are_read_as_what_they_are() -> None:
    model = describe(LLAMA).model
    card = MACHINES["h200"]
    count = parameters(model)
    seen = roofline(model, card, round(count.total * 4.5 / 8), torch.bfloat16, torch.bfloat16, 1, 1)
    read = (count.matrices + count.head) * 4.5 / 8  # of the embedding there is one row
    assert seen.step(1, 100, 1) == pytest.approx(read / card.bandwidth, rel=0.02)
