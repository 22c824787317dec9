"""`bloomery quantize`: written, read again, interrupted and gone on with."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers

from bloomery.artifacts.locate import locate
from bloomery.cli import main
from bloomery.errors import ConfigError
from bloomery.tools.quantize_checkpoint import Wish, convert
from bloomery.models.load import load
from bloomery.quant.int4 import int4
from bloomery.quant.solve import solve
from tests.parity.cases import CASES, make_checkpoint
from tests.parity.serve import decoder_logits
from tests.quant.test_checkpoints import PROMPT, answer, llama  # noqa: F401  # a fixture

CPU = torch.device("cpu")
SAMPLES = [
    torch.randint(3, 101, (40,), generator=torch.Generator().manual_seed(i)).tolist()
    for i in range(4)
]


class Stopped(Exception):
    pass


def converted(origin: Path, out: Path, wish: Wish, stop_after: int | None = None) -> None:
    done = []

    def advance() -> None:
        done.append(1)
        if len(done) == stop_after:
            raise Stopped

    samples = SAMPLES if wish.form == "gptq" else []
    convert(locate(str(origin)), out, wish, samples, advance=advance)


@pytest.mark.parametrize("form", ["int8", "int4", "fp8", "nf4"])
def test_reads_again_as_when_rounded_on_load(form: str, llama: Path, tmp_path: Path) -> None:  # noqa: F811
    """Head and embedding, which loading rounds as well, aside."""
    converted(llama, tmp_path / "out", Wish(form, group=32))
    written = load(locate(str(tmp_path / "out")), "auto", torch.float32, CPU)
    assert not written.notes, written.notes
    rounded = load(
        locate(str(llama)), "auto", torch.float32, CPU, quantize={"int4": "int4-64"}.get(form, form)
    )
    for ours, theirs in zip(written.decoder.layers, rounded.decoder.layers, strict=True):
        got, want = (
            layer.attention.out.matrix.gather(torch.arange(128)) for layer in (ours, theirs)
        )
        close = (
            0.15 if form == "int4" else 2e-2 if form == "nf4" else 1e-6
        )  # other groups; magnitudes twice rounded
        assert (got - want).norm() <= close * want.norm()
    assert not (tmp_path / "out" / "unfinished.json").exists()
    assert len(answer(tmp_path / "out")) == 24


@pytest.mark.parametrize("act_order", [False, True])
def test_gptq_goes_on_where_it_was_interrupted(
    act_order: bool, llama: Path, tmp_path: Path
) -> None:  # noqa: F811
    wish = Wish("gptq", group=32, act_order=act_order)
    converted(llama, tmp_path / "whole", wish)
    with pytest.raises(Stopped):
        converted(llama, tmp_path / "parts", wish, stop_after=1)
    first = tmp_path / "parts" / "model-00001-of-00003.safetensors"
    kept = first.stat().st_mtime_ns
    with pytest.raises(ConfigError, match="not what this conversion left unfinished"):
        converted(llama, tmp_path / "parts", Wish("gptq", group=16))
    shutil.copytree(llama, tmp_path / "another")  # of the same shapes
    with pytest.raises(ConfigError, match="not what this conversion left unfinished"):
        converted(tmp_path / "another", tmp_path / "parts", wish)
    converted(llama, tmp_path / "parts", wish)
    assert first.stat().st_mtime_ns == kept
    for file in sorted((tmp_path / "whole").iterdir()):
        assert file.read_bytes() == (tmp_path / "parts" / file.name).read_bytes(), file.name
    said = json.loads((tmp_path / "whole" / "config.json").read_text())["quantization_config"]
    assert said["quant_method"] == "gptq" and said["desc_act"] is act_order
    assert answer(tmp_path / "whole") == answer(tmp_path / "parts")


def excess(error: torch.Tensor, weight: torch.Tensor, hessian: torch.Tensor) -> float:
    """|error x|^2 over |weight x|^2."""
    return float(((error @ hessian) * error).sum() / ((weight @ hessian) * weight).sum())


def test_gptq_is_nearer_than_plain_rounding() -> None:
    torch.manual_seed(0)
    mix = torch.randn(64, 64) * torch.logspace(0, -2, 64)  # inputs that have to do with each other
    x = torch.randn(500, 64) @ mix
    weight = torch.randn(48, 64)
    hessian = x.T @ x
    plain = int4(weight, 4, 32).dequantize()
    least = excess(plain - weight, weight, hessian)
    for act_order in (False, True):
        solved = solve(weight, hessian, 4, 32, act_order)
        values = (solved.codes.float() - 8) * solved.scale[:, solved.groups.long()]
        assert excess(values - weight, weight, hessian) < 0.6 * least


@pytest.mark.parametrize("name", ["mixtral", "gpt2", "bloom"])
def test_other_families(name: str, tmp_path: Path) -> None:
    """Experts go without calibration, routers unrounded; transposed and grouped products keep their layout."""
    make_checkpoint(next(case for case in CASES if case.name == name), tmp_path / "model")
    plain = load(locate(str(tmp_path / "model")), "auto", torch.float32, CPU)
    want = decoder_logits(plain.decoder, PROMPT, 32)
    for wish in (Wish("gptq", bits=8, group=16), Wish("int8")):
        converted(tmp_path / "model", tmp_path / wish.form, wish)
        again = load(locate(str(tmp_path / wish.form)), "auto", torch.float32, CPU)
        got = decoder_logits(again.decoder, PROMPT, 32)
        assert (got - want).norm() < 0.05 * want.norm()
        assert again.bytes < plain.bytes


def test_a_folder_with_something_else_is_left_alone(llama: Path, tmp_path: Path) -> None:  # noqa: F811
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "letter.txt").write_text("dear")
    with pytest.raises(ConfigError, match="is not empty"):
        converted(llama, tmp_path / "out", Wish("int8"))


def test_sizes_a_format_cannot_say_are_refused_before_any_work(llama: Path, tmp_path: Path) -> None:  # noqa: F811
    with pytest.raises(
        ConfigError, match=r"down_proj: 160 columns are not groups of 128; try --group 32"
    ):
        converted(llama, tmp_path / "out", Wish("int4"))
    sizes = {
        "hidden_size": 100,
        "num_attention_heads": 5,
        "num_key_value_heads": 1,
        "intermediate_size": 136,
    }
    odd = transformers.LlamaConfig(vocab_size=101, num_hidden_layers=1, **sizes)
    transformers.LlamaForCausalLM(odd).save_pretrained(tmp_path / "odd")
    for form, said in (
        ("gptq", r"100 columns are not groups of 128; choose --format int8 or fp8"),
        ("int4", r"100 columns are not groups of 128; choose --format int8 or fp8"),
        ("nf4", r"100 x 100 weights are not several blocks of 64; choose --format int8"),
    ):
        with pytest.raises(ConfigError, match=said):
            converted(tmp_path / "odd", tmp_path / "out", Wish(form))
    assert not (tmp_path / "out").exists()
    converted(tmp_path / "odd", tmp_path / "out", Wish("int8"))
    load(locate(str(tmp_path / "out")), "auto", torch.float32, CPU)


@pytest.mark.parametrize("form", ["gptq", "int4"])
def test_a_group_a_row(form: str, llama: Path, tmp_path: Path) -> None:  # noqa: F811
    converted(llama, tmp_path / "out", Wish(form, group=-1))
    written = load(locate(str(tmp_path / "out")), "auto", torch.float32, CPU)
    plain = load(locate(str(llama)), "auto", torch.float32, CPU)
    for ours, theirs in zip(written.decoder.layers, plain.decoder.layers, strict=True):
        got, want = (
            layer.attention.out.matrix.gather(torch.arange(128)) for layer in (ours, theirs)
        )
        assert (got - want).norm() <= 0.2 * want.norm()


def test_columns_no_text_has_reached_keep_their_values() -> None:
    torch.manual_seed(0)
    weight = torch.randn(32, 64)
    x = torch.randn(100, 64)
    x[:, 10:20] = 0
    solved = solve(weight, x.T @ x, 8, 32)
    values = (solved.codes.float() - 128) * solved.scale[:, solved.groups.long()]
    assert (values - weight)[:, 10:20].norm() < 0.02 * weight[:, 10:20].norm()


def test_from_the_command_line(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:  # noqa: F811
    shutil.copytree(llama, tmp_path / "model")
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({f"w{i}": i for i in range(101)}, unk_token="w0")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "model" / "tokenizer.json"))
    (tmp_path / "text").write_text(" ".join(f"w{i * i % 101}" for i in range(200)))
    order = [
        "quantize",
        str(tmp_path / "model"),
        str(tmp_path / "out"),
        "--format",
        "gptq",
        "--group",
        "32",
    ]
    assert main(order) == 1 and "gptq needs --calibration" in capsys.readouterr().err
    assert (
        main([*order, "--calibration", str(tmp_path / "text"), "--length", "50", "--device", "cpu"])
        == 0
    )
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    assert (
        main(["quantize", str(tmp_path / "out"), str(tmp_path / "twice"), "--format", "int8"]) == 1
    )
    assert "is packed by gptq already" in capsys.readouterr().err


def test_what_cannot_be_honoured_is_said_at_once(
    llama: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "empty").write_text(" \n")
    (tmp_path / "octets").write_bytes(b"\xff\xfe\xff")
    gptq = ["--format", "gptq", "--calibration", str(tmp_path / "empty")]
    for options, said in (
        (
            ["--format", "int8", "--bits", "3", "--act-order"],
            "--bits, --act-order: for gptq; int8 has no such choice",
        ),
        (["--format", "nf4", "--group", "64"], "--group: for gptq and int4"),
        (
            ["--format", "int4", "--group", "0"],
            "--group must be -1, which is a whole row, or at least 16, not 0",
        ),
        ([*gptq, "--samples", "0"], "--samples must be at least 1"),
        ([*gptq, "--damping", "nan"], "--damping must be above 0"),
        (gptq, "empty: is empty"),
        (
            ["--format", "gptq", "--calibration", str(tmp_path / "octets")],
            "octets: is not a file of text in UTF-8",
        ),
        (
            ["--format", "gptq", "--calibration", str(tmp_path / "none")],
            "none: is not a file of text in UTF-8",
        ),
        (["--format", "int8", "--device", "gpu"], "device 'gpu' is not known"),
    ):
        assert main(["quantize", str(llama), str(tmp_path / "out"), *options]) == 1
        assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert (
        main(
            ["quantize", str(llama), str(tmp_path / "empty"), "--format", "int8", "--device", "cpu"]
        )
        == 1
    )
    assert "empty: cannot be written: " in capsys.readouterr().err
