"""GGUF files against the transformers models they were written from, one architecture at least once.

Where transformers reads that architecture's GGUF itself, it must agree too: a misunderstanding that writer and reader
share would show there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from gguf import GGMLQuantizationType as Kind

from bloomery.artifacts.locate import locate
from bloomery.families.gguf import ARCHITECTURES
from tests.parity import gguf_writer
from tests.parity.cases import (
    BLOOM,
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
    Case,
    case,
    make_checkpoint,
    reference_logits,
    rope,
)
from tests.parity.serve import logits


@dataclass(frozen=True)
class Written:
    case: Case
    readable: bool = False  # by transformers too, with all that this case states
    extra: dict[str, Any] = field(default_factory=dict)  # metadata beyond the converter's

    def __str__(self) -> str:
        return self.case.name


def written(
    name: str, config: Any, /, readable: bool = False, extra: Any = (), **values: Any
) -> Written:
    return Written(case(name, config, **values), readable, dict(extra))


# What transformers does not read from a GGUF but takes for granted.
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

CASES = [
    written("llama", tf.LlamaConfig, True, **GROUPED),
    written("llama-tied", tf.LlamaConfig, True, **GROUPED, tie_word_embeddings=True),
    written("llama-biased", tf.LlamaConfig, **WIDE, attention_bias=True, mlp_bias=True),
    written("llama-linear", tf.LlamaConfig, **GROUPED, **LINEAR),
    written("llama-llama3", tf.LlamaConfig, **WIDE, **rope("llama3", 500.0, **LLAMA3)),
    written("llama-yarn", tf.LlamaConfig, **WIDE, **rope("yarn", 500.0, **YARN, beta_fast=8.0)),
    written(
        "llama-yarn-gain",
        tf.LlamaConfig,
        **WIDE,
        **rope("yarn", 500.0, **YARN, attention_factor=1.5),
    ),
    written("mistral", tf.MistralConfig, **WIDE, sliding_window=None),
    written(
        "mistral-window",
        tf.MistralConfig,
        **GROUPED,
        sliding_window=5,
        extra={"attention.sliding_window": 5},
    ),
    written("mixtral", tf.MixtralConfig, **GROUPED, num_local_experts=4),
    written("qwen2", tf.Qwen2Config, True, **GROUPED),
    written(
        "qwen2-yarn",
        tf.Qwen2Config,
        **GROUPED,
        tie_word_embeddings=True,
        **rope("yarn", 500.0, **YARN),
    ),
    written(
        "qwen2_moe",
        tf.Qwen2MoeConfig,
        True,
        **GROUPED
        | SPARSE
        | {"moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632},
    ),
    written("qwen3", tf.Qwen3Config, True, **GROUPED | {"head_dim": 128}),
    written("qwen3-biased", tf.Qwen3Config, **WIDE, attention_bias=True, tie_word_embeddings=True),
    written(
        "qwen3_moe",
        tf.Qwen3MoeConfig,
        True,
        **WIDE | SPARSE | {"moe_intermediate_size": 768},
        norm_topk_prob=True,
    ),
    written("gemma", tf.GemmaConfig, **WIDE),
    written("gemma2", tf.Gemma2Config, True, **GEMMA),
    written(
        "gemma2-capped",
        tf.Gemma2Config,
        **GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0},
    ),
    written("gemma3", tf.Gemma3TextConfig, True, **GEMMA | {"num_hidden_layers": 7}),
    written(
        "gemma3-linear",
        tf.Gemma3TextConfig,
        **GEMMA | {"head_dim": 16, "query_pre_attn_scalar": 16},
        layer_types=MIXED,
        rope_parameters={SLIDING: LOCAL, FULL: GLOBAL},
        extra={"attention.sliding_window_pattern": [True, False, False]},
    ),
    written("phi2", tf.PhiConfig, **PLAIN | {"intermediate_size": 128}),
    written("phi3", tf.Phi3Config, True, **GROUPED),
    written("phi3-window", tf.Phi3Config, **GROUPED, sliding_window=5, partial_rotary_factor=0.5),
    written(
        "phi3-longrope-short", tf.Phi3Config, length=64, **PHI3_LONG, **rope("longrope", **LONG)
    ),
    written(
        "phi3-longrope-long", tf.Phi3Config, prompt=72, **PHI3_LONG, **rope("longrope", **LONG)
    ),
    written("starcoder", tf.GPTBigCodeConfig, **GPT),
    written("starcoder2", tf.Starcoder2Config, True, **GROUPED),
    written(
        "starcoder2-unbiased",
        tf.Starcoder2Config,
        **GROUPED,
        use_bias=False,
        tie_word_embeddings=False,
    ),
    written("bloom", tf.BloomConfig, True, **BLOOM),
    written(
        "bloom-untied",
        tf.BloomConfig,
        **BLOOM | {"hidden_size": 48, "n_head": 6},
        tie_word_embeddings=False,
    ),
    written("falcon-7b", tf.FalconConfig, True, **FALCON),
    written("falcon-40b", tf.FalconConfig, **NEW_FALCON),
    written(
        "falcon-11b",
        tf.FalconConfig,
        **NEW_FALCON,
        num_ln_in_parallel_attn=1,
        tie_word_embeddings=False,
    ),
    written("mpt", tf.MptConfig, **MPT),
    written("mpt-clip", tf.MptConfig, **MPT, attn_config={"clip_qkv": 0.5}),
    written("gpt2", tf.GPT2Config, True, **GPT | {"n_positions": 1024}),
    written("gptneox", tf.GPTNeoXConfig, **PLAIN | {"hidden_size": 64}),
    written(
        "gptneox-sequential", tf.GPTNeoXConfig, **PLAIN, use_parallel_residual=False, rotary_pct=1.0
    ),
    written("stablelm", tf.StableLmConfig, True, **QUARTER),
    written(
        "stablelm-biased",
        tf.StableLmConfig,
        **QUARTER,
        use_qkv_bias=True,
        use_parallel_residual=True,
    ),
    written("stablelm-normed", tf.StableLmConfig, **QUARTER, qk_layernorm=True),
    written("command-r", tf.CohereConfig, **GROUPED),
    written("command-r-normed", tf.CohereConfig, **GROUPED, use_qk_norm=True),
    written("cohere2", tf.Cohere2Config, **GROUPED | {"num_hidden_layers": 5}, sliding_window=5),
    written("granite", tf.GraniteConfig, **GROUPED, **MULTIPLIED, tie_word_embeddings=True),
    written("olmo2", tf.Olmo2Config, **GROUPED),
    written("smollm3", tf.SmolLM3Config, **GROUPED | {"num_hidden_layers": 5}),
]


@pytest.fixture(scope="module", params=CASES, ids=str)
def made(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Written, Path, Any]:
    folder = tmp_path_factory.mktemp("checkpoint")
    model = make_checkpoint(request.param.case, folder)
    gguf_writer.write(model, folder / "model.gguf", extra=request.param.extra)
    return request.param, folder / "model.gguf", model


def random_tokens(count: int, vocab: int = VOCAB) -> list[int]:
    return torch.randint(3, vocab, (count,), generator=torch.Generator().manual_seed(0)).tolist()


def difference(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).abs().max() / want.abs().max())


def through_transformers(path: Path, tokens: list[int]) -> torch.Tensor:
    model = tf.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    )
    return reference_logits(model.eval(), torch.tensor([tokens]), len(tokens))


def test_every_architecture_is_written_here() -> None:
    named = {gguf_writer.ARCHITECTURES[one.case.config().model_type].name for one in CASES}
    assert named == ARCHITECTURES.keys()


def test_logits(made: tuple[Written, Path, Any]) -> None:
    one, path, model = made
    tokens = random_tokens(one.case.prompt)
    want = reference_logits(model, torch.tensor([tokens]), one.case.prompt)
    got = logits(path, tokens, one.case.length)
    assert difference(got, want) <= 1e-5
    if one.readable:
        assert difference(got, through_transformers(path, tokens)) <= 1e-5


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_1], ids=lambda kind: kind.name)
def test_quantised(kind: Kind, tmp_path: Path) -> None:
    sizes = GROUPED | {"hidden_size": 64, "intermediate_size": 96}
    model = make_checkpoint(case("llama", tf.LlamaConfig, **sizes), tmp_path)
    gguf_writer.write(model, tmp_path / "model.gguf", kind)
    tokens = random_tokens(24)
    got = logits(tmp_path / "model.gguf", tokens, 128)
    assert difference(got, through_transformers(tmp_path / "model.gguf", tokens)) <= 1e-5
    plain = reference_logits(model, torch.tensor([tokens]), 24)
    assert difference(got, plain) > 1e-4, "nothing was quantised"


def test_embedded_model() -> None:
    tokens = random_tokens(48, vocab=49152)
    want = through_transformers(locate(None).path, tokens)
    assert difference(logits(None, tokens, 128), want) <= 1e-4
