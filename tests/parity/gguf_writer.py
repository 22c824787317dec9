"""A transformers model written as GGUF, the way llama.cpp's converter writes it.

Names come from the gguf package's own tables; which metadata the converter states, and what it does to a tensor beyond
renaming it, is spelled out here, one architecture a line. Knows nothing of how Bloomery reads the result.
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

Tensors = Iterator[tuple[str, torch.Tensor]]  # by the original's names
Change = Callable[[Any, str, torch.Tensor], Tensors]  # of one tensor, given the config


def write(
    model: Any, path: Path, kind: Kind = Kind.F32, extra: dict[str, Any] | None = None
) -> None:
    """Matrices in `kind` where their rows fill its blocks, everything else in float32. `extra` metadata wins."""
    c = model.config
    arch = ARCHITECTURES[c.model_type]
    writer = gguf.GGUFWriter(path, arch.name)
    for key, value in (common(c) | arch.metadata(c) | (extra or {})).items():
        put(writer, f"{arch.name}.{key}", value)
    writer.add_token_list([f"token {i}" for i in range(c.vocab_size)])
    for id, role in enumerate(("padding", "bos", "eos")):
        writer.add_uint32(f"tokenizer.ggml.{role}_token_id", id)
    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == arch.name)
    names = gguf.get_tensor_name_map(number, c.num_hidden_layers)
    for name, tensor in tensors(model, arch):
        stem, _, suffix = name.rpartition(".")
        target = f"{stem if stem.startswith('rope_') else names.mapping[stem][1]}.{suffix}"
        data = tensor.detach().float().contiguous().numpy()
        if (
            kind != Kind.F32
            and data.ndim > 1
            and data.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0
            and "norm" not in target
        ):
            writer.add_tensor(target, blocks(data, kind), raw_dtype=kind)
        else:
            writer.add_tensor(target, data.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# Of the types that the package cannot make: where a block keeps its scale, and, if it has one, its offset's; and how
# much larger that must be for values to lie around zero.
SCALES = {
    Kind.Q2_K: (80, 82, 1.5),
    Kind.Q3_K: (108, None, 0),
    Kind.Q4_K: (0, 2, 7.5),
    Kind.Q5_K: (0, 2, 15.5),
    Kind.Q6_K: (208, None, 0),
    Kind.IQ4_NL: (0, None, 0),
    Kind.IQ4_XS: (0, None, 0),
}


def blocks(data: np.ndarray, kind: Kind) -> np.ndarray:
    """As the package rounds them; where it cannot, any bits with sane scales in place of what the data was."""
    if kind not in SCALES:
        return gguf.quants.quantize(data, kind)
    values, size = gguf.GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(data.view(np.uint32).ravel()[:4])
    made = random.integers(0, 256, (data.size // values, size), dtype=np.uint8)
    scale, offset, ratio = SCALES[kind]
    each = random.uniform(1e-3, 2e-3, (len(made), 1))
    if kind.name.startswith("IQ4"):  # whose levels do not lie around zero
        each *= random.choice([-1, 1], each.shape)
    made[:, scale : scale + 2] = each.astype(np.float16).view(np.uint8)
    if offset is not None:
        made[:, offset : offset + 2] = (ratio * each).astype(np.float16).view(np.uint8)
    return made.reshape(*data.shape[:-1], -1)


def put(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if value is None:
        return
    by_type = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
    }
    by_type.get(type(value), writer.add_array)(key, value)


# ---- metadata --------------------------------------------------------------------------------------


def common(c: Any) -> dict[str, Any]:
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


def rms(c: Any) -> dict[str, Any]:
    """What most of Llama's descendants state."""
    head = getattr(c, "head_dim", None)
    return {
        "attention.head_count_kv": c.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": c.rms_norm_eps,
        "attention.key_length": head,
        "attention.value_length": head,
        **scaling(c.rope_parameters),
    }


def scaling(rope: dict[str, Any]) -> dict[str, Any]:
    rope = rope.get("full_attention", rope)
    stated: dict[str, Any] = {"rope.freq_base": float(rope["rope_theta"])}
    if rope["rope_type"] in ("linear", "yarn"):
        stated |= {
            "rope.scaling.type": rope["rope_type"],
            "rope.scaling.factor": float(rope["factor"]),
        }
    if rope["rope_type"] == "yarn":
        stated |= {
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
            "rope.scaling.yarn_attn_factor": rope.get("attention_factor"),
            "rope.scaling.yarn_beta_fast": rope.get("beta_fast"),
            "rope.scaling.yarn_beta_slow": rope.get("beta_slow"),
        }
    return stated


def llama(c: Any) -> dict[str, Any]:
    experts = getattr(c, "num_local_experts", None)
    used = c.num_experts_per_tok if experts else None
    dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    return rms(c) | {
        "rope.dimension_count": dim,
        "expert_count": experts,
        "expert_used_count": used,
    }


def sparse(c: Any) -> dict[str, Any]:
    return rms(c) | {
        "expert_count": c.num_experts,
        "expert_used_count": c.num_experts_per_tok,
        "expert_feed_forward_length": c.moe_intermediate_size,
        "expert_shared_feed_forward_length": getattr(c, "shared_expert_intermediate_size", None),
    }


def gemma2(c: Any) -> dict[str, Any]:
    return rms(c) | {
        "attn_logit_softcapping": c.attn_logit_softcapping,
        "final_logit_softcapping": c.final_logit_softcapping,
        "attention.sliding_window": c.sliding_window,
    }


def gemma3(c: Any) -> dict[str, Any]:
    local = c.rope_parameters["sliding_attention"]["rope_theta"]
    return rms(c) | {
        "attention.sliding_window": c.sliding_window,
        "rope.freq_base_swa": float(local),
    }


def phi3(c: Any) -> dict[str, Any]:
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


def layer_norm(c: Any) -> dict[str, Any]:
    words = ("layer_norm_epsilon", "layer_norm_eps", "norm_epsilon")
    return {
        "attention.layer_norm_epsilon": next(getattr(c, word) for word in words if hasattr(c, word))
    }


def partial(c: Any, default: float = 1.0) -> dict[str, Any]:
    fraction = c.rope_parameters.get("partial_rotary_factor", default)
    return layer_norm(c) | {
        "rope.dimension_count": int(fraction * (c.hidden_size // c.num_attention_heads))
    }


def starcoder(c: Any) -> dict[str, Any]:
    return layer_norm(c) | {"attention.head_count_kv": 1}


def starcoder2(c: Any) -> dict[str, Any]:
    return layer_norm(c) | {
        "attention.head_count_kv": c.num_key_value_heads,
        **scaling(c.rope_parameters),
    }


def bloom(c: Any) -> dict[str, Any]:
    return layer_norm(c) | {"attention.head_count_kv": c.num_attention_heads}


def falcon(c: Any) -> dict[str, Any]:
    heads = c.num_kv_heads if c.new_decoder_architecture else 1
    return layer_norm(c) | {
        "attention.head_count_kv": heads,
        "tensor_data_layout": "jploski",
        "context_length": 2048,
    }


def mpt(c: Any) -> dict[str, Any]:
    a = c.attn_config
    clip = None if a.clip_qkv is None else float(a.clip_qkv)
    bias = float(a.alibi_bias_max if a.alibi else 0)
    return {
        "context_length": c.max_seq_len,
        "attention.layer_norm_epsilon": 1e-5,
        "attention.clamp_kqv": clip,
        "attention.max_alibi_bias": bias,
    }


def gptneox(c: Any) -> dict[str, Any]:
    return partial(c, 0.25) | {"use_parallel_residual": c.use_parallel_residual}


def stablelm(c: Any) -> dict[str, Any]:
    kv = {
        "attention.head_count_kv": c.num_key_value_heads,
        "use_parallel_residual": c.use_parallel_residual,
    }
    return partial(c, 0.25) | kv


def phi2(c: Any) -> dict[str, Any]:
    return partial(c, 0.5) | {"attention.head_count_kv": c.num_attention_heads}


def command_r(c: Any) -> dict[str, Any]:
    stated = {
        "attention.head_count_kv": c.num_key_value_heads,
        "logit_scale": c.logit_scale,
        **scaling(c.rope_parameters),
    }
    return layer_norm(c) | stated | {"rope.scaling.type": "none"}


def cohere2(c: Any) -> dict[str, Any]:
    return command_r(c) | {"attention.sliding_window": c.sliding_window}


def granite(c: Any) -> dict[str, Any]:
    return llama(c) | {
        "attention.scale": c.attention_multiplier,
        "embedding_scale": c.embedding_multiplier,
        "residual_scale": c.residual_multiplier,
        "logit_scale": c.logits_scaling,
    }


# ---- tensors ---------------------------------------------------------------------------------------


def tensors(model: Any, arch: Architecture) -> Tensors:
    if arch.divisors is not None:
        yield from arch.divisors(model.config)
    tied = model.config.tie_word_embeddings
    for name, tensor in model.state_dict().items():
        if not (tied and name in ("lm_head.weight", "embed_out.weight")):
            yield from arch.change(model.config, name, tensor)


def same(c: Any, name: str, tensor: torch.Tensor) -> Tensors:
    yield name, tensor


def permuted(c: Any, name: str, tensor: torch.Tensor) -> Tensors:
    """Llama's q and k: within a head, row i of the first half and row i of the second become neighbours."""
    if ".experts." in name:
        yield from stacked(c, name, tensor)
        return
    heads = (
        c.num_attention_heads
        if "q_proj" in name
        else c.num_key_value_heads
        if "k_proj" in name
        else 0
    )
    if heads:
        tensor = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
    yield name, tensor


def stacked(c: Any, name: str, tensor: torch.Tensor) -> Tensors:
    """Experts are one [expert, out, in] tensor a projection; gate and up apart."""
    stem = name.removesuffix(".gate_up_proj")
    if stem != name:
        gate, up = tensor.chunk(2, 1)
        yield f"{stem}.gate_proj.weight", gate
        yield f"{stem}.up_proj.weight", up
    else:
        # llama.cpp's quantiser drops the outer dimension of the one row that gates a shared expert
        tensor = tensor[0] if name.endswith("shared_expert_gate.weight") else tensor
        yield f"{name}.weight" if name.endswith(".experts.down_proj") else name, tensor


def one_added(c: Any, name: str, tensor: torch.Tensor) -> Tensors:
    yield name, tensor + 1 if name.endswith("norm.weight") else tensor


def ungrouped(c: Any, name: str, tensor: torch.Tensor) -> Tensors:
    """[kv head][its q heads, k, v][dim] becomes all q, all k, all v."""
    if "query_key_value" in name:
        dim = c.hidden_size // c.num_attention_heads
        groups = tensor.shape[0] // dim - c.num_attention_heads >> 1
        grouped = tensor.unflatten(0, (groups, -1, dim))
        parts = (grouped[:, :-2], grouped[:, -2:-1], grouped[:, -1:])
        tensor = torch.cat([part.flatten(0, 2) for part in parts])
    yield name, tensor


def bloom_tensors(c: Any, name: str, tensor: torch.Tensor) -> Tensors:
    yield from ungrouped(c, name.removeprefix("transformer."), tensor)


def transposed(c: Any, name: str, tensor: torch.Tensor) -> Tensors:
    yield (
        name,
        tensor.T if name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")) else tensor,
    )


class NormsTogether:
    """StableLM's norms of each head: one [heads, dim] matrix of them all."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def __call__(self, c: Any, name: str, tensor: torch.Tensor) -> Tensors:
        if ".norms." not in name:
            yield name, tensor
            return
        self.seen.append(tensor)
        stem = name.split(".norms.")[0]
        if len(self.seen) == (
            c.num_attention_heads if "q_layernorm" in stem else c.num_key_value_heads
        ):
            yield f"{stem}.weight", torch.stack(self.seen)
            self.seen.clear()


def llama3_divisors(c: Any) -> Tensors:
    rope = c.rope_parameters
    if rope["rope_type"] != "llama3":
        return
    dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    low = rope["low_freq_factor"]
    high = rope["high_freq_factor"]
    length = rope["original_max_position_embeddings"]
    divisors = []
    for i in range(0, dim, 2):
        waves = length / (
            2 * math.pi * rope["rope_theta"] ** (i / dim)
        )  # turns within the original context
        smooth = min(max((waves - low) / (high - low), 0.0), 1.0)
        divisors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    yield "rope_freqs.weight", torch.tensor(divisors)


def longrope_divisors(c: Any) -> Tensors:
    for kind in ("long", "short"):
        if c.rope_parameters.get(f"{kind}_factor"):
            yield f"rope_factors_{kind}.weight", torch.tensor(c.rope_parameters[f"{kind}_factor"])


@dataclass(frozen=True)
class Architecture:
    name: str
    metadata: Callable[[Any], dict[str, Any]]
    change: Change = same
    divisors: Callable[[Any], Tensors] | None = None


ARCHITECTURES = {
    "llama": Architecture("llama", llama, permuted, llama3_divisors),
    "mistral": Architecture("llama", llama, permuted),
    "mixtral": Architecture("llama", llama, permuted),
    "qwen2": Architecture("qwen2", rms),
    "qwen2_moe": Architecture("qwen2moe", sparse, stacked),
    "qwen3": Architecture("qwen3", rms),
    "qwen3_moe": Architecture("qwen3moe", sparse, stacked),
    "gemma": Architecture("gemma", rms, one_added),
    "gemma2": Architecture("gemma2", gemma2, one_added),
    "gemma3_text": Architecture("gemma3", gemma3, one_added),
    "phi": Architecture("phi2", phi2),
    "phi3": Architecture("phi3", phi3, divisors=longrope_divisors),
    "gpt_bigcode": Architecture("starcoder", starcoder),
    "starcoder2": Architecture("starcoder2", starcoder2),
    "bloom": Architecture("bloom", bloom, bloom_tensors),
    "falcon": Architecture("falcon", falcon, ungrouped),
    "mpt": Architecture("mpt", mpt),
    "gpt2": Architecture("gpt2", layer_norm, transposed),
    "gpt_neox": Architecture("gptneox", gptneox, ungrouped),
    "stablelm": Architecture("stablelm", stablelm, NormsTogether()),
    "cohere": Architecture("command-r", command_r),
    "cohere2": Architecture("cohere2", cohere2),
    "granite": Architecture("granite", granite, permuted),
    "olmo2": Architecture("olmo2", rms),
    "smollm3": Architecture("smollm3", llama, permuted),
}
