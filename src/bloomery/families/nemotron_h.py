"""Nemotron-H and Nemotron 3: each layer is one block, which is Mamba-2, attention without
positions, an MLP or experts with squared ReLU. Experts may work in a narrower latent space.
"""

from __future__ import annotations

from dataclasses import replace

from bloomery.families import ModelFamily
from bloomery.families.dense import read_attention, read_model, read_ungated_mlp
from bloomery.families.layer_blocks import read_block_kinds
from bloomery.families.llama import DEFAULTS, NAMES
from bloomery.families.moe import read_experts, read_grouped_router
from bloomery.families.reader import ConfigReader, defaults
from bloomery.families.recurrent import MTP, mamba_names, read_mamba2
from bloomery.spec import LayerSpec, Mamba2Spec, MlpSpec, ModelSpec, MoeSpec, NormSpec, SplitTensors

NEMOTRON_H_NAMES = mamba_names(
    replace(
        NAMES,
        embed="backbone.embeddings",
        layer="backbone.layers.{i}.",
        final_norm="backbone.norm_f",
        attn_qkv=SplitTensors(("mixer.q_proj", "mixer.k_proj", "mixer.v_proj")),
        attn_out="mixer.o_proj",
        mlp_up="mixer.up_proj",
        mlp_down="mixer.down_proj",
        extra={
            "attn_norm": "norm",
            "mlp_norm": "norm",
            "router": "mixer.gate",
            "correction_bias": "mixer.gate.e_score_correction_bias",
            "latent_down": "mixer.fc1_latent_proj",
            "latent_up": "mixer.fc2_latent_proj",
        },
        experts="mixer.experts.{e}.",
        expert_up="up_proj",
        expert_down="down_proj",
        shared_up="mixer.shared_experts.up_proj",
        shared_down="mixer.shared_experts.down_proj",
        prefixes=("backbone.", "model."),
        ignored=MTP,
    ),
    prefix="mixer",
)
NEMOTRON_H = (
    DEFAULTS
    | defaults(vocab=131072, mlp=21504, kv_heads=8, head_dim=128, context=4096)
    | defaults(layer_norm_epsilon=1e-5, mlp_hidden_act="relu2", mamba_n_heads=128)
    | defaults(mamba_d_head=64, mamba_d_state=128, mamba_n_groups=8, mamba_d_conv=4, num_experts=8)
    | defaults(num_experts_per_tok=2, norm_topk_prob=True, moe_intermediate_size=7688)
    | defaults(moe_shared_expert_intermediate_size=7688)
)


def read_mixer(config: ConfigReader, norm: NormSpec) -> Mamba2Spec:
    config.require("mamba_hidden_act", "silu")
    bias = config.flag("use_bias", False)
    inner = config.size("mamba_n_heads") * config.size("mamba_d_head")
    return read_mamba2(config, inner, norm=norm, in_bias=bias, out_bias=bias)


def read_block_mlp(config: ConfigReader, size_key: str) -> MlpSpec:
    return read_ungated_mlp(config, "mlp_hidden_act", config.flag("mlp_bias", False), size_key)


def read_latent_moe(config: ConfigReader) -> MoeSpec:
    config.require("num_shared_experts", 1)
    latent = None
    if config.get("moe_latent_size") is not None:
        config.require("mlp_bias", False)
        latent = config.size("moe_latent_size")
    mlp = read_block_mlp(config, "moe_intermediate_size")
    shared = read_block_mlp(config, "moe_shared_expert_intermediate_size")
    return read_experts(config, read_grouped_router(config), mlp=mlp, shared=shared, latent=latent)


def read_nemotron_h(config: ConfigReader) -> ModelSpec:
    config.require("attention_bias", False)
    config.require("sliding_window", None)
    norm = NormSpec("rms", config.number("layer_norm_epsilon"))
    layers = {
        "recurrent": LayerSpec(None, None, recurrent=read_mixer(config, norm), attn_norm=norm),
        "attention": LayerSpec(read_attention(config, position=None), None, attn_norm=norm),
        "mlp": LayerSpec(None, read_block_mlp(config, "intermediate_size"), mlp_norm=norm),
    }
    kinds = read_block_kinds(config, default_pattern="ME*-")
    if "moe" in kinds:
        layers["moe"] = LayerSpec(None, read_latent_moe(config), mlp_norm=norm)
    return read_model(config, [layers[kind] for kind in kinds], final_norm=norm)


FAMILIES = {"nemotron_h": ModelFamily(read_nemotron_h, NEMOTRON_H_NAMES, NEMOTRON_H)}
