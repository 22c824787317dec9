"""Falcon-H1: Mamba-2 beside attention in every layer, with multipliers at all projections.

The multipliers of inputs are folded into those of outputs, which cost nothing: scores scale with
the product of the factors of q and k, and silu(m g) u = m (g sigmoid(m g) u).
"""

from __future__ import annotations

from dataclasses import replace

from bloomery.families import ModelFamily
from bloomery.families.dense import read_layer, read_model
from bloomery.families.llama import DEFAULTS
from bloomery.families.reader import ConfigReader, defaults
from bloomery.families.recurrent import MAMBA2, MAMBA_NAMES, read_mamba2
from bloomery.spec import LayerSpec, Mamba2Spec, MlpSpec, ModelSpec, SwigluClamp

FALCON_H1 = (
    DEFAULTS
    | MAMBA2
    | defaults(vocab=128000, mlp=14336, kv_heads=8, context=8192, rms_norm_eps=1e-5)
    | defaults(mamba_d_ssm=1024, mamba_norm_before_gate=True)
)
NO_LIMIT = 1e30


def read_factors(config: ConfigReader, name: str, count: int) -> tuple[float, ...]:
    factors = config.list_of(name, float, (1.0,) * count)
    if len(factors) != count or not all(abs(factor) < 1e30 for factor in factors):
        raise config.error(name, f"must hold {count} numbers, not {list(factors)}")
    return tuple(map(float, factors))


def read_mixer(config: ConfigReader) -> Mamba2Spec:
    inner = None if config.get("mamba_d_ssm") is None else config.size("mamba_d_ssm")
    mixer = read_mamba2(config, inner, out_bias=config.flag("projectors_bias", False))
    scale = config.number("ssm_in_multiplier", 1.0)
    if scale != 1.0:
        config.require("mamba_proj_bias", False)
    gate, x, b, c, dt = (scale * factor for factor in read_factors(config, "ssm_multipliers", 5))
    return replace(
        mixer,
        norm=mixer.norm if config.flag("mamba_rms_norm", False) else None,
        gate_after_norm=config.flag("mamba_norm_before_gate"),
        part_scales=(gate, x, b, c, dt),
    )


def scale_layer(config: ConfigReader, layer: LayerSpec) -> LayerSpec:
    """Apply the multipliers of attention and MLP."""
    assert layer.attention is not None and isinstance(layer.mlp, MlpSpec)
    in_scale = config.number("attention_in_multiplier", 1.0)
    if in_scale != 1.0:
        config.require("attention_bias", False)
    score_scale = in_scale**2 * config.number("key_multiplier", 1.0)
    attention = replace(layer.attention, scale=score_scale * layer.attention.head_dim**-0.5)
    gate_scale, down_scale = read_factors(config, "mlp_multipliers", 2)
    mlp = layer.mlp
    if gate_scale != 1.0:
        config.require("mlp_bias", False)
        mlp = replace(mlp, clamp=SwigluClamp(NO_LIMIT, alpha=gate_scale))
    return replace(
        layer,
        attention=attention,
        mlp=mlp,
        attention_scale=in_scale * config.number("attention_out_multiplier", 1.0),
        recurrent_scale=config.number("ssm_out_multiplier", 1.0),
        mlp_scale=gate_scale * down_scale,
    )


def read_falcon_h1(config: ConfigReader) -> ModelSpec:
    config.require("hidden_act", "silu")
    layer = replace(scale_layer(config, read_layer(config)), recurrent=read_mixer(config))
    return read_model(
        config,
        [layer] * len(config.layers()),
        embed_scale=config.number("embedding_multiplier", 1.0),
        logit_scale=config.number("lm_head_multiplier", 1.0),
    )


FAMILIES = {"falcon_h1": ModelFamily(read_falcon_h1, MAMBA_NAMES, FALCON_H1)}
