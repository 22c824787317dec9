"""Finding kernels ahead: the few layers that are captured launch what all layers launch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bloomery.artifacts.locate import locate_model
from bloomery.attention.torch_paged import TorchPagedAttention
from bloomery.models.decoder import Decoder
from bloomery.models.load import load_model
from bloomery.runtime.activation_memory import LargestStep
from bloomery.runtime.kernel_discovery import (
    describe_structure,
    keep_layers,
    select_distinct_layers,
)
from tests.parity.cases import CASES, make_checkpoint
from tests.parity.serve import build_plan, decoder_logits

CPU = torch.device("cpu")
IDS = [3, 1, 4, 1, 5, 9]


def load_case(name: str, folder: Path) -> Decoder:
    make_checkpoint(next(case for case in CASES if case.name == name), folder)
    return load_model(locate_model(str(folder)), "auto", torch.float32, CPU).decoder


def test_two_layers_of_each_structure_and_the_last_are_kept(tmp_path: Path) -> None:
    decoder = load_case("llama", tmp_path)
    deep = keep_layers(decoder, [0, 1, 0, 1, 0, 1])  # the same weights, in a deeper model
    assert select_distinct_layers(deep) == [0, 1, 5]
    other = replace(deep.layers[3], spec=replace(deep.layers[3].spec, residual_scale=0.5))
    deep.layers[3] = other
    assert select_distinct_layers(deep) == [0, 1, 3, 5]


def test_layers_of_different_attention_are_told_apart(tmp_path: Path) -> None:
    decoder = load_case("gemma2", tmp_path)  # its layers alternate between window and no window
    deep = keep_layers(decoder, [0, 1] * 4)
    assert select_distinct_layers(deep) == [0, 1, 2, 3, 7]


def test_structure_is_types_and_shapes_and_not_values() -> None:
    ones = torch.ones(2, 3)
    assert describe_structure([ones, 1]) == describe_structure([torch.zeros(2, 3), 1])
    assert describe_structure([ones, 1]) != describe_structure([ones, 2])
    assert describe_structure(ones) != describe_structure(ones.half())
    assert describe_structure(ones) != describe_structure(torch.ones(3, 2).T)
    hash(describe_structure({"unhashable": ones}))


@pytest.mark.parametrize("name", ["llama", "gemma2", "mixtral"])
def test_a_decoder_of_few_layers_runs_and_leaves_the_original_alone(
    name: str, tmp_path: Path
) -> None:
    decoder = load_case(name, tmp_path)
    expected = decoder_logits(decoder, IDS, len(IDS))
    small = keep_layers(decoder, [0])
    assert len(small.layers) == len(small.spec.layers) == 1
    assert not torch.equal(decoder_logits(small, IDS, len(IDS)), expected)
    assert torch.equal(decoder_logits(decoder, IDS, len(IDS)), expected)


def test_the_listed_works_run_as_often_as_wanted(tmp_path: Path) -> None:
    decoder = load_case("llama", tmp_path)
    max_len = 40
    plan = replace(
        build_plan(tmp_path, max_len), max_num_batched_tokens=128, max_num_seqs=4, block_size=4
    )
    decoder.build_rope_cache(max_len)
    step = LargestStep(decoder, TorchPagedAttention(), plan, torch.float32)
    works = list(step.list_works(captured_tokens=8))
    # Two sizes of the model, attention at two lengths and over short prompts.
    assert len(works) == 5
    for work in works:
        work()
        work()
