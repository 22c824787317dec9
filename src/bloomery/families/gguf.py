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
from dataclasses import dataclass, replace
from typing import Any

from bloomery import families
from bloomery.errors import UnsupportedModel
from bloomery.families import ModelDescription
from bloomery.families.reader import ConfigReader
from bloomery.spec import (
    FusedTensor,
    LayerSpec,
    MlpSpec,
    ModelSpec,
    NormSpec,
    RopeSpec,
    SplitTensors,
    TensorNames,
)

TensorShapes = Mapping[str, Sequence[int]]  # by tensor name, outermost dimension first
VectorReader = Callable[[str], Sequence[float]]  # returns the values of a small tensor
HfConfig = dict[str, Any]

RMS_EPSILON = "attention.layer_norm_rms_epsilon"
LAYER_NORM_EPSILON = "attention.layer_norm_epsilon"
# Keys that may have one value per layer.
PER_LAYER_KEYS = ("feed_forward_length", "attention.head_count", "attention.head_count_kv")
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
    LAYER_NORM_EPSILON: ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"),
    "rope.freq_base": ("rope_theta",),
    "rope.freq_base_swa": ("rope_local_base_freq",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "embedding_scale": ("embedding_multiplier",),
    "residual_scale": ("residual_multiplier",),
    "logit_scale": ("logit_scale", "logits_scaling"),
    "use_parallel_residual": ("use_parallel_residual",),
    "expert_count": ("num_experts",),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_weights_norm": ("norm_topk_prob",),
}
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
    r"attn_(norm|norm_2|q|k|v|qkv|q_norm|k_norm|output|rot_embd)|(post_attention|ffn|post_ffw)_norm"
    r"|ffn_(gate|up|gate_up|down)(_exps|_shexp)?|ffn_gate_inp(_shexp)?))\.(weight|bias)"
)
LAYER_NORMS = ("attn_norm", "attn_post_norm", "mlp_norm", "mlp_post_norm")


# ---- keys of single architectures --------------------------------------------------------------


def read_llama(config: ConfigReader, shapes: TensorShapes) -> HfConfig:
    if config.integer("expert_count", 0):
        return {"model_type": "mixtral"}
    return {}


def make_gemma_reader(
    num_layers_of_largest: int,
) -> Callable[[ConfigReader, TensorShapes], HfConfig]:
    """Return the function that reads the scale of Gemma's scores.

    Scores are scaled by the head dimension, but in the largest model by hidden size / heads.
    """

    def read_gemma(config: ConfigReader, shapes: TensorShapes) -> HfConfig:
        scalar = read_head_dim(config)
        if config.size("block_count") == num_layers_of_largest:
            scalar = config.size("embedding_length") // config.size("attention.head_count")
        return {"query_pre_attn_scalar": scalar}

    return read_gemma


def read_falcon(config: ConfigReader, shapes: TensorShapes) -> HfConfig:
    config.require("tensor_data_layout", "jploski")  # all q, all k, all v
    num_norms = 2 if "blk.0.attn_norm_2.weight" in shapes else 1
    return {"new_decoder_architecture": True, "num_ln_in_parallel_attn": num_norms}


def read_mpt(config: ConfigReader, shapes: TensorShapes) -> HfConfig:
    num_heads = config.size("attention.head_count")
    max_bias = config.number("attention.max_alibi_bias", 0.0)
    attn_type = "multihead_attention"
    if read_num_kv_heads(config) == 1 != num_heads:
        attn_type = "multiquery_attention"
    return {
        "attn_config": {
            "alibi": max_bias > 0,
            "alibi_bias_max": max_bias,
            "clip_qkv": config.number("attention.clamp_kqv", 0.0) or None,
            "attn_type": attn_type,
        },
        "expansion_ratio": config.size("feed_forward_length") // config.size("embedding_length"),
        "learned_pos_emb": "position_embd.weight" in shapes,
    }


def read_starcoder(config: ConfigReader, shapes: TensorShapes) -> HfConfig:
    return {"multi_query": read_num_kv_heads(config) == 1}


def read_stablelm(config: ConfigReader, shapes: TensorShapes) -> HfConfig:
    # Some converters write use_parallel_residual for models that do not use it. Only models that
    # do not have a second norm use it.
    config.get("use_parallel_residual")  # marks the key as read
    return {"use_parallel_residual": "blk.0.ffn_norm.weight" not in shapes}


def read_cohere2(config: ConfigReader, shapes: TensorShapes) -> HfConfig:
    config.size("attention.sliding_window")  # required: only window layers have rope
    return {}


def read_granite(config: ConfigReader, shapes: TensorShapes) -> HfConfig:
    config.require("rope.scaling.finetuned", True)  # here it means that the model has rope at all
    # The default; attention.scale replaces it.
    return {"attention_multiplier": read_head_dim(config) ** -0.5}


def read_qwen3moe(config: ConfigReader, shapes: TensorShapes) -> HfConfig:
    return {"norm_topk_prob": config.flag("expert_weights_norm", True)}


def read_nothing(config: ConfigReader, shapes: TensorShapes) -> HfConfig:
    return {}


@dataclass(frozen=True)
class GgufFamily:
    """How an architecture of GGUF maps to a model family."""

    model_type: str  # of the config.json it was converted from
    epsilon_key: str = RMS_EPSILON  # must be present
    read_keys: Callable[[ConfigReader, TensorShapes], HfConfig] = read_nothing
    permuted: bool = False  # rows of q and k are stored for interleaved rope
    default_window: int = 0  # for a file that states none
    # Every period-th layer has full attention; 0: all layers have a window, if there is one.
    window_period: int = 0


ARCHITECTURES: Mapping[str, GgufFamily] = {
    # A Llama is a Mistral without a window.
    "llama": GgufFamily("mistral", read_keys=read_llama, permuted=True),
    "qwen2": GgufFamily("qwen2"),
    "qwen2moe": GgufFamily("qwen2_moe"),
    "qwen3": GgufFamily("qwen3"),
    "qwen3moe": GgufFamily("qwen3_moe", read_keys=read_qwen3moe),
    "gemma": GgufFamily("gemma"),
    "gemma2": GgufFamily(
        "gemma2", read_keys=make_gemma_reader(46), default_window=4096, window_period=2
    ),
    "gemma3": GgufFamily("gemma3_text", read_keys=make_gemma_reader(62), window_period=6),
    "phi2": GgufFamily("phi", LAYER_NORM_EPSILON),
    "phi3": GgufFamily("phi3"),
    "starcoder": GgufFamily("gpt_bigcode", LAYER_NORM_EPSILON, read_starcoder),
    "starcoder2": GgufFamily("starcoder2", LAYER_NORM_EPSILON),
    "bloom": GgufFamily("bloom", LAYER_NORM_EPSILON),
    "falcon": GgufFamily("falcon", LAYER_NORM_EPSILON, read_falcon),
    "mpt": GgufFamily("mpt", LAYER_NORM_EPSILON, read_mpt),
    "gpt2": GgufFamily("gpt2", LAYER_NORM_EPSILON),
    "gptneox": GgufFamily("gpt_neox", LAYER_NORM_EPSILON),
    "stablelm": GgufFamily("stablelm", LAYER_NORM_EPSILON, read_stablelm),
    "command-r": GgufFamily("cohere", LAYER_NORM_EPSILON),
    "cohere2": GgufFamily("cohere2", LAYER_NORM_EPSILON, read_cohere2, window_period=4),
    "granite": GgufFamily("granite", read_keys=read_granite, permuted=True),
    "olmo2": GgufFamily("olmo2"),
    "smollm3": GgufFamily("smollm3", permuted=True),
}


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
    config = ConfigReader(merged, prefix)
    hf_config = build_hf_config(config, family, shapes, read_vector)
    description = families.describe_config(hf_config)
    check_description(config, hf_config, description.model, shapes)
    names = build_names(description.model, shapes)
    scale = config.optional_number("attention.scale")
    model = adapt_to_converter(description.model, names, shapes, family.permuted, scale)
    # A key had no effect if the family read none of its translations. Sizes are left out: a family
    # that does not read them implies them, and loading checks them against the tensors.
    ignored = {
        key
        for key, hf_keys in HF_KEYS.items()
        if key not in PER_LAYER_KEYS and set(hf_keys) <= set(description.unread)
    }
    unread = (values.keys() - config.names_read - {"vocab_size"}) | (values.keys() & ignored)
    return ModelDescription(model, names, tuple(sorted(prefix + key for key in unread)))


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
    num_kv_heads = hf_config["num_key_value_heads"]
    for layer, layer_type in zip(model.layers, hf_config["layer_types"]):
        attention = layer.attention
        if (attention.window is None) != (layer_type == "full_attention"):
            raise config.error("attention.sliding_window", "is not supported in this architecture")
        if attention.num_kv_heads != num_kv_heads:
            raise config.error("attention.head_count_kv", f"{num_kv_heads} is not supported here")
        if attention.qk_norm is None and hf_config["use_qk_norm"]:
            raise UnsupportedModel(
                "config.json: tensor blk.0.attn_q_norm.weight is not part of this architecture"
            )


def read_head_dim(config: ConfigReader) -> int:
    default = config.size("embedding_length") // config.size("attention.head_count")
    return config.size("attention.key_length", default)


def read_num_kv_heads(config: ConfigReader) -> int:
    return config.size("attention.head_count_kv", config.size("attention.head_count"))


def build_hf_config(
    config: ConfigReader, family: GgufFamily, shapes: TensorShapes, read_vector: VectorReader
) -> HfConfig:
    """Translate the metadata into a config.json of the model family."""
    if len(shapes.get("token_embd.weight", ())) != 2:
        raise UnsupportedModel(
            "config.json: no matrix token_embd.weight: a file with a vocabulary and no model?"
        )
    for key in REQUIRED_SIZES:
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
        **read_rope_parameters(config, shapes, read_vector),
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
        has_window = pattern
    else:
        has_window = [not pattern or (i + 1) % pattern != 0 for i in range(num_layers)]
    layer_types = [
        "sliding_attention" if window and windowed else "full_attention" for windowed in has_window
    ]
    return {"sliding_window": window or None, "layer_types": layer_types}


def read_rope_parameters(
    config: ConfigReader, shapes: TensorShapes, read_vector: VectorReader
) -> HfConfig:
    head_dim = read_head_dim(config)
    rope_dim = config.size("rope.dimension_count", head_dim)
    fraction = 1.0
    if rope_dim != head_dim:
        # Families round head_dim * fraction down; the quarter keeps rounding errors out of it.
        fraction = (rope_dim + 0.25) / head_dim
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
    return {
        "partial_rotary_factor": fraction,
        "original_max_position_embeddings": original,
        "rope_scaling": scaling or None,
    }


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
    config.require("rope.scaling.yarn_log_multiplier", 0.0)
    return {
        "attention_factor": config.optional_number("rope.scaling.yarn_attn_factor"),
        "beta_fast": config.optional_number("rope.scaling.yarn_beta_fast"),
        "beta_slow": config.optional_number("rope.scaling.yarn_beta_slow"),
    }


def read_experts(config: ConfigReader, shapes: TensorShapes) -> HfConfig:
    """Return the sizes of the experts, from their tensors. A layer without a router is dense."""
    if not config.integer("expert_count", 0):
        return {}
    config.require("expert_gating_func", 1)  # softmax
    config.require("expert_weights_scale", 1.0)
    layers = range(config.size("block_count"))
    dense = [i for i in layers if f"blk.{i}.ffn_gate_inp.weight" not in shapes]
    first_sparse = next((i for i in layers if i not in dense), 0)
    hf_config: HfConfig = {"mlp_only_layers": dense}
    for key, hf_key, tensor in EXPERT_SIZES:
        shape = shapes.get(f"blk.{first_sparse}.{tensor}.weight")
        if shape is not None:
            hf_config[hf_key] = shape[-1]
            config.require(key, shape[-1])
    return hf_config


# ---- adapting the spec to the tensors of the file ----------------------------------------------


def build_names(model: ModelSpec, shapes: TensorShapes) -> TensorNames:
    """Return the tensor names of the file, whose matrices may be fused or split."""
    layer_tensors = {
        name.split(".", 2)[2] for name in shapes if name.startswith("blk.") and name.count(".") > 2
    }
    gated = any(isinstance(layer.mlp, MlpSpec) and layer.mlp.gated for layer in model.layers)
    names = NAMES
    if not gated:
        names = replace(names, mlp_up="ffn_up")
    elif "ffn_gate.weight" not in layer_tensors:
        names = replace(names, mlp_up=FusedTensor("ffn_up"))
    if "attn_qkv.weight" in layer_tensors:
        names = replace(names, attn_qkv=FusedTensor("attn_qkv"))
    if "ffn_gate_up_exps.weight" in layer_tensors:
        names = replace(names, expert_up=FusedTensor("ffn_gate_up_exps"))
    if "attn_norm_2.weight" in layer_tensors:  # Falcon's second norm is the one before attention
        norms = {"attn_norm": "attn_norm_2", "mlp_norm": "attn_norm"}
        names = replace(names, extra={**names.extra, **norms})
    return names


def adapt_to_converter(
    model: ModelSpec,
    names: TensorNames,
    shapes: TensorShapes,
    permuted: bool,
    scale: float | None,
) -> ModelSpec:
    """Adapt a spec to the tensors of the file: biases, stored norms, the order of q and k."""

    def adapt_norm(spec: NormSpec | None, name: str) -> NormSpec | None:
        if spec is None:
            return None
        has_bias = spec.kind == "layer" and f"{name}.bias" in shapes
        return replace(spec, bias=has_bias, unit_offset=False)

    def adapt_layer(prefix: str, spec: LayerSpec) -> LayerSpec:
        position = spec.attention.position
        if permuted and isinstance(position, RopeSpec):
            position = replace(position, interleaved=True)
        attention = replace(
            spec.attention,
            position=position,
            bias=f"{prefix}attn_q.bias" in shapes or f"{prefix}attn_qkv.bias" in shapes,
            out_bias=f"{prefix}attn_output.bias" in shapes,
            scale=scale or spec.attention.scale,
            qk_norm=adapt_norm(spec.attention.qk_norm, prefix + names.extra["q_norm"]),
        )
        mlp = spec.mlp
        if isinstance(mlp, MlpSpec):
            mlp = replace(mlp, bias=f"{prefix}ffn_up.bias" in shapes)
        norms: dict[str, Any] = {
            role: adapt_norm(getattr(spec, role), prefix + names.extra[role])
            for role in LAYER_NORMS
        }
        return replace(spec, attention=attention, mlp=mlp, **norms)

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
