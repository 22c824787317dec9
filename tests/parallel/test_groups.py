"""What ranks communicate, and what each rank reads from the checkpoint.

A layer takes an all-reduce for each block, and one for two blocks that read the same input. A rank
reads no more bytes than it keeps.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from gguf import GGMLQuantizationType

from bloomery.artifacts.locate import locate_model
from bloomery.describe import describe_model
from bloomery.families import resolve_tensor_names
from bloomery.hardware import find_hardware
from bloomery.layout import TensorParallelLayout
from bloomery.models.checkpoint import open_source
from bloomery.models.decoder import Decoder
from bloomery.models.weights import ModelWeights
from bloomery.parallel.groups import SINGLE_RANK, DeviceMesh, StagePipe
from bloomery.roofline import Roofline
from bloomery.spec import Mamba2Spec, MambaSpec
from tests.parity.cases import CASES, ParityCase, make_checkpoint
from tests.parity.gguf_writer import write_gguf
from tests.parity.serve import decoder_logits

CPU = torch.device("cpu")
# The everyday run takes the first case of each family.
FIRST_OF_FAMILY = {case.name.partition("-")[0]: case for case in reversed(CASES)}
CASE_PARAMS = [
    case if case in FIRST_OF_FAMILY.values() else pytest.param(case, marks=pytest.mark.slow)
    for case in CASES
]


class MessageCountingGroup:
    """A group whose other ranks do not exist: it counts messages and returns plausible shapes."""

    def __init__(self, size: int):
        self.rank = 0
        self.size = size
        self.num_all_reduces = 0
        self.num_all_gathers = 0

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self.num_all_reduces += 1
        return x

    def all_gather(self, x: torch.Tensor, total_width: int) -> torch.Tensor:
        self.num_all_gathers += 1
        return torch.cat([x] * self.size, -1)[:, :total_width]


class LoadedPart(NamedTuple):
    decoder: Decoder
    bytes_read: int
    bytes_stored: int  # of the whole checkpoint


def load_part(model: Path, group: MessageCountingGroup, layers: range | None = None) -> LoadedPart:
    """Load one rank's part of a model."""
    artifact = locate_model(str(model))
    description = describe_model(artifact)
    source = open_source(artifact)
    reads: list[int] = []
    source.advance = reads.append
    names = resolve_tensor_names(description, source)
    layout = TensorParallelLayout(group.rank, group.size)
    weights = ModelWeights(source, names, torch.float32, CPU, layout=layout)
    decoder = Decoder(description.model, weights, group, layers)
    return LoadedPart(decoder, sum(reads), source.nbytes)


@pytest.mark.parametrize("case", CASE_PARAMS, ids=lambda case: case.name)
def test_an_all_reduce_per_block_and_one_for_blocks_on_the_same_input(
    case: ParityCase, tmp_path: Path
) -> None:
    make_checkpoint(case, tmp_path)
    group = MessageCountingGroup(2)
    decoder = load_part(tmp_path, group).decoder
    decoder_logits(decoder, list(range(4)), 16)
    in_layers = 0
    for layer in decoder.full_spec.layers:
        blocks = [layer.attention, layer.recurrent, layer.mlp]
        in_layers += 1 if layer.parallel else 3 - blocks.count(None)
        in_layers -= case.name.startswith("falcon_h1")  # attention and Mamba-2 on the same input
        # dt, B and C of Mamba-1 are products of all channels.
        in_layers += isinstance(layer.recurrent, MambaSpec)
        # One norm of Mamba-2 may span the heads of both ranks.
        if isinstance(layer.recurrent, Mamba2Spec) and layer.recurrent.norm is not None:
            in_layers += layer.recurrent.norm_groups == 1
    in_embedding = 1
    assert group.num_all_reduces == in_embedding + in_layers
    assert group.num_all_gathers == 1
    roofline = Roofline(decoder.full_spec, find_hardware("h200"), tp=2)
    num_messages = group.num_all_reduces + group.num_all_gathers
    assert roofline.count_messages(4, 4)[0] == num_messages


@pytest.mark.parametrize("name", ["llama", "bloom", "mixtral", "falcon-40b", "gpt2", "llama.gguf"])
def test_a_tensor_parallel_rank_reads_only_its_shard(name: str, tmp_path: Path) -> None:
    stem = name.partition(".")[0]
    case = next(case for case in CASES if case.name == stem)
    checkpoint = make_checkpoint(case, tmp_path, times=4)  # wider than quantized blocks
    model = tmp_path
    if name.endswith(".gguf"):
        model = tmp_path / name
        write_gguf(checkpoint, model, GGMLQuantizationType.Q8_0)
    complete = load_part(model, MessageCountingGroup(1))
    assert complete.bytes_read <= complete.bytes_stored
    half = load_part(model, MessageCountingGroup(2))
    # Every rank reads norms, biases and routers, which are small.
    replicated_share = 0.15
    assert half.bytes_read >= complete.bytes_read / 2
    assert half.bytes_read <= complete.bytes_read * (0.5 + replicated_share)


def test_a_pipeline_stage_reads_only_its_layers(tmp_path: Path) -> None:
    make_checkpoint(next(case for case in CASES if case.name == "llama"), tmp_path)
    complete = load_part(tmp_path, MessageCountingGroup(1))
    num_layers = len(complete.decoder.spec.layers)
    stages = [
        load_part(tmp_path, MessageCountingGroup(1), layers).bytes_read
        for layers in (range(1), range(1, num_layers))
    ]
    assert sum(stages) == complete.bytes_read
    assert min(stages) > complete.bytes_read / (2 * num_layers)


def test_a_single_rank_communicates_nothing() -> None:
    x = torch.randn(3, 4)
    mesh = DeviceMesh()
    assert mesh.group is SINGLE_RANK
    assert mesh.group.all_reduce(x) is x
    assert mesh.group.all_gather(x, 4) is x
    assert mesh.min_over_ranks(7) == 7
    assert mesh.create_stage_pipe(4, torch.float32) is None
    assert mesh.is_driver


def test_only_the_first_rank_of_the_last_stage_is_the_driver() -> None:
    meshes = [
        DeviceMesh(group, stage, num_stages=2)
        for stage in range(2)
        for group in (rank_of_group(0), rank_of_group(1))
    ]
    assert [mesh.is_driver for mesh in meshes] == [False, False, True, False]


def rank_of_group(rank: int) -> MessageCountingGroup:
    group = MessageCountingGroup(2)
    group.rank = rank
    return group


def test_the_first_stage_receives_nothing_and_the_last_one_sends_nothing() -> None:
    pipe = StagePipe(None, None, 4, torch.float32)
    assert pipe.receive(3) is None
    pipe.send(torch.zeros(3, 4))
