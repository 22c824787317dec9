"""Weight sources: slices equal the whole tensor, wrong tensors are named, memory is bounded."""

from __future__ import annotations

import io
import json
import os
import re
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from bloomery.artifacts.locate import ModelArtifact, locate_model
from bloomery.errors import CheckpointError
from bloomery.models import checkpoint
from bloomery.models.checkpoint import DummySource, FileSource, open_source, show_progress
from bloomery.quant.mxfp4 import E2M1

CPU = torch.device("cpu")


def write_checkpoint(folder: Path, **tensors: torch.Tensor) -> FileSource:
    """Save tensors; a double underscore in a name stands for a dot."""
    named = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    save_file(named, folder / "model.safetensors")
    return FileSource.safetensors(folder)


DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.bool,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_read_as_it_was_written(tmp_path: Path, dtype: torch.dtype) -> None:
    # torch has no direct conversion from floats to these unsigned types.
    via = torch.int32 if dtype in (torch.uint16, torch.uint32) else dtype
    tensor = (torch.randn(7, 5) * 3).to(via).to(dtype)
    misaligned = torch.ones(3, dtype=torch.uint8)
    stored = write_checkpoint(tmp_path, misaligned=misaligned, x=tensor).tensor("x", (7, 5))
    assert stored.dtype == dtype
    assert torch.equal(stored.load(dtype, CPU).view(torch.uint8), tensor.view(torch.uint8))
    if dtype.is_floating_point:
        assert torch.equal(stored.load(torch.float32, CPU), tensor.float())


def test_a_misaligned_tensor_is_read(tmp_path: Path) -> None:
    """Writers sort tensors by size, which aligns them; the format does not promise it."""
    values = torch.arange(6, dtype=torch.float32)
    header = {
        "a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
        "b": {"dtype": "F32", "shape": [2, 3], "data_offsets": [3, 27]},
    }
    text = json.dumps(header).encode()
    content = struct.pack("<Q", len(text)) + text + b"123" + values.numpy().tobytes()
    (tmp_path / "model.safetensors").write_bytes(content)
    stored = FileSource.safetensors(tmp_path).tensor("b", (2, 3)).cols(1, 3)
    assert torch.equal(stored.load(torch.float32, CPU), values.view(2, 3)[:, 1:])


def test_slices_equal_the_whole_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = torch.randn(40, 30)
    vector = torch.randn(40)
    files = write_checkpoint(tmp_path, w=matrix, v=vector)
    for num_values in (1, 64, 10**6):  # read at a time: a row, a few rows, all
        monkeypatch.setattr(checkpoint, "STREAMED_VALUES", num_values)
        w = files.tensor("w", (40, 30))
        v = files.tensor("v", (40,))
        assert torch.equal(w.load(torch.float32, CPU), matrix)
        picked = w.rows([(30, 40), (3, 5)]).cols(7, 23).cat([w.rows([(0, 1)]).cols(7, 23)])
        expected = torch.cat([matrix[30:], matrix[3:5], matrix[:1]])[:, 7:23]
        assert torch.equal(picked.load(torch.float32, CPU), expected)
        picked = v.rows([(5, 9), (0, 2)])
        expected = torch.cat([vector[5:9], vector[:2]])
        assert torch.equal(picked.load(torch.float32, CPU), expected)
        rounded = w.load(torch.bfloat16, CPU)
        assert rounded.dtype == torch.bfloat16 and torch.equal(rounded, matrix.bfloat16())


def test_a_transposed_matrix_is_read_as_out_in(tmp_path: Path) -> None:
    stored = torch.randn(30, 40)  # [in, out]
    matrix = write_checkpoint(tmp_path, w=stored).tensor("w", (40, 30), transposed=True)
    assert matrix.shape == (40, 30)
    assert torch.equal(matrix.load(torch.float32, CPU), stored.T)
    part = matrix.rows([(3, 9)]).cols(11, 30)
    assert torch.equal(part.load(torch.float32, CPU), stored.T[3:9, 11:])
    assert torch.equal(part.pieces[0].read((3, 9), (11, 30)), stored.T[3:9, 11:])


def test_experts_of_a_stacked_tensor(tmp_path: Path) -> None:
    stack = torch.randn(4, 6, 5)
    transposed = torch.randn(4, 5, 6)
    biases = torch.randn(4, 6)
    files = write_checkpoint(tmp_path, up=stack, down=transposed, bias=biases)
    for e in range(4):
        assert torch.equal(files.tensor("up", (6, 5), expert=e).load(torch.float32, CPU), stack[e])
        part = files.tensor("down", (6, 5), transposed=True, expert=e).rows([(1, 4)]).cols(2, 5)
        assert torch.equal(part.load(torch.float32, CPU), transposed[e].T[1:4, 2:])
        assert torch.equal(files.tensor("bias", (6,), expert=e).load(torch.float32, CPU), biases[e])
    for name, shape, expert in (("up", (6, 5), 4), ("up", (5, 6), 0), ("bias", (6, 5), 0)):
        with pytest.raises(CheckpointError, match=rf"{name}.*\['experts', "):
            files.tensor(name, shape, expert=expert)


def test_a_read_view_cannot_change_the_file(tmp_path: Path) -> None:
    files = write_checkpoint(tmp_path, w=torch.zeros(4, 4))
    before = (tmp_path / "model.safetensors").read_bytes()
    view = files.tensor("w", (4, 4)).pieces[0].read((0, 4), (0, 4))
    view.fill_(1)
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_a_missing_tensor_and_a_wrong_shape_are_named(tmp_path: Path) -> None:
    files = write_checkpoint(tmp_path, layers__0__weight=torch.zeros(4, 3))
    with pytest.raises(
        CheckpointError, match=r"no tensor 'layers\.0\.bias'.*nearest names are layers\.0\.weight"
    ):
        files.tensor("layers.0.bias", (4,))
    message = (
        r"model\.safetensors: tensor 'layers\.0\.weight' has shape \[4, 3\], the model expects "
    )
    for shape, transposed, expected in (
        ((3, 4), False, "[3, 4]"),
        ((4,), False, "[4]"),
        ((4, 3), True, "[3, 4]"),
    ):
        with pytest.raises(CheckpointError, match=message + re.escape(expected)):
            files.tensor("layers.0.weight", shape, transposed=transposed)


def test_an_unknown_dtype_is_named_when_it_is_needed(tmp_path: Path) -> None:
    text = b'{"x":{"dtype":"F4","shape":[2,4],"data_offsets":[0,4]}}'
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + b"1234")
    files = FileSource.safetensors(tmp_path)
    with pytest.raises(CheckpointError, match="'x' is of type F4"):
        files.tensor("x", (2, 4))


def test_unused_tensors_are_listed(tmp_path: Path) -> None:
    files = write_checkpoint(tmp_path, a=torch.zeros(1), b=torch.zeros(1), c=torch.zeros(1))
    files.tensor("b", (1,))
    assert files.has("a") and not files.has("d") and set(files.names()) == {"a", "b", "c"}
    assert files.unused() == ("a", "c")


def test_a_file_that_shrinks_after_its_header_was_read_is_named(tmp_path: Path) -> None:
    stored = write_checkpoint(tmp_path, w=torch.zeros(4096, 8)).tensor("w", (4096, 8))
    os.truncate(tmp_path / "model.safetensors", 70_000)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: became shorter"):
        stored.load(torch.float32, CPU)


def test_every_byte_read_is_reported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "STREAMED_VALUES", 100)
    files = write_checkpoint(
        tmp_path, w=torch.zeros(64, 32), v=torch.zeros(64, dtype=torch.bfloat16)
    )
    reported: list[int] = []
    stored = files.tensor("w", (64, 32))
    files.advance = reported.append
    stored.load(torch.float32, CPU)
    files.tensor("v", (64,)).load(torch.float32, CPU)
    assert sum(reported) == files.nbytes == 64 * 32 * 4 + 64 * 2 and len(reported) > 10
    reported.clear()
    stored.rows([(0, 16)]).cols(0, 8).load(torch.float32, CPU)
    assert sum(reported) == 16 * 8 * 4, "a rank reports its own slices"


def test_progress_is_printed_as_lines_or_as_a_bar(tmp_path: Path) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    files = write_checkpoint(tmp_path, w=torch.zeros(1000, 1000))
    for stream, expected in (
        (io.StringIO(), "weights: 0.00 GB read in"),
        (Terminal(), "4.0/4.0 MB"),
    ):
        with show_progress(files.nbytes, stream) as files.advance:
            files.tensor("w", (1000, 1000)).load(torch.float32, CPU)
        assert expected in stream.getvalue()


def test_progress_lines_print_the_remaining_time() -> None:
    stream = io.StringIO()
    with checkpoint._print_progress_lines(10**9, stream, interval=0.0) as advance:
        time.sleep(0.01)
        advance(25 * 10**7)
    assert re.search(r"0\.25 of 1\.00 GB, \d+ s left", stream.getvalue())


def test_open_source_by_kind(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, a=torch.zeros(1))
    artifact = ModelArtifact("x", "folder", tmp_path, "local folder")
    assert set(open_source(artifact).names()) == {"a"}
    (tmp_path / "config.json").write_text('{"torch_dtype": "float16"}')
    dummy = open_source(artifact, "dummy")
    assert isinstance(dummy, DummySource)
    assert dummy.tensor("a.weight", (2, 2)).dtype == torch.float16
    assert "blk.0.attn_q.weight" in open_source(locate_model(None)).names()


# ---- random weights ------------------------------------------------------------------------------


def test_dummy_weights_are_nearly_normal_and_independent() -> None:
    dummy = DummySource()
    w = dummy.tensor("layers.0.up.weight", (512, 1024)).load(torch.float32, CPU)
    assert w.shape == (512, 1024)
    assert abs(w.mean()) < 1e-4 and abs(w.std() - 0.02) < 1e-4
    z = w / 0.02
    assert abs((z**4).mean() - 2.7) < 0.05, (
        "a sum of four uniform numbers: tails a little lighter than the normal's 3"
    )
    flat = z.flatten()
    for lag in (1, 2, 1024, 1025):
        assert abs((flat[:-lag] * flat[lag:]).mean()) < 0.01, "neighbours are not correlated"
    assert w.unique(dim=0).shape[0] == 512 and w.T.unique(dim=0).shape[0] == 1024
    assert torch.linalg.matrix_rank(w) == 512


def test_dummy_weights_depend_only_on_name_and_position() -> None:
    dummy = DummySource()
    full = dummy.tensor("a.weight", (300, 2000)).load(torch.float32, CPU)
    stored = DummySource().tensor("a.weight", (300, 2000))
    part = stored.rows([(200, 300), (7, 9)]).cols(512, 1024).load(torch.float32, CPU)
    assert torch.equal(part, torch.cat([full[200:], full[7:9]])[:, 512:1024])
    assert torch.equal(stored.pieces[0].read((0, 5), (0, 9)), full[:5, :9])
    assert torch.equal(stored.load(torch.bfloat16, CPU), full.bfloat16())
    other_tensor = dummy.tensor("b.weight", (300, 2000)).load(torch.float32, CPU)
    experts = [
        dummy.tensor("a.weight", (300, 2000), expert=e).load(torch.float32, CPU) for e in range(2)
    ]
    tensors = [full, other_tensor, *experts]
    for i, x in enumerate(tensors):
        for y in tensors[:i]:
            assert (x == y).float().mean() < 0.01


def test_dummy_mxfp4_experts_have_all_codes_equally_often() -> None:
    dummy = DummySource()
    assert dummy.has("experts.up_blocks") and not dummy.has("up.weight_blocks")
    stored = dummy.tensor("experts.up_blocks", (256, 2048), expert=3)
    codes = stored.load(stored.dtype, CPU)
    assert codes.dtype == torch.uint8
    for nibble in (codes & 15, codes >> 4):
        counts = nibble.flatten().long().bincount(minlength=16).float() / codes.numel()
        assert counts.min() > 0.05 and counts.max() < 0.08
        assert abs(torch.tensor(E2M1)[nibble.long()].mean()) < 0.1
    part = stored.rows([(7, 9)]).cols(5, 50).load(torch.uint8, CPU)
    assert torch.equal(part, codes[7:9, 5:50])
    exponents = dummy.tensor("experts.up_scales", (4, 8), expert=3).load(torch.uint8, CPU)
    assert exponents.unique().tolist() == [120]


def test_dummy_norms_and_biases_change_nothing() -> None:
    dummy = DummySource()
    assert dummy.tensor("norm.weight", (9,)).load(torch.float32, CPU).tolist() == [1.0] * 9
    part = dummy.tensor("norm.bias", (9,)).rows([(2, 4)])
    assert part.load(torch.float32, CPU).tolist() == [0.0] * 2
    assert dummy.has("x.weight") and dummy.has("x.bias") and not dummy.has("x.qweight")
    assert dummy.unused() == () and dummy.nbytes == 0


# ---- memory and time -----------------------------------------------------------------------------

PEAK_MEMORY_SCRIPT = """
import sys, torch
from pathlib import Path
from bloomery.models.checkpoint import FileSource
torch.set_num_threads(1)
peak = lambda: int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024
source = FileSource.safetensors(Path(sys.argv[1]))
dtype = getattr(torch, sys.argv[2])
source.tensor("t0", (1024, 12800)).rows([(0, 1)]).load(dtype, torch.device("cpu"))
before = peak()
weights = [source.tensor(f"t{i}", (1024, 12800)).load(dtype, torch.device("cpu")) for i in range(8)]
print(peak() - before, sum(tensor.nbytes for tensor in weights))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_peak_memory_is_the_weights_and_one_tensor(tmp_path: Path, dtype: str) -> None:
    """A separate process loads 210 MB of bfloat16 weights, unchanged and widened."""
    save_file(
        {f"t{i}": torch.zeros(1024, 12800, dtype=torch.bfloat16) for i in range(8)},
        tmp_path / "model.safetensors",
    )
    process = subprocess.run(
        [sys.executable, "-c", PEAK_MEMORY_SCRIPT, str(tmp_path), dtype],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    grown, weights = map(int, process.stdout.split())
    one_tensor = weights // 8
    assert weights <= grown + 2**20, "the measurement sees the weights"
    assert grown < weights + one_tensor


def test_the_embedded_model_loads_in_about_a_second() -> None:
    files = open_source(locate_model(None))
    started = time.process_time()
    total = 0
    for name in files.names():
        total += files.tensor(name, files.entries[name].shape).load(torch.float32, CPU).numel()
    assert total == 134_515_008
    assert time.process_time() - started < 4.0  # seconds; 0.7 on an idle core
