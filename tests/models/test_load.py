"""Loading a model: what its notes report to the operator."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from bloomery.artifacts.locate import locate_model
from bloomery.errors import UnsupportedModel
from bloomery.kernels.gemv import precompute_norm_shift
from bloomery.layers.mlp import MlpBlock
from bloomery.models.load import LoadedModel, load_model
from bloomery.parallel.groups import DeviceMesh, SingleRank
from bloomery.quant.dense import DenseWeight
from tests.parity.cases import CASES, make_checkpoint
from tests.parity.serve import decoder_logits


class SecondRank(SingleRank):
    """The second of two tensor parallel ranks; loading a model communicates nothing."""

    rank = 1
    size = 2


def load_rank(folder: Path, mesh: DeviceMesh) -> LoadedModel:
    artifact = locate_model(str(folder))
    return load_model(artifact, "auto", torch.float32, torch.device("cpu"), mesh=mesh)


@pytest.mark.parametrize("name", ["bloom", "gpt_oss"])
def test_a_rank_reports_unused_tensors_but_not_the_biases_of_another_rank(
    name: str, tmp_path: Path
) -> None:
    make_checkpoint(next(case for case in CASES if case.name == name), tmp_path)
    for mesh in (DeviceMesh(), DeviceMesh(SecondRank(), rank=1, world_size=2)):
        notes = load_rank(tmp_path, mesh).notes
        assert not any("not part of the model" in note for note in notes)
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {"other.bias": torch.ones(8)}, file, {"format": "pt"})
    notes = load_rank(tmp_path, mesh).notes
    assert any("1 tensors of the checkpoint are not part" in note for note in notes)


@pytest.mark.parametrize("name", ["gpt2", "stablelm"])
def test_products_behind_layer_norms_are_prepared_before_the_first_step(
    name: str, tmp_path: Path
) -> None:
    """A CUDA graph that computed this while it was captured would read what nothing had written."""
    make_checkpoint(next(case for case in CASES if case.name == name), tmp_path)
    for layer in load_rank(tmp_path, DeviceMesh()).decoder.layers:
        assert layer.attention is not None and isinstance(layer.mlp, MlpBlock)
        for linear, norm in (
            (layer.attention.qkv, layer.attn_norm),
            (layer.mlp.up, layer.mlp_norm),
        ):
            assert norm is not None and isinstance(linear.matrix, DenseWeight)
            shift = linear.matrix.norm_shifts[id(norm)]
            expected = precompute_norm_shift(linear.matrix.weight, norm)
            assert torch.equal(shift, expected)


def test_layers_have_one_copy_of_what_they_share(tmp_path: Path) -> None:
    case = next(case for case in CASES if case.name == "zamba2-adapted")
    model = make_checkpoint(case, tmp_path)
    loaded = load_rank(tmp_path, DeviceMesh())
    layers = [layer for layer in loaded.decoder.layers if layer.shared_block is not None]
    weights = [
        (layer.attention.qkv, layer.attention.out, layer.mlp.up, layer.mlp.down)
        for layer in layers
        if layer.attention is not None and isinstance(layer.mlp, MlpBlock)
    ]
    first, second, third = weights  # two blocks take turns
    assert all(a.matrix is b.matrix for a, b in zip(first, third))
    assert not any(a.matrix is b.matrix for a, b in zip(first, second))
    ups = [up.low_rank.up.matrix for _, _, up, _ in weights if up.low_rank is not None]
    assert len(set(map(id, ups))) == 3
    # The block-diagonal matrix of q, k and v has two zeros for each of their [32, 4] values.
    zeros = len(layers) * 2 * 3 * 32 * 4
    num_values = sum(parameter.numel() for parameter in model.parameters()) + zeros
    assert loaded.weight_bytes == 4 * num_values


@pytest.mark.parametrize("tied", [True, False])
def test_shared_tensors_may_be_those_of_any_layer(tied: bool, tmp_path: Path) -> None:
    """Tools keep the tensors of one layer; without tied embeddings transformers keeps all."""
    case = next(case for case in CASES if case.name == "zamba2-adapted")
    config = case.config()
    config.tie_word_embeddings = tied
    model = make_checkpoint(replace(case, config=lambda: config), tmp_path)
    tokens = list(range(5, 17))
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0]
    assert_close(load_rank(tmp_path, DeviceMesh()), tokens, expected)
    if not tied:
        return
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    moved = {
        name.replace("layers.1.shared", "layers.4.shared"): tensor
        for name, tensor in tensors.items()
    }
    save_file(moved, file, {"format": "pt"})
    loaded = load_rank(tmp_path, DeviceMesh())
    assert not any("not part of the model" in note for note in loaded.notes)
    assert_close(loaded, tokens, expected)
    bare = {name.removeprefix("model."): tensor for name, tensor in moved.items()}
    save_file(bare, file, {"format": "pt"})
    assert_close(load_rank(tmp_path, DeviceMesh()), tokens, expected)


def assert_close(loaded: LoadedModel, tokens: list[int], expected: torch.Tensor) -> None:
    actual = decoder_logits(loaded.decoder, tokens, 32)
    assert (actual - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_models_without_any_attention_are_refused(tmp_path: Path) -> None:
    case = next(case for case in CASES if case.name == "lfm2")
    make_checkpoint(case, tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text()) | {"layer_types": ["conv"] * 3}
    file.write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match="none of the layers has attention"):
        load_rank(tmp_path, DeviceMesh())
