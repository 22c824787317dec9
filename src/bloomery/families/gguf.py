"""Describes the model of a GGUF file: metadata becomes a ModelSpec and TensorNames.

The keys of GGUF are translated into those of config.json, and the model family does the rest. Then
the spec is adapted to what converters store differently: rows of q and k permuted for interleaved
rope, norm weights with the 1 already added, fused matrices ungrouped. The names and shapes of the
tensors decide what the metadata does not state (biases, a tied head, a second norm). Nothing here
reads a file: the caller passes metadata, shapes, and a function that reads a small tensor.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from bloomery import families
from bloomery.errors import UnsupportedModel
from bloomery.families import ModelDescription
from bloomery.families.gguf_architectures import (
    ATTENTION_ARCHITECTURES,
    LAYER_NORM_EPSILON,
    RMS_EPSILON,
    GgufFamily,
    HfConfig,
    TensorShapes,
    read_head_dim,
    read_num_kv_heads,
)
from bloomery.families.gguf_recurrent import (
    RECURRENT_ARCHITECTURES,
    adapt_recurrent,
    add_recurrent_names,
    has_recurrent,
)
from bloomery.families.reader import ConfigReader
from bloomery.spec import (
    AttentionSpec,
    FusedTensor,
    LayerSpec,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    NormSpec,
    RopeSpec,
    SplitTensors,
    TensorNames,
)

VectorReader = Callable[[str], Sequence[float]]  # returns the values of a small tensor

ARCHITECTURES: Mapping[str, GgufFamily] = {**ATTENTION_ARCHITECTURES, **RECURRENT_ARCHITECTURES}
# Keys that may have one value per layer.
PER_LAYER_KEYS = ("feed_forward_length", "attention.head_count", "attention.head_count_kv")
# Keys whose values the tensors show: which layers have experts, and how wide the shared expert is.
IMPLIED_KEYS = ("leading_dense_block_count", "expert_shared_count")
REQUIRED_SIZES = (
    "embedding_length",
    "block_count",
    "feed_forward_length",
    "attention.head_count",
    "context_length",
)

# A GGUF key, without the architecture's name, and the keys of config.json with the same meaning.
HF_KEYS: Mapping[str, tuple[str, ...]] = {
    "embedding_length": ("hidden_size",),
    "block_count": ("num_hidden_layers",),
    "feed_forward_length": ("intermediate_size",),
    "context_length": ("max_position_embeddings", "seq_length"),
    "attention.head_count": ("num_attention_heads",),
    "attention.head_count_kv": ("num_key_value_heads", "num_kv_heads"),
    RMS_EPSILON: ("rms_norm_eps",),
    LAYER_NORM_EPSILON: ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"),
    "rope.freq_base": ("rope_theta",),
    "rope.freq_base_swa": ("rope_local_base_freq",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "embedding_scale": ("embedding_multiplier",),
    "residual_scale": ("residual_multiplier",),
    "logit_scale": ("logit_scale", "logits_scaling"),
    "use_parallel_residual": ("use_parallel_residual",),
    "expert_count": ("num_experts",),
    "expert_used_count": ("num_experts_per_tok", "moe_topk"),
    "expert_weights_norm": ("norm_topk_prob", "route_norm"),
    "expert_weights_scale": (
        "routed_scaling_factor",
        "router_scaling_factor",
        "route_scale",
        "moe_routed_scaling_factor",
    ),
    "expert_group_count": ("n_group",),
    "expert_group_used_count": ("topk_group",),
    "interleave_moe_layer_step": ("moe_layer_interval", "interleave_moe_layer_step"),
}
SOFTMAX = 1  # values of expert_gating_func
SIGMOID = 2
GATING_FUNCTIONS = {"softmax": SOFTMAX, "sigmoid": SIGMOID}
# GGUF key, key of config.json, and the tensor whose last dimension is that size.
EXPERT_SIZES = (
    ("expert_feed_forward_length", "moe_intermediate_size", "ffn_down_exps"),
    ("expert_shared_feed_forward_length", "shared_expert_intermediate_size", "ffn_down_shexp"),
)

NAMES = TensorNames(
    embed="token_embd",
    layer="blk.{i}.",
    final_norm="output_norm",
    head="output",
    attn_qkv=SplitTensors(("attn_q", "attn_k", "attn_v")),
    attn_out="attn_output",
    mlp_up=SplitTensors(("ffn_gate", "ffn_up")),
    mlp_down="ffn_down",
    extra={
        "positions": "position_embd",
        "embed_norm": "token_embd_norm",
        "attn_norm": "attn_norm",
        "attn_post_norm": "post_attention_norm",
        "mlp_norm": "ffn_norm",
        "mlp_post_norm": "post_ffw_norm",
        "q_norm": "attn_q_norm",
        "k_norm": "attn_k_norm",
        "router": "ffn_gate_inp",
        "shared_gate": "ffn_gate_inp_shexp",
        "sinks": "attn_sinks.weight",
        "attn_gate": "attn_gate",
        "correction_bias": "exp_probs_b.bias",
        "latent_down": "ffn_latent_down",
        "latent_up": "ffn_latent_up",
    },
    expert_up=SplitTensors(("ffn_gate_exps", "ffn_up_exps")),
    expert_down="ffn_down_exps",
    stacked_experts=True,
    shared_up=SplitTensors(("ffn_gate_shexp", "ffn_up_shexp")),
    shared_down="ffn_down_shexp",
    ignored=("rope_freqs.weight", "rope_factors_*.weight"),  # read with the metadata
)
KNOWN_TENSOR = re.compile(
    r"((token_embd|output)(_norm)?|position_embd|rope_(freqs|factors_long|factors_short)"
    r"|blk\.\d+\.("
    r"attn_(norm|norm_2|q|k|v|qkv|q_norm|k_norm|output|rot_embd|sinks|gate)"
    r"|(post_attention|ffn|post_ffw)_norm|exp_probs_b"
    r"|ssm_(in|out|conv1d|norm|dt|ba|beta|alpha)|shortconv\.(in_proj|out_proj|conv)"
    r"|ffn_(gate|up|gate_up|down)(_exps|_shexp)?|ffn_gate_inp(_shexp)?"
    r"|ffn_latent_(down|up)))\.(weight|bias)"
    r"|blk\.\d+\.(exp_probs_b|ssm_[ad])"
)
VISION = ("v.*", "mm.*")  # names of the vision part, where one file has both
VISION_TENSOR = re.compile(r"(v|mm)\.")
LAYER_NORMS = ("attn_norm", "attn_post_norm", "mlp_norm", "mlp_post_norm")


# ---- from metadata to config.json --------------------------------------------------------------


def describe_gguf(
    metadata: Mapping[str, Any], shapes: TensorShapes, read_vector: VectorReader
) -> ModelDescription:
    """Describe the model of a GGUF file; an unknown value raises an error that names it."""
    try:
        return _describe(metadata, shapes, read_vector)
    except UnsupportedModel as error:
        # The family that reads the translated config.json does not know where it came from.
        raise UnsupportedModel(str(error).replace("config.json", "GGUF file", 1)) from None


def _describe(
    metadata: Mapping[str, Any], shapes: TensorShapes, read_vector: VectorReader
) -> ModelDescription:
    architecture = ConfigReader(metadata).text("general.architecture")
    family = ARCHITECTURES.get(architecture)
    if family is None:
        raise UnsupportedModel(
            f"config.json: general.architecture {architecture!r} is not one Bloomery knows. "
            f"Known: {', '.join(ARCHITECTURES)}"
        )
    prefix = f"{architecture}."
    values = {
        key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)
    }
    merged = {
        key: merge_equal_values(value) if key in PER_LAYER_KEYS else value
        for key, value in values.items()
    }
    for key in ("feed_forward_length", "attention.head_count_kv"):
        if isinstance(merged.get(key), list) and family.recurrent is not None:
            # Layers without attention, or without an MLP, have 0.
            merged[key] = merge_equal_values([value for value in merged[key] if value])
    head_count = merged.get("attention.head_count")
    if isinstance(head_count, list) and head_count:
        merged["attention.head_counts"] = head_count
        merged["attention.head_count"] = head_count[0]
    shapes, skipped = skip_mtp_layers(merged, shapes, prefix)
    if family.vision:
        shapes = {name: shape for name, shape in shapes.items() if not VISION_TENSOR.match(name)}
    config = ConfigReader(merged, prefix)
    hf_config = build_hf_config(config, family, shapes, read_vector)
    description = families.describe_config(hf_config)
    check_description(config, hf_config, description.model, shapes)
    names = build_names(description.model, family, shapes)
    names = replace(
        names, ignored=(*names.ignored, *skipped), vision=VISION if family.vision else ()
    )
    scale = config.optional_number("attention.scale")
    model = adapt_to_converter(description.model, names, shapes, family, scale)
    model = add_xielu_alphas(model, metadata)
    # A key had no effect if the family read none of its translations. Sizes are left out: a family
    # that does not read them implies them, and loading checks them against the tensors.
    ignored = {
        key
        for key, hf_keys in HF_KEYS.items()
        if key not in PER_LAYER_KEYS and set(hf_keys) <= set(description.unread)
    }
    implied = {"vocab_size", "nextn_predict_layers", *PER_LAYER_KEYS, *IMPLIED_KEYS}
    unread = (values.keys() - config.names_read - implied) | (values.keys() & ignored)
    return ModelDescription(
        model,
        names,
        tuple(sorted(prefix + key for key in unread)),
        module_names=description.names,
        permuted=family.permuted,
    )


def skip_mtp_layers(
    values: dict[str, Any], shapes: TensorShapes, path: str
) -> tuple[TensorShapes, tuple[str, ...]]:
    """Leave out the last layers if they are for multi-token prediction; changes `values`.

    Returns the shapes of the other tensors, and patterns of the names that were left out.
    """
    reader = ConfigReader(values, path)
    num_skipped = reader.integer("nextn_predict_layers", 0)
    if not num_skipped:
        return shapes, ()
    num_layers = reader.size("block_count") - num_skipped
    if num_layers < 1:
        raise reader.error("nextn_predict_layers", f"is {num_skipped}, and no layer is left")
    values["block_count"] = num_layers
    prefixes = tuple(f"blk.{num_layers + i}." for i in range(min(num_skipped, 100)))
    others = {name: shape for name, shape in shapes.items() if not name.startswith(prefixes)}
    return others, tuple(f"{prefix}*" for prefix in prefixes)


def merge_equal_values(value: Any) -> Any:
    """Return the single value of a list that has the same value for every layer."""
    if isinstance(value, list) and value and all(item == value[0] for item in value):
        return value[0]
    return value


def check_description(
    config: ConfigReader, hf_config: HfConfig, model: ModelSpec, shapes: TensorShapes
) -> None:
    """Refuse tensors and settings that the family ignores although they change every token."""
    for name in shapes:
        if not KNOWN_TENSOR.fullmatch(name):
            raise UnsupportedModel(
                f"config.json: tensor {name} is not part of any model Bloomery knows"
            )
    num_layers = len(model.layers)
    num_kv_heads = hf_config["num_key_value_heads"]
    head_counts = config.list_of("attention.head_counts", int)
    head_counts = head_counts or (hf_config["num_attention_heads"],) * num_layers
    if len(head_counts) != num_layers:
        raise config.error("attention.head_count", f"names {len(head_counts)} of {num_layers}")
    layer_types = hf_config["layer_types"] or ["full_attention"] * num_layers
    for i, layer in enumerate(model.layers):
        prefix = f"blk.{i}."
        check_experts(config, layer, prefix, shapes)
        if has_recurrent(prefix, shapes) != (layer.recurrent is not None):
            raise config.error("block_count", f"layer {i} is recurrent in the file or in the model")
        attention = layer.attention
        if attention is None:
            continue
        if attention.num_heads != head_counts[i]:
            raise config.error("attention.head_count", f"{head_counts} is not supported here")
        if (attention.window is None) != (layer_types[i] == "full_attention"):
            raise config.error("attention.sliding_window", "is not supported in this architecture")
        if attention.num_kv_heads != num_kv_heads:
            raise config.error("attention.head_count_kv", f"{num_kv_heads} is not supported here")
        unused = {
            "attn_q_norm": attention.qk_norm is None,
            "attn_sinks": not attention.sinks,
            "attn_gate": attention.gate is None,
        }
        for stem, is_unused in unused.items():
            check_unused(shapes, f"{prefix}{stem}.weight", is_unused)


def check_unused(shapes: TensorShapes, tensor: str, is_unused: bool) -> None:
    if is_unused and tensor in shapes:
        raise UnsupportedModel(f"config.json: tensor {tensor} is not part of this architecture")


def check_experts(
    config: ConfigReader, layer: LayerSpec, prefix: str, shapes: TensorShapes
) -> None:
    """Refuse experts that the family would place or weight otherwise than the file states."""
    moe = layer.mlp
    has_bias = isinstance(moe, MoeSpec) and moe.router.correction_bias
    for suffix in ("", ".bias"):
        check_unused(shapes, f"{prefix}exp_probs_b{suffix}", not has_bias)
    if isinstance(moe, MoeSpec) != (f"{prefix}ffn_gate_inp.weight" in shapes):
        raise config.error("expert_count", "experts are in other layers than this family has them")
    if not isinstance(moe, MoeSpec):
        return
    router = moe.router
    if router.score in GATING_FUNCTIONS:
        config.require("expert_gating_func", GATING_FUNCTIONS[router.score])
    scale = config.number("expert_weights_scale", 0.0)  # 0 stands for none, as in llama.cpp
    if scale and abs(router.scale - scale) > 1e-6 * scale:
        raise config.error("expert_weights_scale", f"{scale} is not supported in this architecture")
    if not router.score_chosen_only:
        config.require("expert_weights_norm", router.normalize)


def build_hf_config(
    config: ConfigReader, family: GgufFamily, shapes: TensorShapes, read_vector: VectorReader
) -> HfConfig:
    """Translate the metadata into a config.json of the model family."""
    if len(shapes.get("token_embd.weight", ())) != 2:
        raise UnsupportedModel(
            "config.json: no matrix token_embd.weight: a file with a vocabulary and no model?"
        )
    for key in REQUIRED_SIZES:
        if key != "feed_forward_length" or not config.integer("expert_count", 0):
            config.size(key)
    config.number(family.epsilon_key)
    head_dim = read_head_dim(config)
    config.require("attention.causal", True)
    config.require("attention.value_length", head_dim)
    hf_config: HfConfig = {
        "model_type": family.model_type,
        "num_key_value_heads": read_num_kv_heads(config),
        "rope_theta": 10000.0,
    }
    for key, hf_keys in HF_KEYS.items():
        if config.values.get(key) is not None:
            hf_config.update(dict.fromkeys(hf_keys, config.get(key)))
    has_qk_norm = "blk.0.attn_q_norm.weight" in shapes
    return {
        **hf_config,
        "vocab_size": shapes["token_embd.weight"][0],
        "head_dim": head_dim,
        "tie_word_embeddings": "output.weight" not in shapes,
        "use_qk_norm": has_qk_norm,
        "qk_layernorm": has_qk_norm,
        **read_windows(config, family, shapes),
        **read_rope_parameters(config, family, shapes, read_vector),
        **read_experts(config, shapes),
        **family.read_keys(config, shapes),
    }


def read_windows(config: ConfigReader, family: GgufFamily, shapes: TensorShapes) -> HfConfig:
    """Return the window and the type of each layer, from a list or from a period."""
    num_layers = len({name.split(".")[1] for name in shapes if name.startswith("blk.")})
    block_count = config.size("block_count")
    if num_layers != block_count:
        raise config.error(
            "block_count", f"is {block_count}, and there are tensors of {num_layers} layers"
        )
    window = config.integer("attention.sliding_window", family.default_window)
    pattern = config.get("attention.sliding_window_pattern", family.window_period)
    if isinstance(pattern, bool) or not isinstance(pattern, int | list):
        raise config.error(
            "attention.sliding_window_pattern", f"must be a number or a list, not {pattern!r}"
        )
    if isinstance(pattern, list):
        has_window = pattern[:num_layers]
        if len(has_window) != num_layers:
            raise config.error(
                "attention.sliding_window_pattern",
                f"names {len(has_window)} layers of {num_layers}",
            )
    else:
        full = 0 if family.full_attention_first else pattern - 1
        has_window = [not pattern or i % pattern != full for i in range(num_layers)]
    layer_types = [
        "sliding_attention" if window and windowed else "full_attention" for windowed in has_window
    ]
    return {"sliding_window": window or None, "layer_types": layer_types}


def read_rope_parameters(
    config: ConfigReader, family: GgufFamily, shapes: TensorShapes, read_vector: VectorReader
) -> HfConfig:
    head_dim = read_head_dim(config)
    rope_dim = config.size("rope.dimension_count", head_dim)
    fraction = read_fraction(rope_dim, head_dim)
    sections = config.get("rope.dimension_sections")
    if sections is not None and not family.vision:
        raise config.error("rope.dimension_sections", "is not supported in this architecture")
    original = config.size("rope.scaling.original_context_length", config.size("context_length"))
    scaling = read_rope_scaling(config, rope_dim // 2, shapes, read_vector)
    config.get("rope.scaling.finetuned")  # marks the key as read
    unknown = sorted(
        key
        for key in config.values
        if key.startswith("rope.scaling.") and key not in config.names_read
    )
    if unknown:
        raise config.error(unknown[0], "is not known, and it would change every angle")
    if scaling:
        scaling["original_max_position_embeddings"] = original
        scaling.update(family.rope_keys)
    if family.rope_by_layer_type and config.integer("attention.sliding_window", 0):
        theta = config.number("rope.freq_base", 10000.0)
        local_dim = config.size("rope.dimension_count_swa", rope_dim)
        return {
            "rope_parameters": {
                "full_attention": {
                    "rope_theta": theta,
                    "partial_rotary_factor": fraction,
                    **scaling,
                },
                "sliding_attention": {
                    "rope_theta": config.number("rope.freq_base_swa", theta),
                    "partial_rotary_factor": read_fraction(local_dim, head_dim),
                },
            }
        }
    return {
        "partial_rotary_factor": fraction,
        "original_max_position_embeddings": original,
        "rope_scaling": scaling or None,
        "rope_parameters": None,  # not the family's default
    }


def read_fraction(rope_dim: int, head_dim: int) -> float:
    """Return the part of a head that rotates."""
    if rope_dim == head_dim:
        return 1.0
    # Families round head_dim * fraction down; the quarter keeps rounding errors out of it.
    return (rope_dim + 0.25) / head_dim


def read_rope_scaling(
    config: ConfigReader, num_frequencies: int, shapes: TensorShapes, read_vector: VectorReader
) -> HfConfig:
    """Return the scaling of rope, empty if there is none.

    Converters store the scaling of Llama 3 like longrope, as one divisor per frequency.
    """
    kinds = ("none", "linear", "yarn", "longrope")
    kind = config.choice("rope.scaling.type", {kind: kind for kind in kinds}, "linear")
    factor = config.number("rope.scaling.factor", config.number("rope.scale_linear", 0.0)) or 1.0
    attention_factor = config.number("rope.scaling.attn_factor", 1.0)
    short = "rope_factors_short.weight"
    long = "rope_factors_long.weight"
    if "rope_freqs.weight" in shapes:
        short = "rope_freqs.weight"
        long = "rope_freqs.weight"
    if short in shapes or kind == "longrope":
        expected = (num_frequencies,)
        fits = all(tuple(shapes.get(name, ())) == expected for name in (short, long))
        if kind == "yarn" or factor != 1.0 or not fits:
            raise config.error(
                "rope.scaling.type",
                f"{kind!r} by {factor} does not go with the divisors in {short}",
            )
        return {
            "rope_type": "longrope",
            "short_factor": list(read_vector(short)),
            "long_factor": list(read_vector(long)),
            "attention_factor": attention_factor,
        }
    if attention_factor != 1.0:
        raise config.error(
            "rope.scaling.attn_factor",
            f"is {attention_factor}, and there are no divisors it belongs to",
        )
    if kind == "yarn":
        return {"rope_type": "yarn", "factor": factor, **read_yarn_parameters(config)}
    if kind == "linear" and factor != 1.0:
        return {"rope_type": "linear", "factor": factor}
    return {}


def read_yarn_parameters(config: ConfigReader) -> HfConfig:
    config.require("rope.scaling.yarn_ext_factor", 1.0)
    scaling: HfConfig = {}
    beta = config.optional_number("attention.temperature_scale")
    if beta:
        # Queries are scaled by position, and cos and sin are not.
        scaling["llama_4_scaling_beta"] = beta
        scaling["mscale"] = scaling["mscale_all_dim"] = 1.0
        config.get("rope.scaling.yarn_log_multiplier")  # marks the key as read
    else:
        config.require("rope.scaling.yarn_log_multiplier", 0.0)
    return {
        **scaling,
        "attention_factor": config.optional_number("rope.scaling.yarn_attn_factor"),
        "beta_fast": config.optional_number("rope.scaling.yarn_beta_fast"),
        "beta_slow": config.optional_number("rope.scaling.yarn_beta_slow"),
    }


def read_experts(config: ConfigReader, shapes: TensorShapes) -> HfConfig:
    """Return the sizes of the experts, from their tensors. A layer without a router is dense."""
    if not config.integer("expert_count", 0):
        return {}
    layers = range(config.size("block_count"))
    dense = [i for i in layers if f"blk.{i}.ffn_gate_inp.weight" not in shapes]
    first_sparse = next((i for i in layers if i not in dense), 0)
    hf_config: HfConfig = {
        "mlp_only_layers": dense,
        "mlp_layer_types": ["dense" if i in dense else "sparse" for i in layers],
        "first_k_dense_replace": first_sparse,
        "num_dense_layers": first_sparse,
        "moe_layer_start_index": first_sparse,
        "num_shared_experts": 0,
    }
    for key, hf_key, tensor in EXPERT_SIZES:
        shape = shapes.get(f"blk.{first_sparse}.{tensor}.weight")
        if shape is not None:
            hf_config[hf_key] = shape[-1]
            config.require(key, shape[-1])
    expert_size = hf_config.get("moe_intermediate_size")
    shared_size = hf_config.get("shared_expert_intermediate_size")
    if expert_size and shared_size:
        hf_config["num_shared_experts"] = shared_size // expert_size
    return hf_config


# ---- adapting the spec to the tensors of the file ----------------------------------------------


def build_names(model: ModelSpec, family: GgufFamily, shapes: TensorShapes) -> TensorNames:
    """Return the tensor names of the file, whose matrices may be fused or split."""
    layer_tensors = {
        name.split(".", 2)[2] for name in shapes if name.startswith("blk.") and name.count(".") > 1
    }
    gated = any(isinstance(layer.mlp, MlpSpec) and layer.mlp.gated for layer in model.layers)
    names = add_recurrent_names(NAMES, family.recurrent, layer_tensors)
    if "output_norm.weight" not in shapes and model.embed_norm is None:
        names = replace(names, final_norm="token_embd_norm")
    if not gated:
        names = replace(names, mlp_up="ffn_up")
    elif "ffn_gate.weight" not in layer_tensors:
        names = replace(names, mlp_up=FusedTensor("ffn_up"))
    if "attn_qkv.weight" in layer_tensors and "attn_q.weight" not in layer_tensors:
        names = replace(names, attn_qkv=FusedTensor("attn_qkv"))
    if "ffn_gate_up_exps.weight" in layer_tensors:
        names = replace(names, expert_up=FusedTensor("ffn_gate_up_exps"))
    if any(isinstance(layer.mlp, MoeSpec) and not layer.mlp.mlp.gated for layer in model.layers):
        names = replace(names, expert_up="ffn_up_exps", shared_up="ffn_up_shexp")
    first = model.layers[0]
    has_second_norm = first.mlp_norm is not None and first.attn_post_norm is None
    if any(layer.mlp is None for layer in model.layers):  # one block per layer, and one norm
        names = replace(names, extra={**names.extra, "mlp_norm": "attn_norm"})
    elif has_second_norm and "ffn_norm.weight" not in layer_tensors:
        extra = {**names.extra, "mlp_norm": "post_attention_norm"}
        names = replace(names, extra=extra)
    if "exp_probs_b" in layer_tensors:
        names = replace(names, extra={**names.extra, "correction_bias": "exp_probs_b"})
    if "attn_norm_2.weight" in layer_tensors:  # Falcon's second norm is the one before attention
        norms = {"attn_norm": "attn_norm_2", "mlp_norm": "attn_norm"}
        names = replace(names, extra={**names.extra, **norms})
    return names


def add_xielu_alphas(model: ModelSpec, metadata: Mapping[str, Any]) -> ModelSpec:
    """Add the parameters of the activation xIELU, which are metadata in GGUF."""
    if not any(is_xielu(layer) for layer in model.layers):
        return model
    reader = ConfigReader(metadata)
    layers = []
    for key, constant in (("xielu.beta", 0.5), ("xielu.eps", -1e-6)):
        values = reader.list_of(key, float)
        if any(abs(value - constant) > 1e-3 * abs(constant) for value in values):
            raise reader.error(key, f"must be {constant} in every layer, not {values}")
    for i, layer in enumerate(model.layers):
        alphas = [reader.list_of(key, float) for key in ("xielu.alpha_p", "xielu.alpha_n")]
        if any(len(values) != len(model.layers) for values in alphas):
            raise reader.error("xielu.alpha_p", f"must have {len(model.layers)} numbers")
        mlp = layer.mlp
        if isinstance(mlp, MlpSpec):
            mlp = replace(mlp, xielu_alphas=(float(alphas[0][i]), float(alphas[1][i])))
        layers.append(replace(layer, mlp=mlp))
    return replace(model, layers=tuple(layers))


def is_xielu(layer: LayerSpec) -> bool:
    return isinstance(layer.mlp, MlpSpec) and layer.mlp.activation == "xielu"


def adapt_experts(moe: MoeSpec, names: TensorNames, shapes: TensorShapes, prefix: str) -> MoeSpec:
    """Adapt experts to the biases of the file."""
    router = replace(
        moe.router,
        bias=f"{prefix}ffn_gate_inp.bias" in shapes,
        correction_bias=prefix + names.extra["correction_bias"] in shapes,
    )
    has_bias = f"{prefix}ffn_up_exps.bias" in shapes
    return replace(moe, router=router, mlp=replace(moe.mlp, bias=has_bias))


def adapt_to_converter(
    model: ModelSpec,
    names: TensorNames,
    shapes: TensorShapes,
    family: GgufFamily,
    scale: float | None,
) -> ModelSpec:
    """Adapt a spec to the tensors of the file: biases, stored norms, the order of q and k."""

    def adapt_norm(spec: NormSpec | None, name: str) -> NormSpec | None:
        if spec is None:
            return None
        has_bias = spec.kind == "layer" and f"{name}.bias" in shapes
        return replace(spec, bias=has_bias, unit_offset=False)

    def adapt_attention(prefix: str, spec: AttentionSpec) -> AttentionSpec:
        position = spec.position
        if family.permuted and isinstance(position, RopeSpec):
            position = replace(position, interleaved=True)
        return replace(
            spec,
            position=position,
            bias=f"{prefix}attn_q.bias" in shapes or f"{prefix}attn_qkv.bias" in shapes,
            out_bias=f"{prefix}attn_output.bias" in shapes,
            scale=scale or spec.scale,
            qk_norm=adapt_norm(spec.qk_norm, prefix + names.extra["q_norm"]),
        )

    def adapt_layer(prefix: str, spec: LayerSpec) -> LayerSpec:
        attention = spec.attention and adapt_attention(prefix, spec.attention)
        recurrent = spec.recurrent and adapt_recurrent(
            spec.recurrent, prefix, shapes, family.tiled_heads
        )
        mlp = spec.mlp
        if isinstance(mlp, MoeSpec):
            mlp = adapt_experts(mlp, names, shapes, prefix)
        elif mlp is not None:
            mlp = replace(mlp, bias=f"{prefix}ffn_up.bias" in shapes)
        norms: dict[str, Any] = {
            role: adapt_norm(getattr(spec, role), prefix + names.extra[role])
            for role in LAYER_NORMS
        }
        return replace(spec, attention=attention, mlp=mlp, recurrent=recurrent, **norms)

    layers = tuple(
        adapt_layer(names.layer.format(i=i), spec) for i, spec in enumerate(model.layers)
    )
    return replace(
        model,
        layers=layers,
        embed_norm=adapt_norm(model.embed_norm, names.extra["embed_norm"]),
        final_norm=adapt_norm(model.final_norm, names.final_norm),
        head_bias="output.bias" in shapes,
    )
