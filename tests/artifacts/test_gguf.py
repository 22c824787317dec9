"""Headers of GGUF files: read as the gguf package reads them, and refused if damaged."""

from __future__ import annotations

import random
import struct
import time
import tracemalloc

import gguf
import numpy as np
import pytest

from bloomery.artifacts.gguf import GGML_TYPES, read_gguf
from bloomery.artifacts.locate import locate_model
from bloomery.errors import CheckpointError


@pytest.fixture(scope="module")
def small_file(tmp_path_factory):
    """A real GGUF of a few kilobytes, written by the gguf package."""
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(2048)
    writer.add_token_list(["<s>", "Ġhé", "日本", ""])
    writer.add_token_scores([0.0, -1.5, 2.0, 0.25])
    writer.add_token_types([3, 1, 1, 1])
    writer.add_add_bos_token(True)
    writer.add_array("nested", [[1, 2], [3]])
    writer.add_float64("precise", 0.1)
    writer.add_int64("negative", -(2**40))
    writer.add_tensor("token_embd.weight", np.arange(32, dtype=np.float32).reshape(4, 8))
    writer.add_tensor("output_norm.weight", np.ones(8, dtype=np.float32))
    blocks = np.zeros((2, 34), np.uint8)
    writer.add_tensor("blk.0.ffn_up.weight", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    for write in (
        writer.write_header_to_file,
        writer.write_kv_data_to_file,
        writer.write_tensors_to_file,
        writer.close,
    ):
        write()
    return path


def pack_string(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def pack_tensor(name="t", dims=(8,), kind=0, offset=0, count=None) -> bytes:
    head = pack_string(name) + struct.pack("<I", len(dims) if count is None else count)
    return head + struct.pack(f"<{len(dims)}Q", *dims) + struct.pack("<IQ", kind, offset)


def write_gguf(path, body=b"", tensors=0, pairs=0, version=3, magic=b"GGUF", data=b""):
    head = magic + struct.pack("<IQQ", version, tensors, pairs) + body
    path.write_bytes(head + bytes(-len(head) % 32) + data)
    return path


def pack_pair(key: str, kind: int, value: bytes) -> bytes:
    return pack_string(key) + struct.pack("<I", kind) + value


def test_types_agree_with_ggml():
    known = {
        kind.value: (kind.name, *gguf.constants.GGML_QUANT_SIZES[kind])
        for kind in gguf.constants.GGML_QUANT_SIZES
    }
    known |= {number: GGML_TYPES[number] for number in GGML_TYPES.keys() - known.keys()}
    assert {number: known[number] for number in GGML_TYPES} == GGML_TYPES


def test_small_file_is_read_as_written(small_file):
    gguf_file = read_gguf(small_file)
    assert gguf_file.metadata["general.architecture"] == "llama"
    assert gguf_file.metadata["llama.context_length"] == 2048
    assert gguf_file.metadata["tokenizer.ggml.tokens"] == ["<s>", "Ġhé", "日本", ""]
    assert gguf_file.metadata["tokenizer.ggml.scores"] == [0.0, -1.5, 2.0, 0.25]
    assert gguf_file.metadata["tokenizer.ggml.token_type"] == [3, 1, 1, 1]
    assert gguf_file.metadata["tokenizer.ggml.add_bos_token"] is True
    assert gguf_file.metadata["nested"] == [[1, 2], [3]]
    assert (gguf_file.metadata["precise"], gguf_file.metadata["negative"]) == (0.1, -(2**40))
    assert gguf_file.tensors["token_embd.weight"].shape == (4, 8)
    assert gguf_file.tensors["blk.0.ffn_up.weight"].type == "Q8_0"
    assert gguf_file.tensors["blk.0.ffn_up.weight"].shape == (2, 32)


def test_embedded_model_is_read_quickly():
    path = locate_model(None).path
    gguf_file = read_gguf(path)
    best = min(cpu_seconds(lambda: read_gguf(path)) for _ in range(3))
    assert best < 0.5  # 0.05 s on an idle core; the gguf package takes seconds
    assert len(gguf_file.metadata["tokenizer.ggml.tokens"]) == 49152
    assert len(gguf_file.tensors) == 272


@pytest.mark.parametrize("which", ["small", pytest.param("embedded", marks=pytest.mark.slow)])
def test_header_agrees_with_the_gguf_package(small_file, which):
    path = small_file if which == "small" else locate_model(None).path
    gguf_file = read_gguf(path)
    reference = gguf.GGUFReader(path)
    fields = {
        name: field for name, field in reference.fields.items() if not name.startswith("GGUF.")
    }
    assert gguf_file.metadata.keys() == fields.keys()
    for name in fields.keys() - {"nested"}:  # the package flattens it
        assert gguf_file.metadata[name] == fields[name].contents(), name
    assert list(gguf_file.tensors) == [tensor.name for tensor in reference.tensors]
    for expected in reference.tensors:
        tensor = gguf_file.tensors[expected.name]
        assert tensor.shape == tuple(reversed(expected.shape.tolist()))
        assert tensor.type == expected.tensor_type.name
        assert (tensor.start, tensor.nbytes) == (expected.data_offset, expected.n_bytes)


def test_large_vocabulary_is_read_quickly(tmp_path):
    count = 262_144
    packed_tokens = b"".join(pack_string(f"Ġtoken{i}") for i in range(count))
    body = pack_pair("tokenizer.ggml.tokens", 9, struct.pack("<IQ", 8, count) + packed_tokens)
    body += pack_pair("tokenizer.ggml.scores", 9, struct.pack("<IQ", 6, count) + bytes(4 * count))
    path = write_gguf(tmp_path / "x.gguf", body, pairs=2)
    best = min(cpu_seconds(lambda: read_gguf(path)) for _ in range(3))
    gguf_file = read_gguf(path)
    assert gguf_file.metadata["tokenizer.ggml.tokens"][-1] == f"Ġtoken{count - 1}"
    assert len(gguf_file.metadata["tokenizer.ggml.scores"]) == count
    assert best < 0.5


def cpu_seconds(call) -> float:
    """Return the CPU seconds of a call, which other processes do not affect."""
    start = time.process_time()
    call()
    return time.process_time() - start


HOSTILE = {
    "other magic": ({"magic": b"GGML"}, "not a GGUF"),
    "version 1": ({"version": 1}, "version 1"),
    "version 4": ({"version": 4}, "version 4"),
    "big-endian": ({"version": 3 << 24}, "big-endian"),
    "tensors without end": ({"tensors": 2**63}, "more than any model"),
    "pairs without end": ({"pairs": 2**64 - 1}, "more than any model"),
    "pairs past the end": ({"pairs": 1000}, "metadata pair 0"),
    "tensors past the end": ({"tensors": 1000}, "tensor 0"),
    "key past the end": ({"pairs": 1, "body": struct.pack("<Q", 60000)}, "passes the end"),
    "key of 2**64 bytes": ({"pairs": 1, "body": struct.pack("<Q", 2**64 - 1)}, "a name of"),
    "empty key": ({"pairs": 1, "body": pack_pair("", 4, bytes(4))}, "a name of 0"),
    "key not UTF-8": ({"pairs": 1, "body": struct.pack("<Q", 1) + b"\xff" + bytes(8)}, "not UTF-8"),
    "key twice": ({"pairs": 2, "body": pack_pair("k", 4, bytes(4)) * 2}, "'k': appears twice"),
    "unknown kind": ({"pairs": 1, "body": pack_pair("k", 13, bytes(8))}, "'k': value kind 13"),
    "string past the end": (
        {"pairs": 1, "body": pack_pair("k", 8, struct.pack("<Q", 2**62))},
        "'k': a string passes",
    ),
    "array of 2**60": (
        {"pairs": 1, "body": pack_pair("k", 9, struct.pack("<IQ", 4, 2**60))},
        "'k': an array of",
    ),
    "array past the end": (
        {"pairs": 1, "body": pack_pair("k", 9, struct.pack("<IQ", 4, 10**6))},
        "'k': 4000000 bytes wanted",
    ),
    "strings past the end": (
        {"pairs": 1, "body": pack_pair("k", 9, struct.pack("<IQ", 8, 10**6))},
        "'k': .*within a string",
    ),
    "array of unknown": (
        {"pairs": 1, "body": pack_pair("k", 9, struct.pack("<IQ", 99, 1))},
        "'k': value kind 99",
    ),
    "deep arrays": (
        {"pairs": 1, "body": pack_pair("k", 9, struct.pack("<IQ", 9, 1) * 10_000)},
        "at depth",
    ),
    "alignment 0": (
        {"pairs": 1, "body": pack_pair("general.alignment", 4, bytes(4))},
        "alignment 0",
    ),
    "alignment 24": (
        {"pairs": 1, "body": pack_pair("general.alignment", 4, struct.pack("<I", 24))},
        "alignment 24",
    ),
    "alignment 2**31": (
        {"pairs": 1, "body": pack_pair("general.alignment", 4, struct.pack("<I", 2**31))},
        "alignment",
    ),
    "alignment a string": (
        {"pairs": 1, "body": pack_pair("general.alignment", 8, pack_string("32"))},
        "alignment '32'",
    ),
    "split": (
        {"pairs": 1, "body": pack_pair("split.count", 2, struct.pack("<H", 3))},
        "one of 3 parts.*--merge",
    ),
    "no dimensions": ({"tensors": 1, "body": pack_tensor(dims=())}, "'t': 0 dimensions"),
    "five dimensions": ({"tensors": 1, "body": pack_tensor(dims=(1,) * 5)}, "'t': 5 dimensions"),
    "dimensions without end": ({"tensors": 1, "body": pack_tensor(count=2**32 - 1)}, "dimensions"),
    "dimension 0": ({"tensors": 1, "body": pack_tensor(dims=(8, 0))}, "'t': shape"),
    "product over 2**64": (
        {"tensors": 1, "body": pack_tensor(dims=(2**32, 2**32, 2))},
        "truncated: tensor 't'",
    ),
    "product wraps to 0": (
        {"tensors": 1, "body": pack_tensor(dims=(2**63, 2, 1, 1))},
        "truncated: tensor 't'",
    ),
    "unknown type": ({"tensors": 1, "body": pack_tensor(kind=4)}, "'t': type 4 is not known"),
    "block not full": (
        {"tensors": 1, "body": pack_tensor(dims=(33,), kind=8)},
        "'t': shape .* blocks of 32",
    ),
    "offset not aligned": ({"tensors": 1, "body": pack_tensor(offset=8)}, "'t': offset 8"),
    "offset past the end": (
        {"tensors": 1, "body": pack_tensor(offset=2**63)},
        "truncated: tensor 't'",
    ),
    "data one byte short": (
        {"tensors": 1, "body": pack_tensor(), "data": bytes(31)},
        "truncated: tensor 't'",
    ),
    "tensor twice": (
        {"tensors": 2, "body": pack_tensor() * 2, "data": bytes(64)},
        "'t': appears twice",
    ),
    "overlap": (
        {
            "tensors": 2,
            "body": pack_tensor(dims=(16,)) + pack_tensor("u", offset=32),
            "data": bytes(96),
        },
        "'u' overlaps",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files_are_refused_by_name(tmp_path, case):
    arguments, message = HOSTILE[case]
    path = write_gguf(tmp_path / "x.gguf", **arguments)
    with pytest.raises(CheckpointError, match=message) as error:
        read_gguf(path)
    assert str(path) in str(error.value)


def test_smallest_valid_files(tmp_path):
    assert read_gguf(write_gguf(tmp_path / "empty.gguf")).tensors == {}
    for version in (2, 3):
        gguf_file = read_gguf(
            write_gguf(
                tmp_path / "x.gguf",
                pack_tensor(dims=(4, 2)),
                tensors=1,
                version=version,
                data=bytes(32),
            )
        )
        assert gguf_file.tensors["t"].shape == (2, 4)
    body = pack_pair("general.alignment", 4, struct.pack("<I", 64)) + pack_tensor(offset=64)
    path = write_gguf(tmp_path / "x.gguf", body, tensors=1, pairs=1, data=bytes(128 + 64))
    assert read_gguf(path).tensors["t"].start % 64 == 0


@pytest.mark.parametrize("raw", [b"", b"GGUF", b"version https://git-lfs.github.com/spec/v1\n"])
def test_short_files_are_refused(tmp_path, raw):
    (tmp_path / "x.gguf").write_bytes(raw)
    with pytest.raises(CheckpointError, match="too short|git lfs pull"):
        read_gguf(tmp_path / "x.gguf")


def test_every_truncation_is_refused(small_file, tmp_path):
    data = small_file.read_bytes()
    path = tmp_path / "x.gguf"
    last = max(tensor.start + tensor.nbytes for tensor in read_gguf(small_file).tensors.values())
    for length in range(0, last, 3):
        path.write_bytes(data[:length])
        with pytest.raises(CheckpointError):
            read_gguf(path)
    path.write_bytes(data[: last - 1])
    with pytest.raises(CheckpointError, match=r"truncated: tensor 'blk\.0\.ffn_up\.weight'"):
        read_gguf(path)
    path.write_bytes(data[:last])
    read_gguf(path)


@pytest.mark.parametrize("count", [2000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_mutations_are_refused_or_harmless(small_file, tmp_path, count):
    """Change one to four random bytes: the result is a CheckpointError or a valid table."""
    data = small_file.read_bytes()
    path = tmp_path / "x.gguf"
    generator = random.Random(1)
    header = min(tensor.start for tensor in read_gguf(small_file).tensors.values())
    tracemalloc.start()
    refused = 0
    slowest = 0.0
    for _ in range(count):
        mutated = bytearray(data)
        for _ in range(generator.choice((1, 1, 2, 4))):
            mutated[generator.randrange(header)] = generator.choice(
                (0, 1, 0x7F, 0x80, 0xFF, generator.randrange(256))
            )
        path.write_bytes(mutated)
        start = time.process_time()
        try:
            for tensor in read_gguf(path).tensors.values():
                assert tensor.start >= 0 and tensor.start + tensor.nbytes <= len(data)
        except CheckpointError:
            refused += 1
        slowest = max(slowest, time.process_time() - start)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert refused > count / 10
    assert slowest < 2.0  # CPU seconds
    assert peak < 100 << 20  # bytes
