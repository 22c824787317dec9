"""Laws over every family: absent keys mean transformers' defaults, and nothing unknown is guessed at."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from bloomery.errors import UnsupportedModel
from bloomery.families import as_stored, check, describe, families
from bloomery.spec import Alibi, Attention, Layer, Mlp, Model, Norm, Rope
from tests.families.hub import CONFIGS
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


@pytest.mark.parametrize("kind", sorted(families()))
def test_an_empty_config_means_the_default_one(kind: str) -> None:
    stated = describe(CONFIG_MAPPING[kind]().to_dict())
    silent = describe({"model_type": kind})
    assert silent.model == stated.model
    assert silent.names == stated.names


@pytest.mark.parametrize("kind", sorted(families()))
def test_every_family_has_its_parity_cases(kind: str) -> None:
    assert any(case.config().model_type == kind for case in CASES)


@pytest.mark.parametrize("name", CONFIGS)
def test_junk_is_refused_or_understood_but_never_a_crash(name: str) -> None:
    for key in CONFIGS[name]:
        for junk in JUNK:
            config = copy.deepcopy(CONFIGS[name]) | {key: junk}
            try:
                describe(config)
            except UnsupportedModel as error:
                assert str(error).startswith("config.json: ")


def changed(name: str, **values: Any) -> dict[str, Any]:
    return copy.deepcopy(CONFIGS[name]) | values


MPT = CONFIGS["mpt-7b"]["attn_config"]
REFUSED = [
    (changed("Llama-2-7b", model_type="rwkv"), "model_type 'rwkv'"),
    (changed("Llama-2-7b", model_type=None), "model_type is missing"),
    (changed("Llama-2-7b", hidden_act="quick_gelu"), "hidden_act 'quick_gelu'"),
    (changed("Llama-2-7b", num_attention_heads=33), "does not divide into 33 heads"),
    (changed("Llama-2-7b", num_key_value_heads=5), "32 heads cannot share 5"),
    (changed("Llama-2-7b", partial_rotary_factor=0.5), "partial_rotary_factor 0.5"),
    (changed("Llama-2-7b", n_embd=128), "hidden_size and n_embd contradict"),
    (changed("Llama-2-7b", num_hidden_layers=10**9), "num_hidden_layers is 1000000000"),
    (changed("Llama-2-7b", tie_word_embeddings="yes"), "tie_word_embeddings must be true or false"),
    (
        changed("bloom", apply_residual_connection_post_layernorm=True),
        "apply_residual_connection_post_layernorm",
    ),
    (changed("falcon-40b", num_ln_in_parallel_attn=3), "num_ln_in_parallel_attn 3"),
    (changed("falcon-40b", parallel_attn=False), "parallel_attn False"),
    (changed("mpt-7b", attn_config=MPT | {"qk_ln": True}), "attn_config.qk_ln True"),
    (changed("mpt-7b", attn_config=MPT | {"rope": True}), "attn_config.rope True"),
    (changed("mpt-7b", attn_config=MPT | {"attn_type": "other"}), "attn_config.attn_type 'other'"),
    (changed("mpt-7b", norm_type="rmsnorm"), "norm_type 'rmsnorm'"),
    (changed("mpt-7b", ffn_config={"ffn_type": "mptglu"}), "ffn_config.ffn_type 'mptglu'"),
    (changed("Mixtral-8x7B-v0.1", num_experts_per_tok=9), "9 of 8 experts"),
    (
        changed("Qwen2.5-7B", layer_types=["chunked_attention"] * 28),
        "layer_types 'chunked_attention'",
    ),
    (changed("Qwen2.5-7B", layer_types=["full_attention"]), "layer_types names 1 layers of 28"),
    (changed("Qwen2.5-7B", use_mrope=True), "use_mrope True"),
    (changed("gemma-2-9b", use_bidirectional_attention=True), "use_bidirectional_attention True"),
    (changed("gemma-2-9b", sliding_window=None), "sliding_window is missing"),
    (changed("gpt2", add_cross_attention=True), "add_cross_attention True"),
    (changed("gpt-j-6b", rotary=False), "rotary False"),
    (changed("pythia-6.9b", rotary_pct=0.01), "cannot turn in pairs"),
    (changed("command-r7b", use_qk_norm=True), "use_qk_norm True"),
    (changed("command-r7b", position_embedding_type="none"), "position_embedding_type 'none'"),
    (changed("starcoder2-15b", norm_type="rms_norm"), "norm_type 'rms_norm'"),
    (changed("granite-3.0-8b", logits_scaling=0), "logits_scaling is 0"),
    (changed("SmolLM3-3B", no_rope_layers=[1, 0]), "no_rope_layers names 2 layers of 36"),
]


@pytest.mark.parametrize("config, words", REFUSED, ids=[words for _, words in REFUSED])
def test_what_we_do_not_know_is_refused_by_name(config: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModel, match="^config.json: ") as caught:
        describe(config)
    assert words in str(caught.value)


def test_null_is_not_absent() -> None:
    mistral = CONFIGS["Mistral-7B-v0.1"]
    silent = {
        name: value
        for name, value in mistral.items()
        if name not in ("sliding_window", "num_key_value_heads")
    }
    block = describe(silent).model.layers[0].attention
    assert (block.window, block.num_kv_heads) == (4096, 8)
    block = (
        describe(silent | {"sliding_window": None, "num_key_value_heads": None})
        .model.layers[0]
        .attention
    )
    assert (block.window, block.num_kv_heads) == (None, 32)
    gemma = describe(
        changed("gemma-2-9b", attn_logit_softcapping=None, final_logit_softcapping=None)
    ).model
    assert (gemma.layers[0].attention.softcap, gemma.logit_softcap) == (None, None)


def test_what_nobody_asked_for_is_listed() -> None:
    assert describe(changed("Llama-2-7b", shiny=1)).unread == ("shiny",)
    assert describe(changed("mpt-7b", attn_config=MPT | {"shiny": 1})).unread == (
        "attn_config.shiny",
    )


def test_mpt_without_alibi_has_learned_positions() -> None:
    model = describe(changed("mpt-7b", attn_config=MPT | {"alibi": False})).model
    assert (model.layers[0].attention.position, model.positions) == (None, 2048)
    bare = describe(
        changed("mpt-7b", attn_config=MPT | {"alibi": False}, learned_pos_emb=False)
    ).model
    assert (bare.layers[0].attention.position, bare.positions) == (None, 0)


def test_mpt_variants() -> None:
    attn = MPT | {
        "clip_qkv": 6,
        "softmax_scale": 0.5,
        "alibi_bias_max": 16,
        "attn_type": "multiquery_attention",
    }
    model = describe(
        changed("mpt-7b", attn_config=attn, no_bias=False, logit_scale="inv_sqrt_d_model")
    ).model
    block = model.layers[0].attention
    assert (block.clip, block.scale, block.position, block.num_kv_heads) == (
        6.0,
        0.5,
        Alibi(max_bias=16.0),
        1,
    )
    assert block.bias and block.out_bias and model.final_norm is not None and model.final_norm.bias
    assert model.logit_scale == 4096**-0.5


def test_a_checkpoint_of_the_bare_model_is_found_without_its_prefix() -> None:
    names = describe(CONFIGS["gpt2"]).names
    bare = as_stored(names, {"wte.weight", "h.0.ln_1.weight"})
    assert (bare.embed, bare.layer, bare.final_norm, bare.extra["positions"]) == (
        "wte",
        "h.{i}.",
        "ln_f",
        "wpe",
    )
    assert (bare.head, bare.extra["attn_norm"], bare.attn_out) == ("lm_head", "ln_1", "attn.c_proj")
    assert as_stored(names, {"transformer.wte.weight"}) == names
    assert as_stored(names, {"elsewhere.weight"}) == names


def test_the_text_part_of_gemma_3_is_found_in_either_place() -> None:
    names = describe(CONFIGS["gemma-3-4b-it"]).names
    assert (
        as_stored(names, {"language_model.model.embed_tokens.weight"}).layer
        == "language_model.model.layers.{i}."
    )
    assert (
        as_stored(names, {"model.language_model.embed_tokens.weight"}).layer
        == "model.language_model.layers.{i}."
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_a_description_survives_json(name: str) -> None:
    assert describe(json.loads(json.dumps(CONFIGS[name]))) == describe(CONFIGS[name])


@pytest.mark.parametrize(
    "attention",
    [
        Attention(4, 3, 8),
        Attention(4, 4, 8, Rope(3)),
        Attention(4, 4, 8, Rope(10)),
        Attention(4, 4, 8, window=0),
    ],
)
def test_a_model_no_decoder_can_run_is_refused(attention: Attention) -> None:
    with pytest.raises(UnsupportedModel, match="layer 0"):
        check(Model(10, 32, (Layer(attention, Mlp(8)),), Norm(), 64))
