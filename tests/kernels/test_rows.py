"""A step's two ends: the kernels, under the interpreter, against their references."""

from __future__ import annotations

from itertools import accumulate
from random import Random

import pytest
import torch

from bloomery.kernels import rows as kernels
from bloomery.kernels.launch import interpreted

pytestmark = pytest.mark.skipif(
    not interpreted(), reason="kernels run on the CPU only under TRITON_INTERPRET=1"
)


@pytest.mark.parametrize("lines", [1, 3, 8])
def test_fetch_and_advance(lines: int) -> None:
    generator = torch.Generator().manual_seed(lines)

    def numbers(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(high, shape, generator=generator, dtype=torch.int32)

    count = 9
    width = 5
    size = 4
    last = numbers(1000, count + 1)
    positions = numbers(width * size, count + 1)
    tables = numbers(50, count + 1, width)
    rows = torch.randperm(count, generator=generator)[:lines].int()
    rows[-1] = count  # padding
    want = kernels.fetch_reference(rows, last, positions, tables, size)
    out = torch.full((4, lines), -1, dtype=torch.int32)
    blocks = torch.full((lines, width), -1, dtype=torch.int32)
    kernels.fetch_kernel[(lines,)](
        rows, last, positions, tables, out, blocks, lines, width, SIZE=size, CHUNK=2, PDL=False
    )
    for got, wanted in zip(out, want[:4], strict=True):
        assert torch.equal(got, wanted)
    for line, end in enumerate(want.ends.tolist()):
        used = -(-end // size)
        assert torch.equal(blocks[line, :used], want.tables[line, :used])
    tokens = numbers(1000, lines)
    states = [(last.clone(), positions.clone()) for _ in range(2)]
    kernels.advance_reference(rows, tokens, want.ends, *states[0])
    kernels.advance_kernel[(-(-lines // 2),)](
        rows, tokens, want.ends, *states[1], lines, count, WIDTH=2, PDL=False
    )
    for got, wanted in zip(states[1], states[0], strict=True):
        assert torch.equal(got, wanted)
    assert states[0][0][count] == last[count] and states[0][1][count] == positions[count]


@pytest.mark.parametrize("seed", range(8))
def test_gather(seed: int) -> None:
    random = Random(seed)
    count = 9
    width = 5
    size = 4
    lines = random.choice((0, 3, 6))
    prompts = 4

    def numbers(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(high, shape, generator=generator, dtype=torch.int32)

    generator = torch.Generator().manual_seed(seed)
    last = numbers(1000, count + 1)
    positions = numbers(width * size, count + 1)
    tables = numbers(50, count + 1, width)
    positions[count] = 0
    members = random.sample(range(count), count)
    going = random.randint(0, lines)
    real = random.randint(0, prompts - 1)
    counts = [random.randint(1, 7) for _ in range(real)]
    ends = [random.randint(own, width * size) for own in counts]
    starts = list(accumulate(counts, initial=going))
    tokens = starts[-1] + random.choice((0, 5))
    sent = [
        *members[:going],
        *[count] * (lines - going),
        *[count] * prompts,
        *members[-real or count :],
        *[count] * (prompts - real),
        *starts,
        *[starts[-1]] * (prompts - real - 1),
        tokens,
        *ends,
        *[0] * (prompts - real),
        *(random.randrange(1000) for _ in range(tokens)),
    ]
    given = torch.tensor(sent, dtype=torch.int32), last, positions, tables
    want = kernels.gather_reference(*given, size, lines, prompts, tokens)
    sequences = lines + prompts
    out = torch.full((3 * tokens + 3 * sequences + 1,), -1, dtype=torch.int32)
    blocks = torch.full((sequences, width), -1, dtype=torch.int32)
    kernels.gather_kernel[(sequences,)](
        *given, out, blocks, lines, prompts, tokens, width, count, SIZE=size, CHUNK=4, PDL=False
    )
    got = out.split((sequences, sequences, sequences + 1, tokens, tokens, tokens))
    for name, found in zip(want._fields, got, strict=False):
        assert torch.equal(found, getattr(want, name)), name
    for sequence, end in enumerate(want.ends.tolist()):
        used = -(-end // size)
        assert torch.equal(blocks[sequence, :used], want.tables[sequence, :used])
