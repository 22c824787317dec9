"""The prefill attention kernel under the interpreter: captured steps, and splits of the keys.

tests/kernels/test_paged_decode.py has the cases with decodes and prefills in one step.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from bloomery.attention.triton_paged import NUM_SPLIT_COUNTERS, TritonPagedAttention
from bloomery.kernels.launch import triton_interpreted
from bloomery.kernels.paged_prefill import (
    MAX_SPLITS,
    PagedPrefillTiling,
    select_prefill_tiling,
)
from bloomery.spec import AttentionGateSpec, AttentionSpec
from tests.kernels.oracles import make_attention_case, relative_error
from tests.kernels.test_paged_decode import WITH_HEAD_GROUPS, WITH_SPLITS

pytestmark = [
    pytest.mark.skipif(
        not triton_interpreted(), reason="kernels run on the CPU only under TRITON_INTERPRET=1"
    ),
    # Padding rows divide by zero.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


@pytest.mark.parametrize("backend", [WITH_SPLITS, WITH_HEAD_GROUPS])
def test_prefills_of_a_captured_step_may_be_empty_or_padding(
    backend: TritonPagedAttention,
) -> None:
    """Two decode rows, one of them padding; prefills of 7, 0, 5 and 3 tokens, the last padding."""
    spec = AttentionSpec(4, 2, 16)
    case = make_attention_case(spec, [1, 7, 5], [20, 30, 5], 16, torch.float32, "cpu")
    metadata = case.metadata
    q = torch.cat((case.q, torch.randn(3, 4, 16)))
    captured = replace(
        metadata,
        host_query_lens=(),
        host_seq_lens=(),
        num_decodes=2,
        num_prefills=4,
        query_start_loc=torch.tensor([0, 1, 1, 8, 8, 13, 16]),
        block_tables=metadata.block_tables[[0, 0, 1, 0, 2, 0]],
        seq_lens=torch.tensor([20, 0, 30, 0, 5, 0]),
        positions=F.pad(metadata.positions, (0, 3)),
    )
    plan = backend.prepare(captured)
    actual = backend.attend(q, case.cache, spec, plan)
    assert relative_error(actual[:13], case.expected()) < 1e-6
    assert not actual[13:].any()
    assert not plan.split_counters.any()


def test_prefills_are_split_if_they_are_too_few_for_the_device() -> None:
    def splits(tokens: int, heads: int, kv_heads: int, prefills: int = 1) -> int:
        rows = tokens * heads // kv_heads
        return select_prefill_tiling(rows // prefills, rows, 128, 2, kv_heads, 132).splits

    assert splits(32, 32, 8) == MAX_SPLITS
    assert splits(128, 32, 8) == 4
    assert splits(256, 32, 8) == 2
    assert splits(384, 32, 8) == 1
    assert splits(64, 48, 1) == 5
    assert splits(256, 48, 1) == 1
    assert splits(8192, 48, 1) == 1
    assert splits(8192, 48, 1, prefills=256) == 1


@pytest.mark.parametrize("min_tiles", [1, 3, 50])
@pytest.mark.parametrize(
    "spec",
    [
        AttentionSpec(4, 2, 16),
        AttentionSpec(4, 2, 16, window=20),
        AttentionSpec(4, 2, 16, sinks=True, chunk=24),
        AttentionSpec(6, 2, 16, sinks=True, window=20, gate=AttentionGateSpec()),
        AttentionSpec(6, 2, 24, chunk=7, gate=AttentionGateSpec(per_head=True)),
    ],
    ids=["plain", "window", "sinks chunk", "sinks window gate", "short chunks gate"],
)
def test_splits_equal_the_reference(spec: AttentionSpec, min_tiles: int) -> None:
    """There are whole prompts, chunks after a context, and a chunk shorter than a split."""
    case = make_attention_case(spec, [9, 30, 3, 40], [9, 130, 90, 47], 16, torch.float32, "cpu")
    backend = TritonPagedAttention(
        prefill_tiling=PagedPrefillTiling(16, 16, 4, 2, splits=4, min_tiles=min_tiles)
    )
    plan = backend.prepare(case.metadata)
    actual = case.attend(backend, plan)
    assert relative_error(actual, case.expected()) < 1e-6
    assert not plan.split_counters.any()


def test_prefills_are_not_split_if_there_are_too_few_counters() -> None:
    spec = AttentionSpec(4, 2, 16)
    case = make_attention_case(spec, [30], [130], 16, torch.float32, "cpu")
    backend = TritonPagedAttention(
        prefill_tiling=PagedPrefillTiling(16, 16, 4, 2, splits=4, min_tiles=1)
    )
    # Decodes use the first NUM_SPLIT_COUNTERS counters, so only one is left for prefills.
    counters = torch.zeros(NUM_SPLIT_COUNTERS + 1, dtype=torch.int32)
    plan = replace(backend.prepare(case.metadata), split_counters=counters)
    actual = backend.attend(case.q, case.cache, spec, plan)
    assert relative_error(actual, case.expected()) < 1e-6
    assert not plan.split_counters.any()
