"""Programs: what is written down is what runs, nothing is left out unnoticed, and memory is given out again."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch

from bloomery.native import build as building
from bloomery.native import ops
from bloomery.native.arena import Arena
from bloomery.native.build import NoLibrary, build, whole
from bloomery.native.record import Unrecordable, record
from bloomery.native.team import team


def test_a_program_runs_on_what_its_buffers_hold() -> None:
    x = torch.randn(3, 64)
    out = torch.zeros(3, 64)

    def work() -> None:
        out.copy_(torch.tanh(ops.elements(ops.ACTIVATED, x, activation="silu") * 2.0 + x) / 4.0)

    program = record(work, Arena(1 << 16))
    assert len(program) == 6 and not out.any()  # written down, not done
    for _ in range(2):
        program.replay()
        assert torch.allclose(out, torch.tanh(torch.nn.functional.silu(x) * 2 + x) / 4, atol=1e-6)
        x.copy_(torch.randn(3, 64))


def test_what_has_no_native_form_is_named() -> None:
    x = torch.zeros(3)
    with pytest.raises(Unrecordable, match="sigmoid"):
        record(lambda: x.sigmoid_() and None, Arena(1 << 16))
    with pytest.raises(Unrecordable, match="zeros"):
        record(lambda: torch.zeros(3) and None, Arena(1 << 16))
    assert team().arena is None


def test_threads_do_not_see_each_others_steps() -> None:
    """Eager products of two threads, each through the space that all share, while a third writes a program down."""
    matrix = ops.Matrix(
        64, [(ops.pack("Q8_0", torch.randint(0, 60, (48, 68), dtype=torch.uint8), 64), 48, 3)]
    )
    inputs = [torch.randn(rows, 64) for rows in (40, 41, 90)]
    alone = [ops.linear(matrix, x) for x in inputs]

    def product(number: int) -> bool:
        return all(
            torch.equal(ops.linear(matrix, inputs[number]), alone[number]) for _ in range(200)
        )

    def written() -> bool:
        out = torch.zeros(90, 48)

        def work() -> None:
            out.copy_(ops.linear(matrix, inputs[2]))

        for _ in range(40):
            program = record(work, Arena(1 << 17))
            assert len(program) == 3
            out.zero_()
            program.replay()
            assert torch.equal(out, alone[2])
        return True

    with ThreadPoolExecutor(3) as threads:
        works = [
            threads.submit(torch.inference_mode()(work))
            for work in (partial(product, 0), partial(product, 1), written)
        ]
        assert all(found.result() for found in works)


def test_an_arena_gives_out_what_nobody_holds() -> None:
    arena = Arena(4096)
    for _ in range(100):
        held = arena.tensor(256, torch.float32).view(16, 16)[3:]
        held.fill_(1.0)
    other = arena.tensor(512, torch.float32)
    with pytest.raises(MemoryError):
        arena.tensor(512, torch.float32)
    del held, other
    gc.collect()
    assert arena.free[0][1] - arena.free[0][0] == 4096


def test_a_damaged_library_is_not_loaded(tmp_path: Path) -> None:
    library = build()
    data = library.read_bytes()
    copy = tmp_path / library.name
    for damaged in (
        data[: len(data) // 2],
        data[:-1],
        b"",
        data[:5000] + bytes([data[5000] ^ 1]) + data[5001:],
    ):
        copy.write_bytes(damaged)
        assert not whole(copy)
    assert whole(library)


def test_without_a_compiler_there_is_a_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(building.shutil, "which", lambda name: None)
    with pytest.raises(NoLibrary, match="no C compiler"):
        build(folder=tmp_path)


def test_a_compiler_that_fails_says_so(tmp_path: Path) -> None:
    with pytest.raises(NoLibrary, match="failed"):
        build(("-not-an-option",), tmp_path)
    assert not list(tmp_path.glob("*.so"))
