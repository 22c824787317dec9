"""The Triton kernels of recurrent mixers under the interpreter, against their torch references."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from bloomery.kernels.gated_delta_net import gated_delta_net_reference, gated_delta_net_triton
from bloomery.kernels.launch import triton_interpreted
from bloomery.kernels.state_cache import view_states
from bloomery.spec import GatedDeltaNetSpec, state_parts
from tests.kernels.oracles import ERROR_LIMITS, relative_error, run_in_poisoned_memory
from tests.kernels.recurrent_cases import RecurrentCase, RunMixer, make_case

pytestmark = pytest.mark.skipif(
    not triton_interpreted(), reason="kernels run on the CPU only under TRITON_INTERPRET=1"
)

# New positions and lengths of the sequences of a step.
STEPS: dict[str, tuple[Sequence[int], Sequence[int]]] = {
    "decodes": ([1, 1, 1], [1, 2, 9]),
    "mixed": ([1, 1, 70, 5], [7, 1, 75, 5]),
}


def assert_matches(case: RecurrentCase, kernel: RunMixer, reference: RunMixer) -> None:
    """Outputs and states of the kernel must be those of the reference."""
    expected, expected_memory = case.run(reference)
    captured = case.without_host_lengths()
    result, memory = run_in_poisoned_memory(lambda: captured.run(kernel))
    limit = ERROR_LIMITS[case.projected.dtype]
    assert relative_error(result, expected) < limit
    blocks = case.states.metadata.state_blocks
    parts = state_parts(case.spec)
    for view, expected_view in zip(
        view_states(memory, blocks, parts), view_states(expected_memory, blocks, parts), strict=True
    ):
        assert relative_error(view.read(), expected_view.read()) < limit


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("tiled", [False, True])
def test_gated_delta_net(step: str, tiled: bool) -> None:
    torch.manual_seed(0)
    spec = GatedDeltaNetSpec(2, 4, 16, 24, beta_scale=2.0, tiled_heads=tiled)
    case = make_case(spec, *STEPS[step])
    assert_matches(case, gated_delta_net_triton, gated_delta_net_reference)
