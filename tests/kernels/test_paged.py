"""Attention's two kernels under the interpreter: head sizes, block sizes, splits, and NaN beyond a sequence's end.

That they obey the law of all backends is tested in tests/attention; here they meet tilings as on a card, poisoned
caches and half precision.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from benchmarks.kernels import case, check_attention, error
from bloomery.attention.triton_paged import COUNTERS, TritonPaged
from bloomery.kernels import paged_decode, paged_prefill
from bloomery.kernels.launch import interpreted
from bloomery.spec import Alibi, Attention

pytestmark = [
    pytest.mark.skipif(
        not interpreted(), reason="kernels run on the CPU only under TRITON_INTERPRET=1"
    ),
    pytest.mark.filterwarnings(
        "ignore::RuntimeWarning"
    ),  # rows that stand for nobody divide by zero
]

SMALL = TritonPaged(
    decode=paged_decode.Tiling(16, 4, 2, 4, 1, 1), prefill=paged_prefill.Tiling(16, 16, 4, 2)
)
PARTS = TritonPaged(
    decode=paged_decode.Tiling(16, 4, 2, 2, 3, 1), prefill=paged_prefill.Tiling(16, 16, 4, 2, 3, 1)
)


@pytest.mark.parametrize("size", [16, 32, 64, 128])
@pytest.mark.parametrize(
    ("spec", "backend"),
    [
        (Attention(4, 2, 64), SMALL),
        (Attention(6, 2, 80, window=20), SMALL),
        (Attention(20, 1, 16), PARTS),
        (Attention(2, 1, 96, Alibi()), TritonPaged()),
    ],
    ids=["splits", "window", "parts", "default"],
)
def test_block_sizes(spec: Attention, backend: TritonPaged, size: int) -> None:
    counts = [1, 1, 5, 9]
    lengths = [1, 70, 5, 40]
    assert check_attention(case(spec, counts, lengths, size, torch.float32, "cpu"), backend) < 1e-6


@pytest.mark.parametrize("dim", [64, 80, 96, 112, 128, 256])
def test_head_sizes_in_half_precision(dim: int) -> None:
    spec = Attention(2, 1, dim)
    assert (
        check_attention(case(spec, [1, 20], [90, 30], 64, torch.float16, "cpu"), TritonPaged())
        < 1e-3
    )


@pytest.mark.parametrize("early", [False, True], ids=["", "early"])
def test_a_captured_step_knows_lengths_on_the_device_only(early: bool) -> None:
    spec = Attention(4, 2, 16)
    backend = TritonPaged(early=early, decode=SMALL.decode)
    material = case(spec, [1, 1, 1], [3, 70, 33], 16, torch.float32, "cpu", spare=3)
    assert check_attention(material.captured(), backend) < 1e-6
    shorter = replace(
        material.ragged, ends=torch.tensor([3, 17, 0])
    )  # the last line stands for nobody
    plan = backend.plan(replace(shorter, counts=(), lengths=()))
    got = backend.attend(material.q, material.cache, spec, plan)
    wanted = replace(
        material, q=material.q[:2], ragged=replace(shorter, ends=shorter.ends[:2])
    ).wanted()
    assert error(got[:2], wanted) < 1e-6
    assert not plan.arrived.any()


@pytest.mark.parametrize("backend", [SMALL, PARTS])
def test_prompts_of_a_captured_step_may_be_empty_or_nobodys(backend: TritonPaged) -> None:
    """Two lines of which one is in use, four prompts: seven tokens, none, five, and three that are nobody's."""
    spec = Attention(4, 2, 16)
    material = case(spec, [1, 7, 5], [20, 30, 5], 16, torch.float32, "cpu")
    ragged = material.ragged
    every = torch.tensor
    tables = ragged.tables[[0, 0, 1, 0, 2, 0]]
    q = torch.cat((material.q, torch.randn(3, 4, 16)))
    captured = replace(
        ragged,
        counts=(),
        lengths=(),
        singles=2,
        starts=every([0, 1, 1, 8, 8, 13, 16]),
        tables=tables,
        ends=every([20, 0, 30, 0, 5, 0]),
        positions=F.pad(ragged.positions, (0, 3)),
        several=4,
    )
    plan = backend.plan(captured)
    got = backend.attend(q, material.cache, spec, plan)
    assert error(got[:13], material.wanted()) < 1e-6
    assert not got[13:].any() and not plan.arrived.any()


def test_splits_follow_the_device_and_the_length() -> None:
    def splits(batch: int, heads: int, kv_heads: int, positions: int) -> int:
        return paged_decode.tiling(batch, heads, kv_heads, 128, 2, positions, 132).splits

    assert splits(1, 32, 8, 32768) == paged_decode.USUAL_SPLITS
    assert splits(1, 32, 8, 200) == 4
    assert splits(8, 32, 8, 1024) == 4
    assert splits(64, 32, 8, 4096) == 2
    assert splits(128, 32, 8, 4096) == 1
    assert splits(1, 48, 1, 64) == 1
    assert splits(1, 48, 1, 32768) == paged_decode.USUAL_SPLITS
    assert splits(256, 48, 1, 32768) == 1


def test_prompts_are_shared_where_they_are_too_few_for_the_device() -> None:
    def splits(tokens: int, heads: int, kv_heads: int, prompts: int = 1) -> int:
        rows = tokens * heads // kv_heads
        return paged_prefill.tiling(rows // prompts, rows, 128, 2, kv_heads, 132).splits

    assert splits(32, 32, 8) == paged_prefill.MOST_SPLITS
    assert splits(128, 32, 8) == 4 and splits(256, 32, 8) == 2 and splits(384, 32, 8) == 1
    assert (
        splits(64, 48, 1) == 5
        and splits(256, 48, 1) == 1
        and splits(8192, 48, 1) == splits(8192, 48, 1, prompts=256) == 1
    )


@pytest.mark.parametrize("least", [1, 3, 50])
@pytest.mark.parametrize("window", [None, 20])
def test_programs_that_share_a_tile_find_what_one_does(window: int | None, least: int) -> None:
    """Prompts that begin, that go on behind others, and one shorter than a stretch; the window ends within one."""
    spec = Attention(4, 2, 16, window=window)
    material = case(spec, [9, 30, 3, 40], [9, 130, 90, 47], 16, torch.float32, "cpu")
    shared = TritonPaged(prefill=paged_prefill.Tiling(16, 16, 4, 2, 4, least))
    plan = shared.plan(material.ragged)
    got = shared.attend(material.q, material.cache, spec, plan)
    assert error(got, material.wanted()) < 1e-6 and not plan.arrived.any()


def test_prompts_are_not_shared_where_counters_are_too_few() -> None:
    spec = Attention(4, 2, 16)
    material = case(spec, [30], [130], 16, torch.float32, "cpu")
    shared = TritonPaged(prefill=paged_prefill.Tiling(16, 16, 4, 2, 4, 1))
    plan = replace(
        shared.plan(material.ragged), arrived=torch.zeros(COUNTERS + 1, dtype=torch.int32)
    )
    got = shared.attend(material.q, material.cache, spec, plan)
    assert error(got, material.wanted()) < 1e-6 and not plan.arrived.any()


def test_more_splits_than_counters_are_refused() -> None:
    spec = Attention(4, 2, 16)
    material = case(spec, [1], [70], 16, torch.float32, "cpu")
    plan = replace(SMALL.plan(material.ragged), arrived=torch.zeros(1, dtype=torch.int32))
    with pytest.raises(ValueError, match="too many for 4 splits"):
        SMALL.attend(material.q, material.cache, spec, plan)
