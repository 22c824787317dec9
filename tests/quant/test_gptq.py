"""Streams of packed bits, which GPTQ and compressed-tensors share."""

from __future__ import annotations

import pytest
import torch

from bloomery.quant.gptq import unpack_words
from bloomery.tools.checkpoint_writers import pack_words


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_transposed_words_are_unpacked(bits: int) -> None:
    """Zero points of compressed-tensors: those of few outputs fill a single row of words."""
    codes = torch.randint(1 << bits, (2, 32 // bits))
    words = pack_words(codes, bits).T.tolist()
    stored = torch.tensor(words, dtype=torch.int32)
    assert stored.shape == (1, 2) and stored.T.stride() == (1, 2)
    assert torch.equal(unpack_words(stored.T, bits), codes)
