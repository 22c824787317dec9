"""Building blocks of the families with recurrent layers: Mamba-2, gated delta nets, tensor names.

It defines no family.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from bloomery.families.llama import NAMES
from bloomery.families.reader import ConfigReader, defaults
from bloomery.spec import (
    GatedDeltaNetSpec,
    LayerSpec,
    Mamba2Spec,
    NormSpec,
    RecurrentSpec,
    SplitTensors,
    TensorNames,
)

IS_RECURRENT = {
    "linear_attention": True,
    "mamba": True,
    "full_attention": False,
    "attention": False,
}
INFINITY = {"__float__": "Infinity"}  # how transformers writes it
MTP = ("mtp.*", "model.mtp.*")  # layers for multi-token prediction


def mamba_names(names: TensorNames, prefix: str = "mamba") -> TensorNames:
    """Add the tensors of a Mamba-2 mixer; `prefix` is its place in the layer."""
    return replace(
        names,
        recurrent_in=f"{prefix}.in_proj",
        recurrent_out=f"{prefix}.out_proj",
        recurrent_conv=f"{prefix}.conv1d",
        extra={
            **names.extra,
            "recurrent_norm": f"{prefix}.norm",
            "A_log": f"{prefix}.A_log",
            "dt_bias": f"{prefix}.dt_bias",
            "D": f"{prefix}.D",
        },
    )


def delta_net_names(names: TensorNames, recurrent_in: SplitTensors) -> TensorNames:
    """Add the tensors of a gated delta net, and ignore layers for multi-token prediction."""
    return replace(
        names,
        recurrent_in=recurrent_in,
        recurrent_out="linear_attn.out_proj",
        recurrent_conv="linear_attn.conv1d",
        extra={
            **names.extra,
            "recurrent_norm": "linear_attn.norm",
            "A_log": "linear_attn.A_log",
            "dt_bias": "linear_attn.dt_bias",
        },
        ignored=(*names.ignored, *MTP),
    )


# Values of keys that most configs with Mamba-2 may leave out.
MAMBA2 = defaults(
    mamba_n_heads=128, mamba_n_groups=1, mamba_d_state=256, mamba_d_conv=4, mamba_expand=2
)
# A Llama with Mamba-2 in some layers, and other names of the MLP and of the norms.
MAMBA_NAMES = mamba_names(
    replace(
        NAMES,
        mlp_up=SplitTensors(("feed_forward.gate_proj", "feed_forward.up_proj")),
        mlp_down="feed_forward.down_proj",
        extra={"attn_norm": "input_layernorm", "mlp_norm": "pre_ff_layernorm"},
        final_norm="model.final_layernorm",
    )
)


def put_recurrent(
    layer: LayerSpec, recurrent: RecurrentSpec, is_recurrent: Iterable[bool]
) -> list[LayerSpec]:
    """Repeat the layer; where a flag is set, the mixer is `recurrent` instead of attention."""
    other = replace(layer, attention=None, recurrent=recurrent)
    return [other if flag else layer for flag in is_recurrent]


def read_recurrent_layers(
    config: ConfigReader, is_recurrent_by_default: Callable[[int], bool]
) -> tuple[bool, ...]:
    """Return which layers are recurrent: from `layer_types` if present, else by the rule."""
    return config.layer_choices("layer_types", IS_RECURRENT, is_recurrent_by_default)


def read_mamba2(config: ConfigReader, inner: int | None = None, **changes: Any) -> Mamba2Spec:
    """Read a Mamba-2 mixer with `inner` channels; keywords replace what a family does differently.

    By default it has mamba_expand times the hidden size.
    """
    if inner is None:
        inner = config.size("mamba_expand") * config.size("hidden_size")
    num_heads = config.size("mamba_n_heads")
    head_dim = inner // num_heads
    if config.get("mamba_d_head", "auto") != "auto":
        head_dim = config.size("mamba_d_head")
    if num_heads * head_dim != inner:
        raise config.error("mamba_n_heads", f"{num_heads} do not divide {inner} channels")
    num_groups = config.size("mamba_n_groups")
    bias = config.flag("mamba_proj_bias", False)
    mixer = Mamba2Spec(
        num_heads,
        head_dim,
        config.size("mamba_d_state"),
        num_groups,
        config.size("mamba_d_conv"),
        config.flag("mamba_conv_bias", True),
        in_bias=bias,
        out_bias=bias,
        norm=NormSpec("rms", config.number("rms_norm_eps")),
        norm_groups=num_groups,
        dt_limit=read_dt_limit(config),
    )
    return replace(mixer, **changes)


def read_dt_limit(config: ConfigReader) -> tuple[float, float]:
    """Read the range of dt; infinity may be a number or an object."""
    values = config.get("time_step_limit", (0.0, math.inf))
    limits = values if isinstance(values, list | tuple) else ()
    limits = [math.inf if value == INFINITY else value for value in limits]
    is_range = len(limits) == 2 and all(isinstance(value, int | float) for value in limits)
    if not is_range or not 0 <= limits[0] <= limits[1]:
        raise config.error("time_step_limit", f"must be a range of numbers, not {values!r}")
    return float(limits[0]), float(limits[1])


def read_delta_net(config: ConfigReader) -> GatedDeltaNetSpec:
    return GatedDeltaNetSpec(
        config.size("linear_num_key_heads"),
        config.size("linear_num_value_heads"),
        config.size("linear_key_head_dim"),
        config.size("linear_value_head_dim"),
        config.size("linear_conv_kernel_dim"),
        norm=NormSpec("rms", config.number("rms_norm_eps")),
    )
