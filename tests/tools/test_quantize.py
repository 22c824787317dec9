"""The command `bloomery quantize`: its flags and messages."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import tokenizers

from bloomery.cli import main


def write_tokenizer(folder: Path) -> None:
    """A tokenizer whose vocabulary is w0 .. w100."""
    vocabulary = {f"w{i}": i for i in range(101)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))


def test_the_command_writes_a_gptq_checkpoint(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    out = tmp_path / "out"
    calibration = tmp_path / "text"
    shutil.copytree(llama, model)
    write_tokenizer(model)
    calibration.write_text(" ".join(f"w{i * i % 101}" for i in range(200)))
    command = ["quantize", str(model), str(out), "--format", "gptq", "--group", "32"]
    assert main(command) == 1
    assert "gptq needs --calibration" in capsys.readouterr().err
    command += ["--calibration", str(calibration), "--length", "50", "--device", "cpu"]
    assert main(command) == 0
    assert (out / "tokenizer.json").is_file()
    assert main(["quantize", str(out), str(tmp_path / "twice"), "--format", "int8"]) == 1
    assert "is packed by gptq already" in capsys.readouterr().err


def test_invalid_flags_are_reported_before_any_work(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "empty"
    empty.write_text(" \n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\xff")
    out = tmp_path / "out"

    def calibrate(name: str) -> list[str]:
        return ["--format", "gptq", "--calibration", str(tmp_path / name)]

    for flags, message in (
        (
            ["--format", "int8", "--bits", "3", "--act-order"],
            "--bits, --act-order: only for gptq, not for int8",
        ),
        (["--format", "nf4", "--group", "64"], "--group: only for gptq and int4, not for nf4"),
        (
            ["--format", "int4", "--group", "0"],
            "--group must be -1, which is a whole row, or at least 16, not 0",
        ),
        ([*calibrate("empty"), "--samples", "0"], "--samples must be at least 1"),
        ([*calibrate("empty"), "--damping", "nan"], "--damping must be above 0"),
        (calibrate("empty"), "empty: is empty"),
        (calibrate("binary"), "binary: is not a UTF-8 text file"),
        (calibrate("none"), "none: is not a UTF-8 text file"),
        (["--format", "int8", "--device", "gpu"], "device 'gpu' is not known"),
    ):
        assert main(["quantize", str(llama), str(out), *flags]) == 1
        assert message in capsys.readouterr().err
    assert not out.exists()
    # `empty` is a file, so it cannot be the folder to write.
    assert main(["quantize", str(llama), str(empty), "--format", "int8", "--device", "cpu"]) == 1
    assert "empty: cannot be written: " in capsys.readouterr().err
