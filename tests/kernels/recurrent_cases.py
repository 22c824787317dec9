"""Random mixers and states, shared by the tests and benchmarks of recurrent kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from bloomery.fusion import NormPrologue
from bloomery.kernels.gated_delta_net import DeltaNetWeights
from bloomery.kernels.mamba2 import Mamba2Weights
from bloomery.kernels.short_conv import ShortConvWeights
from bloomery.kernels.state_cache import LayerStates, RecurrentMetadata, count_part_blocks
from bloomery.layout import conv_sizes
from bloomery.models.recurrent import build_factors
from bloomery.spec import (
    GatedDeltaNetSpec,
    Mamba2Spec,
    RecurrentSpec,
    ShortConvSpec,
    recurrent_in_sizes,
    state_parts,
)

MixerWeights = DeltaNetWeights | Mamba2Weights | ShortConvWeights
# Runs a mixer over a step: projected inputs, spec, weights, states -> outputs.
RunMixer = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class RecurrentCase:
    """A step over states that hold NaN where no sequence continues from them."""

    spec: RecurrentSpec
    weights: MixerWeights
    projected: torch.Tensor  # [tokens, input rows]
    states: LayerStates

    def run(self, mixer: RunMixer) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a mixer over a copy of the states; returns its outputs and the memory after it."""
        memory = self.states.memory.clone()
        states = replace(self.states, memory=memory)
        return mixer(self.projected, self.spec, self.weights, states), memory

    def without_host_lengths(self) -> RecurrentCase:
        """The same step as a CUDA graph sees it: only the device knows its lengths."""
        metadata = replace(self.states.metadata, host_query_lens=(), host_seq_lens=())
        return replace(self, states=replace(self.states, metadata=metadata))


def make_weights(spec: RecurrentSpec, device: str) -> MixerWeights:
    """Random weights with decays as trained models have them."""
    channels = sum(conv_sizes(spec))
    conv = torch.randn(channels, spec.conv_width, device=device) * 0.4
    bias = torch.randn(channels, device=device) * 0.1
    match spec:
        case GatedDeltaNetSpec():
            heads = spec.num_value_heads
            norm = NormPrologue("rms", torch.rand(spec.value_dim, device=device), None, 1e-6)
            decay = -torch.rand(heads, device=device) * 2
            return DeltaNetWeights(conv, decay, torch.randn(heads, device=device) - 2, norm)
        case Mamba2Spec():
            heads = spec.num_heads
            return Mamba2Weights(
                conv,
                bias if spec.conv_bias else None,
                -torch.rand(heads, device=device) * 2,
                torch.randn(heads, device=device) - 2,
                torch.randn(heads, device=device),
                build_factors(spec, torch.device(device)),
            )
        case ShortConvSpec():
            return ShortConvWeights(conv, bias if spec.bias else None)
    raise TypeError(f"no random weights for {spec}")


def make_metadata(
    query_lens: Sequence[int], seq_lens: Sequence[int], state_pieces: torch.Tensor
) -> RecurrentMetadata:
    """The layout of a step; sequences with one new position come first."""
    dtype = state_pieces.dtype
    device = state_pieces.device
    return RecurrentMetadata(
        num_decodes=list(query_lens).count(1),
        query_start_loc=torch.tensor([0, *accumulate(query_lens)], dtype=dtype, device=device),
        seq_lens=torch.tensor(seq_lens, dtype=dtype, device=device),
        state_pieces=state_pieces,
        host_query_lens=tuple(query_lens),
        host_seq_lens=tuple(seq_lens),
    )


def make_case(
    spec: RecurrentSpec,
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    block_rows: int = 3,
    spare_values: int = 4,
) -> RecurrentCase:
    """Build a step of sequences of `seq_lens` positions, of which the last `query_lens` are new.

    A block holds about `block_rows` rows of the widest part, and `spare_values` more values. Blocks
    are assigned at random.
    """
    parts = state_parts(spec)
    block_values = block_rows * max(part.width for part in parts) + spare_values
    blocks_per_state = sum(count_part_blocks(part, block_values) for part in parts)
    num_blocks = len(query_lens) * blocks_per_state
    index_dtype = torch.int64 if device == "cpu" else torch.int32
    shuffled = torch.randperm(num_blocks + 2)[:num_blocks].to(device, index_dtype)
    state_pieces = shuffled.view(len(query_lens), blocks_per_state)
    memory = torch.full((num_blocks + 2, block_values), torch.nan, device=device)
    for blocks, query_len, seq_len in zip(state_pieces, query_lens, seq_lens, strict=True):
        if seq_len > query_len:
            values = torch.randn(blocks_per_state, block_values, device=device) * 0.3
            memory[blocks.long()] = values
    projected = torch.randn(sum(query_lens), sum(recurrent_in_sizes(spec)), device=device)
    metadata = make_metadata(query_lens, seq_lens, state_pieces)
    weights = make_weights(spec, device)
    return RecurrentCase(spec, weights, projected.to(dtype), LayerStates(memory, metadata))
