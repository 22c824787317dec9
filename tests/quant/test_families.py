"""Every format while loading, over families that store their products differently: as its numbers in full precision."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bloomery.artifacts.locate import locate
from bloomery.describe import description
from bloomery.families import as_stored
from bloomery.models.checkpoint import open_source
from bloomery.models.decoder import Decoder
from bloomery.models.load import load
from bloomery.models.weights import Weights
from bloomery.quant.base import Product, Stored, Tensors
from bloomery.quant.choose import ON_LOAD
from bloomery.quant.dense import Dense
from bloomery.quant.onload import OnLoad
from tests.parity.cases import CASES, make_checkpoint
from tests.parity.serve import decoder_logits

# Fused and grouped QKV, transposed weights, a gated MLP, experts, experts with a shared one.
NAMES = (
    "bloom",
    "gpt2",
    "falcon-40b",
    "llama",
    "mixtral",
    "qwen2_moe",
    "gpt_bigcode-mqa",
    "phi3",
    "gemma2",
)
PROMPT = [5, 17, 80, 41, 3, 99, 23, 8, 64, 12]
CPU = torch.device("cpu")


class InFull:
    """The numbers another format stands for, dense."""

    def __init__(self, form: OnLoad):
        self.form = form

    def matrix(self, tensors: Tensors, product: Product) -> Dense:
        return Dense(Stored.of(self.form.matrix(tensors, product).dense(torch.float32, CPU)))


@pytest.mark.parametrize("name", [case.name for case in CASES if case.name in NAMES])
def test_every_format_on_load(name: str, tmp_path: Path) -> None:
    make_checkpoint(next(case for case in CASES if case.name == name), tmp_path)
    artifact = locate(str(tmp_path))
    found = description(artifact)
    source = open_source(artifact)
    plain = load(artifact, "auto", torch.float32, CPU)
    for form, kept in ON_LOAD.items():
        packed = load(artifact, "auto", torch.float32, CPU, quantize=form)
        weights = Weights(
            source, as_stored(found.names, source.names()), torch.float32, CPU, InFull(kept)
        )
        want = decoder_logits(Decoder(found.model, weights), PROMPT, 16)
        got = decoder_logits(packed.decoder, PROMPT, 16)
        assert (got - want).abs().max() <= 2e-5 * want.abs().max(), form
        assert packed.bytes < 0.6 * plain.bytes, form
