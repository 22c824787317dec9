"""Llama 4: attention in chunks with rope, and in every fourth layer full attention without rope but
with queries scaled by position; one expert whose input is scaled, and a shared expert.

The text part of the published vision models (llama4) is the same model with other names.
"""

from __future__ import annotations

from dataclasses import replace

from bloomery.families import ModelFamily
from bloomery.families.dense import change_attention, read_layer, read_mlp, read_model
from bloomery.families.llama import DEFAULTS
from bloomery.families.moe import build_moe_names, name_stacked_experts, put_experts, read_experts
from bloomery.families.reader import ConfigReader, defaults
from bloomery.families.rope import read_rope
from bloomery.families.smollm3 import read_rope_layers
from bloomery.families.vision import build_vision_family
from bloomery.spec import LayerSpec, ModelSpec, NormSpec, QueryScaling, RouterSpec

LLAMA4_NAMES = name_stacked_experts(
    build_moe_names("feed_forward.router", "feed_forward.shared_expert", mlp="feed_forward"),
    "feed_forward.experts",
)
VISION_NAMES = replace(LLAMA4_NAMES, vision=("vision_model.*", "multi_modal_projector.*"))
LLAMA4 = (
    DEFAULTS
    | defaults(vocab=202048, hidden=5120, mlp=8192, layers=48, heads=40, kv_heads=8, head_dim=128)
    | defaults(context=131072, rms_norm_eps=1e-5, rope_theta=5e5, intermediate_size_mlp=16384)
    | defaults(num_experts=16, num_experts_per_tok=1, attention_chunk_size=8192)
    | defaults(attn_temperature_tuning=True)
)
HAS_CHUNKS = {"chunked_attention": True, "full_attention": False}


def read_query_scaling(config: ConfigReader) -> QueryScaling | None:
    tuning = config.get("attn_temperature_tuning", False)
    if not isinstance(tuning, int):  # the first files have 4 instead of true
        raise config.error("attn_temperature_tuning", f"must be true or false, not {tuning!r}")
    scale = config.number("attn_scale", 0.1)
    period = config.size("floor_scale", 8192)
    return QueryScaling(scale, period, offset=1) if tuning else None


def read_llama4_layers(config: ConfigReader) -> list[LayerSpec]:
    rope = read_rope(config, config.head_dim(), interleaved=True)
    qk_norm = None
    if config.flag("use_qk_norm", True):
        qk_norm = NormSpec("rms", config.number("rms_norm_eps"), weight=False)
    scaling = read_query_scaling(config)
    with_rope = read_layer(config, position=rope, qk_norm=qk_norm, qk_norm_after_rope=True)
    without_rope = read_layer(config, position=None, query_scaling=scaling)
    rope_layers = read_rope_layers(config)
    chunked_layers = config.layer_choices("layer_types", HAS_CHUNKS, lambda i: rope_layers[i])
    layers = []
    for has_rope, has_chunks in zip(rope_layers, chunked_layers, strict=True):
        layer = with_rope if has_rope else without_rope
        chunk = config.size("attention_chunk_size") if has_chunks else None
        layers.append(change_attention(layer, chunk=chunk))
    return layers


def read_sparse_indices(config: ConfigReader) -> tuple[int, ...]:
    if config.get("moe_layers") is not None:
        config.get("interleave_moe_layer_step")  # the list replaces it
        return config.list_of("moe_layers", int)
    step = config.size("interleave_moe_layer_step", 1)
    return tuple(range(step - 1, len(config.layers()), step))


def read_llama4_text(config: ConfigReader) -> ModelSpec:
    dense = read_mlp(config, "intermediate_size_mlp")
    sparse_layers = read_sparse_indices(config)
    layers = [replace(layer, mlp=dense) for layer in read_llama4_layers(config)]
    if sparse_layers:  # a dense model may state 0 experts
        router = RouterSpec(score="sigmoid", normalize=False, weights_input=True)
        moe = read_experts(config, router, "intermediate_size", shared=read_mlp(config))
        layers = put_experts(layers, moe, [i in sparse_layers for i in config.layers()])
    return read_model(config, layers)


TEXT = {"llama4_text": ModelFamily(read_llama4_text, LLAMA4_NAMES, LLAMA4)}
FAMILIES = TEXT | {"llama4": build_vision_family(TEXT, VISION_NAMES)}
