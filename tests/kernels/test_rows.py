"""A decode step's two ends: the kernels, under the interpreter, against their references."""

from __future__ import annotations

import pytest
import torch

from bloomery.kernels import rows as kernels
from bloomery.kernels.launch import interpreted

pytestmark = pytest.mark.skipif(not interpreted(), reason="kernels run on the CPU only under TRITON_INTERPRET=1")


@pytest.mark.parametrize("lines", [1, 3, 8])
def test_fetch_and_advance(lines: int) -> None:
    generator = torch.Generator().manual_seed(lines)

    def numbers(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(high, shape, generator=generator, dtype=torch.int32)

    count, width, size = 9, 5, 4
    last, positions, tables = numbers(1000, count + 1), numbers(width * size, count + 1), numbers(50, count + 1, width)
    rows = torch.randperm(count, generator=generator)[:lines].int()
    rows[-1] = count  # padding
    want = kernels.fetch_reference(rows, last, positions, tables, size)
    out, blocks = torch.full((4, lines), -1, dtype=torch.int32), torch.full((lines, width), -1, dtype=torch.int32)
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
    kernels.advance_reference(rows, tokens, *states[0])
    kernels.advance_kernel[(1,)](rows, tokens, *states[1], lines, count, WIDTH=8, PDL=False)
    for got, wanted in zip(states[1], states[0], strict=True):
        assert torch.equal(got, wanted)
    assert states[0][0][count] == last[count] and states[0][1][count] == positions[count]
