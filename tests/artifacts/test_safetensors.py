"""Headers and indexes of safetensors: read as the library reads them, refused if damaged."""

from __future__ import annotations

import json
import random
import struct

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from bloomery.artifacts.safetensors import index_checkpoint, read_safetensors_header
from bloomery.errors import CheckpointError

GOOD = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


def write_file(path, header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def write_shards(folder, parts, index_name="model.safetensors.index.json"):
    """Write tensors as shards with their index; `parts` is a list of dicts."""
    weight_map = {}
    for i, tensors in enumerate(parts, 1):
        name = f"model-{i:05}-of-{len(parts):05}.safetensors"
        save_file(tensors, folder / name)
        weight_map |= dict.fromkeys(tensors, name)
    (folder / index_name).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return weight_map


def write_two_shards(folder):
    a = {"a.weight": torch.arange(6.0).view(2, 3), "a.bias": torch.ones(3)}
    b = {"b.weight": torch.arange(8.0).view(4, 2), "b.bias": torch.zeros(2)}
    return write_shards(folder, [a, b])


def test_header_agrees_with_the_library(tmp_path):
    types = [
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
    ]
    types += [
        torch.int8,
        torch.uint8,
        torch.bool,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.uint32,
    ]
    tensors = {f"t{i}": torch.ones(3, i + 1).to(dtype) for i, dtype in enumerate(types)}
    tensors |= {"empty": torch.ones(0, 4), "scalar": torch.tensor(2.0)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    entries = read_safetensors_header(tmp_path / "model.safetensors")
    with safe_open(tmp_path / "model.safetensors", "pt") as reference:
        assert set(entries) == set(reference.keys())
        for name, entry in entries.items():
            part = reference.get_slice(name)
            assert (list(entry.shape), entry.dtype) == (part.get_shape(), part.get_dtype())
    raw = (tmp_path / "model.safetensors").read_bytes()
    entry = entries["t1"]
    assert raw[entry.start : entry.end] == tensors["t1"].numpy().tobytes()


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (
            b'{"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"x":{}}',
            b"1234",
            "'x' appears twice",
        ),
        (
            b'{"x":{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
            b"1234",
            "'dtype' appears twice",
        ),
        (b'{"x":{"dtype":"F32","shape":[NaN],"data_offsets":[0,4]}}', b"1234", "NaN"),
        (b"[1, 2]", b"", "not a JSON object"),
        (b'{"x":' + b"[" * 100_000, b"", "not valid JSON"),
        (b'{"x\xff":1}', b"", "not valid JSON"),
        (b'{"x":' + b"9" * 5000 + b"}", b"", "not valid JSON"),
        (b"{}", b"1234", "4 bytes after the last tensor"),
        ({"x": 3}, b"", "'x'.*dtype, shape and data_offsets"),
        ({"x": {**GOOD, "more": 1}}, b"", "nothing else"),
        ({"x": {**GOOD, "dtype": "F31"}}, bytes(24), "dtype 'F31'"),
        ({"x": {**GOOD, "dtype": []}}, bytes(24), r"dtype \[\]"),
        ({"x": {**GOOD, "shape": [2, -3]}}, bytes(24), "shape"),
        ({"x": {**GOOD, "shape": [2, 3.0]}}, bytes(24), "shape"),
        ({"x": {**GOOD, "shape": [True, 6]}}, bytes(24), "shape"),
        ({"x": {**GOOD, "shape": [1] * 17}}, bytes(24), "shape"),
        ({"x": {**GOOD, "shape": [2**62, 2**62]}}, bytes(24), "takes"),
        ({"x": {**GOOD, "shape": [2, 4]}}, bytes(24), "takes 32 bytes, not the 24"),
        ({"x": {**GOOD, "data_offsets": [24, 0]}}, bytes(24), "not the -24"),
        ({"x": {**GOOD, "data_offsets": [0]}}, bytes(24), "pair"),
        ({"x": {"dtype": "F4", "shape": [3], "data_offsets": [0, 1]}}, b"12", "1.5 bytes"),
        ({"x": GOOD, "y": {**GOOD, "data_offsets": [12, 36]}}, bytes(36), "'y' overlaps"),
        ({"x": GOOD, "y": {**GOOD, "data_offsets": [32, 56]}}, bytes(56), "'y' leaves a gap"),
        ({"x": {**GOOD, "data_offsets": [8, 32]}}, bytes(32), "'x' leaves a gap"),
        ({"x": GOOD, "y": {**GOOD, "data_offsets": [24, 48]}}, bytes(47), "truncated: tensor 'y'"),
    ],
)
def test_damaged_headers_are_refused_by_name(tmp_path, header, data, message):
    path = write_file(tmp_path / "model.safetensors", header, data)
    with pytest.raises(CheckpointError, match=message) as error:
        read_safetensors_header(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("length", [0, 1, 3, 10**8 + 1, 2**40, 2**64 - 1])
def test_header_length_is_bounded_by_the_file(tmp_path, length):
    with pytest.raises(CheckpointError, match="download it again"):
        read_safetensors_header(write_file(tmp_path / "model.safetensors", b"{}", b"", length))


@pytest.mark.parametrize(
    "raw", [b"", b"1234567", b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n"]
)
def test_files_without_weights_are_refused(tmp_path, raw):
    (tmp_path / "model.safetensors").write_bytes(raw)
    with pytest.raises(
        CheckpointError, match="git lfs pull" if raw.startswith(b"v") else "truncated"
    ):
        index_checkpoint(tmp_path)


def test_single_file_and_shards_give_the_same_index(tmp_path):
    weight_map = write_two_shards(tmp_path)
    index = index_checkpoint(tmp_path)
    assert {name: file.name for name, (file, _) in index.items()} == weight_map
    (tmp_path / "whole").mkdir()
    save_file(
        {name: torch.zeros(entry.shape) for name, (_, entry) in index.items()},
        tmp_path / "whole/x.safetensors",
    )
    assert {
        name: entry.shape for name, (_, entry) in index_checkpoint(tmp_path / "whole").items()
    } == {name: entry.shape for name, (_, entry) in index.items()}


def test_second_copy_of_the_weights_is_ignored(tmp_path):
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    save_file({"b": torch.ones(1)}, tmp_path / "consolidated.safetensors")
    assert index_checkpoint(tmp_path).keys() == {"a"}


@pytest.mark.parametrize("cut", [1, 4096, 0.5])
def test_truncated_shard_is_refused_by_name(tmp_path, cut):
    write_shards(tmp_path, [{"a": torch.ones(3)}, {"b": torch.ones(3000), "c": torch.ones(3000)}])
    path = tmp_path / "model-00002-of-00002.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * cut)] if cut < 1 else data[:-cut])
    with pytest.raises(
        CheckpointError, match=r"00002-of-00002\.safetensors: truncated: tensor '[bc]'"
    ):
        index_checkpoint(tmp_path)


def test_missing_shard_is_refused(tmp_path):
    write_two_shards(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match=r"00002-of-00002\.safetensors: missing; it holds 'b\.\w+' and 1 more"
    ):
        index_checkpoint(tmp_path)


def test_swapped_shards_are_refused(tmp_path):
    write_two_shards(tmp_path)
    first = tmp_path / "model-00001-of-00002.safetensors"
    second = tmp_path / "model-00002-of-00002.safetensors"
    temporary = tmp_path / "temporary"
    first.rename(temporary)
    second.rename(first)
    temporary.rename(second)
    with pytest.raises(
        CheckpointError,
        match=r"tensor 'a\.\w+' should be in model-00001.*it is in model-00002.*swapped",
    ):
        index_checkpoint(tmp_path)


def test_tensor_that_no_shard_has_is_refused(tmp_path):
    write_two_shards(tmp_path)
    save_file({"a.weight": torch.ones(2, 3)}, tmp_path / "model-00001-of-00002.safetensors")
    with pytest.raises(
        CheckpointError, match=r"'a\.bias' should be in model-00001.*no shard has it"
    ):
        index_checkpoint(tmp_path)


def test_tensor_that_the_index_does_not_place_in_its_shard_is_refused(tmp_path):
    write_two_shards(tmp_path)
    path = tmp_path / "model-00001-of-00002.safetensors"
    save_file({"a.weight": torch.ones(2, 3), "a.bias": torch.ones(3), "new": torch.ones(1)}, path)
    with pytest.raises(
        CheckpointError, match=r"00001-of-00002\.safetensors: holds tensor 'new'.*does not list"
    ):
        index_checkpoint(tmp_path)
    save_file(
        {"a.weight": torch.ones(2, 3), "a.bias": torch.ones(3), "b.bias": torch.ones(1)}, path
    )
    with pytest.raises(CheckpointError, match=r"holds tensor 'b\.bias'.*places in model-00002"):
        index_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["model-00003-of-00003.safetensors", "model.safetensors"])
def test_shards_of_another_save_are_refused(tmp_path, name):
    write_two_shards(tmp_path)
    save_file({"z": torch.ones(1)}, tmp_path / name)
    with pytest.raises(CheckpointError, match=rf"{name} not in model\.safetensors\.index\.json"):
        index_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/etc/x.safetensors", "a/x.safetensors", "c:x.safetensors", "x", 5]
)
def test_shard_outside_the_folder_is_refused(tmp_path, name):
    save_file({"z": torch.ones(1)}, tmp_path / "x.safetensors")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"z": name}}))
    with pytest.raises(CheckpointError, match="'z'.*not a file of this folder"):
        index_checkpoint(folder)


@pytest.mark.parametrize(
    "text",
    ["", "{}", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": {"a":"x","a":"y"}}'],
)
def test_damaged_index_is_refused(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
        index_checkpoint(tmp_path)


def test_shards_without_an_index_are_refused(tmp_path):
    write_two_shards(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match="download the index too"):
        index_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"no \.safetensors file"):
        index_checkpoint(tmp_path.parent / "nowhere")


def test_links_into_a_cache_are_followed(tmp_path):
    """A snapshot in the cache of the Hub is a folder of links."""
    save_file({"z": torch.ones(1)}, tmp_path / "blob")
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot/model.safetensors").symlink_to(tmp_path / "blob")
    assert index_checkpoint(tmp_path / "snapshot").keys() == {"z"}
    (tmp_path / "blob").unlink()
    with pytest.raises(CheckpointError, match="no such file"):
        read_safetensors_header(tmp_path / "snapshot/model.safetensors")


def test_mutations_never_give_a_tensor_outside_the_file(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(2, 3), "b": torch.ones(5, dtype=torch.float16)}, path)
    data = path.read_bytes()
    generator = random.Random(0)
    refused = 0
    for _ in range(1000):
        mutated = bytearray(data)
        mutated[generator.randrange(len(data) - 34)] = generator.randrange(256)
        path.write_bytes(mutated)
        try:
            for entry in read_safetensors_header(path).values():
                assert 0 <= entry.start <= entry.end <= len(data)
        except CheckpointError:
            refused += 1
    assert refused > 300
