"""The formats that can be selected, and models served from checkpoints of every format."""

from __future__ import annotations

from pathlib import Path

import pytest

from bloomery.config import QUANTIZATIONS
from bloomery.quant.select import ON_LOAD_FORMATS
from tests.parity.serve import prompt_logits
from tests.quant.checkpoints import PROMPT, generate
from tests.quant.packers import PACKED_CASES, is_in_layer, repack_checkpoint


def test_the_quantization_flag_lists_all_on_load_formats() -> None:
    assert set(QUANTIZATIONS) == {"auto", *ON_LOAD_FORMATS}


@pytest.mark.parametrize("name", PACKED_CASES)
def test_packed_checkpoints_generate_the_tokens_of_their_values(
    name: str, llama: Path, tmp_path: Path
) -> None:
    packed = tmp_path / "packed"
    dense = tmp_path / "dense"

    # One module stays unquantized, so the fused QKV projection has parts of two formats.
    def is_packed(module: str) -> bool:
        return is_in_layer(module) and "0.self_attn.k_proj" not in module

    repack_checkpoint(llama, packed, dense, PACKED_CASES[name], is_packed)
    expected = prompt_logits(dense, PROMPT, 48)
    actual = prompt_logits(packed, PROMPT, 48)
    assert (actual - expected).abs().max() <= 2e-5 * expected.abs().max()
    assert generate(packed) == generate(dense)
