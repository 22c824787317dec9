"""Every family and variant as a tiny random checkpoint, and transformers' answer to it.

A new family adds its lines here. Sizes are such that one checkpoint takes well under a second.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers as tf

VOCAB = 101


@dataclass(frozen=True)
class Case:
    """`prompt` and `length` say for what the comparison is fair: how many tokens go in at once, and the longest
    sequence served. Dynamic rope agrees where a prompt within the original context is decoded beyond it; longrope
    where the prompt and the length are on the same side of it."""

    name: str
    config: Callable[[], Any]
    attention: str = "eager"  # transformers' implementation to compare with
    prompt: int = 24
    length: int = 128


SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
PLAIN = SIZES | SPECIAL | {"intermediate_size": 48, "max_position_embeddings": 128}
GROUPED = PLAIN | {"num_key_value_heads": 2}
WIDE = GROUPED | {"head_dim": 16}
QUARTER = GROUPED | {
    "hidden_size": 64
}  # a quarter of a head must be more than one pair, or its speed means nothing
GEMMA = WIDE | {"sliding_window": 5, "query_pre_attn_scalar": 24}
CAPPED = GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}
GEMMA3 = GEMMA | {"num_hidden_layers": 7}
SPARSE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
SHARED = SPARSE | {"shared_expert_intermediate_size": 40}
GPT = SPECIAL | {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 128}
BLOOM = {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 3, "n_head": 4}
FALCON = SIZES | SPECIAL | {"max_position_embeddings": 128}
NEW_FALCON = FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2}
FALCON_RW = FALCON | {"alibi": True, "bias": True, "multi_query": False, "parallel_attn": False}
MPT = {"vocab_size": VOCAB, "d_model": 32, "n_layers": 3, "n_heads": 4, "max_seq_len": 128}
OPT = SIZES | SPECIAL | {"ffn_dim": 48, "max_position_embeddings": 128}
EYES = {
    "image_size": 16,
    "patch_size": 8,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 2,
}
SLIDING = "sliding_attention"
FULL = "full_attention"


def rope(kind: str, theta: float = 10000.0, **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **values}}


LINEAR = rope("linear", factor=4.0)
DYNAMIC = rope("dynamic", factor=4.0)
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32}
LONG = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 3.0, 4.0]}
PHI3_LONG = GROUPED | {"max_position_embeddings": 256, "original_max_position_embeddings": 64}


def case(
    name: str,
    config: Any,
    /,
    attention: str = "eager",
    prompt: int = 24,
    length: int = 128,
    **values: Any,
) -> Case:
    return Case(name, lambda: config(**values), attention, prompt, length)


CASES = [
    case("bloom", tf.BloomConfig, **BLOOM),
    case("bloom-6-heads", tf.BloomConfig, **BLOOM | {"hidden_size": 48, "n_head": 6}),
    case("bloom-untied", tf.BloomConfig, **BLOOM, tie_word_embeddings=False),
    case("gpt_bigcode-mqa", tf.GPTBigCodeConfig, **GPT),
    case(
        "gpt_bigcode-mha",
        tf.GPTBigCodeConfig,
        **GPT,
        multi_query=False,
        activation_function="gelu",
        n_inner=80,
    ),
    case("falcon-7b", tf.FalconConfig, **FALCON),
    case("falcon-40b", tf.FalconConfig, **NEW_FALCON),
    case(
        "falcon-11b", tf.FalconConfig, **NEW_FALCON, num_ln_in_parallel_attn=1, ffn_hidden_size=80
    ),
    # transformers' eager path adds Falcon's ALiBi twice, in the mask and to the scores; its SDPA path once
    case("falcon-rw", tf.FalconConfig, attention="sdpa", **FALCON_RW),
    case("falcon-untied", tf.FalconConfig, **FALCON, bias=True, tie_word_embeddings=False),
    case("mpt", tf.MptConfig, **MPT),
    case(
        "mpt-clip-scale", tf.MptConfig, **MPT, attn_config={"clip_qkv": 0.5, "softmax_scale": 0.2}
    ),
    case(
        "mpt-6-heads",
        tf.MptConfig,
        **MPT | {"d_model": 48, "n_heads": 6},
        tie_word_embeddings=False,
    ),
    case("llama", tf.LlamaConfig, **GROUPED),
    case(
        "llama-tied",
        tf.LlamaConfig,
        **WIDE,
        tie_word_embeddings=True,
        attention_bias=True,
        mlp_bias=True,
    ),
    case("llama-linear", tf.LlamaConfig, **GROUPED, **LINEAR),
    case(
        "llama-dynamic",
        tf.LlamaConfig,
        prompt=48,
        **GROUPED | {"max_position_embeddings": 64},
        **DYNAMIC,
    ),
    case("llama-llama3", tf.LlamaConfig, **WIDE, **rope("llama3", 500.0, **LLAMA3)),
    case("llama-yarn", tf.LlamaConfig, **WIDE, **rope("yarn", 500.0, **YARN)),
    case(
        "llama-yarn-scaled",
        tf.LlamaConfig,
        **WIDE,
        **rope("yarn", 500.0, **YARN, mscale=1.2, mscale_all_dim=0.7),
    ),
    case(
        "llama-yarn-exact",
        tf.LlamaConfig,
        **WIDE,
        **rope("yarn", 500.0, **YARN, truncate=False, beta_fast=8.0),
    ),
    case("mistral", tf.MistralConfig, **GROUPED, sliding_window=5),
    case("mistral-wide", tf.MistralConfig, **WIDE, sliding_window=None, tie_word_embeddings=True),
    case("mixtral", tf.MixtralConfig, **GROUPED, num_local_experts=4),
    case("mixtral-window", tf.MixtralConfig, **WIDE, num_local_experts=4, sliding_window=5),
    case("qwen2", tf.Qwen2Config, **GROUPED),
    case(
        "qwen2-window",
        tf.Qwen2Config,
        **GROUPED,
        use_sliding_window=True,
        sliding_window=5,
        max_window_layers=1,
    ),
    case(
        "qwen2-layer-types",
        tf.Qwen2Config,
        **GROUPED,
        use_sliding_window=True,
        sliding_window=5,
        layer_types=[SLIDING, FULL, SLIDING],
        tie_word_embeddings=True,
    ),
    case("qwen2_moe", tf.Qwen2MoeConfig, **GROUPED, **SHARED),
    case(
        "qwen2_moe-mixed",
        tf.Qwen2MoeConfig,
        **GROUPED,
        **SHARED,
        norm_topk_prob=True,
        decoder_sparse_step=2,
    ),
    case(
        "qwen2_moe-window",
        tf.Qwen2MoeConfig,
        **GROUPED,
        **SHARED,
        use_sliding_window=True,
        sliding_window=5,
        qkv_bias=False,
        mlp_only_layers=[1],
    ),
    case("qwen3", tf.Qwen3Config, **WIDE),
    case(
        "qwen3-window",
        tf.Qwen3Config,
        **WIDE,
        attention_bias=True,
        use_sliding_window=True,
        sliding_window=5,
        max_window_layers=1,
        tie_word_embeddings=True,
    ),
    case("qwen3_moe", tf.Qwen3MoeConfig, **WIDE, **SPARSE, norm_topk_prob=True),
    case(
        "qwen3_moe-mixed",
        tf.Qwen3MoeConfig,
        **GROUPED,
        **SPARSE,
        decoder_sparse_step=2,
        use_sliding_window=True,
        sliding_window=5,
    ),
    case(
        "qwen3_moe-dense-first",
        tf.Qwen3MoeConfig,
        **GROUPED,
        **SPARSE,
        mlp_only_layers=[0],
        attention_bias=True,
    ),
    case("gemma", tf.GemmaConfig, **WIDE),
    case("gemma2", tf.Gemma2Config, **CAPPED),
    case(
        "gemma2-uncapped",
        tf.Gemma2Config,
        **GEMMA,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
    ),
    case("gemma3_text", tf.Gemma3TextConfig, **GEMMA3),
    case(
        "gemma3_text-linear",
        tf.Gemma3TextConfig,
        **GEMMA3,
        rope_parameters={
            SLIDING: {"rope_type": "default", "rope_theta": 100.0},
            FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000.0},
        },
    ),
    case(
        "gemma3", tf.Gemma3Config, text_config=GEMMA3, vision_config=EYES | {"num_hidden_layers": 1}
    ),
    case("gpt2", tf.GPT2Config, **GPT),
    case(
        "gpt2-scaled",
        tf.GPT2Config,
        **GPT,
        n_inner=80,
        scale_attn_by_inverse_layer_idx=True,
        scale_attn_weights=False,
    ),
    case(
        "gpt2-upcast", tf.GPT2Config, **GPT, reorder_and_upcast_attn=True, tie_word_embeddings=False
    ),
    case("gpt_neox", tf.GPTNeoXConfig, **PLAIN | {"hidden_size": 64}),
    case(
        "gpt_neox-sequential",
        tf.GPTNeoXConfig,
        **PLAIN,
        rotary_pct=1.0,
        use_parallel_residual=False,
        tie_word_embeddings=True,
    ),
    case(
        "gpt_neox-half",
        tf.GPTNeoXConfig,
        **PLAIN,
        rotary_pct=0.5,
        rotary_emb_base=100,
        attention_bias=False,
    ),
    case("gptj", tf.GPTJConfig, **GPT, rotary_dim=4),
    case("gptj-inner", tf.GPTJConfig, **GPT, rotary_dim=8, n_inner=80),
    case("opt", tf.OPTConfig, **OPT),
    case("opt-350m", tf.OPTConfig, **OPT, do_layer_norm_before=False, word_embed_proj_dim=16),
    case("opt-projected", tf.OPTConfig, **OPT, word_embed_proj_dim=16, tie_word_embeddings=False),
    case(
        "opt-no-final-norm",
        tf.OPTConfig,
        **OPT,
        _remove_final_layer_norm=True,
        layer_norm_elementwise_affine=False,
    ),
    case("galactica", tf.OPTConfig, **OPT, enable_bias=False, activation_function="gelu"),
    case("phi", tf.PhiConfig, **PLAIN),
    case("phi-normed", tf.PhiConfig, **QUARTER, qk_layernorm=True, partial_rotary_factor=0.25),
    case("phi3", tf.Phi3Config, **GROUPED),
    case("phi3-window", tf.Phi3Config, **GROUPED, sliding_window=5, partial_rotary_factor=0.5),
    case("phi3-longrope-short", tf.Phi3Config, length=64, **PHI3_LONG, **rope("longrope", **LONG)),
    case("phi3-longrope-long", tf.Phi3Config, prompt=72, **PHI3_LONG, **rope("longrope", **LONG)),
    case("cohere", tf.CohereConfig, **GROUPED),
    case(
        "cohere-normed",
        tf.CohereConfig,
        **GROUPED,
        use_qk_norm=True,
        attention_bias=True,
        tie_word_embeddings=False,
    ),
    case("cohere2", tf.Cohere2Config, **GROUPED | {"num_hidden_layers": 5}, sliding_window=5),
    case("starcoder2", tf.Starcoder2Config, **GROUPED),
    case(
        "starcoder2-window",
        tf.Starcoder2Config,
        **GROUPED,
        sliding_window=5,
        use_bias=False,
        tie_word_embeddings=False,
    ),
    case("stablelm", tf.StableLmConfig, **QUARTER),
    case(
        "stablelm-parallel",
        tf.StableLmConfig,
        **QUARTER,
        use_parallel_residual=True,
        use_qkv_bias=True,
    ),
    case(
        "stablelm-normed",
        tf.StableLmConfig,
        **GROUPED,
        qk_layernorm=True,
        partial_rotary_factor=0.5,
    ),
    case("granite", tf.GraniteConfig, **GROUPED),
    case(
        "granite-multiplied",
        tf.GraniteConfig,
        **GROUPED,
        embedding_multiplier=3.0,
        attention_multiplier=0.2,
        residual_multiplier=0.5,
        logits_scaling=4.0,
        tie_word_embeddings=True,
        attention_bias=True,
        mlp_bias=True,
    ),
    case("olmo2", tf.Olmo2Config, **GROUPED),
    case("olmo2-biased", tf.Olmo2Config, **GROUPED, attention_bias=True, tie_word_embeddings=True),
    case("smollm3", tf.SmolLM3Config, **GROUPED | {"num_hidden_layers": 5}),
    case(
        "smollm3-window",
        tf.SmolLM3Config,
        **GROUPED,
        no_rope_layers=[1, 0, 0],
        use_sliding_window=True,
        sliding_window=5,
    ),
]


WIDTHS = (
    "hidden_size",
    "intermediate_size",
    "n_embd",
    "n_inner",
    "d_model",
    "ffn_dim",
    "word_embed_proj_dim",
    "head_dim",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "rotary_dim",
    "query_pre_attn_scalar",
)


def widened(config: Any, times: int) -> Any:
    """The same mechanisms in a wider model."""
    widths = {
        name: getattr(config, name, None) for name in WIDTHS
    }  # some are two names of one number
    for name, width in widths.items():
        if isinstance(width, int) and not isinstance(getattr(type(config), name, None), property):
            setattr(config, name, times * width)
    for values in (
        getattr(config, "rope_parameters", None) or {},
        getattr(config, "rope_scaling", None) or {},
    ):
        for name in ("short_factor", "long_factor"):
            if isinstance(values.get(name), list) and len(values[name]) < 16:
                values[name] = values[name] * times
    return config


def make_checkpoint(case: Case, folder: Path, times: int = 1) -> Any:
    """The case's model with seeded random weights, saved as safetensors and ready to answer; `times` as wide."""
    generator = torch.Generator().manual_seed(0)
    config = widened(case.config(), times) if times > 1 else case.config()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = tf.AutoModelForCausalLM.from_config(
            config, attn_implementation=case.attention
        ).eval()
    with torch.no_grad():
        for weight in model.parameters():  # so that no norm is all ones and no bias zero
            weight.add_(0.2 / times**0.5 * torch.randn(weight.shape, generator=generator))
    model.save_pretrained(folder)
    return model


@torch.no_grad()
def reference_logits(model: Any, tokens: torch.Tensor, prompt: int) -> torch.Tensor:
    """Logits of every position of tokens [1, n], as served: the prompt at once, the rest one by one over a cache."""
    answer = model(tokens[:, :prompt], use_cache=True)
    logits = [answer.logits]
    cache = answer.past_key_values
    for position in range(prompt, tokens.shape[1]):
        answer = model(tokens[:, position : position + 1], past_key_values=cache, use_cache=True)
        logits.append(answer.logits)
    return torch.cat(logits, 1)[0]
