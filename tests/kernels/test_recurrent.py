"""The Triton kernels of recurrent mixers under the interpreter, against their torch references."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch

from bloomery.kernels.delta_net_kernels import DeltaNetTiling
from bloomery.kernels.gated_delta_net import gated_delta_net_reference, gated_delta_net_triton
from bloomery.kernels.launch import triton_interpreted
from bloomery.kernels.mamba import selective_scan_reference, selective_scan_triton
from bloomery.kernels.mamba2 import gate_mamba2_reference, mamba2_reference, mamba2_triton
from bloomery.kernels.mamba2_kernels import gate_mamba2_triton
from bloomery.kernels.short_conv import short_conv_reference, short_conv_triton
from bloomery.kernels.state_cache import LayerStates, StateView, view_states
from bloomery.spec import (
    GatedDeltaNetSpec,
    Mamba2Spec,
    RecurrentSpec,
    ShortConvSpec,
    StatePart,
    state_parts,
)
from tests.kernels.oracles import ERROR_LIMITS, relative_error, run_in_poisoned_memory
from tests.kernels.recurrent_cases import RecurrentCase, RunMixer, make_case, make_metadata

pytestmark = pytest.mark.skipif(
    not triton_interpreted(), reason="kernels run on the CPU only under TRITON_INTERPRET=1"
)

# New positions and lengths of the sequences of a step.
STEPS: dict[str, tuple[Sequence[int], Sequence[int]]] = {
    "decodes": ([1, 1, 1], [1, 2, 9]),
    "many": ([1, *[2] * 17, 5], [3, *[5] * 17, 5]),
    "mixed": ([1, 1, 70, 5], [7, 1, 75, 5]),
}


def assert_matches(case: RecurrentCase, kernel: RunMixer, reference: RunMixer) -> None:
    """Outputs and states of the kernel must be those of the reference."""
    expected, expected_memory = case.run(reference)
    captured = case.without_host_lengths()
    result, memory = run_in_poisoned_memory(lambda: captured.run(kernel))
    limit = ERROR_LIMITS[case.projected.dtype]
    assert relative_error(result, expected) < limit
    blocks = case.states.metadata.state_pieces
    parts = state_parts(case.spec)
    for view, expected_view in zip(
        view_states(memory, blocks, parts), view_states(expected_memory, blocks, parts), strict=True
    ):
        assert relative_error(view.read(), expected_view.read()) < limit


@pytest.mark.parametrize(
    ("step", "tiled"), [("decodes", False), ("mixed", True), ("mixed", False), ("many", False)]
)
def test_gated_delta_net(step: str, tiled: bool) -> None:
    torch.manual_seed(0)
    spec = GatedDeltaNetSpec(2, 4, 16, 24, beta_scale=2.0, tiled_heads=tiled)
    case = make_case(spec, *STEPS[step])
    assert_matches(case, gated_delta_net_triton, gated_delta_net_reference)


def test_gated_delta_net_by_slices() -> None:
    """Steps of many decodes take a state in slices."""
    torch.manual_seed(0)
    case = make_case(GatedDeltaNetSpec(2, 4, 16, 24, beta_scale=2.0), *STEPS["decodes"])
    tiling = DeltaNetTiling(many_decodes=1, decode_slice=8)
    mixer = partial(gated_delta_net_triton, tiling=tiling)
    assert_matches(case, mixer, gated_delta_net_reference)


@pytest.mark.parametrize(
    ("step", "is_scaled"), [("decodes", True), ("mixed", True), ("mixed", False), ("many", False)]
)
def test_mamba2(step: str, is_scaled: bool) -> None:
    torch.manual_seed(0)
    spec = Mamba2Spec(4, 24, 16, num_groups=2)
    if is_scaled:
        spec = Mamba2Spec(
            2, 16, 20, conv_bias=False, dt_limit=(0.02, 0.3), part_scales=(1.0, 2.0, 0.5, 0.25, 2.0)
        )
    case = make_case(spec, *STEPS[step])
    assert_matches(case, mamba2_triton, mamba2_reference)


@pytest.mark.parametrize(
    "spec",
    [
        Mamba2Spec(4, 6, 8, norm_groups=2, part_scales=(0.5, 1.0, 1.0, 1.0, 1.0)),
        Mamba2Spec(4, 6, 8, gate_after_norm=True),
        Mamba2Spec(4, 6, 8, norm=None),
    ],
)
def test_gate_of_mamba2(spec: Mamba2Spec) -> None:
    torch.manual_seed(0)
    projected = torch.randn(3, 40)
    y = torch.randn(3, 24)
    weight = None if spec.norm is None else torch.rand(24)
    expected = gate_mamba2_reference(y, projected[:, :24], spec, weight)
    result = run_in_poisoned_memory(lambda: gate_mamba2_triton(y, projected, spec, weight))
    assert relative_error(result, expected) < ERROR_LIMITS[torch.float32]


@pytest.mark.parametrize("step", STEPS)
def test_short_conv(step: str) -> None:
    torch.manual_seed(0)
    case = make_case(ShortConvSpec(150, bias=True), *STEPS[step])
    assert_matches(case, short_conv_triton, short_conv_reference)


@pytest.mark.parametrize(
    ("spec", "kernel", "reference"),
    [
        (GatedDeltaNetSpec(2, 4, 16, 24), gated_delta_net_triton, gated_delta_net_reference),
        (Mamba2Spec(4, 24, 16, num_groups=2), mamba2_triton, mamba2_reference),
        (ShortConvSpec(150), short_conv_triton, short_conv_reference),
    ],
    ids=["delta-net", "mamba2", "short-conv"],
)
def test_positions_of_other_waves_change_no_state(
    spec: RecurrentSpec, kernel: RunMixer, reference: RunMixer
) -> None:
    """Decodes in two waves are those in one. A sequence without a length is in the other wave."""
    torch.manual_seed(0)
    case = make_case(spec, [1] * 4, [1, 2, 9, 5])
    expected, expected_memory = case.run(reference)
    metadata = case.without_host_lengths().states.metadata
    memory = case.states.memory.clone()
    result = torch.empty_like(expected)
    for indices in ([1, 2], [0, 3]):
        seq_lens = torch.zeros_like(metadata.seq_lens)
        seq_lens[indices] = metadata.seq_lens[indices]
        states = LayerStates(memory, replace(metadata, seq_lens=seq_lens))
        result[indices] = kernel(case.projected, spec, case.weights, states)[indices]
    limit = ERROR_LIMITS[case.projected.dtype]
    assert relative_error(result, expected) < limit
    blocks = metadata.state_pieces
    for view, expected_view in zip(
        view_states(memory, blocks, state_parts(spec)),
        view_states(expected_memory, blocks, state_parts(spec)),
        strict=True,
    ):
        assert relative_error(view.read(), expected_view.read()) < limit


def test_selective_scan() -> None:
    torch.manual_seed(0)
    inner, size = 40, 6
    query_lens, seq_lens = STEPS["mixed"]
    tokens = sum(query_lens)
    part = StatePart(inner, size)
    blocks = torch.randperm(4 * 10)[: 4 * 8].view(4, 8)
    memory = torch.randn(40, 5 * size + 2)
    metadata = make_metadata(query_lens, seq_lens, blocks)
    x, gate = torch.randn(tokens, 2 * inner).chunk(2, -1)
    dt = torch.rand(tokens, inner)
    b, c = torch.randn(2, tokens, size)
    inputs = (x.contiguous(), dt, b, c, gate, -torch.rand(inner, size), torch.randn(inner))
    results = []
    for scan in (selective_scan_triton, selective_scan_reference):
        view = StateView(memory.clone(), blocks, part)
        results.append((scan(*inputs, view, metadata), view.read()))
    for result, expected in zip(*results, strict=True):
        assert relative_error(result, expected) < ERROR_LIMITS[torch.float32]
