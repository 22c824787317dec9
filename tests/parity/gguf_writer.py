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
    model: Any, path: Path, kind: Kind = Kind.F32, extra: dict[str, Any] | None = None
) -> None:
    """Write matrices whose rows fill blocks of `kind` in that type, all others in float32.

    `extra` metadata overrides the converter's.
    """
    c = model.config
    arch = ARCHITECTURES[c.model_type]
    writer = gguf.GGUFWriter(path, arch.name)
    for key, value in (common_metadata(c) | arch.metadata(c) | (extra or {})).items():
        add_metadata(writer, f"{arch.name}.{key}", value)
    writer.add_token_list([f"token {i}" for i in range(c.vocab_size)])
    for id, role in enumerate(("padding", "bos", "eos")):
        writer.add_uint32(f"tokenizer.ggml.{role}_token_id", id)
    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == arch.name)
    names = gguf.get_tensor_name_map(number, c.num_hidden_layers)
    for name, tensor in convert_tensors(model, arch):
        stem, _, suffix = name.rpartition(".")
        target = f"{stem if stem.startswith('rope_') else names.mapping[stem][1]}.{suffix}"
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
    original = rope.get("original_max_position_embeddings") or c.original_max_position_embeddings
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


def convert_tensors(model: Any, arch: GgufArchitecture) -> NamedTensors:
    """Yield all tensors of the model as the converter writes them."""
    if arch.rope_factors is not None:
        yield from arch.rope_factors(model.config)
    tied = model.config.tie_word_embeddings
    for name, tensor in model.state_dict().items():
        if not (tied and name in ("lm_head.weight", "embed_out.weight")):
            yield from arch.change(model.config, name, tensor)


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
    "olmo2": GgufArchitecture("olmo2", rms_norm_metadata),
    "smollm3": GgufArchitecture("smollm3", llama_metadata, permute_qk),
}
