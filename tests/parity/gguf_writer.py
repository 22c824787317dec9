"""Writes a transformers model as GGUF, in the same way as llama.cpp's converter.

Tensor names come from the tables of the gguf package. This module defines which metadata the
converter writes for each architecture, and how it changes a tensor besides renaming it. It must not
know how Bloomery reads the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind

NamedTensors = Iterator[tuple[str, torch.Tensor]]  # with the names of transformers
# config, name, tensor -> the tensors that are written instead of it
TensorChange = Callable[[Any, str, torch.Tensor], NamedTensors]


def write_gguf(
    model: Any,
    path: Path,
    kind: Kind = Kind.F32,
    extra: dict[str, Any] | None = None,
    architecture: GgufArchitecture | None = None,
) -> None:
    """Write matrices whose rows fill blocks of `kind` in that type, all others in float32.

    `extra` metadata overrides the converter's, `architecture` its choice.
    """
    c = getattr(model.config, "text_config", model.config)
    arch = architecture or find_architecture(model.config)
    writer = gguf.GGUFWriter(path, arch.name)
    for key, value in (common_metadata(c) | arch.metadata(c) | (extra or {})).items():
        add_metadata(writer, f"{arch.name}.{key}", value)
    add_xielu_metadata(writer, model)
    writer.add_token_list([f"token {i}" for i in range(c.vocab_size)])
    for id, role in enumerate(("padding", "bos", "eos")):
        writer.add_uint32(f"tokenizer.ggml.{role}_token_id", id)
    table = arch.table or arch.name
    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == table)
    names = gguf.get_tensor_name_map(number, c.num_hidden_layers)
    for name, tensor in convert_tensors(model, arch):
        stem, _, suffix = name.rpartition(".")
        is_final = name.startswith(("rope_", "blk."))
        target = name if is_final else f"{names.mapping[stem][1]}.{suffix}"
        values = tensor.detach().float().contiguous().numpy()
        if (
            kind != Kind.F32
            and values.ndim > 1
            and values.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0
            and "norm" not in target
        ):
            writer.add_tensor(target, quantize_blocks(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(target, values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def find_architecture(config: Any) -> GgufArchitecture:
    """Return the architecture that the converter chooses for a model."""
    if config.model_type == "nemotron_h" and "moe" not in config.layers_block_type:
        return DENSE_NEMOTRON_H
    return ARCHITECTURES[config.model_type]


# Types that the package cannot quantize to: where the scale of a block and the scale of its offset
# begin (bytes), and the ratio of the two that centres the values around zero.
SCALES = {
    Kind.Q2_K: (80, 82, 1.5),
    Kind.Q3_K: (108, None, 0),
    Kind.Q4_K: (0, 2, 7.5),
    Kind.Q5_K: (0, 2, 15.5),
    Kind.Q6_K: (208, None, 0),
    Kind.IQ4_NL: (0, None, 0),
    Kind.IQ4_XS: (0, None, 0),
    Kind.IQ2_XXS: (0, None, 0),
    Kind.IQ2_XS: (0, None, 0),
    Kind.IQ2_S: (0, None, 0),
    Kind.IQ3_XXS: (0, None, 0),
    Kind.IQ3_S: (0, None, 0),
    Kind.IQ1_S: (0, None, 0),
    Kind.IQ1_M: (48, None, 0),
    Kind.Q1_0: (0, None, 0),
    Kind.NVFP4: (0, None, 0),
}


def quantize_blocks(weight: np.ndarray, kind: Kind) -> np.ndarray:
    """Quantize with the package; if it cannot, return random bits with plausible scales."""
    if kind not in SCALES:
        return gguf.quants.quantize(weight, kind)
    block_values, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(weight.view(np.uint32).ravel()[:4])
    num_blocks = weight.size // block_values
    blocks = random.integers(0, 256, (num_blocks, block_bytes), dtype=np.uint8)
    scale, offset, ratio = SCALES[kind]
    scales = random.uniform(1e-3, 2e-3, (len(blocks), 1))
    if kind.name.startswith("IQ4"):  # their levels are not centred around zero
        scales *= random.choice([-1, 1], scales.shape)
    half_bytes = scales.astype(np.float16).view(np.uint8)
    if kind == Kind.IQ1_M:  # four bits of the scale at the top of each of four words
        nibbles = np.stack([half_bytes & 15, half_bytes >> 4], -1).reshape(-1, 4)
        high_bytes = blocks[:, scale + 1 : scale + 8 : 2]
        high_bytes &= 15
        high_bytes |= nibbles << 4
    elif kind == Kind.NVFP4:  # four 8-bit floats of up to 2 ** -4
        blocks[:, :4] = random.integers(8, 24, (len(blocks), 4))
    else:
        blocks[:, scale : scale + 2] = half_bytes
    if offset is not None:
        blocks[:, offset : offset + 2] = (ratio * scales).astype(np.float16).view(np.uint8)
    return blocks.reshape(*weight.shape[:-1], -1)


def dequantize_blocks(blocks: np.ndarray, kind: Kind) -> np.ndarray:
    """Dequantize with the package, or by definition where it cannot: [rows, bytes] -> values."""
    if kind != Kind.Q1_0:
        return gguf.quants.dequantize(blocks, kind)
    per_block = blocks.reshape(-1, 18)
    scales = np.ascontiguousarray(per_block[:, :2]).view(np.float16).astype(np.float32)
    bits = np.unpackbits(per_block[:, 2:], axis=1, bitorder="little")
    values = np.where(bits == 1, scales, -scales)
    return values.reshape(*blocks.shape[:-1], -1)


def add_metadata(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if value is None:
        return
    by_type = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
    }
    by_type.get(type(value), writer.add_array)(key, value)


# ---- metadata ------------------------------------------------------------------------------------


def common_metadata(c: Any) -> dict[str, Any]:
    hidden = c.hidden_size
    return {
        "block_count": c.num_hidden_layers,
        "context_length": getattr(c, "max_position_embeddings", 2048),
        "embedding_length": hidden,
        "feed_forward_length": getattr(c, "intermediate_size", None)
        or getattr(c, "n_inner", None)
        or 4 * hidden,
        "attention.head_count": c.num_attention_heads,
        "vocab_size": c.vocab_size,
    }


def rms_norm_metadata(c: Any) -> dict[str, Any]:
    """Return the metadata of most architectures that derive from Llama."""
    head = getattr(c, "head_dim", None)
    return {
        "attention.head_count_kv": c.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": c.rms_norm_eps,
        "attention.key_length": head,
        "attention.value_length": head,
        **rope_metadata(c.rope_parameters),
    }


def rope_metadata(rope: dict[str, Any]) -> dict[str, Any]:
    rope = rope.get("full_attention", rope)
    metadata: dict[str, Any] = {"rope.freq_base": float(rope["rope_theta"])}
    if rope["rope_type"] in ("linear", "yarn"):
        metadata |= {
            "rope.scaling.type": rope["rope_type"],
            "rope.scaling.factor": float(rope["factor"]),
        }
    if rope["rope_type"] == "yarn":
        metadata |= {
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
            "rope.scaling.yarn_attn_factor": rope.get("attention_factor"),
            "rope.scaling.yarn_beta_fast": rope.get("beta_fast"),
            "rope.scaling.yarn_beta_slow": rope.get("beta_slow"),
        }
    return metadata


def llama_metadata(c: Any) -> dict[str, Any]:
    experts = getattr(c, "num_local_experts", None)
    experts_per_token = c.num_experts_per_tok if experts else None
    dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    return rms_norm_metadata(c) | {
        "rope.dimension_count": dim,
        "expert_count": experts,
        "expert_used_count": experts_per_token,
    }


def moe_metadata(c: Any) -> dict[str, Any]:
    return rms_norm_metadata(c) | {
        "expert_count": c.num_experts,
        "expert_used_count": c.num_experts_per_tok,
        "expert_feed_forward_length": c.moe_intermediate_size,
        "expert_shared_feed_forward_length": getattr(c, "shared_expert_intermediate_size", None),
    }


def add_xielu_metadata(writer: gguf.GGUFWriter, model: Any) -> None:
    """Write the parameters of the activation xIELU, one number per layer."""
    for key in ("alpha_p", "alpha_n", "beta", "eps"):
        values = [
            float(tensor)
            for name, tensor in model.state_dict().items()
            if name.endswith(f".act_fn.{key}")
        ]
        if values:
            writer.add_array(f"xielu.{key}", values)


def first_value(c: Any, *names: str) -> Any:
    """Return the first of these values that the config has."""
    return next((value for name in names if (value := getattr(c, name, None)) is not None), None)


def routed_metadata(c: Any) -> dict[str, Any]:
    """Return what the converter writes for every model with experts."""
    gating = {"softmax": 1, "sigmoid": 2}
    score = first_value(c, "scoring_func", "score_func", "expert_selection_fn")
    rope = c.rope_parameters
    local = rope.get("sliding_attention", {}).get("rope_theta")
    return rms_norm_metadata(c) | {
        "expert_count": first_value(c, "num_local_experts", "num_experts", "n_routed_experts"),
        "expert_used_count": first_value(c, "num_experts_per_tok", "moe_k"),
        "expert_group_count": getattr(c, "n_group", None),
        "expert_group_used_count": getattr(c, "topk_group", None),
        "expert_gating_func": gating.get(score),
        "rope.freq_base_swa": local and float(local),
    }


def window_metadata(c: Any) -> dict[str, Any]:
    """Return the window, and which layers have one."""
    return {
        "attention.sliding_window": c.sliding_window or 0,
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in c.layer_types],
    }


def glm4_metadata(c: Any) -> dict[str, Any]:
    fraction = c.rope_parameters.get("partial_rotary_factor", 0.5)
    return rms_norm_metadata(c) | {"rope.dimension_count": int(c.head_dim * fraction)}


def glm4moe_metadata(c: Any) -> dict[str, Any]:
    head = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    fraction = c.rope_parameters.get("partial_rotary_factor", 1.0)
    return routed_metadata(c) | {
        "rope.dimension_count": int(head * fraction),
        "expert_feed_forward_length": c.moe_intermediate_size,
        "expert_shared_count": c.n_shared_experts,
        "leading_dense_block_count": getattr(c, "first_k_dense_replace", 0),
        "expert_gating_func": 2,
        "expert_weights_scale": float(c.routed_scaling_factor),
        "expert_weights_norm": c.norm_topk_prob,
    }


def dots1_metadata(c: Any) -> dict[str, Any]:
    return glm4moe_metadata(c) | {"rope.dimension_count": None}


def ernie_moe_metadata(c: Any) -> dict[str, Any]:
    return routed_metadata(c) | {
        "expert_count": c.moe_num_experts,
        "interleave_moe_layer_step": c.moe_layer_interval,
        "leading_dense_block_count": c.moe_layer_start_index,
        "expert_feed_forward_length": c.moe_intermediate_size,
        "expert_shared_count": c.moe_num_shared_experts,
    }


def minimax_m2_metadata(c: Any) -> dict[str, Any]:
    fraction = c.rope_parameters.get("partial_rotary_factor", 1.0)
    return routed_metadata(c) | {
        "expert_feed_forward_length": c.intermediate_size,
        "rope.dimension_count": int(c.head_dim * fraction),
        "expert_gating_func": 2,
    }


def hunyuan_metadata(c: Any) -> dict[str, Any]:
    """Return the metadata of Hunyuan, whose scaling of rope is put into its base."""
    rope = c.rope_parameters
    metadata = rms_norm_metadata(c)
    if rope["rope_type"] == "dynamic":
        dim = c.head_dim
        metadata["rope.freq_base"] = rope["rope_theta"] * rope["alpha"] ** (dim / (dim - 2))
        metadata["rope.scaling.type"] = "none"
        metadata["rope.scaling.factor"] = 1.0
    return metadata


def hunyuan_moe_metadata(c: Any) -> dict[str, Any]:
    top_k = c.moe_topk if isinstance(c.moe_topk, int) else c.moe_topk[0]
    return hunyuan_metadata(c) | {
        "expert_count": c.num_experts,
        "expert_used_count": top_k,
        "expert_feed_forward_length": c.intermediate_size,
        "expert_shared_feed_forward_length": c.intermediate_size,
        "expert_shared_count": 1,
    }


def hy_v3_metadata(c: Any) -> dict[str, Any]:
    return routed_metadata(c) | {
        "expert_feed_forward_length": c.moe_intermediate_size,
        "expert_shared_feed_forward_length": c.moe_intermediate_size * c.num_shared_experts,
        "expert_weights_norm": True,
        "expert_weights_scale": float(c.router_scaling_factor),
        "expert_gating_func": 2,
    }


def granitemoe_metadata(c: Any) -> dict[str, Any]:
    shared = getattr(c, "shared_intermediate_size", None)
    return granite_metadata(c) | {"expert_shared_feed_forward_length": shared}


def granite_swa_metadata(c: Any) -> dict[str, Any]:
    return granite_metadata(c) | window_metadata(c)


def exaone4_metadata(c: Any) -> dict[str, Any]:
    return rms_norm_metadata(c) | (window_metadata(c) if c.sliding_window else {})


def olmo2_metadata(c: Any) -> dict[str, Any]:
    return rms_norm_metadata(c) | (window_metadata(c) if hasattr(c, "sliding_window") else {})


def afmoe_metadata(c: Any) -> dict[str, Any]:
    return routed_metadata(c) | {
        "expert_shared_count": c.num_shared_experts,
        "expert_feed_forward_length": c.moe_intermediate_size,
        "leading_dense_block_count": c.num_dense_layers,
        "expert_weights_norm": True,
        "expert_weights_scale": float(c.route_scale),
        "attention.sliding_window": c.sliding_window,
    }


def laguna_metadata(c: Any) -> dict[str, Any]:
    full = c.rope_parameters["full_attention"]
    local = c.rope_parameters["sliding_attention"]
    return routed_metadata(c) | {
        "attention.head_count": list(c.num_attention_heads_per_layer),
        "attention.sliding_window": c.sliding_window,
        "expert_feed_forward_length": c.moe_intermediate_size,
        "expert_shared_feed_forward_length": c.shared_expert_intermediate_size,
        "expert_weights_norm": True,
        "expert_weights_scale": float(c.moe_routed_scaling_factor),
        "expert_gating_func": 2,
        "rope.dimension_count": int(c.head_dim * full.get("partial_rotary_factor", 1.0)),
        "rope.dimension_count_swa": int(c.head_dim * local.get("partial_rotary_factor", 1.0)),
    }


def mellum_metadata(c: Any) -> dict[str, Any]:
    return (
        routed_metadata(c)
        | window_metadata(c)
        | {"expert_feed_forward_length": c.moe_intermediate_size}
    )


def gpt_oss_metadata(c: Any) -> dict[str, Any]:
    return routed_metadata(c) | {
        "attention.sliding_window": c.sliding_window,
        "expert_feed_forward_length": c.intermediate_size,
    }


def phimoe_metadata(c: Any) -> dict[str, Any]:
    return phi3_metadata(c) | {
        "expert_count": c.num_local_experts,
        "expert_used_count": c.num_experts_per_tok,
    }


def cohere2_moe_metadata(c: Any) -> dict[str, Any]:
    shared = c.num_shared_experts
    return (
        routed_metadata(c)
        | layer_norm_metadata(c)
        | window_metadata(c)
        | {
            "attention.layer_norm_rms_epsilon": None,
            "logit_scale": c.logit_scale,
            "feed_forward_length": c.prefix_dense_intermediate_size or c.intermediate_size,
            "expert_feed_forward_length": c.intermediate_size,
            "expert_shared_count": shared or None,
            "expert_shared_feed_forward_length": shared * c.intermediate_size or None,
            "expert_weights_norm": c.norm_topk_prob,
            "rope.dimension_count": c.head_dim,
            "rope.scaling.type": "none",
        }
    )


def llama4_metadata(c: Any) -> dict[str, Any]:
    return routed_metadata(c) | {
        "feed_forward_length": c.intermediate_size_mlp,
        "expert_feed_forward_length": c.intermediate_size,
        "interleave_moe_layer_step": c.interleave_moe_layer_step,
        "rope.dimension_count": c.head_dim,
    }


def delta_net_metadata(c: Any) -> dict[str, Any]:
    experts = getattr(c, "num_experts", None)
    rope = c.rope_parameters
    sections = [*rope["mrope_section"], 0] if c.model_type != "qwen3_next" else None
    return rms_norm_metadata(c) | {
        "ssm.conv_kernel": c.linear_conv_kernel_dim,
        "ssm.state_size": c.linear_key_head_dim,
        "ssm.group_count": c.linear_num_key_heads,
        "ssm.time_step_rank": c.linear_num_value_heads,
        "ssm.inner_size": c.linear_value_head_dim * c.linear_num_value_heads,
        "full_attention_interval": 4,
        "rope.dimension_count": int(c.head_dim * rope["partial_rotary_factor"]),
        "rope.dimension_sections": sections,
        "expert_count": experts,
        "expert_used_count": experts and c.num_experts_per_tok,
        "expert_feed_forward_length": experts and c.moe_intermediate_size,
        "expert_shared_feed_forward_length": experts and c.shared_expert_intermediate_size,
    }


def kv_heads_by_layer(c: Any) -> list[int]:
    return [c.num_key_value_heads if kind == "full_attention" else 0 for kind in c.layer_types]


def lfm2_metadata(c: Any) -> dict[str, Any]:
    metadata = {
        "attention.head_count_kv": kv_heads_by_layer(c),
        "attention.layer_norm_rms_epsilon": c.norm_eps,
        "shortconv.l_cache": c.conv_L_cache,
        **rope_metadata(c.rope_parameters),
    }
    if c.model_type == "lfm2":
        return metadata
    return metadata | {
        "expert_count": c.num_experts,
        "expert_used_count": c.num_experts_per_tok,
        "expert_feed_forward_length": c.moe_intermediate_size,
        "leading_dense_block_count": c.num_dense_layers,
        "expert_gating_func": 2,
    }


def mamba2_metadata(c: Any, inner: int) -> dict[str, Any]:
    return {
        "ssm.conv_kernel": first_value(c, "mamba_d_conv", "conv_kernel"),
        "ssm.state_size": first_value(c, "mamba_d_state", "ssm_state_size"),
        "ssm.group_count": first_value(c, "mamba_n_groups", "n_groups"),
        "ssm.time_step_rank": first_value(c, "mamba_n_heads", "mamba_num_heads"),
        "ssm.inner_size": inner,
        "attention.layer_norm_rms_epsilon": first_value(c, "rms_norm_eps", "layer_norm_epsilon"),
    }


def granite_hybrid_metadata(c: Any) -> dict[str, Any]:
    experts = c.num_local_experts or None
    return {
        **granitemoe_metadata(c),
        **mamba2_metadata(c, c.mamba_expand * c.hidden_size),
        "attention.head_count_kv": kv_heads_by_layer(c),
        "expert_count": experts,
        "expert_used_count": experts and c.num_experts_per_tok,
        "rope.scaling.finetuned": c.position_embedding_type == "rope",
    }


def falcon_h1_metadata(c: Any) -> dict[str, Any]:
    return {**rms_norm_metadata(c), **mamba2_metadata(c, c.mamba_d_ssm)}


def nemotron_h_metadata(c: Any) -> dict[str, Any]:
    sizes = {"moe": c.moe_intermediate_size, "mlp": c.intermediate_size}
    has_experts = "moe" in c.layers_block_type
    metadata = {
        **mamba2_metadata(c, c.mamba_num_heads * c.mamba_head_dim),
        "attention.head_count_kv": kv_heads_by_layer(c),
        "attention.key_length": c.head_dim,
        "attention.value_length": c.head_dim,
        "feed_forward_length": [sizes.get(kind, 0) for kind in c.layers_block_type],
        "rope.scaling.finetuned": False,
    }
    if not has_experts:
        return metadata
    return metadata | {
        "expert_count": c.n_routed_experts,
        "expert_used_count": c.num_experts_per_tok,
        "expert_feed_forward_length": c.moe_intermediate_size,
        "expert_shared_feed_forward_length": c.moe_shared_expert_intermediate_size,
        "expert_shared_count": c.n_shared_experts,
        "expert_weights_norm": c.norm_topk_prob,
        "expert_weights_scale": float(c.routed_scaling_factor),
        "expert_group_count": c.n_group,
        "expert_group_used_count": c.topk_group,
        "moe_latent_size": c.moe_latent_size,
    }


def mistral3_metadata(c: Any) -> dict[str, Any]:
    rope = c.rope_parameters
    return llama_metadata(c) | {
        "rope.scaling.yarn_log_multiplier": rope.get("mscale_all_dim"),
        "attention.temperature_scale": rope.get("llama_4_scaling_beta"),
    }


def nemotron_metadata(c: Any) -> dict[str, Any]:
    fraction = c.rope_parameters["partial_rotary_factor"]
    return {
        "attention.head_count_kv": c.num_key_value_heads,
        "attention.layer_norm_epsilon": c.norm_eps,
        "attention.layer_norm_rms_epsilon": c.norm_eps,
        "attention.key_length": c.head_dim,
        "attention.value_length": c.head_dim,
        "rope.dimension_count": int(fraction * c.hidden_size) // c.num_attention_heads,
        "rope.freq_base": float(c.rope_parameters["rope_theta"]),
        "rope.scaling.type": "none",
    }


def vision_metadata(c: Any) -> dict[str, Any]:
    sections = [*c.rope_parameters["mrope_section"], 0]
    return rms_norm_metadata(c) | {"rope.dimension_sections": sections}


def vision_moe_metadata(c: Any) -> dict[str, Any]:
    return moe_metadata(c) | vision_metadata(c) | {"n_deepstack_layers": 1}


def gemma2_metadata(c: Any) -> dict[str, Any]:
    return rms_norm_metadata(c) | {
        "attn_logit_softcapping": c.attn_logit_softcapping,
        "final_logit_softcapping": c.final_logit_softcapping,
        "attention.sliding_window": c.sliding_window,
    }


def gemma3_metadata(c: Any) -> dict[str, Any]:
    local = c.rope_parameters["sliding_attention"]["rope_theta"]
    return rms_norm_metadata(c) | {
        "attention.sliding_window": c.sliding_window,
        "rope.freq_base_swa": float(local),
    }


def phi3_metadata(c: Any) -> dict[str, Any]:
    rope = c.rope_parameters
    width = c.hidden_size // c.num_attention_heads
    original = rope.get("original_max_position_embeddings") or first_value(
        c, "original_max_position_embeddings", "max_position_embeddings"
    )
    stretch = c.max_position_embeddings / original
    gain = None
    if rope["rope_type"] == "longrope":
        gain = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0
    return {
        "attention.head_count_kv": c.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": c.rms_norm_eps,
        "attention.sliding_window": c.sliding_window or 0,
        "rope.dimension_count": int(rope.get("partial_rotary_factor", 1.0) * width),
        "rope.freq_base": float(rope["rope_theta"]),
        "rope.scaling.original_context_length": original,
        "rope.scaling.attn_factor": gain,
    }


def layer_norm_metadata(c: Any) -> dict[str, Any]:
    names = ("layer_norm_epsilon", "layer_norm_eps", "norm_epsilon")
    return {
        "attention.layer_norm_epsilon": next(getattr(c, name) for name in names if hasattr(c, name))
    }


def partial_rope_metadata(c: Any, default: float = 1.0) -> dict[str, Any]:
    fraction = c.rope_parameters.get("partial_rotary_factor", default)
    return layer_norm_metadata(c) | {
        "rope.dimension_count": int(fraction * (c.hidden_size // c.num_attention_heads))
    }


def starcoder_metadata(c: Any) -> dict[str, Any]:
    return layer_norm_metadata(c) | {"attention.head_count_kv": 1}


def starcoder2_metadata(c: Any) -> dict[str, Any]:
    return layer_norm_metadata(c) | {
        "attention.head_count_kv": c.num_key_value_heads,
        **rope_metadata(c.rope_parameters),
    }


def bloom_metadata(c: Any) -> dict[str, Any]:
    return layer_norm_metadata(c) | {"attention.head_count_kv": c.num_attention_heads}


def falcon_metadata(c: Any) -> dict[str, Any]:
    heads = c.num_kv_heads if c.new_decoder_architecture else 1
    return layer_norm_metadata(c) | {
        "attention.head_count_kv": heads,
        "tensor_data_layout": "jploski",
        "context_length": 2048,
    }


def mpt_metadata(c: Any) -> dict[str, Any]:
    a = c.attn_config
    clip = None if a.clip_qkv is None else float(a.clip_qkv)
    bias = float(a.alibi_bias_max if a.alibi else 0)
    return {
        "context_length": c.max_seq_len,
        "attention.layer_norm_epsilon": 1e-5,
        "attention.clamp_kqv": clip,
        "attention.max_alibi_bias": bias,
    }


def gptneox_metadata(c: Any) -> dict[str, Any]:
    return partial_rope_metadata(c, 0.25) | {"use_parallel_residual": c.use_parallel_residual}


def stablelm_metadata(c: Any) -> dict[str, Any]:
    kv = {
        "attention.head_count_kv": c.num_key_value_heads,
        "use_parallel_residual": c.use_parallel_residual,
    }
    return partial_rope_metadata(c, 0.25) | kv


def phi2_metadata(c: Any) -> dict[str, Any]:
    return partial_rope_metadata(c, 0.5) | {"attention.head_count_kv": c.num_attention_heads}


def command_r_metadata(c: Any) -> dict[str, Any]:
    metadata = {
        "attention.head_count_kv": c.num_key_value_heads,
        "logit_scale": c.logit_scale,
        **rope_metadata(c.rope_parameters),
    }
    return layer_norm_metadata(c) | metadata | {"rope.scaling.type": "none"}


def cohere2_metadata(c: Any) -> dict[str, Any]:
    return command_r_metadata(c) | {"attention.sliding_window": c.sliding_window}


def granite_metadata(c: Any) -> dict[str, Any]:
    return llama_metadata(c) | {
        "attention.scale": c.attention_multiplier,
        "embedding_scale": c.embedding_multiplier,
        "residual_scale": c.residual_multiplier,
        "logit_scale": c.logits_scaling,
    }


# ---- tensors -------------------------------------------------------------------------------------


# A vision part, which has a file of its own, and parameters of an activation.
NOT_WRITTEN = (".visual.", ".vision_tower.", ".multi_modal_projector.", ".act_fn.")


def convert_tensors(model: Any, arch: GgufArchitecture) -> NamedTensors:
    """Yield all tensors of the model as the converter writes them."""
    if arch.rope_factors is not None:
        yield from arch.rope_factors(model.config)
    tied = model.config.tie_word_embeddings
    config = getattr(model.config, "text_config", model.config)
    for name, tensor in model.state_dict().items():
        name = name.replace("model.language_model.", "model.")
        is_skipped = any(part in name for part in NOT_WRITTEN)
        if not (is_skipped or tied and name in ("lm_head.weight", "embed_out.weight")):
            yield from arch.change(config, name, tensor)


def keep_tensor(c: Any, name: str, tensor: torch.Tensor) -> NamedTensors:
    yield name, tensor


def permute_qk(c: Any, name: str, tensor: torch.Tensor) -> NamedTensors:
    """Interleave the two halves of each head's rows in q and k of Llama."""
    if ".experts." in name:
        yield from stack_experts(c, name, tensor)
        return
    heads = 0
    if "q_proj" in name:
        heads = c.num_attention_heads
    elif "k_proj" in name:
        heads = c.num_key_value_heads
    if heads:
        tensor = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
    yield name, tensor


def stack_experts(c: Any, name: str, tensor: torch.Tensor) -> NamedTensors:
    """Write one [expert, out, in] tensor for each projection, with gate and up separate."""
    stem = name.removesuffix(".gate_up_proj")
    if stem != name:
        gate, up = tensor.chunk(2, 1)
        yield f"{stem}.gate_proj.weight", gate
        yield f"{stem}.up_proj.weight", up
    else:
        # llama.cpp drops the outer dimension of the one row that gates a shared expert.
        tensor = tensor[0] if name.endswith("shared_expert_gate.weight") else tensor
        yield f"{name}.weight" if name.endswith(".experts.down_proj") else name, tensor


@dataclass(frozen=True)
class ExpertWriter:
    """Writes stacked experts, and the tensors of models with experts that are not named alike.

    transformers names them otherwise in memory than in files, so their names here are final.
    """

    transposed: bool = False  # [expert, in, out] in memory
    interleaved: bool = False  # gate and up by turns
    permuted: bool = False  # q and k as in Llama
    correction_bias: str = "exp_probs_b.bias"

    def __call__(self, c: Any, name: str, tensor: torch.Tensor) -> NamedTensors:
        if ".layers." not in name:
            yield name, tensor
            return
        prefix = f"blk.{name.split('.')[2]}."
        if name.endswith("sinks"):
            yield f"{prefix}attn_sinks.weight", tensor
        elif name.endswith(("e_score_correction_bias", "expert_bias")):
            yield prefix + self.correction_bias, tensor.reshape(-1)
        elif name.endswith("self_attn.g_proj.weight"):
            yield f"{prefix}attn_gate.weight", tensor
        elif name.endswith("block_sparse_moe.router.weight"):
            yield f"{prefix}ffn_gate_inp.weight", tensor
        elif name.endswith("shared_mlp.input_linear.weight"):
            for role, part in zip(("gate", "up"), tensor.chunk(2, 0), strict=True):
                yield f"{prefix}ffn_{role}_shexp.weight", part
        elif ".experts." in name:
            for stem, part in self.split(name.rpartition(".")[2], tensor):
                yield prefix + stem, part
        elif self.permuted:
            yield from permute_qk(c, name, tensor)
        else:
            yield name, tensor

    def split(self, name: str, tensor: torch.Tensor) -> NamedTensors:
        """Yield the parts of a tensor of stacked experts, with the names of GGUF."""
        is_bias = name.endswith("_bias")
        suffix = "bias" if is_bias else "weight"
        if self.transposed and not is_bias:
            tensor = tensor.transpose(1, 2)
        if name.startswith("down_proj"):
            yield f"ffn_down_exps.{suffix}", tensor
            return
        gate, up = tensor.chunk(2, 1)
        if self.interleaved:
            gate = tensor[:, ::2]
            up = tensor[:, 1::2]
        yield f"ffn_gate_exps.{suffix}", gate
        yield f"ffn_up_exps.{suffix}", up


@dataclass(frozen=True)
class RecurrentWriter:
    """Writes recurrent mixers as the converter stores them, and other tensors with `other`."""

    other: TensorChange
    tiled_heads: bool = False  # value heads of a gated delta net: by turns over the key heads
    adds_one: bool = False  # to norms
    keeps_projections: bool = False  # fused by key head, as the first converter did

    def __call__(self, c: Any, name: str, tensor: torch.Tensor) -> NamedTensors:
        if self.adds_one and name.endswith("norm.weight") and ".linear_attn." not in name:
            tensor = tensor + 1
        if not any(mixer in name for mixer in (".linear_attn.", ".mamba.", ".mixer.", ".conv.")):
            yield from self.other(c, name, tensor)
            return
        if ".linear_attn." in name and self.tiled_heads:
            tensor = self.tile_heads(c, name, tensor)
        prefix = f"blk.{name.split('.')[2]}."
        role = name.rpartition(".")[2]
        if role == "A_log":
            values = -torch.exp(tensor)
            yield f"{prefix}ssm_a", values if ".linear_attn." in name else values[:, None]
        elif role == "D":
            yield f"{prefix}ssm_d", tensor[:, None]
        elif role == "dt_bias":
            yield f"{prefix}ssm_dt.bias", tensor
        elif name.endswith(("conv1d.weight", "conv.conv.weight")):
            yield from self.other(c, name, tensor[:, 0])
        elif name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
            groups = first_value(c, "mamba_n_groups", "n_groups")
            yield from self.other(c, name, tensor.unflatten(0, (groups, -1)))
        elif name.endswith("in_proj_qkvz.weight") and not self.keeps_projections:
            yield from self.ungroup(c, prefix, tensor)
        else:
            yield from self.other(c, name, tensor)

    def ungroup(self, c: Any, prefix: str, tensor: torch.Tensor) -> NamedTensors:
        """[key head][q, k, v, gate] becomes all q, all k, all v, and a gate of its own."""
        value_rows = c.linear_value_head_dim * c.linear_num_value_heads // c.linear_num_key_heads
        sizes = [c.linear_key_head_dim] * 2 + [value_rows] * 2
        heads = tensor.unflatten(0, (c.linear_num_key_heads, -1)).split(sizes, 1)
        q, k, v, gate = (part.flatten(0, 1) for part in heads)
        yield f"{prefix}attn_qkv.weight", torch.cat((q, k, v))
        yield f"{prefix}attn_gate.weight", gate

    def tile_heads(self, c: Any, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Take value heads from the key heads by turns, in rows, or in columns of the output."""

        def tile(part: torch.Tensor, dim: int) -> torch.Tensor:
            heads = (c.linear_num_key_heads, c.linear_num_value_heads // c.linear_num_key_heads)
            return part.unflatten(dim, (*heads, -1)).transpose(dim, dim + 1).flatten(dim, dim + 2)

        if name.endswith("out_proj.weight"):
            return tile(tensor, 1)
        if "in_proj_qkv." in name or "conv1d" in name:
            first = 2 * c.linear_num_key_heads * c.linear_key_head_dim
            return torch.cat((tensor[:first], tile(tensor[first:], 0)))
        return tensor if name.endswith("norm.weight") else tile(tensor, 0)


def split_shared_mlp(c: Any, name: str, tensor: torch.Tensor) -> NamedTensors:
    """Write Granite's only MLP, or its shared expert and the experts."""
    prefix = f"blk.{name.split('.')[2]}." if ".layers." in name else ""
    if c.num_local_experts or ".shared_mlp." not in name:
        yield from ExpertWriter(permuted=True)(c, name, tensor)
    elif "input_linear" in name:
        for role, part in zip(("gate", "up"), tensor.chunk(2, 0), strict=True):
            yield f"{prefix}ffn_{role}.weight", part
    else:
        yield f"{prefix}ffn_down.weight", tensor


def rename_nemotron_h(c: Any, name: str, tensor: torch.Tensor) -> NamedTensors:
    prefix = f"blk.{name.split('.')[2]}." if ".layers." in name else ""
    if ".experts." in name:
        yield f"{prefix}ffn_{name.split('.')[-1].split('_')[0]}_exps.weight", tensor
    elif name.endswith("e_score_correction_bias"):
        yield f"{prefix}exp_probs_b.bias", tensor
    else:
        yield name.replace("model.", "backbone.", 1), tensor


def multiply_falcon_h1(c: Any, name: str, tensor: torch.Tensor) -> NamedTensors:
    """Multiply the weights by the factors of their outputs and inputs."""
    attention_in = c.attention_in_multiplier
    factors = {
        "q_proj": attention_in,
        "k_proj": attention_in * c.key_multiplier,
        "v_proj": attention_in,
        "o_proj": c.attention_out_multiplier,
        "gate_proj": c.mlp_multipliers[0],
        "down_proj": c.mlp_multipliers[1],
        "out_proj": c.ssm_out_multiplier,
        "lm_head": c.lm_head_multiplier,
        "embed_tokens": c.embedding_multiplier,
    }
    role = name.removesuffix(".weight").rpartition(".")[2]
    if role == "pre_ff_layernorm":  # the package's name of it has two suffixes
        name = f"blk.{name.split('.')[2]}.ffn_norm.weight"
    if role == "in_proj":
        groups = c.mamba_n_groups * c.mamba_d_state
        sizes = [c.mamba_d_ssm, c.mamba_d_ssm, groups, groups, c.mamba_n_heads]
        parts = zip(tensor.split(sizes), c.ssm_multipliers, strict=True)
        tensor = torch.cat([c.ssm_in_multiplier * factor * part for part, factor in parts])
    yield name, tensor * factors.get(role, 1.0)


def add_one_to_norms(c: Any, name: str, tensor: torch.Tensor) -> NamedTensors:
    yield name, tensor + 1 if name.endswith("norm.weight") else tensor


def ungroup_qkv(c: Any, name: str, tensor: torch.Tensor) -> NamedTensors:
    """[kv head][its q heads, k, v][dim] becomes all q, all k, all v."""
    if "query_key_value" in name:
        dim = c.hidden_size // c.num_attention_heads
        groups = tensor.shape[0] // dim - c.num_attention_heads >> 1
        grouped = tensor.unflatten(0, (groups, -1, dim))
        parts = (grouped[:, :-2], grouped[:, -2:-1], grouped[:, -1:])
        tensor = torch.cat([part.flatten(0, 2) for part in parts])
    yield name, tensor


def rename_bloom_tensors(c: Any, name: str, tensor: torch.Tensor) -> NamedTensors:
    yield from ungroup_qkv(c, name.removeprefix("transformer."), tensor)


def transpose_linears(c: Any, name: str, tensor: torch.Tensor) -> NamedTensors:
    yield (
        name,
        tensor.T if name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")) else tensor,
    )


class StackHeadNorms:
    """Stacks the norms of StableLM's heads into one [heads, dim] matrix."""

    def __init__(self) -> None:
        self.head_norms: list[torch.Tensor] = []

    def __call__(self, c: Any, name: str, tensor: torch.Tensor) -> NamedTensors:
        if ".norms." not in name:
            yield name, tensor
            return
        self.head_norms.append(tensor)
        stem = name.split(".norms.")[0]
        if len(self.head_norms) == (
            c.num_attention_heads if "q_layernorm" in stem else c.num_key_value_heads
        ):
            yield f"{stem}.weight", torch.stack(self.head_norms)
            self.head_norms.clear()


def llama3_rope_factors(c: Any) -> NamedTensors:
    rope = c.rope_parameters
    if rope["rope_type"] != "llama3":
        return
    dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    low = rope["low_freq_factor"]
    high = rope["high_freq_factor"]
    length = rope["original_max_position_embeddings"]
    factors = []
    for i in range(0, dim, 2):
        # rotations within the original context
        rotations = length / (2 * math.pi * rope["rope_theta"] ** (i / dim))
        smooth = min(max((rotations - low) / (high - low), 0.0), 1.0)
        factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    yield "rope_freqs.weight", torch.tensor(factors)


def longrope_factors(c: Any) -> NamedTensors:
    for kind in ("long", "short"):
        if c.rope_parameters.get(f"{kind}_factor"):
            yield f"rope_factors_{kind}.weight", torch.tensor(c.rope_parameters[f"{kind}_factor"])


@dataclass(frozen=True)
class GgufArchitecture:
    """How the converter writes one architecture: metadata and changes of tensors."""

    name: str
    metadata: Callable[[Any], dict[str, Any]]
    change: TensorChange = keep_tensor
    rope_factors: Callable[[Any], NamedTensors] | None = None
    table: str = ""  # the architecture whose names apply, if the package lacks this one


TILED_DELTA_NETS = RecurrentWriter(ExpertWriter(), tiled_heads=True, adds_one=True)
ARCHITECTURES = {
    "llama": GgufArchitecture("llama", llama_metadata, permute_qk, llama3_rope_factors),
    "mistral": GgufArchitecture("llama", llama_metadata, permute_qk),
    "mixtral": GgufArchitecture("llama", llama_metadata, permute_qk),
    "qwen2": GgufArchitecture("qwen2", rms_norm_metadata),
    "qwen2_moe": GgufArchitecture("qwen2moe", moe_metadata, stack_experts),
    "qwen3": GgufArchitecture("qwen3", rms_norm_metadata),
    "qwen3_moe": GgufArchitecture("qwen3moe", moe_metadata, stack_experts),
    "gemma": GgufArchitecture("gemma", rms_norm_metadata, add_one_to_norms),
    "gemma2": GgufArchitecture("gemma2", gemma2_metadata, add_one_to_norms),
    "gemma3_text": GgufArchitecture("gemma3", gemma3_metadata, add_one_to_norms),
    "phi": GgufArchitecture("phi2", phi2_metadata),
    "phi3": GgufArchitecture("phi3", phi3_metadata, rope_factors=longrope_factors),
    "gpt_bigcode": GgufArchitecture("starcoder", starcoder_metadata),
    "starcoder2": GgufArchitecture("starcoder2", starcoder2_metadata),
    "bloom": GgufArchitecture("bloom", bloom_metadata, rename_bloom_tensors),
    "falcon": GgufArchitecture("falcon", falcon_metadata, ungroup_qkv),
    "mpt": GgufArchitecture("mpt", mpt_metadata),
    "gpt2": GgufArchitecture("gpt2", layer_norm_metadata, transpose_linears),
    "gpt_neox": GgufArchitecture("gptneox", gptneox_metadata, ungroup_qkv),
    "stablelm": GgufArchitecture("stablelm", stablelm_metadata, StackHeadNorms()),
    "cohere": GgufArchitecture("command-r", command_r_metadata),
    "cohere2": GgufArchitecture("cohere2", cohere2_metadata),
    "granite": GgufArchitecture("granite", granite_metadata, permute_qk),
    "olmo2": GgufArchitecture("olmo2", olmo2_metadata),
    "olmo3": GgufArchitecture("olmo2", olmo2_metadata),
    "olmoe": GgufArchitecture("olmoe", routed_metadata, ExpertWriter()),
    "glm4": GgufArchitecture("glm4", glm4_metadata),
    "glm4_moe": GgufArchitecture("glm4moe", glm4moe_metadata, ExpertWriter()),
    "solar_open": GgufArchitecture("glm4moe", glm4moe_metadata, ExpertWriter()),
    "ernie4_5": GgufArchitecture("ernie4_5", rms_norm_metadata),
    "ernie4_5_moe": GgufArchitecture("ernie4_5-moe", ernie_moe_metadata, ExpertWriter()),
    "seed_oss": GgufArchitecture("seed_oss", rms_norm_metadata),
    "exaone4": GgufArchitecture("exaone4", exaone4_metadata, rope_factors=llama3_rope_factors),
    "hunyuan_v1_dense": GgufArchitecture("hunyuan-dense", hunyuan_metadata),
    "hunyuan_v1_moe": GgufArchitecture("hunyuan-moe", hunyuan_moe_metadata, ExpertWriter()),
    "hy_v3": GgufArchitecture(
        "hy_v3", hy_v3_metadata, ExpertWriter(correction_bias="exp_probs_b"), table="dots1"
    ),
    "minimax_m2": GgufArchitecture("minimax-m2", minimax_m2_metadata, ExpertWriter()),
    "granitemoe": GgufArchitecture("granitemoe", granitemoe_metadata, ExpertWriter(permuted=True)),
    "granitemoeshared": GgufArchitecture(
        "granitemoe", granitemoe_metadata, ExpertWriter(permuted=True)
    ),
    "granite_swa": GgufArchitecture(
        "granite_swa", granite_swa_metadata, ExpertWriter(permuted=True), table="granite"
    ),
    "apertus": GgufArchitecture("apertus", llama_metadata, rope_factors=llama3_rope_factors),
    "arcee": GgufArchitecture("arcee", llama_metadata, permute_qk),
    "afmoe": GgufArchitecture("afmoe", afmoe_metadata, ExpertWriter()),
    "laguna": GgufArchitecture("laguna", laguna_metadata, ExpertWriter(), table="dots1"),
    "mellum": GgufArchitecture("mellum", mellum_metadata, ExpertWriter(), table="dots1"),
    "dots1": GgufArchitecture("dots1", dots1_metadata, ExpertWriter()),
    "nemotron": GgufArchitecture("nemotron", nemotron_metadata, add_one_to_norms),
    "gpt_oss": GgufArchitecture(
        "gpt-oss", gpt_oss_metadata, ExpertWriter(transposed=True, interleaved=True)
    ),
    "phimoe": GgufArchitecture(
        "phimoe", phimoe_metadata, ExpertWriter(), rope_factors=longrope_factors
    ),
    "cohere2_moe": GgufArchitecture(
        "cohere2moe", cohere2_moe_metadata, ExpertWriter(), table="dots1"
    ),
    "llama4_text": GgufArchitecture("llama4", llama4_metadata, ExpertWriter(transposed=True)),
    "ministral3": GgufArchitecture("mistral3", mistral3_metadata, permute_qk),
    "mistral3": GgufArchitecture("mistral3", mistral3_metadata, permute_qk),
    "qwen2_vl": GgufArchitecture("qwen2vl", vision_metadata),
    "qwen3_vl": GgufArchitecture("qwen3vl", vision_metadata),
    "qwen3_vl_moe": GgufArchitecture("qwen3vlmoe", vision_moe_metadata, ExpertWriter()),
    "smollm3": GgufArchitecture("smollm3", llama_metadata, permute_qk),
    "qwen3_5": GgufArchitecture("qwen35", delta_net_metadata, TILED_DELTA_NETS),
    "qwen3_5_text": GgufArchitecture("qwen35", delta_net_metadata, TILED_DELTA_NETS),
    "qwen3_5_moe": GgufArchitecture("qwen35moe", delta_net_metadata, TILED_DELTA_NETS),
    "qwen3_next": GgufArchitecture(
        "qwen3next", delta_net_metadata, RecurrentWriter(ExpertWriter(), adds_one=True)
    ),
    "lfm2": GgufArchitecture("lfm2", lfm2_metadata, RecurrentWriter(keep_tensor)),
    "lfm2_moe": GgufArchitecture("lfm2moe", lfm2_metadata, RecurrentWriter(ExpertWriter())),
    "granitemoehybrid": GgufArchitecture(
        "granitehybrid", granite_hybrid_metadata, RecurrentWriter(split_shared_mlp)
    ),
    "falcon_h1": GgufArchitecture(
        "falcon-h1", falcon_h1_metadata, RecurrentWriter(multiply_falcon_h1)
    ),
    "nemotron_h": GgufArchitecture(
        "nemotron_h_moe", nemotron_h_metadata, RecurrentWriter(rename_nemotron_h)
    ),
}
FIRST_QWEN3_NEXT = GgufArchitecture(
    "qwen3next",
    delta_net_metadata,
    RecurrentWriter(ExpertWriter(), adds_one=True, keeps_projections=True),
)
DENSE_NEMOTRON_H = GgufArchitecture(
    "nemotron_h", nemotron_h_metadata, RecurrentWriter(rename_nemotron_h)
)
