"""Every backend against the definition of attention, over random ragged steps.

The definition knows no pages: it keeps each sequence's keys and values in a list and computes one query at a time.
"""

from __future__ import annotations

from itertools import accumulate
from random import Random

import pytest
import torch

from bloomery.attention import torch_paged
from bloomery.attention.base import Backend, AttentionMetadata, cache_shape
from bloomery.attention.torch_paged import TorchPaged
from bloomery.attention.triton_paged import TritonPaged
from bloomery.kernels import paged_decode, paged_prefill
from bloomery.kernels.alibi import alibi_slopes
from bloomery.kernels.launch import interpreted
from bloomery.kernels.store import store
from bloomery.spec import Alibi, Attention

SPECS = {
    "mha": Attention(4, 4, 16),
    "gqa": Attention(6, 2, 16),
    "mqa": Attention(4, 1, 8, scale=0.3),
    "window": Attention(4, 2, 16, window=5),
    "alibi": Attention(6, 6, 8, Alibi()),
    "alibi-gqa": Attention(6, 3, 8, Alibi(scale=0.5)),
    "softcap": Attention(4, 2, 16, softcap=2.0),
    "softcap-window": Attention(4, 2, 16, softcap=2.0, window=3),
    **{f"d{dim}": Attention(2, 1, dim) for dim in (64, 80, 96, 112, 128, 256)},
}
BACKENDS: dict[str, Backend] = {"torch": TorchPaged(), "torch-plain": TorchPaged(fused=False)}
if interpreted():  # small tiles, so that short sequences have several, and splits
    BACKENDS["triton"] = TritonPaged(
        decode=paged_decode.Tiling(16, 4, 2, splits=2, direct=1),
        prefill=paged_prefill.Tiling(16, 16, 4, 2, 2, 1),
    )


def define(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, position: int, spec: Attention
) -> torch.Tensor:
    """One query [heads, dim] over keys and values [length, kv heads, dim], in float64."""
    share = spec.num_heads // spec.num_kv_heads
    out = torch.empty(spec.num_heads, spec.head_dim, dtype=torch.float64)
    first = 0 if spec.window is None else max(0, position - spec.window + 1)
    for head in range(spec.num_heads):
        k = keys[first : position + 1, head // share].double()
        v = values[first : position + 1, head // share].double()
        scores = k @ q[head].double() * spec.softmax_scale
        if spec.softcap is not None:
            scores = spec.softcap * torch.tanh(scores / spec.softcap)
        if isinstance(spec.position, Alibi):
            slope = alibi_slopes(spec.num_heads, spec.position.max_bias)[head] * spec.position.scale
            scores = scores + slope.double() * torch.arange(first - position, 1)
        out[head] = scores.softmax(0) @ v
    return out.flatten()


def ragged(
    random: Random, tables: list[list[int]], lengths: list[int], counts: list[int], size: int
) -> AttentionMetadata:
    positions = []
    slots = []
    for table, length, count in zip(tables, lengths, counts):
        for position in range(length - count, length):
            positions.append(position)
            slots.append(table[position // size] * size + position % size)
    widest = max(map(len, tables))
    padded = [table + [random.randrange(40)] * (widest - len(table)) for table in tables]
    starts = [0, *accumulate(counts)]
    return AttentionMetadata(
        tuple(counts),
        tuple(lengths),
        counts.count(1),
        torch.tensor(starts),
        torch.tensor(lengths),
        torch.tensor(positions),
        torch.tensor(slots),
        torch.tensor(padded),
        size,
    )


@pytest.mark.filterwarnings(
    "ignore::RuntimeWarning"
)  # interpreted kernels divide by zero for rows of nobody
@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_backend_equals_the_definition(
    spec: Attention, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_paged, "SCORES", 64)  # so that queries go in many slices
    random = Random(0)
    size = 4
    torch.manual_seed(0)
    cache = torch.randn(cache_shape(spec, 40, size))
    free = random.sample(range(40), 40)
    tables: list[list[int]] = [[] for _ in range(4)]
    lengths = [0] * 4
    stored: list[list[torch.Tensor]] = [[] for _ in range(4)]
    for _ in range(6):
        members = random.sample(range(4), random.randrange(1, 5))
        counts = sorted((random.choice([1, 1, 3, 7]) for _ in members), key=lambda count: count > 1)
        for member, count in zip(members, counts):
            lengths[member] += count
            while len(tables[member]) * size < lengths[member]:
                tables[member].append(free.pop())
        q = torch.randn(sum(counts), spec.num_heads, spec.head_dim)
        k, v = torch.randn(2, sum(counts), spec.num_kv_heads, spec.head_dim)
        step = ragged(
            random, [tables[m] for m in members], [lengths[m] for m in members], counts, size
        )
        store(k, v, cache, step.slots)
        got = backend.attend(q, cache, spec, backend.plan(step))
        token = 0
        for member, count in zip(members, counts):
            for i in range(count):
                stored[member].append(torch.stack((k[token + i], v[token + i])))
            keys, values = torch.stack(stored[member], 1)
            for i in range(count):
                want = define(q[token + i], keys, values, lengths[member] - count + i, spec)
                torch.testing.assert_close(got[token + i].double(), want, rtol=1e-5, atol=1e-5)
            token += count


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.skipif(
    not interpreted(), reason="kernels run on the CPU only under TRITON_INTERPRET=1"
)
@pytest.mark.parametrize(
    ("counts", "before", "taken"),
    [([40], 0, 1), ([1, 40, 20, 33, 50], 10, 2), ([1, 20, 40], 256, 1)],
    ids=["alone", "among others", "behind a chunk"],
)
def test_long_prompts_may_go_to_the_library(counts: list[int], before: int, taken: int) -> None:
    """The same numbers, read from pages or gathered; `before` of the last sequence are in the cache already."""
    spec = Attention(4, 2, 64)
    lengths = [*counts[:-1], counts[-1] + before]
    torch_rng = torch.manual_seed(0)
    tables = torch.randperm(100, generator=torch_rng).view(-1, 20)[: len(counts)].tolist()
    step = ragged(Random(0), tables, lengths, counts, 16)
    cache = torch.randn(cache_shape(spec, 100, 16)).half()
    q = torch.randn(sum(counts), 4, 64).half()
    mine = TritonPaged(library=None)
    library = TritonPaged(library=30)
    assert [prompt.whole for prompt in library.plan(step).prompts].count(True) == taken
    want = mine.attend(q, cache, spec, mine.plan(step))
    torch.testing.assert_close(
        library.attend(q, cache, spec, library.plan(step)), want, rtol=2e-3, atol=2e-3
    )


def test_a_backend_says_why_not() -> None:
    spec = Attention(4, 2, 64)
    backend = TritonPaged()
    cpu = torch.device("cpu")
    assert backend.refuses(spec, torch.float16, cpu) == (
        None if interpreted() else "it needs a CUDA device"
    )
    if interpreted():
        assert "float64" in (backend.refuses(spec, torch.float64, cpu) or "")
        assert "512" in (backend.refuses(Attention(4, 2, 512), torch.float16, cpu) or "")


def test_memory_stays_linear_in_the_prompt() -> None:
    """A prompt of 6,000 tokens would have 36 million scores a head; no slice may hold more than the limit."""
    spec = Attention(2, 1, 8)
    backend = TorchPaged(fused=False)
    n = 6000
    sizes: list[int] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                sizes.append(out.numel())
            return out

    cache = torch.zeros(cache_shape(spec, n // 16, 16))
    everything = torch.arange(n)
    ends = torch.tensor([n])
    step = AttentionMetadata(
        (n,),
        (n,),
        0,
        torch.tensor([0, n]),
        ends,
        everything,
        everything,
        torch.arange(n // 16)[None],
        16,
    )
    q = torch.randn(n, 2, 8)
    with Watch():
        backend.attend(q, cache, spec, backend.plan(step))
    assert max(sizes) <= torch_paged.SCORES
