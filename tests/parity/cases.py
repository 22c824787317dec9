"""Every family and variant as a tiny random checkpoint, and the logits of transformers for it.

A new family adds its cases here. Sizes are such that one checkpoint takes well under a second.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from safetensors.torch import load_file, save_file

VOCAB = 101


@dataclass(frozen=True)
class ParityCase:
    """A model config, and the lengths for which transformers is comparable.

    With dynamic rope, a prompt within the original context is decoded beyond it. With longrope, the
    prompt and the length are on the same side of the original context.
    """

    name: str
    config: Callable[[], Any]
    attention: str = "eager"  # transformers' implementation to compare with
    prompt: int = 24  # tokens
    length: int = 128  # max_model_len


SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
PLAIN = SIZES | SPECIAL | {"intermediate_size": 48, "max_position_embeddings": 128}
GROUPED = PLAIN | {"num_key_value_heads": 2}
WIDE = GROUPED | {"head_dim": 16}
# A quarter of a head must be more than one rope pair, or its frequency has no effect.
QUARTER = GROUPED | {"hidden_size": 64}
GEMMA = WIDE | {"sliding_window": 5, "query_pre_attn_scalar": 24}
CAPPED = GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}
GEMMA3 = GEMMA | {"num_hidden_layers": 7}
SPARSE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
# The bias of each router changes the choice, and one of the best experts is in a group left out.
ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
GROUPS = ROUTED | {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
SHARED = SPARSE | {"shared_expert_intermediate_size": 40}
STACKED = SPARSE | {"shared_expert_intermediate_size": 64}  # as wide as two experts
GPT_OSS = WIDE | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5}
GPT = SPECIAL | {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 128}
BLOOM = {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 3, "n_head": 4}
FALCON = SIZES | SPECIAL | {"max_position_embeddings": 128}
NEW_FALCON = FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2}
FALCON_RW = FALCON | {"alibi": True, "bias": True, "multi_query": False, "parallel_attn": False}
MPT = {"vocab_size": VOCAB, "d_model": 32, "n_layers": 3, "n_heads": 4, "max_seq_len": 128}
OPT = SIZES | SPECIAL | {"ffn_dim": 48, "max_position_embeddings": 128}
VISION = {
    "image_size": 16,
    "patch_size": 8,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 2,
}
LLAMA4_VISION = VISION | {"num_hidden_layers": 1, "vision_output_dim": 16}
QWEN2_VISION = {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2}
QWEN_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 32,
}
QWEN3_VISION = QWEN_VISION | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16}
MROPE = {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [2, 3, 3]}
QWEN2_VL = WIDE | {"hidden_size": 64, "rope_parameters": MROPE}
QWEN3_VL = WIDE | {"rope_parameters": {**MROPE, "mrope_interleaved": True}}
MISTRAL3 = WIDE | {"model_type": "mistral", "sliding_window": None}
LLAMA4 = WIDE | {
    "intermediate_size_mlp": 40,
    "num_local_experts": 4,
    "attention_chunk_size": 7,
    "floor_scale": 4,
    "attn_scale": 0.5,
}
# Outputs of a delta net may be tiny before their norm, which then enlarges rounding errors.
DELTA_NET = WIDE | {
    "rms_norm_eps": 1e-4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [1, 1, 0],
        "mrope_interleaved": True,
    },
}
DELTA_NET_MOE = {key: value for key, value in DELTA_NET.items() if key != "intermediate_size"}
QWEN3_5_VISION = QWEN_VISION | {"num_position_embeddings": 16}
LFM2 = GROUPED | {
    "layer_types": ["conv", "full_attention", "conv"],
    "block_auto_adjust_ff_dim": False,
}
# Values that are not those of a state without any factor or limit.
MAMBA2 = GROUPED | {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
}
# transformers applies the least time step to prompts only, so there is none here.
NEMOTRON_H = {key: value for key, value in WIDE.items() if key != "num_hidden_layers"} | {
    "mamba_num_heads": 4,
    "mamba_head_dim": 12,
    "n_groups": 2,
    "ssm_state_size": 8,
    "time_step_min": 1e-30,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 40,
}
GRANITE_FACTORS = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.5,
    "logits_scaling": 4.0,
}
FALCON_H1_FACTORS = {
    "attention_in_multiplier": 0.8,
    "attention_out_multiplier": 1.5,
    "key_multiplier": 0.6,
    "ssm_in_multiplier": 1.3,
    "ssm_out_multiplier": 0.7,
    "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7],
    "mlp_multipliers": [1.4, 0.6],
    "embedding_multiplier": 1.7,
    "lm_head_multiplier": 0.5,
}
# There is no least time step, as in Nemotron-H. Blocks without residuals enlarge rounding errors,
# in wide models more.
ZAMBA2 = PLAIN | {
    "hidden_size": 16,
    "num_hidden_layers": 5,
    "layers_block_type": ["mamba", "hybrid", "hybrid", "mamba", "hybrid"],
    "n_mamba_heads": 4,
    "mamba_ngroups": 2,
    "mamba_d_state": 8,
    "adapter_rank": 4,
    "time_step_min": 1e-30,
}
JAMBA = GROUPED | {
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "expert_layer_offset": 1,
    "mamba_d_state": 6,
    "num_experts": 4,
}
TIED = {"tie_word_embeddings": True}
UNTIED = {"tie_word_embeddings": False}
SLIDING = "sliding_attention"
FULL = "full_attention"
CHUNKED = "chunked_attention"
DENSE_FIRST = ["dense", "sparse", "sparse"]


def rope(kind: str, theta: float = 10000.0, **values: Any) -> dict[str, Any]:
    """Return the rope values of a transformers config."""
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
SHORT_YARN = {
    "factor": 16.0,
    "original_max_position_embeddings": 8,
    "llama_4_scaling_beta": 0.5,
    "max_position_embeddings": 128,
}
LONG = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 3.0, 4.0]}
PHI3_LONG = GROUPED | {"max_position_embeddings": 256, "original_max_position_embeddings": 64}


def parity_case(
    name: str,
    config: Any,
    /,
    attention: str = "eager",
    prompt: int = 24,
    length: int = 128,
    **values: Any,
) -> ParityCase:
    """Make a case of a transformers config class and its values."""
    return ParityCase(name, lambda: config(**values), attention, prompt, length)


CASES = [
    parity_case("bloom", tf.BloomConfig, **BLOOM),
    parity_case("bloom-6-heads", tf.BloomConfig, **BLOOM | {"hidden_size": 48, "n_head": 6}),
    parity_case("bloom-untied", tf.BloomConfig, **BLOOM, tie_word_embeddings=False),
    parity_case(
        "bloom-residual-after-norm",
        tf.BloomConfig,
        **BLOOM,
        apply_residual_connection_post_layernorm=True,
    ),
    parity_case("gpt_bigcode-mqa", tf.GPTBigCodeConfig, **GPT),
    parity_case(
        "gpt_bigcode-mha",
        tf.GPTBigCodeConfig,
        **GPT,
        multi_query=False,
        activation_function="gelu",
        n_inner=80,
    ),
    parity_case("falcon-7b", tf.FalconConfig, **FALCON),
    parity_case("falcon-40b", tf.FalconConfig, **NEW_FALCON),
    parity_case(
        "falcon-11b", tf.FalconConfig, **NEW_FALCON, num_ln_in_parallel_attn=1, ffn_hidden_size=80
    ),
    # The eager path of transformers adds Falcon's ALiBi twice, the SDPA path once.
    parity_case("falcon-rw", tf.FalconConfig, attention="sdpa", **FALCON_RW),
    parity_case("falcon-untied", tf.FalconConfig, **FALCON, bias=True, tie_word_embeddings=False),
    parity_case("mpt", tf.MptConfig, **MPT),
    parity_case(
        "mpt-clip-scale", tf.MptConfig, **MPT, attn_config={"clip_qkv": 0.5, "softmax_scale": 0.2}
    ),
    parity_case(
        "mpt-6-heads",
        tf.MptConfig,
        **MPT | {"d_model": 48, "n_heads": 6},
        tie_word_embeddings=False,
    ),
    parity_case("llama", tf.LlamaConfig, **GROUPED),
    parity_case(
        "llama-tied",
        tf.LlamaConfig,
        **WIDE,
        tie_word_embeddings=True,
        attention_bias=True,
        mlp_bias=True,
    ),
    parity_case("llama-linear", tf.LlamaConfig, **GROUPED, **LINEAR),
    parity_case(
        "llama-dynamic",
        tf.LlamaConfig,
        prompt=48,
        **GROUPED | {"max_position_embeddings": 64},
        **DYNAMIC,
    ),
    parity_case("llama-llama3", tf.LlamaConfig, **WIDE, **rope("llama3", 500.0, **LLAMA3)),
    parity_case("llama-yarn", tf.LlamaConfig, **WIDE, **rope("yarn", 500.0, **YARN)),
    parity_case(
        "llama-yarn-scaled",
        tf.LlamaConfig,
        **WIDE,
        **rope("yarn", 500.0, **YARN, mscale=1.2, mscale_all_dim=0.7),
    ),
    parity_case(
        "llama-yarn-exact",
        tf.LlamaConfig,
        **WIDE,
        **rope("yarn", 500.0, **YARN, truncate=False, beta_fast=8.0),
    ),
    parity_case("mistral", tf.MistralConfig, **GROUPED, sliding_window=5),
    parity_case(
        "mistral-wide", tf.MistralConfig, **WIDE, sliding_window=None, tie_word_embeddings=True
    ),
    parity_case(
        "ministral",
        tf.MinistralConfig,
        **WIDE,
        sliding_window=5,
        layer_types=[SLIDING, FULL, SLIDING],
    ),
    parity_case("mixtral", tf.MixtralConfig, **GROUPED, num_local_experts=4),
    parity_case("mixtral-window", tf.MixtralConfig, **WIDE, num_local_experts=4, sliding_window=5),
    parity_case("qwen2", tf.Qwen2Config, **GROUPED),
    parity_case(
        "qwen2-window",
        tf.Qwen2Config,
        **GROUPED,
        use_sliding_window=True,
        sliding_window=5,
        max_window_layers=1,
    ),
    parity_case(
        "qwen2-layer-types",
        tf.Qwen2Config,
        **GROUPED,
        use_sliding_window=True,
        sliding_window=5,
        layer_types=[SLIDING, FULL, SLIDING],
        tie_word_embeddings=True,
    ),
    parity_case("qwen2_moe", tf.Qwen2MoeConfig, **GROUPED, **SHARED),
    parity_case("qwen2_moe-stacked", tf.Qwen2MoeConfig, **GROUPED, **STACKED),
    parity_case(
        "qwen2_moe-mixed",
        tf.Qwen2MoeConfig,
        **GROUPED,
        **SHARED,
        norm_topk_prob=True,
        decoder_sparse_step=2,
    ),
    parity_case(
        "qwen2_moe-window",
        tf.Qwen2MoeConfig,
        **GROUPED,
        **SHARED,
        use_sliding_window=True,
        sliding_window=5,
        qkv_bias=False,
        mlp_only_layers=[1],
    ),
    parity_case("qwen3", tf.Qwen3Config, **WIDE),
    parity_case(
        "qwen3-window",
        tf.Qwen3Config,
        **WIDE,
        attention_bias=True,
        use_sliding_window=True,
        sliding_window=5,
        max_window_layers=1,
        tie_word_embeddings=True,
    ),
    parity_case("qwen3_moe", tf.Qwen3MoeConfig, **WIDE, **SPARSE, norm_topk_prob=True),
    parity_case(
        "qwen3_moe-mixed",
        tf.Qwen3MoeConfig,
        **GROUPED,
        **SPARSE,
        decoder_sparse_step=2,
        use_sliding_window=True,
        sliding_window=5,
    ),
    parity_case(
        "qwen3_moe-dense-first",
        tf.Qwen3MoeConfig,
        **GROUPED,
        **SPARSE,
        mlp_only_layers=[0],
        attention_bias=True,
    ),
    parity_case("gpt_oss", tf.GptOssConfig, **GPT_OSS),
    parity_case(
        "gpt_oss-full",
        tf.GptOssConfig,
        **GPT_OSS,
        **rope("default"),
        attention_bias=False,
        swiglu_limit=0.02,
        layer_types=[FULL, SLIDING, FULL],
    ),
    parity_case("gemma", tf.GemmaConfig, **WIDE),
    parity_case("gemma2", tf.Gemma2Config, **CAPPED),
    parity_case(
        "gemma2-uncapped",
        tf.Gemma2Config,
        **GEMMA,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
    ),
    parity_case("gemma3_text", tf.Gemma3TextConfig, **GEMMA3),
    parity_case(
        "gemma3_text-linear",
        tf.Gemma3TextConfig,
        **GEMMA3,
        rope_parameters={
            SLIDING: {"rope_type": "default", "rope_theta": 100.0},
            FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000.0},
        },
    ),
    parity_case(
        "gemma3",
        tf.Gemma3Config,
        text_config=GEMMA3,
        vision_config=VISION | {"num_hidden_layers": 1},
    ),
    parity_case(
        "mistral3", tf.Mistral3Config, text_config=MISTRAL3, vision_config=VISION, **UNTIED
    ),
    parity_case(
        "mistral3-ministral3",
        tf.Mistral3Config,
        text_config=WIDE
        | {"model_type": "ministral3", "sliding_window": None}
        | rope("yarn", 500.0, **SHORT_YARN, mscale=1.0, mscale_all_dim=1.0),
        vision_config=VISION,
        **UNTIED,
    ),
    parity_case(
        "qwen2_vl", tf.Qwen2VLConfig, text_config=QWEN2_VL, vision_config=QWEN2_VISION, **TIED
    ),
    parity_case(
        "qwen2_5_vl", tf.Qwen2_5_VLConfig, text_config=QWEN2_VL, vision_config=QWEN_VISION, **UNTIED
    ),
    parity_case(
        "qwen3_vl", tf.Qwen3VLConfig, text_config=QWEN3_VL, vision_config=QWEN3_VISION, **TIED
    ),
    parity_case(
        "qwen3_vl_moe",
        tf.Qwen3VLMoeConfig,
        text_config=QWEN3_VL | SPARSE,
        vision_config=QWEN3_VISION,
        **UNTIED,
    ),
    parity_case("gpt2", tf.GPT2Config, **GPT),
    parity_case(
        "gpt2-scaled",
        tf.GPT2Config,
        **GPT,
        n_inner=80,
        scale_attn_by_inverse_layer_idx=True,
        scale_attn_weights=False,
    ),
    parity_case(
        "gpt2-upcast", tf.GPT2Config, **GPT, reorder_and_upcast_attn=True, tie_word_embeddings=False
    ),
    parity_case("gpt_neox", tf.GPTNeoXConfig, **PLAIN | {"hidden_size": 64}),
    parity_case(
        "gpt_neox-sequential",
        tf.GPTNeoXConfig,
        **PLAIN,
        rotary_pct=1.0,
        use_parallel_residual=False,
        tie_word_embeddings=True,
    ),
    parity_case(
        "gpt_neox-half",
        tf.GPTNeoXConfig,
        **PLAIN,
        rotary_pct=0.5,
        rotary_emb_base=100,
        attention_bias=False,
    ),
    parity_case("gptj", tf.GPTJConfig, **GPT, rotary_dim=4),
    parity_case("gptj-inner", tf.GPTJConfig, **GPT, rotary_dim=8, n_inner=80),
    parity_case("opt", tf.OPTConfig, **OPT),
    parity_case(
        "opt-350m", tf.OPTConfig, **OPT, do_layer_norm_before=False, word_embed_proj_dim=16
    ),
    parity_case(
        "opt-projected", tf.OPTConfig, **OPT, word_embed_proj_dim=16, tie_word_embeddings=False
    ),
    parity_case(
        "opt-no-final-norm",
        tf.OPTConfig,
        **OPT,
        _remove_final_layer_norm=True,
        layer_norm_elementwise_affine=False,
    ),
    parity_case("galactica", tf.OPTConfig, **OPT, enable_bias=False, activation_function="gelu"),
    parity_case("phi", tf.PhiConfig, **PLAIN),
    parity_case(
        "phi-normed", tf.PhiConfig, **QUARTER, qk_layernorm=True, partial_rotary_factor=0.25
    ),
    parity_case("phi3", tf.Phi3Config, **GROUPED),
    parity_case(
        "phi3-window", tf.Phi3Config, **GROUPED, sliding_window=5, partial_rotary_factor=0.5
    ),
    parity_case(
        "phi3-longrope-short", tf.Phi3Config, length=64, **PHI3_LONG, **rope("longrope", **LONG)
    ),
    parity_case(
        "phi3-longrope-long", tf.Phi3Config, prompt=72, **PHI3_LONG, **rope("longrope", **LONG)
    ),
    parity_case("cohere", tf.CohereConfig, **GROUPED),
    parity_case(
        "cohere-normed",
        tf.CohereConfig,
        **GROUPED,
        use_qk_norm=True,
        attention_bias=True,
        tie_word_embeddings=False,
    ),
    parity_case(
        "cohere2", tf.Cohere2Config, **GROUPED | {"num_hidden_layers": 5}, sliding_window=5
    ),
    parity_case("starcoder2", tf.Starcoder2Config, **GROUPED),
    parity_case(
        "starcoder2-window",
        tf.Starcoder2Config,
        **GROUPED,
        sliding_window=5,
        use_bias=False,
        tie_word_embeddings=False,
    ),
    parity_case("stablelm", tf.StableLmConfig, **QUARTER),
    parity_case(
        "stablelm-parallel",
        tf.StableLmConfig,
        **QUARTER,
        use_parallel_residual=True,
        use_qkv_bias=True,
    ),
    parity_case(
        "stablelm-normed",
        tf.StableLmConfig,
        **GROUPED,
        qk_layernorm=True,
        partial_rotary_factor=0.5,
    ),
    parity_case("granite", tf.GraniteConfig, **GROUPED),
    parity_case(
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
    parity_case(
        "granite_swa",
        tf.GraniteSWAConfig,
        **GROUPED | {"num_hidden_layers": 5},
        sliding_window=5,
        layer_rope_theta=[0, 100.0, 100.0, 1000.0, 0],
        attention_multiplier=0.2,
    ),
    parity_case("olmo2", tf.Olmo2Config, **GROUPED),
    parity_case(
        "olmo2-biased", tf.Olmo2Config, **GROUPED, attention_bias=True, tie_word_embeddings=True
    ),
    parity_case("olmo3", tf.Olmo3Config, **GROUPED | {"num_hidden_layers": 5}, sliding_window=5),
    parity_case(
        "olmo3-yarn",
        tf.Olmo3Config,
        **GROUPED,
        sliding_window=5,
        layer_types=[SLIDING, FULL, SLIDING],
        rope_parameters={
            SLIDING: {"rope_type": "default", "rope_theta": 100.0},
            FULL: {"rope_type": "yarn", "rope_theta": 100.0, **YARN},
        },
    ),
    parity_case("glm", tf.GlmConfig, **WIDE),
    parity_case(
        "glm-unbiased", tf.GlmConfig, **WIDE, attention_bias=False, tie_word_embeddings=True
    ),
    parity_case("glm4", tf.Glm4Config, **WIDE),
    parity_case("ernie4_5", tf.Ernie4_5Config, **WIDE),
    parity_case(
        "ernie4_5-biased", tf.Ernie4_5Config, **WIDE, use_bias=True, tie_word_embeddings=False
    ),
    parity_case("seed_oss", tf.SeedOssConfig, **WIDE),
    parity_case(
        "seed_oss-biased",
        tf.SeedOssConfig,
        **WIDE,
        attention_bias=False,
        attention_out_bias=True,
        mlp_bias=True,
    ),
    parity_case(
        "exaone4", tf.Exaone4Config, **GROUPED | {"num_hidden_layers": 5}, sliding_window=5
    ),
    parity_case(
        "exaone4-full", tf.Exaone4Config, **GROUPED, sliding_window=None, layer_types=[FULL] * 3
    ),
    parity_case("arcee", tf.ArceeConfig, **GROUPED),
    parity_case("arcee-biased", tf.ArceeConfig, **GROUPED, attention_bias=True, mlp_bias=True),
    parity_case("apertus", tf.ApertusConfig, **GROUPED, **rope("llama3", 500.0, **LLAMA3)),
    parity_case("apertus-relu2", tf.ApertusConfig, **WIDE, hidden_act="relu2", attention_bias=True),
    parity_case("helium", tf.HeliumConfig, **GROUPED, head_dim=8),
    parity_case(
        "helium-biased", tf.HeliumConfig, **GROUPED, head_dim=8, attention_bias=True, mlp_bias=True
    ),
    parity_case("nemotron", tf.NemotronConfig, **QUARTER),
    parity_case(
        "nemotron-biased",
        tf.NemotronConfig,
        **GROUPED,
        attention_bias=True,
        mlp_bias=True,
        partial_rotary_factor=1.0,
    ),
    parity_case("smollm3", tf.SmolLM3Config, **GROUPED | {"num_hidden_layers": 5}),
    parity_case("glm4_moe", tf.Glm4MoeConfig, **WIDE, **ROUTED),
    parity_case(
        "glm4_moe-groups",
        tf.Glm4MoeConfig,
        **WIDE,
        **GROUPS,
        use_qk_norm=True,
        attention_bias=True,
        n_shared_experts=2,
        norm_topk_prob=False,
    ),
    parity_case("solar_open", tf.SolarOpenConfig, **WIDE, **GROUPS),
    parity_case(
        "solar_open-yarn",
        tf.SolarOpenConfig,
        **WIDE,
        **ROUTED,
        attention_bias=True,
        **rope("yarn", 500.0, **YARN),
    ),
    parity_case("dots1", tf.Dots1Config, **GROUPED, **ROUTED, n_shared_experts=2),
    parity_case(
        "dots1-window",
        tf.Dots1Config,
        **GROUPED,
        **GROUPS,
        n_shared_experts=1,
        first_k_dense_replace=1,
        norm_topk_prob=True,
        sliding_window=5,
        max_window_layers=1,
    ),
    parity_case(
        "minimax_m2", tf.MiniMaxM2Config, **WIDE, num_local_experts=6, num_experts_per_tok=3
    ),
    parity_case(
        "minimax_m2-partial",
        tf.MiniMaxM2Config,
        **WIDE,
        num_local_experts=4,
        num_experts_per_tok=2,
        rotary_dim=8,
        tie_word_embeddings=True,
    ),
    parity_case(
        "ernie4_5_moe",
        tf.Ernie4_5_MoeConfig,
        **GROUPED,
        moe_num_experts=6,
        moe_k=3,
        moe_intermediate_size=24,
    ),
    parity_case(
        "ernie4_5_moe-biased",
        tf.Ernie4_5_MoeConfig,
        **GROUPED | {"num_hidden_layers": 4},
        moe_num_experts=4,
        moe_k=2,
        moe_intermediate_size=24,
        moe_num_shared_experts=0,
        moe_layer_interval=2,
        moe_layer_start_index=0,
        moe_layer_end_index=2,
        moe_norm_min=0.9,
        use_bias=True,
        tie_word_embeddings=False,
    ),
    parity_case("olmoe", tf.OlmoeConfig, **GROUPED, num_experts=4, num_experts_per_tok=2),
    parity_case(
        "olmoe-clipped",
        tf.OlmoeConfig,
        **GROUPED,
        num_experts=4,
        num_experts_per_tok=2,
        clip_qkv=0.5,
        norm_topk_prob=True,
        attention_bias=True,
        tie_word_embeddings=True,
    ),
    parity_case("hunyuan_v1_dense", tf.HunYuanDenseV1Config, **WIDE),
    parity_case(
        "hunyuan_v1_dense-alpha",
        tf.HunYuanDenseV1Config,
        **WIDE,
        **rope("dynamic", alpha=4.0, factor=1.0),
        attention_bias=True,
        tie_word_embeddings=True,
    ),
    parity_case(
        "ministral3",
        tf.Ministral3Config,
        **WIDE,
        **rope("yarn", 500.0, **SHORT_YARN, mscale=1.0, mscale_all_dim=1.0),
    ),
    parity_case(
        "ministral3-window",
        tf.Ministral3Config,
        **WIDE,
        **rope("yarn", 500.0, **SHORT_YARN),
        sliding_window=5,
        tie_word_embeddings=True,
    ),
    parity_case("hunyuan_v1_moe", tf.HunYuanMoEV1Config, **WIDE, num_experts=4, moe_topk=2),
    parity_case(
        "hunyuan_v1_moe-alpha",
        tf.HunYuanMoEV1Config,
        **WIDE,
        num_experts=6,
        moe_topk=[3, 1, 2],
        attention_bias=True,
        tie_word_embeddings=True,
        **rope("dynamic", alpha=50.0, factor=1.0),
    ),
    parity_case("hy_v3", tf.HYV3Config, **WIDE, **EXPERTS),
    parity_case(
        "hy_v3-biased",
        tf.HYV3Config,
        **WIDE,
        **EXPERTS,
        attention_bias=True,
        mlp_bias=True,
        num_shared_experts=2,
        mlp_layer_types=["sparse", "dense", "sparse"],
        enable_moe_fp32_combine=False,
    ),
    parity_case("granitemoe", tf.GraniteMoeConfig, **GROUPED, num_local_experts=4),
    parity_case(
        "granitemoe-multiplied",
        tf.GraniteMoeConfig,
        **GROUPED,
        num_local_experts=6,
        num_experts_per_tok=3,
        embedding_multiplier=3.0,
        attention_multiplier=0.2,
        residual_multiplier=0.5,
        logits_scaling=4.0,
        tie_word_embeddings=True,
        attention_bias=True,
    ),
    parity_case(
        "granitemoeshared",
        tf.GraniteMoeSharedConfig,
        **GROUPED,
        num_local_experts=4,
        shared_intermediate_size=40,
    ),
    parity_case("granitemoeshared-none", tf.GraniteMoeSharedConfig, **GROUPED, num_local_experts=4),
    parity_case(
        "afmoe",
        tf.AfmoeConfig,
        **WIDE,
        **EXPERTS,
        sliding_window=5,
        global_attn_every_n_layers=3,
        route_scale=2.5,
    ),
    parity_case(
        "afmoe-scaled",
        tf.AfmoeConfig,
        **WIDE,
        **EXPERTS,
        sliding_window=5,
        layer_types=[FULL, SLIDING, FULL],
        num_dense_layers=2,
        num_shared_experts=1,
        mup_enabled=True,
        attention_bias=True,
    ),
    parity_case("laguna", tf.LagunaConfig, **WIDE, **EXPERTS, shared_expert_intermediate_size=40),
    parity_case(
        "laguna-window",
        tf.LagunaConfig,
        **WIDE,
        **EXPERTS,
        shared_expert_intermediate_size=24,
        gating="per-element",
        num_attention_heads_per_layer=[4, 6, 2],
        layer_types=[FULL, SLIDING, SLIDING],
        mlp_layer_types=["sparse", "sparse", "dense"],
        sliding_window=5,
        moe_routed_scaling_factor=2.5,
        moe_router_logit_softcapping=1.5,
        rope_parameters={
            FULL: {"rope_type": "yarn", "rope_theta": 500.0, "partial_rotary_factor": 0.5, **YARN},
            SLIDING: {"rope_type": "default", "rope_theta": 100.0},
        },
    ),
    parity_case("mellum", tf.MellumConfig, **WIDE, **EXPERTS, mlp_layer_types=DENSE_FIRST),
    parity_case(
        "mellum-window",
        tf.MellumConfig,
        **WIDE,
        **EXPERTS,
        norm_topk_prob=False,
        sliding_window=5,
        layer_types=[SLIDING, FULL, SLIDING],
        rope_parameters={
            FULL: {"rope_type": "yarn", "rope_theta": 500.0, **YARN},
            SLIDING: {"rope_type": "default", "rope_theta": 100.0},
        },
    ),
    parity_case("phimoe", tf.PhimoeConfig, **GROUPED, num_local_experts=6),
    parity_case(
        "phimoe-mixed",
        tf.PhimoeConfig,
        **GROUPED,
        num_local_experts=6,
        router_jitter_noise=0.4,
        sliding_window=5,
        attention_bias=True,
        lm_head_bias=True,
    ),
    parity_case(
        "phimoe-longrope",
        tf.PhimoeConfig,
        length=64,
        **PHI3_LONG,
        num_local_experts=4,
        **rope("longrope", **LONG, short_mscale=1.2, long_mscale=1.3),
    ),
    parity_case(
        "cohere2_moe",
        tf.Cohere2MoeConfig,
        **WIDE | {"num_hidden_layers": 5},
        num_experts=6,
        num_experts_per_tok=3,
        num_shared_experts=2,
        sliding_window=5,
    ),
    parity_case(
        "cohere2_moe-sigmoid",
        tf.Cohere2MoeConfig,
        **WIDE | {"num_hidden_layers": 4},
        num_experts=4,
        num_shared_experts=1,
        shared_expert_combination_strategy="sum",
        expert_selection_fn="sigmoid",
        sliding_window=5,
        sliding_window_pattern=2,
        first_k_dense_replace=1,
        prefix_dense_intermediate_size=40,
        rms_norm_eps=1e-5,
        attention_bias=True,
        tie_word_embeddings=False,
    ),
    parity_case(
        "cohere2_moe-prefix",
        tf.Cohere2MoeConfig,
        **WIDE,
        num_experts=4,
        expert_selection_fn="sigmoid",
        norm_topk_prob=False,
        sliding_window=5,
        first_k_dense_replace=2,
        prefix_dense_sliding_window_pattern=2,
    ),
    parity_case("llama4_text", tf.Llama4TextConfig, **LLAMA4 | {"num_hidden_layers": 5}),
    parity_case(
        "llama4_text-mixed",
        tf.Llama4TextConfig,
        **LLAMA4,
        num_experts_per_tok=2,
        interleave_moe_layer_step=2,
        use_qk_norm=False,
        attention_bias=True,
        attn_temperature_tuning=False,
        no_rope_layers=[0, 1, 1],
        layer_types=[CHUNKED, FULL, CHUNKED],
        **rope("llama3", 500.0, **LLAMA3 | {"high_freq_factor": 1.0}),
    ),
    parity_case(
        "llama4_text-dense",
        tf.Llama4TextConfig,
        **LLAMA4 | {"num_local_experts": 0},
        num_experts_per_tok=0,
        moe_layers=[],
        interleave_moe_layer_step=0,
        layer_types=[FULL] * 3,
        tie_word_embeddings=True,
    ),
    parity_case(
        "llama4",
        tf.Llama4Config,
        text_config=LLAMA4 | {"num_hidden_layers": 4},
        vision_config=LLAMA4_VISION,
    ),
    parity_case(
        "smollm3-window",
        tf.SmolLM3Config,
        **GROUPED,
        no_rope_layers=[1, 0, 0],
        use_sliding_window=True,
        sliding_window=5,
    ),
    parity_case("qwen3_5_text", tf.Qwen3_5TextConfig, **DELTA_NET),
    parity_case(
        "qwen3_5_text-biased",
        tf.Qwen3_5TextConfig,
        **DELTA_NET | {"linear_num_key_heads": 4, "linear_conv_kernel_dim": 3},
        attention_bias=True,
        tie_word_embeddings=True,
    ),
    parity_case(
        "qwen3_5", tf.Qwen3_5Config, text_config=DELTA_NET, vision_config=QWEN3_5_VISION, **UNTIED
    ),
    parity_case("qwen3_5_moe_text", tf.Qwen3_5MoeTextConfig, **DELTA_NET_MOE, **SHARED),
    parity_case(
        "qwen3_5_moe",
        tf.Qwen3_5MoeConfig,
        text_config=DELTA_NET_MOE | SHARED,
        vision_config=QWEN3_5_VISION,
        **UNTIED,
    ),
    parity_case("qwen3_next", tf.Qwen3NextConfig, **DELTA_NET, **SHARED),
    parity_case(
        "qwen3_next-mixed",
        tf.Qwen3NextConfig,
        **DELTA_NET,
        **SHARED,
        mlp_only_layers=[0],
        norm_topk_prob=False,
    ),
    parity_case("lfm2", tf.Lfm2Config, **LFM2),
    parity_case(
        "lfm2-biased",
        tf.Lfm2Config,
        **LFM2 | {"block_auto_adjust_ff_dim": True},
        conv_bias=True,
        conv_L_cache=4,
        block_multiple_of=16,
        block_ffn_dim_multiplier=1.1,
        tie_word_embeddings=False,
    ),
    parity_case(
        "lfm2_moe",
        tf.Lfm2MoeConfig,
        **LFM2,
        **EXPERTS,
        num_dense_layers=1,
        routed_scaling_factor=1.5,
    ),
    parity_case(
        "nemotron_h",
        tf.NemotronHConfig,
        **NEMOTRON_H,
        layers_block_type=["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
    ),
    parity_case(
        "nemotron_h-latent",
        tf.NemotronHConfig,
        **NEMOTRON_H | GROUPS,
        hybrid_override_pattern="E*M",
        moe_latent_size=24,
        use_bias=True,
    ),
    parity_case(
        "granitemoehybrid",
        tf.GraniteMoeHybridConfig,
        **MAMBA2,
        layer_types=["mamba", "attention", "mamba"],
        num_local_experts=4,
        shared_intermediate_size=40,
        **GRANITE_FACTORS,
    ),
    parity_case(
        "granitemoehybrid-dense",
        tf.GraniteMoeHybridConfig,
        **MAMBA2,
        layer_types=["mamba", "attention", "mamba"],
        num_local_experts=0,
        shared_intermediate_size=40,
        position_embedding_type="rope",
        attention_bias=True,
        mamba_proj_bias=True,
        mamba_conv_bias=False,
    ),
    parity_case("bamba", tf.BambaConfig, **MAMBA2, attn_layer_indices=[1], attention_bias=True),
    parity_case("falcon_h1", tf.FalconH1Config, **MAMBA2, mamba_d_ssm=64),
    parity_case(
        "falcon_h1-multiplied",
        tf.FalconH1Config,
        **MAMBA2 | {"mamba_d_head": 12},
        **FALCON_H1_FACTORS,
        mamba_d_ssm=48,
        mamba_rms_norm=True,
        projectors_bias=True,
    ),
    parity_case(
        "falcon_h1-gated-first",
        tf.FalconH1Config,
        **MAMBA2,
        mamba_d_ssm=64,
        mamba_rms_norm=True,
        mamba_norm_before_gate=False,
        mlp_bias=True,
    ),
    parity_case("jamba", tf.JambaConfig, **JAMBA),
    parity_case(
        "jamba-dense",
        tf.JambaConfig,
        **JAMBA | {"num_experts": 1},
        mamba_proj_bias=True,
        mamba_conv_bias=False,
        mamba_dt_rank=5,
    ),
    parity_case("zamba2", tf.Zamba2Config, **ZAMBA2),
    parity_case(
        "zamba2-adapted",
        tf.Zamba2Config,
        **ZAMBA2,
        num_mem_blocks=2,
        use_shared_attention_adapter=True,
        use_mem_rope=True,
    ),
    parity_case(
        "zamba2-biased",
        tf.Zamba2Config,
        **ZAMBA2 | {"mamba_ngroups": 1},
        num_mem_blocks=2,
        num_key_value_heads=2,
        add_bias_linear=True,
        **LINEAR,
        use_mem_rope=True,
    ),
    parity_case("olmo_hybrid", tf.OlmoHybridConfig, **GROUPED | {"num_hidden_layers": 4}),
    parity_case(
        "olmo_hybrid-no-positions",
        tf.OlmoHybridConfig,
        **GROUPED,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        linear_allow_neg_eigval=False,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=12,
        rope_parameters={"rope_type": "default", "rope_theta": None},
    ),
]


ROUTER_BIASES = ("correction_bias", "feed_forward.expert_bias")  # buffers
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
    "shared_intermediate_size",
    "intermediate_size_mlp",
    "prefix_dense_intermediate_size",
    "rotary_dim",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "attention_hidden_size",
    "mamba_headdim",
    "mamba_d_ssm",
    "mamba_d_head",
    "mamba_d_state",
    "mamba_head_dim",
    "ssm_state_size",
    "moe_latent_size",
    "moe_shared_expert_intermediate_size",
    "query_pre_attn_scalar",
)


def widen_config(config: Any, times: int) -> Any:
    """Make the model `times` as wide, in place; returns the config."""
    # All widths are read before any is written, because some names are aliases of one value.
    widths = {name: getattr(config, name, None) for name in WIDTHS}
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


def make_checkpoint(case: ParityCase, folder: Path, times: int = 1) -> Any:
    """Save the case's model, `times` as wide, with seeded random weights; returns the model."""
    generator = torch.Generator().manual_seed(0)
    config = widen_config(case.config(), times) if times > 1 else case.config()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        has_vision = hasattr(config, "vision_config")
        factory = tf.AutoModelForImageTextToText if has_vision else tf.AutoModelForCausalLM
        model = factory.from_config(config, attn_implementation=case.attention).eval()
    with torch.no_grad():
        for weight in model.parameters():  # no norm is all ones and no bias zero
            weight.add_(0.2 / times**0.5 * torch.randn(weight.shape, generator=generator))
        for name, buffer in model.named_buffers():
            if name.endswith(ROUTER_BIASES):  # of a router; it is as large as the scores
                buffer.add_(0.2 * torch.randn(buffer.shape, generator=generator))
    model.save_pretrained(folder)
    if config.model_type == "olmo_hybrid":
        restore_published_names(folder / "model.safetensors")
    return model


def restore_published_names(file: Path) -> None:
    """Undo what transformers does to norms of attention layers when it saves an OLMo Hybrid."""
    tensors = load_file(file)
    renamed = {}
    for name, tensor in tensors.items():
        layer = name.removesuffix("feedforward_layer_norm.weight")
        if layer != name and f"{layer}self_attn.q_proj.weight" in tensors:
            name = f"{layer}post_attention_layernorm.weight"
        renamed[name] = tensor
    save_file(renamed, file, {"format": "pt"})


def count_positions(model: Any, start: int, end: int) -> dict[str, Any]:
    """Return the positions of a call for the model that counts them from 0 in every call."""
    if model.config.model_type != "bamba":
        return {}
    return {"position_ids": torch.arange(start, end, device=model.device)[None]}


@torch.no_grad()
def reference_logits(model: Any, tokens: torch.Tensor, prompt: int) -> torch.Tensor:
    """Return the logits of tokens [1, n]: the prompt in one pass, then token by token."""
    output = model(tokens[:, :prompt], use_cache=True)
    logits = [output.logits]
    cache = output.past_key_values
    for position in range(prompt, tokens.shape[1]):
        positions = count_positions(model, position, position + 1)
        token = tokens[:, position : position + 1]
        output = model(token, past_key_values=cache, use_cache=True, **positions)
        logits.append(output.logits)
    return torch.cat(logits, 1)[0]
