"""The paged attention kernels under the interpreter: head sizes, block sizes and splits.

Cases with decodes and prefills are here too, because both kernels share their helpers. The KV cache
holds NaN past the end of every sequence. tests/attention compares all backends with one another.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bloomery.attention.triton_paged import TritonPagedAttention
from bloomery.kernels.launch import triton_interpreted
from bloomery.kernels.paged_decode import (
    MAX_CHOSEN_SPLITS,
    PagedDecodeTiling,
    select_decode_tiling,
)
from bloomery.kernels.paged_prefill import PagedPrefillTiling
from bloomery.spec import AlibiSpec, AttentionGateSpec, AttentionSpec
from tests.kernels.oracles import check_attention, make_attention_case, relative_error

pytestmark = [
    pytest.mark.skipif(
        not triton_interpreted(), reason="kernels run on the CPU only under TRITON_INTERPRET=1"
    ),
    # Padding rows divide by zero.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

PER_HEAD_GATE = AttentionGateSpec(per_head=True, activation="softplus")
WITH_SPLITS = TritonPagedAttention(
    decode_tiling=PagedDecodeTiling(16, 4, 2, splits=4, head_groups=1, max_unsplit_tiles=1),
    prefill_tiling=PagedPrefillTiling(16, 16, 4, 2),
)
WITH_HEAD_GROUPS = TritonPagedAttention(
    decode_tiling=PagedDecodeTiling(16, 4, 2, splits=2, head_groups=3, max_unsplit_tiles=1),
    prefill_tiling=PagedPrefillTiling(16, 16, 4, 2, splits=3, min_tiles=1),
)


@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
@pytest.mark.parametrize(
    ("spec", "backend"),
    [
        (AttentionSpec(4, 2, 64), WITH_SPLITS),
        (AttentionSpec(6, 2, 80, window=20), WITH_SPLITS),
        (AttentionSpec(20, 1, 16), WITH_HEAD_GROUPS),
        (AttentionSpec(2, 1, 96, AlibiSpec()), TritonPagedAttention()),
        (AttentionSpec(6, 2, 24, sinks=True, chunk=24), WITH_SPLITS),
        (AttentionSpec(20, 1, 16, sinks=True, window=20, gate=PER_HEAD_GATE), WITH_HEAD_GROUPS),
        (AttentionSpec(4, 2, 48, chunk=35, window=30, gate=AttentionGateSpec()), WITH_SPLITS),
    ],
    ids=["splits", "window", "head groups", "default", "sinks chunk", "sinks gate", "chunk gate"],
)
def test_attention_is_right_for_every_block_size(
    spec: AttentionSpec, backend: TritonPagedAttention, block_size: int
) -> None:
    case = make_attention_case(spec, [1, 1, 5, 9], [1, 70, 5, 40], block_size, torch.float32, "cpu")
    assert check_attention(case, backend) < 1e-6


@pytest.mark.parametrize("head_dim", [64, 80, 96, 112, 128, 256, 320, 384, 512])
def test_attention_is_right_for_every_head_size_in_half_precision(head_dim: int) -> None:
    spec = AttentionSpec(2, 1, head_dim)
    case = make_attention_case(spec, [1, 20], [90, 30], 64, torch.float16, "cpu")
    assert check_attention(case, TritonPagedAttention()) < 1e-3


@pytest.mark.parametrize("early", [False, True], ids=["", "early"])
def test_decode_of_a_captured_step_takes_lengths_from_the_device(early: bool) -> None:
    spec = AttentionSpec(4, 2, 16, sinks=True, chunk=40, gate=AttentionGateSpec())
    backend = TritonPagedAttention(early_decode=early, decode_tiling=WITH_SPLITS.decode_tiling)
    case = make_attention_case(
        spec, [1, 1, 1], [3, 70, 33], 16, torch.float32, "cpu", extra_blocks=3
    )
    assert check_attention(case.without_host_lengths(), backend) < 1e-6
    # The same step with other lengths; the last row is a padding row. No position is NaN.
    case = replace(case, cache=torch.randn_like(case.cache))
    shorter = replace(case.metadata, seq_lens=torch.tensor([3, 17, 0]))
    plan = backend.prepare(replace(shorter, host_query_lens=(), host_seq_lens=()))
    actual = case.attend(backend, plan)
    without_padding = replace(shorter, seq_lens=shorter.seq_lens[:2])
    assert case.gate is not None
    unpadded = replace(case, q=case.q[:2], gate=case.gate[:2], metadata=without_padding)
    expected = unpadded.expected()
    assert relative_error(actual[:2], expected) < 1e-6
    assert not plan.split_counters.any()


def test_the_number_of_splits_follows_the_device_and_the_length() -> None:
    def splits(batch_size: int, heads: int, kv_heads: int, max_seq_len: int) -> int:
        tiling = select_decode_tiling(batch_size, heads, kv_heads, 128, 2, max_seq_len, 132)
        return tiling.splits

    assert splits(1, 32, 8, 32768) == MAX_CHOSEN_SPLITS
    assert splits(1, 32, 8, 200) == 4
    assert splits(8, 32, 8, 1024) == 4
    assert splits(64, 32, 8, 4096) == 2
    assert splits(128, 32, 8, 4096) == 1
    assert splits(1, 48, 1, 64) == 1
    assert splits(1, 48, 1, 32768) == MAX_CHOSEN_SPLITS
    assert splits(256, 48, 1, 32768) == 1


def test_more_splits_than_counters_are_refused() -> None:
    spec = AttentionSpec(4, 2, 16)
    case = make_attention_case(spec, [1], [70], 16, torch.float32, "cpu")
    plan = WITH_SPLITS.prepare(case.metadata)
    plan = replace(plan, split_counters=torch.zeros(1, dtype=torch.int32))
    with pytest.raises(ValueError, match="too many for 4 splits"):
        WITH_SPLITS.attend(case.q, case.cache, spec, plan)
