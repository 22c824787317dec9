"""Tensors pulled from files and made up: equal to the whole, slice by slice; wrong ones named; memory bounded."""

from __future__ import annotations

import io
import json
import os
import re
import struct
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import save_file

from bloomery.artifacts.locate import Artifact, locate
from bloomery.errors import CheckpointError
from bloomery.models import checkpoint
from bloomery.models.checkpoint import DummySource, FileSource, open_source, progress

CPU = torch.device("cpu")


def source(folder, **tensors) -> FileSource:
    save_file(
        {name.replace("__", "."): tensor for name, tensor in tensors.items()},
        folder / "model.safetensors",
    )
    return FileSource.safetensors(folder)


TYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]
TYPES += [
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.bool,
]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_every_type_is_read_as_it_was_written(tmp_path, dtype):
    tensor = (
        (torch.randn(7, 5) * 3)
        .to(torch.int32 if dtype in (torch.uint16, torch.uint32) else dtype)
        .to(dtype)
    )
    stored = source(tmp_path, odd=torch.ones(3, dtype=torch.uint8), x=tensor).tensor("x", (7, 5))
    assert stored.dtype == dtype
    assert torch.equal(stored.load(dtype, CPU).view(torch.uint8), tensor.view(torch.uint8))
    if dtype.is_floating_point:
        assert torch.equal(stored.load(torch.float32, CPU), tensor.float())


def test_misaligned_tensors(tmp_path):
    """Writers sort by size so that tensors are aligned; the format does not promise it."""
    values = torch.arange(6, dtype=torch.float32)
    header = {
        "a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
        "b": {"dtype": "F32", "shape": [2, 3], "data_offsets": [3, 27]},
    }
    text = json.dumps(header).encode()
    data = struct.pack("<Q", len(text)) + text + b"123" + values.numpy().tobytes()
    (tmp_path / "model.safetensors").write_bytes(data)
    found = FileSource.safetensors(tmp_path).tensor("b", (2, 3)).cols(1, 3).load(torch.float32, CPU)
    assert torch.equal(found, values.view(2, 3)[:, 1:])


def test_slices_equal_the_whole(tmp_path, monkeypatch):
    whole = torch.randn(40, 30)
    vector = torch.randn(40)
    files = source(tmp_path, w=whole, v=vector)
    for step in (1, 64, 10**6):  # values at a time: a row, a few rows, all
        monkeypatch.setattr(checkpoint, "STREAMED_VALUES", step)
        w = files.tensor("w", (40, 30))
        v = files.tensor("v", (40,))
        assert torch.equal(w.load(torch.float32, CPU), whole)
        picked = w.rows([(30, 40), (3, 5)]).cols(7, 23).cat([w.rows([(0, 1)]).cols(7, 23)])
        assert torch.equal(
            picked.load(torch.float32, CPU), torch.cat([whole[30:], whole[3:5], whole[:1]])[:, 7:23]
        )
        assert torch.equal(
            v.rows([(5, 9), (0, 2)]).load(torch.float32, CPU), torch.cat([vector[5:9], vector[:2]])
        )
        half = w.load(torch.bfloat16, CPU)
        assert half.dtype == torch.bfloat16 and torch.equal(half, whole.bfloat16())


def test_transposed_is_read_as_canonical(tmp_path):
    stored = torch.randn(30, 40)  # [in, out]
    turned = source(tmp_path, w=stored).tensor("w", (40, 30), transposed=True)
    assert turned.shape == (40, 30)
    assert torch.equal(turned.load(torch.float32, CPU), stored.T)
    part = turned.rows([(3, 9)]).cols(11, 30)
    assert torch.equal(part.load(torch.float32, CPU), stored.T[3:9, 11:])
    assert torch.equal(part.pieces[0].read((3, 9), (11, 30)), stored.T[3:9, 11:])


def test_experts_of_a_stack(tmp_path):
    stack = torch.randn(4, 6, 5)
    turned = torch.randn(4, 5, 6)
    biases = torch.randn(4, 6)
    files = source(tmp_path, up=stack, down=turned, bias=biases)
    for e in range(4):
        assert torch.equal(files.tensor("up", (6, 5), expert=e).load(torch.float32, CPU), stack[e])
        found = files.tensor("down", (6, 5), transposed=True, expert=e).rows([(1, 4)]).cols(2, 5)
        assert torch.equal(found.load(torch.float32, CPU), turned[e].T[1:4, 2:])
        assert torch.equal(files.tensor("bias", (6,), expert=e).load(torch.float32, CPU), biases[e])
    for name, shape, expert in (("up", (6, 5), 4), ("up", (5, 6), 0), ("bias", (6, 5), 0)):
        with pytest.raises(CheckpointError, match=rf"{name}.*\['experts', "):
            files.tensor(name, shape, expert=expert)


def test_reading_is_a_view_of_the_file(tmp_path):
    """No copy, and no way to write to the file through it."""
    files = source(tmp_path, w=torch.zeros(4, 4))
    before = (tmp_path / "model.safetensors").read_bytes()
    view = files.tensor("w", (4, 4)).pieces[0].read((0, 4), (0, 4))
    view.fill_(1)
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_missing_and_misshapen_tensors_are_named(tmp_path):
    files = source(tmp_path, layers__0__weight=torch.zeros(4, 3))
    with pytest.raises(
        CheckpointError, match=r"no tensor 'layers\.0\.bias'.*nearest names are layers\.0\.weight"
    ):
        files.tensor("layers.0.bias", (4,))
    message = (
        r"model\.safetensors: tensor 'layers\.0\.weight' has shape \[4, 3\], the model expects "
    )
    for shape, transposed, wanted in (
        ((3, 4), False, "[3, 4]"),
        ((4,), False, "[4]"),
        ((4, 3), True, "[3, 4]"),
    ):
        with pytest.raises(CheckpointError, match=message + re.escape(wanted)):
            files.tensor("layers.0.weight", shape, transposed=transposed)


def test_unknown_type_is_named_when_it_is_pulled(tmp_path):
    text = b'{"x":{"dtype":"F4","shape":[2,4],"data_offsets":[0,4]}}'
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + b"1234")
    files = FileSource.safetensors(tmp_path)
    with pytest.raises(CheckpointError, match="'x' is of type F4"):
        files.tensor("x", (2, 4))


def test_unused_tensors_are_listed(tmp_path):
    files = source(tmp_path, a=torch.zeros(1), b=torch.zeros(1), c=torch.zeros(1))
    files.tensor("b", (1,))
    assert files.has("a") and not files.has("d") and set(files.names()) == {"a", "b", "c"}
    assert files.unused() == ("a", "c")


def test_file_that_shrinks_after_the_headers_were_checked(tmp_path):
    stored = source(tmp_path, w=torch.zeros(4096, 8)).tensor("w", (4096, 8))
    os.truncate(tmp_path / "model.safetensors", 70_000)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: became shorter"):
        stored.load(torch.float32, CPU)


def test_bytes_are_reported_once_each(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "STREAMED_VALUES", 100)
    files = source(tmp_path, w=torch.zeros(64, 32), v=torch.zeros(64, dtype=torch.bfloat16))
    seen: list[int] = []
    stored = files.tensor("w", (64, 32))
    files.advance = seen.append
    stored.load(torch.float32, CPU)
    files.tensor("v", (64,)).load(torch.float32, CPU)
    assert sum(seen) == files.nbytes == 64 * 32 * 4 + 64 * 2 and len(seen) > 10
    seen.clear()
    stored.rows([(0, 16)]).cols(0, 8).load(torch.float32, CPU)
    assert sum(seen) == 16 * 8 * 4, "a rank reports its own slices"


def test_progress_in_plain_lines_and_on_a_terminal(tmp_path):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    files = source(tmp_path, w=torch.zeros(1000, 1000))
    for stream, expected in (
        (io.StringIO(), "weights: 0.00 GB read in"),
        (Terminal(), "4.0/4.0 MB"),
    ):
        with progress(files.nbytes, stream) as files.advance:
            files.tensor("w", (1000, 1000)).load(torch.float32, CPU)
        assert expected in stream.getvalue()


def test_plain_lines_say_how_long_it_will_take():
    stream = io.StringIO()
    with checkpoint._lines(10**9, stream, every=0.0) as advance:
        time.sleep(0.01)
        advance(25 * 10**7)
    assert re.search(r"0\.25 of 1\.00 GB, \d+ s left", stream.getvalue())


def test_open_source_by_kind(tmp_path):
    source(tmp_path, a=torch.zeros(1))
    artifact = Artifact("x", "folder", tmp_path, "local folder")
    assert set(open_source(artifact).names()) == {"a"}
    assert isinstance(open_source(artifact, "dummy"), DummySource)
    assert "blk.0.attn_q.weight" in open_source(locate(None)).names()


# ---- made-up weights -----------------------------------------------------------------------------


def test_dummy_weights_are_normal_and_of_the_shape_asked_for():
    dummy = DummySource()
    w = dummy.tensor("layers.0.up.weight", (512, 1024)).load(torch.float32, CPU)
    assert w.shape == (512, 1024)
    assert abs(w.mean()) < 1e-4 and abs(w.std() - 0.02) < 1e-4
    z = w / 0.02
    assert abs((z**4).mean() - 2.7) < 0.05, (
        "four dice: a little lighter in the tails than a normal's 3"
    )
    flat = z.flatten()
    for lag in (1, 2, 1024, 1025):
        assert abs((flat[:-lag] * flat[lag:]).mean()) < 0.01, (
            "neighbours know nothing of each other"
        )
    assert w.unique(dim=0).shape[0] == 512 and w.T.unique(dim=0).shape[0] == 1024
    assert torch.linalg.matrix_rank(w) == 512


def test_dummy_weights_depend_on_name_and_place_alone():
    dummy = DummySource()
    whole = dummy.tensor("a.weight", (300, 2000)).load(torch.float32, CPU)
    stored = DummySource().tensor("a.weight", (300, 2000))
    part = stored.rows([(200, 300), (7, 9)]).cols(512, 1024).load(torch.float32, CPU)
    assert torch.equal(part, torch.cat([whole[200:], whole[7:9]])[:, 512:1024])
    assert torch.equal(stored.pieces[0].read((0, 5), (0, 9)), whole[:5, :9])
    assert torch.equal(stored.load(torch.bfloat16, CPU), whole.bfloat16())
    other = dummy.tensor("b.weight", (300, 2000)).load(torch.float32, CPU)
    experts = [
        dummy.tensor("a.weight", (300, 2000), expert=e).load(torch.float32, CPU) for e in range(2)
    ]
    seen = [whole, other, *experts]
    assert all((x == y).float().mean() < 0.01 for i, x in enumerate(seen) for y in seen[:i])


def test_dummy_norms_and_biases_are_neutral():
    dummy = DummySource()
    assert dummy.tensor("norm.weight", (9,)).load(torch.float32, CPU).tolist() == [1.0] * 9
    assert (
        dummy.tensor("norm.bias", (9,)).rows([(2, 4)]).load(torch.float32, CPU).tolist()
        == [0.0] * 2
    )
    assert dummy.has("x.weight") and dummy.has("x.bias") and not dummy.has("x.qweight")
    assert dummy.unused() == () and dummy.nbytes == 0


# ---- memory and time -----------------------------------------------------------------------------

PEAK = """
import sys, torch
from pathlib import Path
from bloomery.models.checkpoint import FileSource
torch.set_num_threads(1)
peak = lambda: int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024
source = FileSource.safetensors(Path(sys.argv[1]))
dtype = getattr(torch, sys.argv[2])
source.tensor("t0", (1024, 12800)).rows([(0, 1)]).load(dtype, torch.device("cpu"))
before = peak()
kept = [source.tensor(f"t{i}", (1024, 12800)).load(dtype, torch.device("cpu")) for i in range(8)]
print(peak() - before, sum(t.nbytes for t in kept))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_peak_memory_is_the_weights_and_one_tensor(tmp_path, dtype):
    """210 MB of weights in bfloat16, loaded as they are and widened, in a process of its own."""
    save_file(
        {f"t{i}": torch.zeros(1024, 12800, dtype=torch.bfloat16) for i in range(8)},
        tmp_path / "model.safetensors",
    )
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(tmp_path), dtype],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    grown, weights = map(int, done.stdout.split())
    one = weights // 8
    assert weights <= grown + 2**20, "the measurement sees the weights"
    assert grown < weights + one


def test_embedded_model_is_loaded_in_about_a_second():
    files = open_source(locate(None))
    begun = time.process_time()
    total = 0
    for name in files.names():
        total += files.tensor(name, files.entries[name].shape).load(torch.float32, CPU).numel()
    assert total == 134_515_008
    assert time.process_time() - begun < 4.0  # 0.7 s on an idle core
