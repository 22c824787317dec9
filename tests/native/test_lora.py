"""The native operations of LoRA adapters against their references in torch."""

from __future__ import annotations

import pytest
import torch

from bloomery.kernels.lora import (
    LoraMatrices,
    LoraRows,
    lora_expand,
    lora_expand_reference,
    lora_lookup,
    lora_lookup_reference,
    lora_project,
    lora_shrink,
    lora_shrink_reference,
)
from bloomery.native import ops
from bloomery.native.thread_pool import ThreadPool

SLOTS = 3


@pytest.mark.parametrize("top_k", [0, 2])
@pytest.mark.parametrize("inputs, parts, rank", [(40, (24, 9), 8), (5, (70,), 3)])
def test_products_equal_reference(
    pool: ThreadPool, inputs: int, parts: tuple[int, ...], rank: int, top_k: int
) -> None:
    torch.manual_seed(inputs)
    num_experts = 3 if top_k else 1
    outputs = sum(parts)
    sizes = (num_experts * len(parts) * rank * inputs, num_experts * outputs * rank, outputs)
    a, b, bias = torch.randn(SLOTS, sum(sizes)).split(sizes, 1)
    matrices = LoraMatrices(
        a.unflatten(1, (num_experts, len(parts) * rank, inputs)),
        b.unflatten(1, (num_experts, outputs, rank)),
        torch.arange(len(parts)).repeat_interleave(torch.tensor(parts)).int(),
        None if top_k else bias,
    )
    slots = torch.tensor([0, -1, 2, 1, 2], dtype=torch.int32)
    experts = None
    if top_k:  # an id outside of the range has no matrix
        experts = torch.tensor([[0, 1], [2, 0], [2, -1], [3, 1], [0, 0]], dtype=torch.int32)
    rows = LoraRows(slots, experts)
    x = torch.randn(5 * max(1, top_k), inputs)
    y = torch.randn(len(x), outputs)
    expected = y.clone()
    lora_expand_reference(lora_shrink_reference(x, matrices, rows), matrices, rows, expected)
    lora_expand(lora_shrink(x, matrices, rows, pool), matrices, rows, y, pool)
    assert torch.allclose(y, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("is_partial", [False, True])
def test_lookups_equal_reference(pool: ThreadPool, is_partial: bool) -> None:
    tables = torch.randn(SLOTS, 10 * 20)[:, : 9 * 20].unflatten(1, (9, 20))
    slots = torch.tensor([0, -1, 2, 1, 2, 0], dtype=torch.int32)
    token_ids = torch.tensor([4, 5, 3, 12, 20, 12])
    active = torch.tensor([1, 0, 1], dtype=torch.int32) if is_partial else None
    expected = torch.ones(6, 20)
    lora_lookup_reference(token_ids, tables, slots, 4, expected, active)
    out = torch.ones(6, 20)
    lora_lookup(token_ids, tables, slots, 4, out, active, pool)
    assert torch.equal(out, expected)


def test_heads_replace_the_logits_of_their_rows(pool: ThreadPool) -> None:
    tables = torch.randn(SLOTS, 30, 16)
    slots = torch.tensor([0, -1, 2, 1], dtype=torch.int32)
    active = torch.tensor([1, 0, 1], dtype=torch.int32)
    x = torch.randn(4, 16)
    logits = torch.randn(4, 30)
    expected = logits.clone()
    expected[0] = tables[0] @ x[0]
    expected[2] = tables[2] @ x[2]
    for threads in (None, pool):
        out = logits.clone()
        lora_project(x, tables, slots, out, active, threads)
        assert torch.allclose(out, expected, rtol=1e-5, atol=1e-5)


def test_pairs_get_the_rows_of_their_tokens(pool: ThreadPool) -> None:
    x = torch.randn(3, 10)
    weights = torch.rand(3, 2)
    order = torch.tensor([5, 0, 3, 1, 2, 4], dtype=torch.int32)
    expected = x.repeat_interleave(2, 0) * weights.view(-1, 1)
    assert torch.equal(ops.pair_inputs(pool, x, 6, None, weights), expected)
    assert torch.equal(ops.pair_inputs(pool, x, 6, order, weights), expected[order.long()])
    assert torch.equal(ops.pair_inputs(pool, x, 3), x)
