"""Every attention backend compared with the definition of attention, over random steps.

The definition has no block tables: it stores the keys and values of each sequence in a list and
computes one query at a time.
"""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch

from bloomery.attention import torch_paged
from bloomery.attention.base import AttentionBackend, AttentionMetadata, kv_cache_shape
from bloomery.attention.cpu_paged import CpuPagedAttention
from bloomery.attention.torch_paged import TorchPagedAttention
from bloomery.attention.triton_paged import TritonPagedAttention
from bloomery.kernels import paged_decode, paged_prefill
from bloomery.kernels.alibi import alibi_slopes
from bloomery.kernels.launch import triton_interpreted
from bloomery.kernels.rope_cache import write_kv_cache
from bloomery.layout import gate_size
from bloomery.spec import AlibiSpec, AttentionGateSpec, AttentionSpec

CPU = torch.device("cpu")
SPECS = {
    "mha": AttentionSpec(4, 4, 16),
    "gqa": AttentionSpec(6, 2, 16),
    "mqa": AttentionSpec(4, 1, 8, scale=0.3),
    "window": AttentionSpec(4, 2, 16, window=5),
    "alibi": AttentionSpec(6, 6, 8, AlibiSpec()),
    "alibi-gqa": AttentionSpec(6, 3, 8, AlibiSpec(scale=0.5)),
    "softcap": AttentionSpec(4, 2, 16, softcap=2.0),
    "softcap-window": AttentionSpec(4, 2, 16, softcap=2.0, window=3),
    "chunk": AttentionSpec(4, 2, 16, chunk=6),
    "chunk-window": AttentionSpec(4, 2, 16, chunk=9, window=7),
    "sinks": AttentionSpec(6, 2, 16, sinks=True),
    "sinks-window": AttentionSpec(4, 1, 8, sinks=True, window=5),
    "sinks-softcap-chunk": AttentionSpec(4, 2, 16, sinks=True, softcap=2.0, chunk=6),
    "sinks-alibi": AttentionSpec(6, 3, 8, AlibiSpec(), sinks=True),
    "gate": AttentionSpec(4, 2, 16, gate=AttentionGateSpec()),
    "gate-per-head": AttentionSpec(6, 2, 16, gate=AttentionGateSpec(per_head=True)),
    "gate-softplus-window": AttentionSpec(
        4, 1, 8, window=5, gate=AttentionGateSpec(activation="softplus")
    ),
    "gate-softplus-per-head-sinks": AttentionSpec(
        4, 2, 24, sinks=True, gate=AttentionGateSpec("packed", True, "softplus")
    ),
    **{f"d{dim}": AttentionSpec(2, 1, dim) for dim in (64, 80, 96, 112, 128, 256)},
    **{
        f"d{dim}": AttentionSpec(4, 2, dim, sinks=True, window=9, gate=AttentionGateSpec())
        for dim in (320, 384, 512)
    },
}
BACKENDS: dict[str, AttentionBackend] = {
    "torch": TorchPagedAttention(),
    "torch-plain": TorchPagedAttention(fused=False),
}
if triton_interpreted():  # small tiles, so that short sequences have several tiles and splits
    BACKENDS["triton"] = TritonPagedAttention(
        decode_tiling=paged_decode.PagedDecodeTiling(16, 4, 2, splits=2, max_unsplit_tiles=1),
        prefill_tiling=paged_prefill.PagedPrefillTiling(16, 16, 4, 2, 2, 1),
    )
BLOCK_SIZE = 4
NUM_BLOCKS = 40
NUM_SEQUENCES = 4


def attend_by_definition(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    position: int,
    spec: AttentionSpec,
    sinks: torch.Tensor | None,
    gate: torch.Tensor | None,
) -> torch.Tensor:
    """One query [heads, dim] over keys and values [length, kv heads, dim], in float64.

    sinks [heads]; gate [heads * dim] or [heads].
    """
    heads_per_kv_head = spec.num_heads // spec.num_kv_heads
    out = torch.empty(spec.num_heads, spec.head_dim, dtype=torch.float64)
    first = 0 if spec.window is None else max(0, position - spec.window + 1)
    if spec.chunk is not None:
        first = max(first, position // spec.chunk * spec.chunk)
    scale = spec.head_dim**-0.5 if spec.scale is None else spec.scale
    for head in range(spec.num_heads):
        k = keys[first : position + 1, head // heads_per_kv_head].double()
        v = values[first : position + 1, head // heads_per_kv_head].double()
        scores = k @ q[head].double() * scale
        if spec.softcap is not None:
            scores = spec.softcap * torch.tanh(scores / spec.softcap)
        if isinstance(spec.position, AlibiSpec):
            slopes = alibi_slopes(spec.num_heads, spec.position.max_bias)
            slope = slopes[head] * spec.position.scale
            scores = scores + slope.double() * torch.arange(first - position, 1)
        weights = scores.exp()
        total = weights.sum() if sinks is None else weights.sum() + sinks[head].double().exp()
        out[head] = weights / total @ v
    if spec.gate is None or gate is None:
        return out.flatten()
    factors = gate.double()
    if spec.gate.activation == "sigmoid":
        factors = 1 / (1 + (-factors).exp())
    else:
        factors = (1 + factors.exp()).log()
    return (out * factors.view(spec.num_heads, -1)).flatten()


def pad_tables(random: Random, tables: list[list[int]]) -> list[list[int]]:
    """Block tables of one width, padded with random blocks."""
    width = max(map(len, tables))
    return [table + [random.randrange(NUM_BLOCKS)] * (width - len(table)) for table in tables]


# Interpreted kernels divide by zero for padding rows.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_backend_equals_the_definition(
    spec: AttentionSpec, backend: AttentionBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots that no query sees are not numbers: others may have written anything there."""
    monkeypatch.setattr(torch_paged, "MAX_SCORES", 64)  # so that there are many slices of queries
    random = Random(0)
    torch.manual_seed(0)
    sinks = 2 * torch.randn(spec.num_heads) if spec.sinks else None
    cache = torch.full(kv_cache_shape(spec, NUM_BLOCKS, BLOCK_SIZE), torch.nan)
    free_blocks = random.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    tables: list[list[int]] = [[] for _ in range(NUM_SEQUENCES)]
    lengths = [0] * NUM_SEQUENCES
    stored: list[list[torch.Tensor]] = [[] for _ in range(NUM_SEQUENCES)]
    for _ in range(6):
        members = random.sample(range(NUM_SEQUENCES), random.randrange(1, NUM_SEQUENCES + 1))
        query_lens = [random.choice([1, 1, 3, 7]) for _ in members]
        query_lens.sort(key=lambda query_len: query_len > 1)
        for member, query_len in zip(members, query_lens):
            lengths[member] += query_len
            while len(tables[member]) * BLOCK_SIZE < lengths[member]:
                tables[member].append(free_blocks.pop())
        num_tokens = sum(query_lens)
        q = torch.randn(num_tokens, spec.num_heads, spec.head_dim)
        k, v = torch.randn(2, num_tokens, spec.num_kv_heads, spec.head_dim)
        metadata = AttentionMetadata.from_host(
            query_lens,
            [lengths[member] for member in members],
            pad_tables(random, [tables[member] for member in members]),
            BLOCK_SIZE,
            CPU,
            spec.window,
        )
        write_kv_cache(k, v, cache, metadata.slot_mapping)
        for member, query_len in zip(members, query_lens):
            first_query = lengths[member] - query_len
            for position in range(max(first_query + 1 - (spec.window or lengths[member]), 0)):
                block = tables[member][position // BLOCK_SIZE]
                cache[:, block * BLOCK_SIZE + position % BLOCK_SIZE] = torch.nan
        gate = None
        if spec.gate is not None:
            gate = 2 * torch.randn(num_tokens, gate_size(spec))
        actual = backend.attend(q, cache, spec, backend.prepare(metadata), sinks, gate)
        first = 0
        for member, query_len in zip(members, query_lens):
            tokens = range(first, first + query_len)
            stored[member] += [torch.stack((k[token], v[token])) for token in tokens]
            keys, values = torch.stack(stored[member], 1)
            for token in tokens:
                position = lengths[member] - query_len + token - first
                token_gate = None if gate is None else gate[token]
                expected = attend_by_definition(
                    q[token], keys, values, position, spec, sinks, token_gate
                )
                torch.testing.assert_close(actual[token].double(), expected, rtol=1e-5, atol=1e-5)
            first += query_len


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.skipif(
    not triton_interpreted(), reason="kernels run on the CPU only under TRITON_INTERPRET=1"
)
@pytest.mark.parametrize(
    ("query_lens", "num_cached", "num_long"),
    [([40], 0, 1), ([1, 40, 20, 33, 50], 10, 2), ([1, 20, 40], 256, 1)],
    ids=["alone", "among others", "after a chunk"],
)
def test_the_library_gives_the_results_of_our_kernel(
    query_lens: list[int], num_cached: int, num_long: int
) -> None:
    """`num_cached` positions of the last sequence are in the KV cache before the step."""
    spec = AttentionSpec(4, 2, 64, chunk=1000, gate=AttentionGateSpec())
    block_size = 16
    seq_lens = [*query_lens[:-1], query_lens[-1] + num_cached]
    generator = torch.manual_seed(0)
    tables = torch.randperm(100, generator=generator).view(-1, 20)[: len(query_lens)].tolist()
    metadata = AttentionMetadata.from_host(query_lens, seq_lens, tables, block_size, CPU)
    cache = torch.randn(kv_cache_shape(spec, 100, block_size)).half()
    q = torch.randn(sum(query_lens), 4, 64).half()
    kernel = TritonPagedAttention(library_min_len=None)
    library = TritonPagedAttention(library_min_len=30)
    plan = library.prepare(metadata)
    assert [group.long for group in plan.prefill_groups].count(True) == num_long
    gate = torch.randn(len(q), gate_size(spec)).half()
    expected = kernel.attend(q, cache, spec, kernel.prepare(metadata), None, gate)
    actual = library.attend(q, cache, spec, plan, None, gate)
    torch.testing.assert_close(actual, expected, rtol=2e-3, atol=2e-3)


def test_a_backend_says_why_it_does_not_support_a_layer() -> None:
    spec = AttentionSpec(4, 2, 64)
    backend = TritonPagedAttention()
    reason = backend.unsupported_reason(spec, torch.float16, CPU)
    assert reason == (None if triton_interpreted() else "it needs a CUDA device")
    if triton_interpreted():
        assert "float64" in (backend.unsupported_reason(spec, torch.float64, CPU) or "")
        wide = AttentionSpec(4, 2, 576)
        assert "576" in (backend.unsupported_reason(wide, torch.float16, CPU) or "")


def test_backends_report_their_capabilities() -> None:
    """Each backend fits one step path of the worker: graphs on a GPU, traces on a CPU."""
    assert TritonPagedAttention().capabilities().device_side_metadata
    assert not TritonPagedAttention().capabilities().cpu_traceable
    cpu = CpuPagedAttention(None).capabilities()  # type: ignore[arg-type]
    assert cpu.cpu_traceable and cpu.float16_kv_cache and not cpu.device_side_metadata
    plain = TorchPagedAttention().capabilities()
    assert not (plain.device_side_metadata or plain.cpu_traceable or plain.float16_kv_cache)


class TensorSizeRecorder(torch.utils._python_dispatch.TorchDispatchMode):
    """Records the size of every tensor that torch creates."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.sizes.append(out.numel())
        return out


def test_memory_stays_linear_in_the_prompt_length() -> None:
    """6,000 tokens have 36 million scores per head; no slice may hold more than the limit."""
    spec = AttentionSpec(2, 1, 8)
    backend = TorchPagedAttention(fused=False)
    prompt_len = 6000
    num_blocks = prompt_len // 16
    cache = torch.zeros(kv_cache_shape(spec, num_blocks, 16))
    metadata = AttentionMetadata.from_host([prompt_len], [prompt_len], [range(num_blocks)], 16, CPU)
    q = torch.randn(prompt_len, 2, 8)
    with TensorSizeRecorder() as recorder:
        backend.attend(q, cache, spec, backend.prepare(metadata))
    assert max(recorder.sizes) <= torch_paged.MAX_SCORES
