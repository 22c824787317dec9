"""The architectures of GGUF with recurrent layers: their tensors, their keys and their layers.

The converter stores A = -exp(A_log), norms with the 1 already added, convolutions as matrices, and
Falcon-H1's multipliers as part of the weights.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from bloomery.families.gguf_architectures import (
    RMS_EPSILON,
    GgufFamily,
    HfConfig,
    RecurrentTensors,
    TensorShapes,
    read_head_dim,
)
from bloomery.families.reader import ConfigReader
from bloomery.spec import (
    GatedDeltaNetSpec,
    Mamba2Spec,
    RecurrentSpec,
    ShortConvSpec,
    SplitTensors,
    TensorNames,
)

DELTA_NET_VECTORS = {"recurrent_norm": "ssm_norm", "neg_A": "ssm_a", "dt_bias": "ssm_dt.bias"}
DELTA_NET = RecurrentTensors(
    SplitTensors(("attn_qkv", "attn_gate", "ssm_beta", "ssm_alpha"), parts=(3, 1, 1, 1)),
    "ssm_out",
    "ssm_conv1d",
    DELTA_NET_VECTORS,
)
DELTA_NET_BY_HEAD = replace(
    DELTA_NET,
    projection=SplitTensors(
        ("attn_qkv", "attn_gate", "ssm_ba"), parts=(3, 1, 2), grouped=(False, False, True)
    ),
)
# The first converter of qwen3next left the projections as they are.
FUSED_DELTA_NET = replace(
    DELTA_NET, projection=SplitTensors(("ssm_in", "ssm_ba"), parts=(4, 2), grouped=(True, True))
)
MAMBA2 = RecurrentTensors("ssm_in", "ssm_out", "ssm_conv1d", {**DELTA_NET_VECTORS, "D": "ssm_d"})
SHORT_CONV = RecurrentTensors("shortconv.in_proj", "shortconv.out_proj", "shortconv.conv")
CONVOLUTIONS = ("ssm_conv1d.weight", "shortconv.conv.weight")  # only recurrent layers have them


def add_recurrent_names(
    names: TensorNames, recurrent: RecurrentTensors | None, layer_tensors: Collection[str]
) -> TensorNames:
    """Add the tensors of recurrent layers; `layer_tensors` are all names within a layer."""
    if recurrent is None:
        return names
    if recurrent == DELTA_NET_BY_HEAD and "ssm_in.weight" in layer_tensors:
        recurrent = FUSED_DELTA_NET
    return replace(
        names,
        recurrent_in=recurrent.projection,
        recurrent_out=recurrent.out,
        recurrent_conv=recurrent.conv,
        extra={**names.extra, **recurrent.extra},
    )


def has_recurrent(prefix: str, shapes: TensorShapes) -> bool:
    """Whether the layer with that prefix has a recurrent mixer."""
    return any(prefix + name in shapes for name in CONVOLUTIONS)


def read_layer_types(
    config: ConfigReader, shapes: TensorShapes, recurrent: str = "linear_attention"
) -> list[str]:
    """Return the type of each layer. The tensors show it."""
    return [
        recurrent if has_recurrent(f"blk.{i}.", shapes) else "full_attention"
        for i in range(config.size("block_count"))
    ]


def read_delta_net(config: ConfigReader, shapes: TensorShapes) -> HfConfig:
    config.get("full_attention_interval")  # marks the key as read
    num_heads = config.size("ssm.time_step_rank")
    return {
        "layer_types": read_layer_types(config, shapes),
        "linear_num_key_heads": config.size("ssm.group_count"),
        "linear_num_value_heads": num_heads,
        "linear_key_head_dim": config.size("ssm.state_size"),
        "linear_value_head_dim": config.size("ssm.inner_size") // num_heads,
        "linear_conv_kernel_dim": config.size("ssm.conv_kernel"),
    }


def read_mamba2(config: ConfigReader, shapes: TensorShapes) -> HfConfig:
    inner = config.size("ssm.inner_size")
    num_heads = config.size("ssm.time_step_rank")
    return {
        "layer_types": read_layer_types(config, shapes),
        "mamba_d_ssm": inner,
        "mamba_expand": inner // config.size("embedding_length"),
        "mamba_n_heads": num_heads,
        "mamba_d_head": inner // num_heads,
        "mamba_n_groups": config.size("ssm.group_count"),
        "mamba_d_state": config.size("ssm.state_size"),
        "mamba_d_conv": config.size("ssm.conv_kernel"),
    }


def read_falcon_h1(config: ConfigReader, shapes: TensorShapes) -> HfConfig:
    has_norm = "blk.0.ssm_norm.weight" in shapes
    return {
        **read_mamba2(config, shapes),
        "layer_types": None,
        "mamba_rms_norm": has_norm,
        "mamba_norm_before_gate": False,
    }


def read_granite_hybrid(config: ConfigReader, shapes: TensorShapes) -> HfConfig:
    has_experts = "blk.0.ffn_gate_inp.weight" in shapes
    shared_down = "ffn_down_shexp" if has_experts else "ffn_down"  # without experts the only MLP
    shared = shapes.get(f"blk.0.{shared_down}.weight", (config.size("feed_forward_length"),))
    config.require("expert_shared_feed_forward_length", shared[-1])
    # Here the key means that the attention layers have rope at all.
    has_rope = config.flag("rope.scaling.finetuned", True)
    return {
        **read_mamba2(config, shapes),
        "attention_multiplier": read_head_dim(config) ** -0.5,  # attention.scale replaces it
        "num_experts": config.integer("expert_count", 0),
        "position_embedding_type": "rope" if has_rope else "nope",
        "shared_intermediate_size": shared[-1],
    }


def read_nemotron_h(config: ConfigReader, shapes: TensorShapes) -> HfConfig:
    """Read the keys of Nemotron-H, whose layers have one block each."""
    kinds = {"ssm_conv1d": "mamba", "attn_output": "attention", "ffn_gate_inp": "moe"}
    blocks = [
        next((kinds[name] for name in kinds if f"blk.{i}.{name}.weight" in shapes), "mlp")
        for i in range(config.size("block_count"))
    ]
    num_heads = config.size("ssm.time_step_rank")
    keys: HfConfig = {
        "layers_block_type": blocks,
        "layer_norm_epsilon": config.number(RMS_EPSILON),
        "mamba_num_heads": num_heads,
        "mamba_head_dim": config.size("ssm.inner_size") // num_heads,
        "n_groups": config.size("ssm.group_count"),
        "ssm_state_size": config.size("ssm.state_size"),
        "conv_kernel": config.size("ssm.conv_kernel"),
        "num_shared_experts": 1,
    }
    if "moe" in blocks:
        first = blocks.index("moe")
        shared = shapes.get(f"blk.{first}.ffn_down_shexp.weight", (0,))
        latent = shapes.get(f"blk.{first}.ffn_latent_down.weight")
        keys["moe_shared_expert_intermediate_size"] = shared[-1]
        keys["moe_latent_size"] = latent[0] if latent else None
        config.require("moe_latent_size", keys["moe_latent_size"])
    return keys


def read_lfm2(config: ConfigReader, shapes: TensorShapes) -> HfConfig:
    return {
        "layer_types": read_layer_types(config, shapes, "conv"),
        "norm_eps": config.number(RMS_EPSILON),
        "conv_L_cache": config.size("shortconv.l_cache"),
        "block_auto_adjust_ff_dim": False,  # the converter has adjusted it
        "use_expert_bias": any("exp_probs_b" in name for name in shapes),
        "tie_embedding": "output.weight" not in shapes,
    }


def adapt_recurrent(
    spec: RecurrentSpec, prefix: str, shapes: TensorShapes, tiled_heads: bool
) -> RecurrentSpec:
    """Adapt a mixer to the biases of the file and to its order of heads."""
    match spec:
        case GatedDeltaNetSpec():
            return replace(spec, tiled_heads=tiled_heads)
        case Mamba2Spec():
            return replace(
                spec,
                conv_bias=f"{prefix}ssm_conv1d.bias" in shapes,
                in_bias=f"{prefix}ssm_in.bias" in shapes,
                out_bias=f"{prefix}ssm_out.bias" in shapes,
            )
        case ShortConvSpec():
            return replace(spec, bias=f"{prefix}shortconv.conv.bias" in shapes)
    return spec


RECURRENT_ARCHITECTURES: Mapping[str, GgufFamily] = {
    "qwen35": GgufFamily(
        "qwen3_5_text",
        read_keys=read_delta_net,
        vision=True,
        recurrent=DELTA_NET,
        tiled_heads=True,
    ),
    "qwen35moe": GgufFamily(
        "qwen3_5_moe_text",
        read_keys=read_delta_net,
        vision=True,
        recurrent=DELTA_NET,
        tiled_heads=True,
    ),
    "qwen3next": GgufFamily("qwen3_next", read_keys=read_delta_net, recurrent=DELTA_NET_BY_HEAD),
    "lfm2": GgufFamily("lfm2", read_keys=read_lfm2, recurrent=SHORT_CONV),
    "lfm2moe": GgufFamily("lfm2_moe", read_keys=read_lfm2, recurrent=SHORT_CONV),
    "granitehybrid": GgufFamily(
        "granitemoehybrid", read_keys=read_granite_hybrid, permuted=True, recurrent=MAMBA2
    ),
    "falcon-h1": GgufFamily("falcon_h1", read_keys=read_falcon_h1, recurrent=MAMBA2),
    "nemotron_h": GgufFamily("nemotron_h", read_keys=read_nemotron_h, recurrent=MAMBA2),
    "nemotron_h_moe": GgufFamily("nemotron_h", read_keys=read_nemotron_h, recurrent=MAMBA2),
}
