"""Every family: absent keys have the defaults of transformers, unknown values are refused."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from bloomery.errors import UnsupportedModel
from bloomery.families import check_spec, describe_config, load_families, resolve_name_prefix
from bloomery.families.reader import SYNONYMS
from bloomery.spec import (
    AlibiSpec,
    AttentionSpec,
    LayerSpec,
    MlpSpec,
    ModelSpec,
    NormSpec,
    RopeSpec,
)
from tests.families.hub_configs import CONFIGS
from tests.parity.cases import CASES

JUNK: list[Any] = [
    -1,
    0,
    1,
    2**70,
    1e300,
    float("nan"),
    0.3,
    "",
    "other",
    True,
    False,
    [],
    [None],
    ["x"],
    {},
    {"a": 1},
]


# Families whose defaults in transformers describe no model, and why.
NO_DEFAULT_MODEL = {
    "dots1": "num_experts is missing",
    "glm4_moe": "hidden_size 4096 does not divide into 96 heads",
}


@pytest.mark.parametrize("model_type", sorted(load_families()))
def test_empty_config_has_the_defaults_of_transformers(model_type: str) -> None:
    explicit = CONFIG_MAPPING[model_type]().to_dict()
    implicit = {"model_type": model_type}
    if model_type in NO_DEFAULT_MODEL:
        for config in (explicit, implicit):
            with pytest.raises(UnsupportedModel, match=NO_DEFAULT_MODEL[model_type]):
                describe_config(config)
        return
    assert describe_config(implicit).model == describe_config(explicit).model
    assert describe_config(implicit).names == describe_config(explicit).names


def test_every_family_has_parity_cases() -> None:
    assert load_families().keys() <= {case.config().model_type for case in CASES}


def keep_layers(config: dict[str, Any], num_layers: int) -> dict[str, Any]:
    """Return a config of fewer layers; lists with an entry per layer become as short."""
    layer_keys = ("num_hidden_layers", *SYNONYMS["num_hidden_layers"])
    counts = {config[key] for key in layer_keys if key in config}
    short = {}
    for key, value in config.items():
        if key in layer_keys:
            value = num_layers
        elif key == "text_config":
            value = keep_layers(value, num_layers)
        elif isinstance(value, list) and len(value) in counts:
            value = value[:num_layers]
        short[key] = value
    return short


@pytest.mark.parametrize("name", CONFIGS)
def test_junk_values_never_crash(name: str) -> None:
    short = keep_layers(CONFIGS[name], 4)
    describe_config(short)
    text = short.get("text_config", {})
    junk_configs = [short | {key: junk} for key in short for junk in JUNK]
    junk_configs += [short | {"text_config": text | {key: junk}} for key in text for junk in JUNK]
    for config in junk_configs:
        try:
            describe_config(copy.deepcopy(config))
        except UnsupportedModel as error:
            assert str(error).startswith("config.json: ")


def config_with(name: str, **values: Any) -> dict[str, Any]:
    return copy.deepcopy(CONFIGS[name]) | values


MPT = CONFIGS["mpt-7b"]["attn_config"]
REFUSED = [
    (config_with("Llama-2-7b", model_type="rwkv"), "model_type 'rwkv'"),
    (config_with("Llama-2-7b", model_type=None), "model_type is missing"),
    (config_with("Zamba2-7B", use_long_context=True), "use_long_context True is not supported"),
    (config_with("Zamba2-7B", attention_head_dim=112), "attention_head_dim 112"),
    (config_with("Zamba2-7B", layers_block_type=["mamba"] * 3), "names 3 layers of 81"),
    (config_with("Qwen3-Next-80B-A3B", linear_num_key_heads=5), "32 value heads cannot share 5"),
    (config_with("Qwen3-Next-80B-A3B", linear_conv_kernel_dim=1), "width 1 has no past"),
    (config_with("Qwen3-Next-80B-A3B", attn_output_gate=False), "attn_output_gate False"),
    (config_with("Qwen3-Next-80B-A3B", layer_types=["sparse"] * 48), "layer_types 'sparse'"),
    (config_with("LFM2-8B-A1B", layer_types=["conv"] * 23), "layer_types names 23 layers of 24"),
    (config_with("granite-4.0-h-small", mamba_n_groups=3), "128 heads cannot share 3 groups"),
    (config_with("granite-4.0-h-small", mamba_n_heads=96), "mamba_n_heads 96 do not divide"),
    (config_with("granite-4.0-h-small", time_step_limit=[1.0]), "time_step_limit must be a range"),
    (config_with("Falcon-H1-0.5B", ssm_multipliers=[1.0]), "ssm_multipliers must hold 5 numbers"),
    (config_with("Nemotron-3-Nano-30B-A3B", hybrid_override_pattern="MX"), "'X' is not known"),
    (config_with("Nemotron-3-Nano-30B-A3B", hybrid_override_pattern=""), "names 0 layers"),
    (config_with("Nemotron-3-Nano-30B-A3B", n_shared_experts=2), "n_shared_experts 2"),
    (config_with("Bamba-9B", attn_rotary_emb=32), "attn_rotary_emb 32"),
    (config_with("Llama-2-7b", hidden_act="quick_gelu"), "hidden_act 'quick_gelu'"),
    (config_with("Llama-2-7b", num_attention_heads=33), "does not divide into 33 heads"),
    (config_with("Llama-2-7b", num_key_value_heads=5), "32 heads cannot share 5"),
    (config_with("Llama-2-7b", partial_rotary_factor=0.5), "partial_rotary_factor 0.5"),
    (config_with("Llama-2-7b", n_embd=128), "hidden_size and n_embd contradict"),
    (config_with("Llama-2-7b", num_hidden_layers=10**9), "num_hidden_layers is 1000000000"),
    (
        config_with("Llama-2-7b", tie_word_embeddings="yes"),
        "tie_word_embeddings must be true or false",
    ),
    (
        config_with("falcon-40b", apply_residual_connection_post_layernorm=True),
        "apply_residual_connection_post_layernorm",
    ),
    (config_with("falcon-40b", num_ln_in_parallel_attn=3), "num_ln_in_parallel_attn 3"),
    (config_with("falcon-40b", parallel_attn=False), "parallel_attn False"),
    (config_with("mpt-7b", attn_config=MPT | {"qk_ln": True}), "attn_config.qk_ln True"),
    (config_with("mpt-7b", attn_config=MPT | {"rope": True}), "attn_config.rope True"),
    (
        config_with("mpt-7b", attn_config=MPT | {"attn_type": "other"}),
        "attn_config.attn_type 'other'",
    ),
    (config_with("mpt-7b", norm_type="rmsnorm"), "norm_type 'rmsnorm'"),
    (config_with("mpt-7b", ffn_config={"ffn_type": "mptglu"}), "ffn_config.ffn_type 'mptglu'"),
    (config_with("Mixtral-8x7B-v0.1", num_experts_per_tok=9), "9 experts per token cannot"),
    (
        config_with("Qwen2.5-7B", layer_types=["chunked_attention"] * 28),
        "layer_types 'chunked_attention'",
    ),
    (config_with("Qwen2.5-7B", layer_types=["full_attention"]), "layer_types names 1 layers of 28"),
    (config_with("Qwen2.5-7B", use_mrope=True), "use_mrope True"),
    (
        config_with("gemma-2-9b", use_bidirectional_attention=True),
        "use_bidirectional_attention True",
    ),
    (config_with("gemma-2-9b", sliding_window=None), "sliding_window is missing"),
    (config_with("gpt2", add_cross_attention=True), "add_cross_attention True"),
    (config_with("gpt-j-6b", rotary=False), "rotary False"),
    (config_with("pythia-6.9b", rotary_pct=0.01), "cannot rotate in pairs"),
    (config_with("command-r7b", use_qk_norm=True), "use_qk_norm True"),
    (config_with("command-r7b", position_embedding_type="none"), "position_embedding_type 'none'"),
    (config_with("starcoder2-15b", norm_type="rms_norm"), "norm_type 'rms_norm'"),
    (config_with("granite-3.0-8b", logits_scaling=0), "logits_scaling is 0"),
    (config_with("GLM-4.5-Air", scoring_func="softmax"), "scoring_func 'softmax'"),
    (config_with("GLM-4.5-Air", n_routed_experts=0), "n_routed_experts is 0"),
    (config_with("gpt-oss-20b", swiglu_limit=-1), "a limit of -1"),
    (config_with("GLM-4.5-Air", num_nextn_predict_layers=10**6), "num_nextn_predict_layers is"),
    (config_with("GLM-4.5-Air", n_group=3), "128 experts do not divide into 3 groups"),
    (config_with("GLM-4.5-Air", n_group=4, topk_group=5), "5 of 4 groups of experts"),
    (config_with("GLM-4.5-Air", n_group=64, topk_group=2), "8 experts cannot be chosen from 2"),
    (config_with("dots.llm1", scoring_func="softmax"), "scoring_func 'softmax'"),
    (config_with("MiniMax-M2", qk_norm_type="per_head"), "qk_norm_type 'per_head'"),
    (config_with("MiniMax-M2", attn_type_list=[0] * 62), "attn_type_list"),
    (config_with("Hunyuan-A13B", moe_topk=[8]), "moe_topk must be a size"),
    (config_with("Hunyuan-A13B", num_shared_expert=2), "num_shared_expert is not supported"),
    (config_with("Hy3", mlp_layer_types=["moe"] * 80), "mlp_layer_types 'moe'"),
    (config_with("Hy3", qk_norm=False), "qk_norm False"),
    (config_with("Trinity-Nano", score_func="softmax"), "score_func 'softmax'"),
    (config_with("Laguna-XS", gating=False), "gating must be a string"),
    (config_with("Laguna-XS", gating_types=["none"] * 40), "gating_types 'none'"),
    (config_with("Laguna-XS", swa_attention_sink_enabled=True), "swa_attention_sink_enabled True"),
    (config_with("Phi-3.5-MoE", num_experts_per_tok=3), "num_experts_per_tok 3"),
    (config_with("North-Mini", expert_selection_fn="top"), "expert_selection_fn 'top'"),
    (config_with("SmolLM3-3B", no_rope_layers=[1, 0]), "no_rope_layers names 2 layers of 36"),
]


@pytest.mark.parametrize("config, message", REFUSED, ids=[message for _, message in REFUSED])
def test_unsupported_values_are_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match="^config.json: ") as caught:
        describe_config(config)
    assert message in str(caught.value)


def test_null_and_absent_keys_differ() -> None:
    mistral = CONFIGS["Mistral-7B-v0.1"]
    implicit = {
        name: value
        for name, value in mistral.items()
        if name not in ("sliding_window", "num_key_value_heads")
    }
    block = describe_config(implicit).model.layers[0].attention
    assert (block.window, block.num_kv_heads) == (4096, 8)
    block = (
        describe_config(implicit | {"sliding_window": None, "num_key_value_heads": None})
        .model.layers[0]
        .attention
    )
    assert (block.window, block.num_kv_heads) == (None, 32)
    gemma = describe_config(
        config_with("gemma-2-9b", attn_logit_softcapping=None, final_logit_softcapping=None)
    ).model
    assert (gemma.layers[0].attention.softcap, gemma.logit_softcap) == (None, None)


def test_unread_keys_are_listed() -> None:
    assert describe_config(config_with("Llama-2-7b", shiny=1)).unread == ("shiny",)
    assert describe_config(config_with("mpt-7b", attn_config=MPT | {"shiny": 1})).unread == (
        "attn_config.shiny",
    )


def test_mpt_without_alibi_has_learned_positions() -> None:
    model = describe_config(config_with("mpt-7b", attn_config=MPT | {"alibi": False})).model
    assert (model.layers[0].attention.position, model.positions) == (None, 2048)
    bare = describe_config(
        config_with("mpt-7b", attn_config=MPT | {"alibi": False}, learned_pos_emb=False)
    ).model
    assert (bare.layers[0].attention.position, bare.positions) == (None, 0)


def test_mpt_variants() -> None:
    attn = MPT | {
        "clip_qkv": 6,
        "softmax_scale": 0.5,
        "alibi_bias_max": 16,
        "attn_type": "multiquery_attention",
    }
    model = describe_config(
        config_with("mpt-7b", attn_config=attn, no_bias=False, logit_scale="inv_sqrt_d_model")
    ).model
    block = model.layers[0].attention
    assert (block.clip, block.scale, block.position, block.num_kv_heads) == (
        6.0,
        0.5,
        AlibiSpec(max_bias=16.0),
        1,
    )
    assert block.bias and block.out_bias and model.final_norm is not None and model.final_norm.bias
    assert model.logit_scale == 4096**-0.5


def test_checkpoint_of_the_bare_model_has_no_prefix() -> None:
    names = describe_config(CONFIGS["gpt2"]).names
    bare = resolve_name_prefix(names, {"wte.weight", "h.0.ln_1.weight"})
    assert (bare.embed, bare.layer, bare.final_norm, bare.extra["positions"]) == (
        "wte",
        "h.{i}.",
        "ln_f",
        "wpe",
    )
    assert (bare.head, bare.extra["attn_norm"], bare.attn_out) == ("lm_head", "ln_1", "attn.c_proj")
    assert resolve_name_prefix(names, {"transformer.wte.weight"}) == names
    assert resolve_name_prefix(names, {"elsewhere.weight"}) == names


def test_prefixes_of_the_text_part_of_gemma_3() -> None:
    names = describe_config(CONFIGS["gemma-3-4b-it"]).names
    assert (
        resolve_name_prefix(names, {"language_model.model.embed_tokens.weight"}).layer
        == "language_model.model.layers.{i}."
    )
    assert (
        resolve_name_prefix(names, {"model.language_model.embed_tokens.weight"}).layer
        == "model.language_model.layers.{i}."
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_description_is_the_same_after_a_json_round_trip(name: str) -> None:
    assert describe_config(json.loads(json.dumps(CONFIGS[name]))) == describe_config(CONFIGS[name])


@pytest.mark.parametrize(
    "attention",
    [
        AttentionSpec(4, 3, 8),
        AttentionSpec(4, 4, 8, RopeSpec(3)),
        AttentionSpec(4, 4, 8, RopeSpec(10)),
        AttentionSpec(4, 4, 8, window=0),
    ],
)
def test_specs_that_no_decoder_can_run_are_refused(attention: AttentionSpec) -> None:
    with pytest.raises(UnsupportedModel, match="layer 0"):
        check_spec(ModelSpec(10, 32, (LayerSpec(attention, MlpSpec(8)),), NormSpec(), 64))
