"""GGUF files of every architecture compared with the transformers models they were written from.

If transformers can read the GGUF file itself, its logits must agree too. This detects errors that
our writer and our reader have in common.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from gguf import GGMLQuantizationType as Kind

from bloomery.artifacts.locate import locate_model
from bloomery.families.gguf import ARCHITECTURES
from tests.parity import cases, gguf_writer
from tests.parity.cases import (
    BLOOM,
    EXPERTS,
    FALCON,
    FULL,
    GPT,
    GROUPED,
    LINEAR,
    LLAMA3,
    LONG,
    MPT,
    NEW_FALCON,
    PHI3_LONG,
    PLAIN,
    QUARTER,
    SLIDING,
    SPARSE,
    VOCAB,
    WIDE,
    YARN,
    ParityCase,
    make_checkpoint,
    parity_case,
    reference_logits,
    rope,
)
from tests.parity.serve import prompt_logits


@dataclass(frozen=True)
class GgufCase:
    """A parity case that is written as a GGUF file."""

    case: ParityCase
    readable: bool = False  # transformers can read the file with all metadata of the case
    extra: dict[str, Any] = field(default_factory=dict)  # metadata beyond the converter's

    def __str__(self) -> str:
        return self.case.name


def gguf_case(
    name: str, config: Any, /, readable: bool = False, extra: Any = (), **values: Any
) -> GgufCase:
    return GgufCase(parity_case(name, config, **values), readable, dict(extra))


# Values that transformers assumes instead of reading them from the file.
GEMMA = GROUPED | {"head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 5}
MIXED = [SLIDING, FULL, FULL]
MULTIPLIED = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.5,
    "logits_scaling": 4.0,
}
LOCAL = {"rope_type": "default", "rope_theta": 100.0}
GLOBAL = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000.0}

# Chunks and scaled queries are those of the published models, beyond the length of a prompt here.
LLAMA4 = WIDE | {"intermediate_size_mlp": 40, "num_local_experts": 4}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 500.0, **YARN}
LOCAL_ROPE = {
    "rope_parameters": {SLIDING: LOCAL, FULL: {**YARN_ROPE, "partial_rotary_factor": 0.5}}
}
MELLUM_ROPE = {"rope_parameters": {SLIDING: LOCAL, FULL: YARN_ROPE}}
# Cases of the families themselves, written as GGUF.
REUSED = (
    "olmo3",
    "olmo3-yarn",
    "olmoe",
    "glm4",
    "glm4_moe",
    "glm4_moe-groups",
    "solar_open-yarn",
    "ernie4_5",
    "ernie4_5-biased",
    "ernie4_5_moe",
    "seed_oss",
    "seed_oss-biased",
    "exaone4",
    "hunyuan_v1_dense-alpha",
    "hunyuan_v1_moe",
    "hy_v3",
    "minimax_m2-partial",
    "granitemoe-multiplied",
    "granitemoeshared",
    "apertus",
    "arcee",
    "dots1",
    "nemotron",
    "nemotron-biased",
    "gpt_oss",
    "phimoe",
    "cohere2_moe",
    "ministral3",
    "mistral3",
    "qwen2_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "qwen3_5_text",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_next",
    "lfm2-biased",
    "granitemoehybrid",
    "granitemoehybrid-dense",
    "falcon_h1",
    "nemotron_h-latent",
)
FAMILY_CASES = {case.name: case for case in cases.CASES}


def reuse_case(name: str) -> GgufCase:
    return GgufCase(FAMILY_CASES[name])


CASES = [
    gguf_case("llama", tf.LlamaConfig, True, **GROUPED),
    gguf_case("llama-tied", tf.LlamaConfig, True, **GROUPED, tie_word_embeddings=True),
    gguf_case("llama-biased", tf.LlamaConfig, **WIDE, attention_bias=True, mlp_bias=True),
    gguf_case("llama-linear", tf.LlamaConfig, **GROUPED, **LINEAR),
    gguf_case("llama-llama3", tf.LlamaConfig, **WIDE, **rope("llama3", 500.0, **LLAMA3)),
    gguf_case("llama-yarn", tf.LlamaConfig, **WIDE, **rope("yarn", 500.0, **YARN, beta_fast=8.0)),
    gguf_case(
        "llama-yarn-gain",
        tf.LlamaConfig,
        **WIDE,
        **rope("yarn", 500.0, **YARN, attention_factor=1.5),
    ),
    gguf_case("mistral", tf.MistralConfig, **WIDE, sliding_window=None),
    gguf_case(
        "mistral-window",
        tf.MistralConfig,
        **GROUPED,
        sliding_window=5,
        extra={"attention.sliding_window": 5},
    ),
    gguf_case("mixtral", tf.MixtralConfig, **GROUPED, num_local_experts=4),
    gguf_case("qwen2", tf.Qwen2Config, True, **GROUPED),
    gguf_case(
        "qwen2-yarn",
        tf.Qwen2Config,
        **GROUPED,
        tie_word_embeddings=True,
        **rope("yarn", 500.0, **YARN),
    ),
    gguf_case(
        "qwen2_moe",
        tf.Qwen2MoeConfig,
        True,
        **GROUPED
        | SPARSE
        | {"moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632},
    ),
    gguf_case("qwen3", tf.Qwen3Config, True, **GROUPED | {"head_dim": 128}),
    gguf_case(
        "qwen3-biased", tf.Qwen3Config, **WIDE, attention_bias=True, tie_word_embeddings=True
    ),
    gguf_case(
        "qwen3_moe",
        tf.Qwen3MoeConfig,
        True,
        **WIDE | SPARSE | {"moe_intermediate_size": 768},
        norm_topk_prob=True,
    ),
    gguf_case("gemma", tf.GemmaConfig, **WIDE),
    gguf_case("gemma2", tf.Gemma2Config, True, **GEMMA),
    gguf_case(
        "gemma2-capped",
        tf.Gemma2Config,
        **GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0},
    ),
    gguf_case("gemma3", tf.Gemma3TextConfig, True, **GEMMA | {"num_hidden_layers": 7}),
    gguf_case(
        "gemma3-linear",
        tf.Gemma3TextConfig,
        **GEMMA | {"head_dim": 16, "query_pre_attn_scalar": 16},
        layer_types=MIXED,
        rope_parameters={SLIDING: LOCAL, FULL: GLOBAL},
        extra={"attention.sliding_window_pattern": [True, False, False]},
    ),
    gguf_case("phi2", tf.PhiConfig, **PLAIN | {"intermediate_size": 128}),
    gguf_case("phi3", tf.Phi3Config, True, **GROUPED),
    gguf_case("phi3-window", tf.Phi3Config, **GROUPED, sliding_window=5, partial_rotary_factor=0.5),
    gguf_case(
        "phi3-longrope-short", tf.Phi3Config, length=64, **PHI3_LONG, **rope("longrope", **LONG)
    ),
    gguf_case(
        "phi3-longrope-long", tf.Phi3Config, prompt=72, **PHI3_LONG, **rope("longrope", **LONG)
    ),
    gguf_case("starcoder", tf.GPTBigCodeConfig, **GPT),
    gguf_case("starcoder2", tf.Starcoder2Config, True, **GROUPED),
    gguf_case(
        "starcoder2-unbiased",
        tf.Starcoder2Config,
        **GROUPED,
        use_bias=False,
        tie_word_embeddings=False,
    ),
    gguf_case("bloom", tf.BloomConfig, True, **BLOOM),
    gguf_case(
        "bloom-untied",
        tf.BloomConfig,
        **BLOOM | {"hidden_size": 48, "n_head": 6},
        tie_word_embeddings=False,
    ),
    gguf_case("falcon-7b", tf.FalconConfig, True, **FALCON),
    gguf_case("falcon-40b", tf.FalconConfig, **NEW_FALCON),
    gguf_case(
        "falcon-11b",
        tf.FalconConfig,
        **NEW_FALCON,
        num_ln_in_parallel_attn=1,
        tie_word_embeddings=False,
    ),
    gguf_case("mpt", tf.MptConfig, **MPT),
    gguf_case("mpt-clip", tf.MptConfig, **MPT, attn_config={"clip_qkv": 0.5}),
    gguf_case("gpt2", tf.GPT2Config, True, **GPT | {"n_positions": 1024}),
    gguf_case("gptneox", tf.GPTNeoXConfig, **PLAIN | {"hidden_size": 64}),
    gguf_case(
        "gptneox-sequential", tf.GPTNeoXConfig, **PLAIN, use_parallel_residual=False, rotary_pct=1.0
    ),
    gguf_case("stablelm", tf.StableLmConfig, True, **QUARTER),
    gguf_case(
        "stablelm-biased",
        tf.StableLmConfig,
        **QUARTER,
        use_qkv_bias=True,
        use_parallel_residual=True,
    ),
    gguf_case("stablelm-normed", tf.StableLmConfig, **QUARTER, qk_layernorm=True),
    gguf_case("command-r", tf.CohereConfig, **GROUPED),
    gguf_case("command-r-normed", tf.CohereConfig, **GROUPED, use_qk_norm=True),
    gguf_case("cohere2", tf.Cohere2Config, **GROUPED | {"num_hidden_layers": 5}, sliding_window=5),
    gguf_case("granite", tf.GraniteConfig, **GROUPED, **MULTIPLIED, tie_word_embeddings=True),
    gguf_case("olmo2", tf.Olmo2Config, **GROUPED),
    *map(reuse_case, REUSED),
    gguf_case(
        "granite_swa",
        tf.GraniteSWAConfig,
        **GROUPED,
        **MULTIPLIED,
        sliding_window=5,
        layer_rope_theta=[10000.0, 0, 10000.0],
        extra={"attention.rope_pattern": [True, False, True]},
    ),
    gguf_case(
        "afmoe",
        tf.AfmoeConfig,
        **WIDE | {"num_hidden_layers": 5},
        **EXPERTS,
        sliding_window=5,
        route_scale=2.5,
        mup_enabled=True,
    ),
    gguf_case(
        "laguna",
        tf.LagunaConfig,
        **WIDE,
        **EXPERTS,
        **LOCAL_ROPE,
        shared_expert_intermediate_size=40,
        layer_types=[FULL, SLIDING, SLIDING],
        sliding_window=5,
    ),
    gguf_case(
        "laguna-per-element",
        tf.LagunaConfig,
        **WIDE,
        **EXPERTS,
        **LOCAL_ROPE,
        shared_expert_intermediate_size=24,
        gating="per-element",
        num_attention_heads_per_layer=[4, 6, 2],
        layer_types=[FULL, SLIDING, SLIDING],
        mlp_layer_types=["dense", "dense", "sparse"],
        sliding_window=5,
        moe_routed_scaling_factor=2.5,
    ),
    gguf_case(
        "mellum",
        tf.MellumConfig,
        **WIDE,
        **EXPERTS,
        **MELLUM_ROPE,
        sliding_window=5,
        layer_types=[SLIDING, FULL, SLIDING],
    ),
    gguf_case(
        "cohere2moe-sigmoid",
        tf.Cohere2MoeConfig,
        **WIDE,
        num_experts=4,
        num_shared_experts=1,
        expert_selection_fn="sigmoid",
        norm_topk_prob=False,
        sliding_window=5,
        first_k_dense_replace=2,
        prefix_dense_intermediate_size=40,
    ),
    gguf_case("llama4", tf.Llama4TextConfig, **LLAMA4 | {"num_hidden_layers": 5}),
    gguf_case(
        "llama4-dense",
        tf.Llama4TextConfig,
        **LLAMA4,
        interleave_moe_layer_step=2,
        no_rope_layers=[1, 1, 1],
        layer_types=[FULL] * 3,
        attn_temperature_tuning=False,
        extra={"attention.sliding_window": 0},
    ),
    gguf_case(
        "exaone4-llama3",
        tf.Exaone4Config,
        **WIDE,
        sliding_window=None,
        layer_types=[FULL] * 3,
        **rope("llama3", 500.0, **LLAMA3),
    ),
    gguf_case(
        "falcon-h1-multiplied",
        tf.FalconH1Config,
        **cases.MAMBA2,
        **cases.FALCON_H1_FACTORS,
        mamba_d_ssm=64,
        mamba_rms_norm=True,
        mamba_norm_before_gate=False,
    ),
    gguf_case("lfm2_moe", tf.Lfm2MoeConfig, **cases.LFM2, **EXPERTS, num_dense_layers=1),
    gguf_case(
        "nemotron-h-dense",
        tf.NemotronHConfig,
        **cases.NEMOTRON_H,
        hybrid_override_pattern="M-*-",
    ),
    gguf_case("smollm3", tf.SmolLM3Config, **GROUPED | {"num_hidden_layers": 5}),
]


@pytest.fixture(scope="module", params=CASES, ids=str)
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[GgufCase, Path, Any]:
    folder = tmp_path_factory.mktemp("checkpoint")
    model = make_checkpoint(request.param.case, folder)
    gguf_writer.write_gguf(model, folder / "model.gguf", extra=request.param.extra)
    return request.param, folder / "model.gguf", model


def random_tokens(count: int, vocab: int = VOCAB) -> list[int]:
    return torch.randint(3, vocab, (count,), generator=torch.Generator().manual_seed(0)).tolist()


def relative_difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).abs().max() / expected.abs().max())


def transformers_logits(path: Path, tokens: list[int]) -> torch.Tensor:
    model = tf.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    )
    return reference_logits(model.eval(), torch.tensor([tokens]), len(tokens))


def test_every_architecture_has_a_case() -> None:
    names = {gguf_writer.find_architecture(entry.case.config()).name for entry in CASES}
    assert names == ARCHITECTURES.keys()


def test_logits_equal_transformers(checkpoint: tuple[GgufCase, Path, Any]) -> None:
    gguf_case, path, model = checkpoint
    tokens = random_tokens(gguf_case.case.prompt)
    expected = reference_logits(model, torch.tensor([tokens]), gguf_case.case.prompt)
    actual = prompt_logits(path, tokens, gguf_case.case.length)
    assert relative_difference(actual, expected) <= 1e-5
    if gguf_case.readable:
        assert relative_difference(actual, transformers_logits(path, tokens)) <= 1e-5


def test_files_of_the_first_converter_of_qwen3_next(tmp_path: Path) -> None:
    model = make_checkpoint(FAMILY_CASES["qwen3_next"], tmp_path)
    path = tmp_path / "model.gguf"
    gguf_writer.write_gguf(model, path, architecture=gguf_writer.FIRST_QWEN3_NEXT)
    tokens = random_tokens(24)
    expected = reference_logits(model, torch.tensor([tokens]), 24)
    assert relative_difference(prompt_logits(path, tokens, 128), expected) <= 1e-5


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_1], ids=lambda kind: kind.name)
def test_quantized_files_equal_transformers(kind: Kind, tmp_path: Path) -> None:
    sizes = GROUPED | {"hidden_size": 64, "intermediate_size": 96}
    model = make_checkpoint(parity_case("llama", tf.LlamaConfig, **sizes), tmp_path)
    gguf_writer.write_gguf(model, tmp_path / "model.gguf", kind)
    tokens = random_tokens(24)
    actual = prompt_logits(tmp_path / "model.gguf", tokens, 128)
    assert relative_difference(actual, transformers_logits(tmp_path / "model.gguf", tokens)) <= 1e-5
    unquantized = reference_logits(model, torch.tensor([tokens]), 24)
    assert relative_difference(actual, unquantized) > 1e-4, "nothing was quantized"


def test_the_embedded_model_equals_transformers() -> None:
    tokens = random_tokens(48, vocab=49152)
    expected = transformers_logits(locate_model(None).path, tokens)
    assert relative_difference(prompt_logits(None, tokens, 128), expected) <= 1e-4
