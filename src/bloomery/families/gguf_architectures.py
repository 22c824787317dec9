"""The architectures of GGUF: which model family each one is, and the keys that only it has.

Facts about llama.cpp's converter and loader are here; families/gguf.py applies them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bloomery.families.reader import ConfigReader
from bloomery.spec import SplitTensors

TensorShapes = Mapping[str, Sequence[int]]  # by tensor name, outermost dimension first
HfConfig = dict[str, Any]

RMS_EPSILON = "attention.layer_norm_rms_epsilon"
LAYER_NORM_EPSILON = "attention.layer_norm_epsilon"
LLAMA4_CHUNK = 8192  # positions; files do not state it


def read_head_dim(config: ConfigReader) -> int:
    default = config.size("embedding_length") // config.size("attention.head_count")
    return config.size("attention.key_length", default)


def read_num_kv_heads(config: ConfigReader) -> int:
    return config.size("attention.head_count_kv", config.size("attention.head_count"))


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


def read_cohere2_moe(config: ConfigReader, shapes: TensorShapes) -> HfConfig:
    functions = {1: "softmax", 2: "sigmoid"}
    gating = config.integer("expert_gating_func", 2)
    if gating not in functions:
        raise config.error("expert_gating_func", f"{gating} is not known. Known: {functions}")
    return {
        **read_cohere2(config, shapes),
        "expert_selection_fn": functions[gating],
        "prefix_dense_intermediate_size": config.size("feed_forward_length"),
        "intermediate_size": config.size("expert_feed_forward_length"),
    }


def read_granite(config: ConfigReader, shapes: TensorShapes) -> HfConfig:
    config.require("rope.scaling.finetuned", True)  # here it means that the model has rope at all
    shared = shapes.get("blk.0.ffn_down_shexp.weight")
    return {
        # The default; attention.scale replaces it.
        "attention_multiplier": read_head_dim(config) ** -0.5,
        "shared_intermediate_size": shared[-1] if shared else 0,
    }


def read_granite_swa(config: ConfigReader, shapes: TensorShapes) -> HfConfig:
    num_layers = config.size("block_count")
    theta = config.number("rope.freq_base", 10000.0)
    has_rope = config.list_of("attention.rope_pattern", bool, [True] * num_layers)
    return {
        **read_granite(config, shapes),
        "layer_rope_theta": [theta if rotates else 0.0 for rotates in has_rope],
    }


def read_qwen3moe(config: ConfigReader, shapes: TensorShapes) -> HfConfig:
    return {"norm_topk_prob": config.flag("expert_weights_norm", True)}


def read_olmo2(config: ConfigReader, shapes: TensorShapes) -> HfConfig:
    if config.integer("attention.sliding_window", 0):
        return {"model_type": "olmo3"}
    return {}


def read_afmoe(config: ConfigReader, shapes: TensorShapes) -> HfConfig:
    return {"mup_enabled": True}  # embeddings are always scaled


def read_laguna(config: ConfigReader, shapes: TensorShapes) -> HfConfig:
    num_layers = config.size("block_count")
    heads = config.list_of("attention.head_counts", int)
    heads = heads or (config.size("attention.head_count"),) * num_layers
    gate = shapes.get("blk.0.attn_gate.weight", (0,))
    return {
        "num_attention_heads_per_layer": list(heads),
        "gating": "per-head" if gate[0] == heads[0] else "per-element",
    }


def read_gpt_oss(config: ConfigReader, shapes: TensorShapes) -> HfConfig:
    return {"intermediate_size": config.size("expert_feed_forward_length")}


def read_llama4(config: ConfigReader, shapes: TensorShapes) -> HfConfig:
    num_layers = config.size("block_count")
    keys: HfConfig = {
        "intermediate_size": config.size("expert_feed_forward_length"),
        "intermediate_size_mlp": config.size("feed_forward_length"),
        "moe_layers": [i for i in range(num_layers) if f"blk.{i}.ffn_gate_inp.weight" in shapes],
        "attention_chunk_size": LLAMA4_CHUNK,
        "layer_types": None,  # by default: chunks in all layers with rope
        # The norms of q and k have no weights. Only the model with 128 experts has none of them.
        "use_qk_norm": config.size("expert_count") != 128,
    }
    if config.get("attention.sliding_window") == 0:  # neither chunks nor layers without rope
        keys["no_rope_layers"] = [1] * num_layers
        keys["layer_types"] = ["full_attention"] * num_layers
        keys["attn_temperature_tuning"] = False
    return keys


def read_mistral3(config: ConfigReader, shapes: TensorShapes) -> HfConfig:
    if config.optional_number("attention.temperature_scale"):
        return {"model_type": "ministral3"}
    return {}


def read_hunyuan_moe(config: ConfigReader, shapes: TensorShapes) -> HfConfig:
    return {"intermediate_size": config.size("expert_feed_forward_length")}


def read_nothing(config: ConfigReader, shapes: TensorShapes) -> HfConfig:
    return {}


@dataclass(frozen=True)
class RecurrentTensors:
    """The tensors of an architecture's recurrent layers; the fields are those of TensorNames."""

    projection: str | SplitTensors
    out: str
    conv: str
    extra: Mapping[str, str] = field(default_factory=dict)


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
    full_attention_first: bool = False  # in each period; otherwise it comes last
    # Layers with a window have a rope of their own, without scaling.
    rope_by_layer_type: bool = False
    rope_keys: HfConfig = field(default_factory=dict)  # of rope scaling; files do not state them
    vision: bool = False  # the text part of a vision model
    recurrent: RecurrentTensors | None = None
    tiled_heads: bool = False  # of gated delta nets


ATTENTION_ARCHITECTURES: Mapping[str, GgufFamily] = {
    # A Llama is a Mistral without a window.
    "llama": GgufFamily("mistral", read_keys=read_llama, permuted=True),
    "llama4": GgufFamily("llama4_text", read_keys=read_llama4),
    "mistral3": GgufFamily("mistral", read_keys=read_mistral3, permuted=True),
    "qwen2": GgufFamily("qwen2"),
    "qwen2moe": GgufFamily("qwen2_moe"),
    "qwen2vl": GgufFamily("qwen2", vision=True),
    "qwen3": GgufFamily("qwen3"),
    "qwen3moe": GgufFamily("qwen3_moe", read_keys=read_qwen3moe),
    "qwen3vl": GgufFamily("qwen3", vision=True),
    "qwen3vlmoe": GgufFamily("qwen3_moe", read_keys=read_qwen3moe, vision=True),
    "gemma": GgufFamily("gemma"),
    "gemma2": GgufFamily(
        "gemma2", read_keys=make_gemma_reader(46), default_window=4096, window_period=2
    ),
    "gemma3": GgufFamily("gemma3_text", read_keys=make_gemma_reader(62), window_period=6),
    "phi2": GgufFamily("phi", LAYER_NORM_EPSILON),
    "phi3": GgufFamily("phi3"),
    "phimoe": GgufFamily("phimoe"),
    "starcoder": GgufFamily("gpt_bigcode", LAYER_NORM_EPSILON, read_starcoder),
    "starcoder2": GgufFamily("starcoder2", LAYER_NORM_EPSILON),
    "bloom": GgufFamily("bloom", LAYER_NORM_EPSILON),
    "falcon": GgufFamily("falcon", LAYER_NORM_EPSILON, read_falcon),
    "mpt": GgufFamily("mpt", LAYER_NORM_EPSILON, read_mpt),
    "gpt2": GgufFamily("gpt2", LAYER_NORM_EPSILON),
    "gpt-oss": GgufFamily(
        "gpt_oss", read_keys=read_gpt_oss, window_period=2, rope_keys={"truncate": False}
    ),
    "gptneox": GgufFamily("gpt_neox", LAYER_NORM_EPSILON),
    "stablelm": GgufFamily("stablelm", LAYER_NORM_EPSILON, read_stablelm),
    "command-r": GgufFamily("cohere", LAYER_NORM_EPSILON),
    "cohere2": GgufFamily("cohere2", LAYER_NORM_EPSILON, read_cohere2, window_period=4),
    "cohere2moe": GgufFamily("cohere2_moe", LAYER_NORM_EPSILON, read_cohere2_moe, window_period=4),
    "granite": GgufFamily("granite", read_keys=read_granite, permuted=True),
    "granitemoe": GgufFamily("granitemoe", read_keys=read_granite, permuted=True),
    "granite_swa": GgufFamily("granite_swa", read_keys=read_granite_swa, permuted=True),
    "olmo2": GgufFamily("olmo2", read_keys=read_olmo2, window_period=4, rope_by_layer_type=True),
    "olmoe": GgufFamily("olmoe"),
    "smollm3": GgufFamily("smollm3", permuted=True),
    "glm4": GgufFamily("glm4"),
    "glm4moe": GgufFamily("glm4_moe"),
    "ernie4_5": GgufFamily("ernie4_5"),
    "ernie4_5-moe": GgufFamily("ernie4_5_moe"),
    "seed_oss": GgufFamily("seed_oss"),
    "exaone4": GgufFamily("exaone4", window_period=4),
    "hunyuan-dense": GgufFamily("hunyuan_v1_dense"),
    "hunyuan-moe": GgufFamily("hunyuan_v1_moe", read_keys=read_hunyuan_moe),
    "hy_v3": GgufFamily("hy_v3"),
    "minimax-m2": GgufFamily("minimax_m2"),
    "dots1": GgufFamily("dots1"),
    "apertus": GgufFamily("apertus"),
    "arcee": GgufFamily("arcee", permuted=True),
    "afmoe": GgufFamily("afmoe", read_keys=read_afmoe, window_period=4),
    "laguna": GgufFamily(
        "laguna",
        read_keys=read_laguna,
        window_period=4,
        full_attention_first=True,
        rope_by_layer_type=True,
    ),
    "mellum": GgufFamily("mellum", window_period=4, rope_by_layer_type=True),
    "nemotron": GgufFamily("nemotron", LAYER_NORM_EPSILON),
}
