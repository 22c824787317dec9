"""Quantized checkpoints: written, loaded again, interrupted and resumed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from bloomery.artifacts.locate import locate_model
from bloomery.errors import ConfigError, UnsupportedModel
from bloomery.models.load import LoadedModel, load_model
from bloomery.tools.quantize_checkpoint import QuantizeOptions, quantize_checkpoint
from tests.parity.cases import CASES, make_checkpoint
from tests.parity.serve import decoder_logits
from tests.quant.checkpoints import NUM_GENERATED, PROMPT, generate

CPU = torch.device("cpu")
CALIBRATION_SAMPLES = [
    torch.randint(3, 101, (40,), generator=torch.Generator().manual_seed(seed)).tolist()
    for seed in range(4)
]


class ConversionStopped(Exception):
    """Interrupts a conversion."""


def convert(
    origin: Path, out: Path, options: QuantizeOptions, stop_after: int | None = None
) -> None:
    """Quantize a checkpoint; raise ConversionStopped after so many shards."""
    num_shards = 0

    def advance() -> None:
        nonlocal num_shards
        num_shards += 1
        if num_shards == stop_after:
            raise ConversionStopped

    samples = CALIBRATION_SAMPLES if options.format == "gptq" else []
    quantize_checkpoint(locate_model(str(origin)), out, options, samples, advance=advance)


def load(folder: Path, quantize: str = "auto") -> LoadedModel:
    return load_model(locate_model(str(folder)), "auto", torch.float32, CPU, quantize=quantize)


def attention_outputs(model: LoadedModel) -> list[torch.Tensor]:
    """The weights of the attention's output projection in every layer."""
    rows = torch.arange(128)
    return [layer.attention.out.matrix.gather(rows) for layer in model.decoder.layers]


def assert_close(actual: LoadedModel, expected: LoadedModel, tolerance: float) -> None:
    pairs = zip(attention_outputs(actual), attention_outputs(expected), strict=True)
    for actual_weight, expected_weight in pairs:
        error = (actual_weight - expected_weight).norm()
        assert error <= tolerance * expected_weight.norm()


@pytest.mark.parametrize(
    ("format", "on_load_format", "tolerance"),
    [
        ("int8", "int8", 1e-6),
        ("int4", "int4-64", 0.15),  # other groups
        ("fp8", "fp8", 1e-6),
        ("nf4", "nf4", 2e-2),  # absmax values are nested in other blocks
    ],
)
def test_written_weights_equal_those_quantized_on_load(
    format: str, on_load_format: str, tolerance: float, llama: Path, tmp_path: Path
) -> None:
    """Only layers are compared: loading quantizes the LM head and the embedding as well."""
    out = tmp_path / "out"
    convert(llama, out, QuantizeOptions(format, group_size=32))
    written = load(out)
    assert not written.notes, written.notes
    assert_close(written, load(llama, quantize=on_load_format), tolerance)
    assert not (out / "unfinished.json").exists()
    assert len(generate(out)) == NUM_GENERATED


@pytest.mark.parametrize("act_order", [False, True])
def test_gptq_resumes_where_it_was_interrupted(
    act_order: bool, llama: Path, tmp_path: Path
) -> None:
    options = QuantizeOptions("gptq", group_size=32, act_order=act_order)
    uninterrupted = tmp_path / "uninterrupted"
    resumed = tmp_path / "resumed"
    convert(llama, uninterrupted, options)
    with pytest.raises(ConversionStopped):
        convert(llama, resumed, options, stop_after=1)
    first_shard = resumed / "model-00001-of-00003.safetensors"
    written_at = first_shard.stat().st_mtime_ns
    with pytest.raises(ConfigError, match="holds no unfinished conversion of this model"):
        convert(llama, resumed, QuantizeOptions("gptq", group_size=16))
    same_shapes = tmp_path / "same-shapes"
    shutil.copytree(llama, same_shapes)
    with pytest.raises(ConfigError, match="holds no unfinished conversion of this model"):
        convert(same_shapes, resumed, options)
    convert(llama, resumed, options)
    assert first_shard.stat().st_mtime_ns == written_at
    for file in sorted(uninterrupted.iterdir()):
        assert file.read_bytes() == (resumed / file.name).read_bytes(), file.name
    config = json.loads((uninterrupted / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "gptq" and config["desc_act"] is act_order
    assert generate(uninterrupted) == generate(resumed)


@pytest.mark.parametrize("family", ["mixtral", "gpt2", "bloom"])
def test_quantized_families_have_nearly_the_same_logits(family: str, tmp_path: Path) -> None:
    """Experts have no calibration, routers are not quantized, layouts of weights are kept."""
    origin = tmp_path / "model"
    make_checkpoint(next(case for case in CASES if case.name == family), origin)
    unquantized = load(origin)
    expected = decoder_logits(unquantized.decoder, PROMPT, 32)
    for options in (QuantizeOptions("gptq", bits=8, group_size=16), QuantizeOptions("int8")):
        out = tmp_path / options.format
        convert(origin, out, options)
        quantized = load(out)
        actual = decoder_logits(quantized.decoder, PROMPT, 32)
        assert (actual - expected).norm() < 0.05 * expected.norm()
        assert quantized.weight_bytes < unquantized.weight_bytes


def expert_matrices(model: LoadedModel) -> list[torch.Tensor]:
    """The first rows of the matrices of experts: those of the first two, where they are narrow."""
    stacks = [layer.mlp.experts for layer in model.decoder.layers if hasattr(layer.mlp, "experts")]
    assert stacks
    return [
        matrix.gather(torch.arange(64)) for stack in stacks for matrix in (stack.up, stack.down)
    ]


@pytest.mark.parametrize("family", ["granitemoe", "llama4_text", "qwen3_moe", "lfm2_moe"])
def test_stacked_experts_are_written_one_by_one(family: str, tmp_path: Path) -> None:
    """Two families publish them stacked, the others are so when transformers saves them anew."""
    origin = tmp_path / "model"
    model = make_checkpoint(next(case for case in CASES if case.name == family), origin)
    model.save_pretrained(origin, save_original_format=family in ("granitemoe", "llama4_text"))
    all_options = [QuantizeOptions("int8")]
    if family != "lfm2_moe":  # has recurrent layers
        all_options.append(QuantizeOptions("gptq", bits=8, group_size=16))
    for options in all_options:
        out = tmp_path / options.format
        convert(origin, out, options)
        quantized = load(out)
        assert not any("not part of the model" in note for note in quantized.notes)
        pairs = zip(expert_matrices(quantized), expert_matrices(load(origin)), strict=True)
        for actual, expected in pairs:
            assert (actual - expected).norm() < 0.02 * expected.norm()


def test_experts_with_gate_and_up_by_turns_are_refused_before_any_work(tmp_path: Path) -> None:
    origin = tmp_path / "model"
    make_checkpoint(next(case for case in CASES if case.name == "gpt_oss"), origin)
    out = tmp_path / "out"
    with pytest.raises(UnsupportedModel, match="gate and up rows by turns"):
        convert(origin, out, QuantizeOptions("int8"))
    assert not out.exists()


def test_gptq_refuses_recurrent_layers_before_any_work_and_int8_takes_them(tmp_path: Path) -> None:
    origin = tmp_path / "model"
    make_checkpoint(next(case for case in CASES if case.name == "lfm2"), origin)
    out = tmp_path / "out"
    with pytest.raises(UnsupportedModel, match="choose another --format"):
        convert(origin, out, QuantizeOptions("gptq"))
    assert not out.exists()
    convert(origin, out, QuantizeOptions("int8"))
    assert len(generate(out)) == NUM_GENERATED


def block_matrices(model: LoadedModel) -> list[torch.Tensor]:
    """The first rows of all matrices of the blocks that layers share, and of what they add."""
    layers = [layer for layer in model.decoder.layers if layer.shared_block is not None]
    linears = []
    for layer in layers:
        for linear in (layer.attention.qkv, layer.attention.out, layer.mlp.up, layer.mlp.down):
            low_rank = linear.low_rank
            linears += [linear] if low_rank is None else [linear, low_rank.down, low_rank.up]
    assert len(linears) == 3 * 8
    return [linear.matrix.gather(torch.arange(4)) for linear in linears]


def test_what_layers_share_is_quantized_once(tmp_path: Path) -> None:
    origin = tmp_path / "model"
    make_checkpoint(next(case for case in CASES if case.name == "zamba2-adapted"), origin)
    out = tmp_path / "out"
    convert(origin, out, QuantizeOptions("int8"))
    stored = [name for shard in out.glob("*.safetensors") for name in load_file(shard)]
    assert len(stored) == len(set(stored))
    written = load(out)
    assert not any("not part of the model" in note for note in written.notes)
    pairs = zip(block_matrices(written), block_matrices(load(origin, "int8")), strict=True)
    for actual, expected in pairs:
        torch.testing.assert_close(actual, expected)
    assert written.weight_bytes < load(origin).weight_bytes


def test_a_folder_with_other_files_is_refused(llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("not a checkpoint")
    with pytest.raises(ConfigError, match="is not empty"):
        convert(llama, out, QuantizeOptions("int8"))


def test_impossible_shapes_are_refused_before_any_work(llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(
        ConfigError, match=r"down_proj: 160 columns are not groups of 128; try --group 32"
    ):
        convert(llama, out, QuantizeOptions("int4"))
    config = transformers.LlamaConfig(
        vocab_size=101,
        num_hidden_layers=1,
        hidden_size=100,
        num_attention_heads=5,
        num_key_value_heads=1,
        intermediate_size=136,
    )
    odd = tmp_path / "odd"
    transformers.LlamaForCausalLM(config).save_pretrained(odd)
    for format, message in (
        ("gptq", r"100 columns are not groups of 128; choose --format int8 or fp8"),
        ("int4", r"100 columns are not groups of 128; choose --format int8 or fp8"),
        ("nf4", r"100 x 100 weights are not several blocks of 64; choose --format int8"),
    ):
        with pytest.raises(ConfigError, match=message):
            convert(odd, out, QuantizeOptions(format))
    assert not out.exists()
    convert(odd, out, QuantizeOptions("int8"))
    load(out)


@pytest.mark.parametrize("format", ["gptq", "int4"])
def test_a_group_may_be_a_whole_row(format: str, llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert(llama, out, QuantizeOptions(format, group_size=-1))
    assert_close(load(out), load(llama), 0.2)
