"""What ranks say to each other: at most two sums a layer, one where both blocks share a residual, and no more bytes
read from the checkpoint than a rank keeps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from bloomery.artifacts.locate import locate
from bloomery.attention.base import AttentionMetadata, cache_shape
from bloomery.attention.torch_paged import TorchPaged
from bloomery.describe import description
from bloomery.families import as_stored
from bloomery.layout import Layout
from bloomery.models.checkpoint import open_source
from bloomery.models.decoder import Decoder
from bloomery.models.weights import Weights
from bloomery.roofline import Roofline, machine
from tests.parity.cases import CASES, Case, make_checkpoint
from tests.parity.gguf_writer import write


class Counting:
    """A rank that hears only itself, and counts what it would have said."""

    def __init__(self, size: int):
        self.rank = 0
        self.size = size
        self.sums = 0
        self.joins = 0

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        self.sums += 1
        return x

    def join(self, x: torch.Tensor, total: int) -> torch.Tensor:
        self.joins += 1
        return torch.cat([x] * self.size, -1)[:, :total]


def part_of(model: Path, group: Counting, layers: range | None = None) -> tuple[Decoder, int, int]:
    """A rank's part of a model, how many bytes were read for it, and how many there are."""
    artifact = locate(str(model))
    found = description(artifact)
    source = open_source(artifact)
    read: list[int] = []
    source.advance = read.append
    names = as_stored(found.names, source.names())
    weights = Weights(
        source, names, torch.float32, torch.device("cpu"), layout=Layout(group.rank, group.size)
    )
    return Decoder(found.model, weights, group, layers), sum(read), source.nbytes


@torch.inference_mode()
def forward(decoder: Decoder) -> None:
    decoder.reach(16)
    backend = TorchPaged()
    n = 4
    caches = [torch.zeros(cache_shape(layer.attention, 1, 16)) for layer in decoder.spec.layers]
    every = torch.arange(n)
    step = AttentionMetadata(
        (n,),
        (n,),
        0,
        torch.tensor([0, n]),
        torch.tensor([n]),
        every,
        every,
        torch.zeros(1, 1).long(),
        16,
    )
    decoder.logits(decoder(every, every, every, caches, backend, backend.plan(step)))


# Of each family the first, and all in the long form.
FIRST = {case.name.partition("-")[0]: case for case in reversed(CASES)}.values()
ALL = [case if case in FIRST else pytest.param(case, marks=pytest.mark.slow) for case in CASES]


@pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
def test_two_sums_a_layer_and_one_where_blocks_are_parallel(case: Case, tmp_path: Path) -> None:
    make_checkpoint(case, tmp_path)
    group = Counting(2)
    decoder, _, _ = part_of(tmp_path, group)
    forward(decoder)
    layers = sum(1 if layer.parallel else 2 for layer in decoder.spec.layers)
    assert (group.sums, group.joins) == (1 + layers, 1)  # one for the embedding
    assert (
        Roofline(decoder.whole, machine("h200"), tp=2).messages(4, 4)[0] == group.sums + group.joins
    )


@pytest.mark.parametrize("name", ["llama", "bloom", "mixtral", "falcon-40b", "gpt2", "llama.gguf"])
def test_a_rank_reads_only_its_slices(name: str, tmp_path: Path) -> None:
    stem = name.partition(".")[0]
    file = tmp_path / name
    made = make_checkpoint(
        next(case for case in CASES if case.name == stem), tmp_path, times=4
    )  # wider than blocks
    if file.suffix:
        write(made, file, Kind.Q8_0)
    model = file if file.suffix else tmp_path
    _, all_of_it, stored = part_of(model, Counting(1))
    assert all_of_it <= stored
    _, half, _ = part_of(model, Counting(2))
    vectors = 0.15  # norms, biases and routers are small, and everybody's
    assert all_of_it / 2 <= half <= all_of_it * (0.5 + vectors)


def test_a_stage_reads_only_its_layers(tmp_path: Path) -> None:
    make_checkpoint(next(case for case in CASES if case.name == "llama"), tmp_path)
    decoder, all_of_it, _ = part_of(tmp_path, Counting(1))
    count = len(decoder.spec.layers)
    parts = [part_of(tmp_path, Counting(1), layers)[1] for layers in (range(1), range(1, count))]
    assert sum(parts) == all_of_it and min(parts) > all_of_it / (2 * count)
