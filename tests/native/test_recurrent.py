"""The native kernels of recurrent mixers, against their torch references."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from bloomery.fusion import NormPrologue
from bloomery.kernels.gated_delta_net import DeltaNetWeights
from bloomery.kernels.mamba2 import Mamba2Weights
from bloomery.kernels.short_conv import ShortConvWeights
from bloomery.kernels.state_cache import LayerStates, view_states
from bloomery.layers.linear import LinearLayer
from bloomery.layers.recurrent import (
    DeltaNetMixer,
    Mamba2Mixer,
    MambaMixer,
    RecurrentMixer,
    ShortConvMixer,
    find_native_states,
)
from bloomery.native.thread_pool import ThreadPool, TraceArena
from bloomery.native.trace import record_trace
from bloomery.quant.dense import DenseWeight
from bloomery.spec import (
    GatedDeltaNetSpec,
    Mamba2Spec,
    MambaSpec,
    RecurrentSpec,
    ShortConvSpec,
    state_parts,
)
from tests.kernels.recurrent_cases import MixerWeights, RecurrentCase, make_case, make_metadata

SPECS: dict[str, RecurrentSpec] = {
    "delta net": GatedDeltaNetSpec(2, 4, 16, 40, beta_scale=2.0),
    "tiled delta net": GatedDeltaNetSpec(2, 6, 8, 64, tiled_heads=True),
    "mamba2": Mamba2Spec(4, 12, 16, num_groups=2, norm_groups=2),
    "scaled mamba2": Mamba2Spec(
        4, 8, 24, norm=None, dt_limit=(0.01, 0.2), part_scales=(0.5, 2.0, 0.25, 1.5, 0.75)
    ),
    "mamba2, gate last": Mamba2Spec(4, 8, 8, conv_bias=False, gate_after_norm=True),
    "odd delta net": GatedDeltaNetSpec(2, 4, 10, 37),
    "odd mamba2": Mamba2Spec(3, 7, 11),
    "short conv": ShortConvSpec(70, bias=True),
}
STEPS: dict[str, tuple[Sequence[int], Sequence[int]]] = {
    "decodes": ([1, 1, 1], [1, 2, 9]),
    "mixed": ([1, 1, 9, 5], [7, 1, 12, 5]),
}


def build_mixer(
    spec: RecurrentSpec, weights: MixerWeights, pool: ThreadPool | None
) -> RecurrentMixer:
    match spec, weights:
        case GatedDeltaNetSpec(), DeltaNetWeights():
            return DeltaNetMixer(spec, weights, pool)
        case Mamba2Spec(), Mamba2Weights():
            norm_weight = None
            if spec.norm is not None:
                norm_weight = torch.rand(spec.num_heads * spec.head_dim)
            return Mamba2Mixer(spec, weights, norm_weight, None, pool)
        case ShortConvSpec(), ShortConvWeights():
            return ShortConvMixer(spec, weights, pool)
    raise TypeError(f"no mixer of {spec}")


def run_mixer(mixer: RecurrentMixer, case: RecurrentCase) -> tuple[torch.Tensor, ...]:
    """Outputs, then each part of the states after the step."""
    memory = case.states.memory.clone()
    states = LayerStates(memory, case.states.metadata)
    out = mixer(case.projected, states)
    views = view_states(memory, case.states.metadata.state_pieces, state_parts(case.spec))
    return out, *(view.read() for view in views)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", SPECS)
def test_native_mixers_match_torch(name: str, step: str, pool: ThreadPool) -> None:
    torch.manual_seed(0)
    case = make_case(SPECS[name], *STEPS[step])
    assert find_native_states(pool, case.projected, case.states) is not None
    native = build_mixer(case.spec, case.weights, pool)
    expected = run_mixer(replace_pool(native), case)
    for actual, reference in zip(run_mixer(native, case), expected, strict=True):
        assert torch.allclose(actual, reference, atol=2e-5, rtol=1e-4)


def replace_pool(mixer: RecurrentMixer) -> RecurrentMixer:
    """The same mixer in torch."""
    assert isinstance(mixer, DeltaNetMixer | Mamba2Mixer | ShortConvMixer)
    return replace(mixer, pool=None)


@pytest.mark.parametrize("name", SPECS)
def test_traced_decodes_continue_from_the_states(name: str, pool: ThreadPool) -> None:
    torch.manual_seed(0)
    case = make_case(SPECS[name], [1, 1], [4, 9])
    mixer = build_mixer(case.spec, case.weights, pool)
    out = torch.zeros(0)

    def step() -> None:
        nonlocal out
        out = mixer(case.projected, case.states)

    trace = record_trace(pool, step, TraceArena(1 << 20))
    initial = case.states.memory.clone()
    trace.replay()
    first = out.clone()
    after_first = case.states.memory.clone()
    case.states.metadata.seq_lens.add_(1)
    trace.replay()
    reference = replace_pool(mixer)
    case.states.metadata.seq_lens.sub_(1)
    expected_first = run_mixer(reference, replace_memory(case, initial))[0]
    assert torch.allclose(first, expected_first, atol=2e-5, rtol=1e-4)
    metadata = case.states.metadata
    later = replace(
        metadata,
        seq_lens=metadata.seq_lens + 1,
        host_seq_lens=tuple(length + 1 for length in metadata.host_seq_lens),
    )
    second = replace(case, states=LayerStates(after_first, later))
    assert torch.allclose(out, run_mixer(reference, second)[0], atol=2e-5, rtol=1e-4)


def replace_memory(case: RecurrentCase, memory: torch.Tensor) -> RecurrentCase:
    return replace(case, states=replace(case.states, memory=memory))


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("with_norms", [False, True])
def test_native_mamba_matches_torch(with_norms: bool, step: str, pool: ThreadPool) -> None:
    torch.manual_seed(0)
    spec = MambaSpec(24, 7, 3)
    query_lens, seq_lens = STEPS[step]
    tokens = sum(query_lens)
    num_sequences = len(query_lens)
    sizes = (spec.dt_rank, spec.state_size, spec.state_size)
    blocks_per_state = 12  # of 28 values: 4 for the convolution, 8 for the scan
    blocks = torch.randperm(12 * num_sequences).view(num_sequences, blocks_per_state)
    memory = torch.randn(12 * num_sequences, 28)
    metadata = make_metadata(query_lens, seq_lens, blocks)

    def linear(outputs: int, inputs: int, bias: bool) -> LinearLayer:
        weight = DenseWeight(torch.randn(outputs, inputs) * 0.3)
        return LinearLayer(weight, torch.randn(outputs) if bias else None)

    mixer = MambaMixer(
        spec,
        torch.randn(spec.inner, spec.conv_width),
        torch.randn(spec.inner),
        linear(sum(sizes), spec.inner, False),
        linear(spec.inner, spec.dt_rank, True),
        -torch.rand(spec.inner, spec.state_size),
        torch.randn(spec.inner),
        (
            NormPrologue("rms", torch.rand(sizes[0]), None, 1e-6) if with_norms else None,
            NormPrologue("rms", torch.rand(sizes[1]), None, 1e-6) if with_norms else None,
            NormPrologue("rms", torch.rand(sizes[2]), None, 1e-6) if with_norms else None,
        ),
        pool,
    )
    projected = torch.randn(tokens, 2 * spec.inner)
    results = []
    for used in (mixer, replace(mixer, pool=None)):
        own_memory = memory.clone()
        out = used(projected, LayerStates(own_memory, metadata))
        views = view_states(own_memory, blocks, state_parts(spec))
        results.append((out, *(view.read() for view in views)))
    for actual, expected in zip(*results, strict=True):
        assert torch.allclose(actual, expected, atol=2e-5, rtol=1e-4)
