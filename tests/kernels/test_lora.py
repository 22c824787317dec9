"""The kernels of LoRA adapters under the interpreter, against loops over slots in torch."""

from __future__ import annotations

import pytest
import torch

from bloomery.fusion import ActivationEpilogue, NormPrologue, QkTransform, ResidualEpilogue
from bloomery.kernels import launch
from bloomery.kernels.activation import activation_reference, activation_triton
from bloomery.kernels.gemv import fused_linear_reference, gemv_triton
from bloomery.kernels.lora import (
    SHRUNK_COPIES,
    FusedLora,
    LoraMatrices,
    LoraRows,
    group_rows,
    group_rows_reference,
    lora_bias,
    lora_expand_reference,
    lora_expand_triton,
    lora_lookup_reference,
    lora_lookup_triton,
    lora_shrink_reference,
    lora_shrink_triton,
)
from bloomery.kernels.norm import norm_triton, rms_norm_reference
from bloomery.kernels.rope_cache import (
    apply_rope_and_cache_reference,
    apply_rope_and_cache_triton,
)

SLOTS = 3
# Rows, inputs, outputs of each part, rank, experts per token of how many (0: no experts), dtype.
SHAPES = [
    (1, 40, (24,), 8, 0, torch.float32),
    (5, 600, (40, 16, 16), 16, 0, torch.float32),
    (20, 300, (70, 70), 24, 0, torch.float16),
    (3, 9000, (32,), 16, 0, torch.float32),
    (130, 64, (32,), 16, 0, torch.float32),
    (6, 48, (20, 20), 8, 2, torch.float32),
]


def make_matrices(
    inputs: int, parts: tuple[int, ...], rank: int, num_experts: int, dtype: torch.dtype
) -> LoraMatrices:
    """Random matrices of all slots, which lie in one block of memory as on the device."""
    outputs = sum(parts)
    sizes = (len(parts) * rank * inputs * num_experts, outputs * rank * num_experts, outputs)
    memory = torch.randn(SLOTS, sum(sizes)).to(dtype)
    a, b, bias = memory.split(sizes, 1)
    row_parts = torch.arange(len(parts)).repeat_interleave(torch.tensor(parts)).int()
    return LoraMatrices(
        a.unflatten(1, (num_experts, len(parts) * rank, inputs)),
        b.unflatten(1, (num_experts, outputs, rank)),
        row_parts,
        bias if num_experts == 1 else None,
    )


def check_close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    limit = 1e-5 if dtype == torch.float32 else 4e-3
    assert (actual.float() - expected.float()).abs().max() <= limit * expected.abs().max()


@pytest.mark.parametrize("num_rows", [2, 40, 200])
def test_rows_are_grouped_by_adapter(num_rows: int) -> None:
    torch.manual_seed(num_rows)
    slots = torch.randint(-1, SLOTS, (num_rows,), dtype=torch.int32)
    expected = group_rows_reference(slots, SLOTS)
    actual = group_rows(slots, SLOTS)
    assert torch.equal(actual.slots, expected.slots)
    assert torch.equal(actual.rows, expected.rows)
    assert sorted(expected.rows[expected.rows >= 0].tolist()) == list(range(num_rows))


@pytest.mark.parametrize("is_grouped", [False, True])
@pytest.mark.parametrize("num_rows, inputs, parts, rank, top_k, dtype", SHAPES)
def test_kernels_equal_reference(
    num_rows: int,
    inputs: int,
    parts: tuple[int, ...],
    rank: int,
    top_k: int,
    dtype: torch.dtype,
    is_grouped: bool,
) -> None:
    torch.manual_seed(num_rows)
    num_experts = 3 if top_k else 1
    matrices = make_matrices(inputs, parts, rank, num_experts, dtype)
    slots = torch.randint(-1, SLOTS, (num_rows,), dtype=torch.int32)
    slots[0] = 1
    experts = None
    if top_k:  # an id outside of the range has no matrix
        experts = torch.randint(-1, num_experts + 1, (num_rows, top_k), dtype=torch.int32)
    rows = LoraRows(slots, experts, group_rows(slots, SLOTS) if is_grouped else None)
    count = num_rows * max(1, top_k)
    x = torch.randn(count, inputs).to(dtype)
    expected_low = lora_shrink_reference(x, matrices, rows)
    partial = lora_shrink_triton(x, matrices, rows)
    used = torch.zeros(count, dtype=torch.bool)
    for _, _, index in rows.matrix_rows(num_experts):
        used[index] = True
    check_close(partial.sum(0)[used], expected_low[used], dtype)
    y = torch.randn(count, sum(parts)).to(dtype)
    expected = y.clone()
    lora_expand_reference(expected_low, matrices, rows, expected)
    lora_expand_triton(partial, matrices, rows, y)
    check_close(y, expected, dtype)
    expected = torch.zeros_like(y)
    lora_expand_reference(expected_low, matrices, rows, expected)
    y = torch.full_like(y, float("nan"))
    lora_expand_triton(partial, matrices, rows, y, accumulates=False)
    check_close(y, expected, dtype)
    assert used.any() and (num_rows == 1 or not used.all())


@pytest.mark.parametrize("slot", [-1, 2])
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_adapter_of_one_row_is_a_bias(slot: int, has_bias: bool) -> None:
    matrices = make_matrices(40, (32, 16), 8, 1, torch.float32)
    rows = LoraRows(torch.tensor([slot], dtype=torch.int32))
    x = torch.randn(1, 40)
    bias = torch.randn(48) if has_bias else None
    expected = torch.zeros(1, 48) if bias is None else bias[None].clone()
    lora_expand_reference(lora_shrink_reference(x, matrices, rows), matrices, rows, expected)
    actual = lora_bias(lora_shrink_triton(x, matrices, rows), matrices, rows, bias, x.dtype)
    check_close(actual, expected[0], torch.float32) if slot >= 0 or has_bias else None
    assert torch.equal(actual == 0, expected[0] == 0)


@pytest.mark.parametrize("is_grouped", [False, True])
def test_what_earlier_kernels_write_is_read_after_the_wait(
    is_grouped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bias of a low-rank part is the result of the kernel before the adapter's."""
    matrices = make_matrices(40, (32, 16), 8, 1, torch.float32)
    slots = torch.tensor([2], dtype=torch.int32)
    rows = LoraRows(slots, None, group_rows(slots, SLOTS) if is_grouped else None)
    written = {"shrunk": torch.randn(1, 1, 16), "start": torch.randn(48)}
    inputs = {name: torch.full_like(values, float("nan")) for name, values in written.items()}

    def wait() -> None:
        for name, values in written.items():
            inputs[name].copy_(values)

    monkeypatch.setattr(launch, "gdc_wait", wait)
    monkeypatch.setattr(launch, "gdc_launch_dependents", lambda: None)
    monkeypatch.setattr("bloomery.kernels.lora.pdl_options", lambda *_: {"PDL": True})
    y = torch.empty(1, 48)
    lora_expand_triton(inputs["shrunk"], matrices, rows, y, inputs["start"], accumulates=False)
    expected = written["start"][None].clone()
    lora_expand_reference(written["shrunk"][0], matrices, rows, expected)
    check_close(y, expected, torch.float32)


@pytest.mark.parametrize("is_partial", [False, True])
def test_lookups_equal_reference(is_partial: bool) -> None:
    """Ids outside of the tables become 0; with `active`, rows of other slots stay as they are."""
    tables = torch.randn(SLOTS, 10 * 20)[:, : 9 * 20].unflatten(1, (9, 20))
    slots = torch.tensor([0, -1, 2, 1, 2, 0], dtype=torch.int32)
    token_ids = torch.tensor([4, 5, 3, 12, 20, 12])
    active = torch.tensor([1, 0, 1], dtype=torch.int32) if is_partial else None
    results = []
    for lookup in (lora_lookup_reference, lora_lookup_triton):
        out = torch.ones(6, 20)
        lookup(token_ids, tables, slots, 4, out, active)
        results.append(out)
    assert torch.equal(*results)


EPILOGUES = {
    "plain": (None, 48),
    "residual": (ResidualEpilogue(torch.randn(1, 48), 0.5), 48),
    "gated": (ActivationEpilogue("silu", True), 48),
}


@pytest.mark.parametrize("kind", EPILOGUES)
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("slot", [-1, 1])
def test_an_adapter_fused_with_the_product_equals_reference(
    kind: str, has_norm: bool, slot: int
) -> None:
    """The interpreter runs programs in order, so the shrunk row is there when it is needed."""
    epilogue, outputs = EPILOGUES[kind]
    inputs = 5000 if kind == "plain" else 264
    parts = (outputs // 2, outputs // 2)
    matrices = make_matrices(inputs, parts, 8, 1, torch.float32)
    x = torch.randn(1, inputs)
    weight = torch.randn(outputs, inputs) / inputs**0.5
    bias = torch.randn(outputs)
    norm = NormPrologue("rms", torch.rand(inputs) + 0.5, None, 1e-5) if has_norm else None
    rows = LoraRows(torch.tensor([slot], dtype=torch.int32))
    normed = x if norm is None else rms_norm_reference(x, norm.weight, norm.eps)
    added = torch.zeros(1, outputs)
    lora_expand_reference(lora_shrink_reference(normed, matrices, rows), matrices, rows, added)
    expected = fused_linear_reference(x, weight, bias + added[0], norm, epilogue)
    shrunk = torch.zeros(SHRUNK_COPIES, 16)
    lora = FusedLora(matrices, rows.slots, shrunk)
    actual = gemv_triton(x, weight, bias, norm, epilogue, lora=lora)
    check_close(actual, expected, torch.float32)
    # Programs that wait for a sum know by its bits that it is there.
    assert (shrunk.view(torch.int32) != 0).all()


def test_kernels_after_a_product_add_its_second_part() -> None:
    """A norm, an activation, and rope with the KV cache read the sum of two tensors."""
    torch.manual_seed(0)
    y, added, residual = torch.randn(3, 5, 64)
    weight = torch.rand(64)
    total, normed = norm_triton(y, weight, None, 1e-5, False, residual, 0.5, added)
    expected = residual + 0.5 * (y + added)
    assert torch.allclose(total, expected, atol=1e-6)
    assert torch.allclose(normed, rms_norm_reference(expected, weight, 1e-5), atol=1e-5)
    for gated in (False, True):
        activation = ActivationEpilogue("silu", gated)
        actual = activation_triton(y, activation, added)
        assert torch.allclose(actual, activation_reference(y + added, activation), atol=1e-6)
    angles = (torch.rand(5, 8), torch.rand(5, 8))
    transform = QkTransform(angles=angles)
    slot_mapping = torch.tensor([3, 0, 4, 1, 2], dtype=torch.int32)
    results = []
    for run in (apply_rope_and_cache_reference, apply_rope_and_cache_triton):
        cache = torch.zeros(2, 6, 1, 16)
        gate = torch.zeros(5, 16)
        columns = (y + added,) if run is apply_rope_and_cache_reference else (y,)
        extra = () if run is apply_rope_and_cache_reference else (added,)
        q = run(*columns, cache, slot_mapping, transform, gate, *extra)
        results.append(torch.cat((q.flatten(), cache.flatten(), gate.flatten())))
    assert torch.allclose(*results, atol=1e-6)
