"""GGUF metadata -> spec.Model, and where each tensor lies in the file.

GGUF says in its own words what a config.json says, so its keys are translated and the family does the rest. Then comes
what converters store differently: q and k in the order of another rotation, norms with their one added, fused matrices
ungrouped. What metadata leaves open (biases, a tied head, a second norm) is read off the tensors' names and shapes.
This file reads no file: it is given metadata, shapes, and a way to see the few vectors that belong to the description.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bloomery import families
from bloomery.errors import UnsupportedModel
from bloomery.families import Description
from bloomery.families.reader import Reader
from bloomery.spec import Fused, Layer, Mlp, Model, Names, Norm, Rope, Split

Shapes = Mapping[str, Sequence[int]]  # of every tensor, outermost dimension first
Vector = Callable[[str], Sequence[float]]  # the values of a small tensor
Config = dict[str, Any]

RMS = "attention.layer_norm_rms_epsilon"
LAYER = "attention.layer_norm_epsilon"
PER_LAYER = ("feed_forward_length", "attention.head_count", "attention.head_count_kv")
SIZES = (
    "embedding_length",
    "block_count",
    "feed_forward_length",
    "attention.head_count",
    "context_length",
)

# A key of GGUF, behind the architecture's name, and the words that families have for it.
WORDS: Mapping[str, tuple[str, ...]] = {
    "embedding_length": ("hidden_size",),
    "block_count": ("num_hidden_layers",),
    "feed_forward_length": ("intermediate_size",),
    "context_length": ("max_position_embeddings", "seq_length"),
    "attention.head_count": ("num_attention_heads",),
    "attention.head_count_kv": ("num_key_value_heads", "num_kv_heads"),
    RMS: ("rms_norm_eps",),
    LAYER: ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"),
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
EXPERT_SIZES = (
    ("expert_feed_forward_length", "moe_intermediate_size", "ffn_down_exps"),
    ("expert_shared_feed_forward_length", "shared_expert_intermediate_size", "ffn_down_shexp"),
)

NAMES = Names(
    embed="token_embd",
    layer="blk.{i}.",
    final_norm="output_norm",
    head="output",
    attn_qkv=Split(("attn_q", "attn_k", "attn_v")),
    attn_out="attn_output",
    mlp_up=Split(("ffn_gate", "ffn_up")),
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
    expert_up=Split(("ffn_gate_exps", "ffn_up_exps")),
    expert_down="ffn_down_exps",
    stacked_experts=True,
    shared_up=Split(("ffn_gate_shexp", "ffn_up_shexp")),
    shared_down="ffn_down_shexp",
    ignored=("rope_freqs.weight", "rope_factors_*.weight"),  # part of the description
)
TENSOR = re.compile(
    r"((token_embd|output)(_norm)?|position_embd|rope_(freqs|factors_long|factors_short)|blk\.\d+\.("
    r"attn_(norm|norm_2|q|k|v|qkv|q_norm|k_norm|output|rot_embd)|(post_attention|ffn|post_ffw)_norm"
    r"|ffn_(gate|up|gate_up|down)(_exps|_shexp)?|ffn_gate_inp(_shexp)?))\.(weight|bias)"
)
NORMS = ("attn_norm", "attn_post_norm", "mlp_norm", "mlp_post_norm")


# ---- what one architecture says in its own way ---------------------------------------------------


def llama(c: Reader, shapes: Shapes) -> Config:
    return {"model_type": "mixtral"} if c.whole("expert_count", 0) else {}


def gemma(largest: int) -> Callable[[Reader, Shapes], Config]:
    """Scores are scaled by a head's width; in the largest model, of so many layers, by its share of the hidden size."""

    def words(c: Reader, shapes: Shapes) -> Config:
        share = c.size("embedding_length") // c.size("attention.head_count")
        return {"query_pre_attn_scalar": share if c.size("block_count") == largest else head_dim(c)}

    return words


def falcon(c: Reader, shapes: Shapes) -> Config:
    c.must("tensor_data_layout", "jploski")  # all q, all k, all v
    norms = 2 if "blk.0.attn_norm_2.weight" in shapes else 1
    return {"new_decoder_architecture": True, "num_ln_in_parallel_attn": norms}


def mpt(c: Reader, shapes: Shapes) -> Config:
    heads = c.size("attention.head_count")
    bias = c.number("attention.max_alibi_bias", 0.0)
    one = c.size("attention.head_count_kv", heads) == 1 != heads
    return {
        "attn_config": {
            "alibi": bias > 0,
            "alibi_bias_max": bias,
            "clip_qkv": c.number("attention.clamp_kqv", 0.0) or None,
            "attn_type": "multiquery_attention" if one else "multihead_attention",
        },
        "expansion_ratio": c.size("feed_forward_length") // c.size("embedding_length"),
        "learned_pos_emb": "position_embd.weight" in shapes,
    }


def starcoder(c: Reader, shapes: Shapes) -> Config:
    return {"multi_query": c.size("attention.head_count_kv", c.size("attention.head_count")) == 1}


def stablelm(c: Reader, shapes: Shapes) -> Config:
    # Converters have written use_parallel_residual for models that are not; a second norm tells.
    c.get("use_parallel_residual")
    return {"use_parallel_residual": "blk.0.ffn_norm.weight" not in shapes}


def cohere2(c: Reader, shapes: Shapes) -> Config:
    c.size("attention.sliding_window")  # without one there would be no positions
    return {}


def granite(c: Reader, shapes: Shapes) -> Config:
    c.must("rope.scaling.finetuned", True)  # here a switch for having positions at all
    return {"attention_multiplier": head_dim(c) ** -0.5}  # unless attention.scale says otherwise


@dataclass(frozen=True)
class Architecture:
    family: str  # model_type of the config.json it was converted from
    epsilon: str = RMS  # the key without which its norms are unknown
    words: Callable[[Reader, Shapes], Config] = lambda c, shapes: {}
    permuted: bool = False  # rows of q and k are stored so that pairs (0,1), (2,3).. turn
    window: int = 0  # of a file that does not state one
    period: int = (
        0  # every so many layers one sees everything; 0: all slide, where there is a window
    )


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(
        "mistral", words=llama, permuted=True
    ),  # Llama is a Mistral without a window
    "qwen2": Architecture("qwen2"),
    "qwen2moe": Architecture("qwen2_moe"),
    "qwen3": Architecture("qwen3"),
    "qwen3moe": Architecture(
        "qwen3_moe", words=lambda c, _: {"norm_topk_prob": c.flag("expert_weights_norm", True)}
    ),
    "gemma": Architecture("gemma"),
    "gemma2": Architecture("gemma2", words=gemma(46), window=4096, period=2),
    "gemma3": Architecture("gemma3_text", words=gemma(62), period=6),
    "phi2": Architecture("phi", LAYER),
    "phi3": Architecture("phi3"),
    "starcoder": Architecture("gpt_bigcode", LAYER, starcoder),
    "starcoder2": Architecture("starcoder2", LAYER),
    "bloom": Architecture("bloom", LAYER),
    "falcon": Architecture("falcon", LAYER, falcon),
    "mpt": Architecture("mpt", LAYER, mpt),
    "gpt2": Architecture("gpt2", LAYER),
    "gptneox": Architecture("gpt_neox", LAYER),
    "stablelm": Architecture("stablelm", LAYER, stablelm),
    "command-r": Architecture("cohere", LAYER),
    "cohere2": Architecture("cohere2", LAYER, cohere2, period=4),
    "granite": Architecture("granite", words=granite, permuted=True),
    "olmo2": Architecture("olmo2"),
    "smollm3": Architecture("smollm3", permuted=True),
}


# ---- from metadata to config.json's words --------------------------------------------------------


def describe(metadata: Mapping[str, Any], shapes: Shapes, vector: Vector) -> Description:
    """What a GGUF file says, or an error that names the value we do not know."""
    try:
        return _describe(metadata, shapes, vector)
    except UnsupportedModel as error:
        raise UnsupportedModel(str(error).replace("config.json", "GGUF file", 1)) from None


def _describe(metadata: Mapping[str, Any], shapes: Shapes, vector: Vector) -> Description:
    name = Reader(metadata).text("general.architecture")
    known = ARCHITECTURES.get(name)
    if known is None:
        raise UnsupportedModel(
            f"config.json: general.architecture {name!r} is not one Bloomery knows. Known: {', '.join(ARCHITECTURES)}"
        )
    own = {
        key.removeprefix(f"{name}."): value
        for key, value in metadata.items()
        if key.startswith(f"{name}.")
    }
    c = Reader(
        {key: even(value) if key in PER_LAYER else value for key, value in own.items()}, f"{name}."
    )
    told = config(c, known, shapes, vector)
    read = families.describe(told)
    heard(c, told, read.model, shapes)
    names = names_of(read.model, shapes)
    model = as_converted(
        read.model, names, shapes, known.permuted, c.optional_number("attention.scale")
    )
    # Sizes that a family takes for granted are the tensors' own, and checked with them.
    unheard = {
        key
        for key, words in WORDS.items()
        if key not in PER_LAYER and set(words) <= set(read.unread)
    }
    unread = own.keys() & (own.keys() - c.read - {"vocab_size"} | unheard)
    return Description(model, names, tuple(sorted(f"{name}.{key}" for key in unread)))


def even(value: Any) -> Any:
    """A list that says the same of every layer is one value."""
    return (
        value[0]
        if isinstance(value, list) and value and all(item == value[0] for item in value)
        else value
    )


def heard(c: Reader, told: Config, model: Model, shapes: Shapes) -> None:
    """Refuse what the family is deaf to and what would change every token."""
    strange = next((name for name in shapes if not TENSOR.fullmatch(name)), None)
    if strange is not None:
        raise UnsupportedModel(
            f"config.json: tensor {strange} is not part of any model Bloomery knows"
        )
    for layer, kind in zip(model.layers, told["layer_types"]):
        attention = layer.attention
        if (attention.window is None) != (kind == "full_attention"):
            raise c.wrong("attention.sliding_window", "is not supported in this architecture")
        if attention.num_kv_heads != told["num_key_value_heads"]:
            raise c.wrong(
                "attention.head_count_kv", f"{told['num_key_value_heads']} is not supported here"
            )
        if attention.qk_norm is None and told["use_qk_norm"]:
            raise UnsupportedModel(
                "config.json: tensor blk.0.attn_q_norm.weight is not part of this architecture"
            )


def head_dim(c: Reader) -> int:
    return c.size(
        "attention.key_length", c.size("embedding_length") // c.size("attention.head_count")
    )


def config(c: Reader, known: Architecture, shapes: Shapes, vector: Vector) -> Config:
    if len(shapes.get("token_embd.weight", ())) != 2:
        raise UnsupportedModel(
            "config.json: no matrix token_embd.weight: a file with a vocabulary and no model?"
        )
    for key in SIZES:
        c.size(key)
    c.number(known.epsilon)
    c.must("attention.causal", True)
    c.must("attention.value_length", head_dim(c))
    return {
        "model_type": known.family,
        "num_key_value_heads": c.size("attention.head_count_kv", c.size("attention.head_count")),
        "rope_theta": 10000.0,
        **{
            word: c.get(key)
            for key, words in WORDS.items()
            if c.values.get(key) is not None
            for word in words
        },
        "vocab_size": shapes["token_embd.weight"][0],
        "head_dim": head_dim(c),
        "tie_word_embeddings": "output.weight" not in shapes,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in shapes,
        "qk_layernorm": "blk.0.attn_q_norm.weight" in shapes,
        **windows(c, known, shapes),
        **rotation(c, shapes, vector),
        **experts(c, shapes),
        **known.words(c, shapes),
    }


def windows(c: Reader, known: Architecture, shapes: Shapes) -> Config:
    """Which layers slide, one by one: by a list, by a period, or by what the architecture is known for."""
    count = len({name.split(".")[1] for name in shapes if name.startswith("blk.")})
    if count != c.size("block_count"):
        raise c.wrong(
            "block_count", f"is {c.size('block_count')}, and there are tensors of {count} layers"
        )
    size = c.whole("attention.sliding_window", known.window)
    pattern = c.get("attention.sliding_window_pattern", known.period)
    if isinstance(pattern, bool) or not isinstance(pattern, int | list):
        raise c.wrong(
            "attention.sliding_window_pattern", f"must be a number or a list, not {pattern!r}"
        )
    slides = (
        pattern
        if isinstance(pattern, list)
        else [not pattern or (i + 1) % pattern != 0 for i in range(count)]
    )
    kinds = ["sliding_attention" if size and slide else "full_attention" for slide in slides]
    return {"sliding_window": size or None, "layer_types": kinds}


def rotation(c: Reader, shapes: Shapes, vector: Vector) -> Config:
    width = head_dim(c)
    context = c.size("context_length")
    turned = c.size("rope.dimension_count", width)
    # A quarter over, because a family rounds its fraction down to whole dimensions.
    fraction = 1.0 if turned == width else (turned + 0.25) / width
    original = c.size("rope.scaling.original_context_length", context)
    scaling = stretched(c, turned // 2, shapes, vector)
    c.get("rope.scaling.finetuned")
    unknown = sorted(
        key for key in c.values if key.startswith("rope.scaling.") and key not in c.read
    )
    if unknown:
        raise c.wrong(unknown[0], "is not known, and it would bend every angle")
    return {
        "partial_rotary_factor": fraction,
        "original_max_position_embeddings": original,
        "rope_scaling": {**scaling, "original_max_position_embeddings": original}
        if scaling
        else None,
    }


def stretched(c: Reader, pairs: int, shapes: Shapes, vector: Vector) -> Config:
    """The scaling of so many rotary frequencies. Llama 3's is kept as one divisor for each, as longrope's are."""
    kinds = ("none", "linear", "yarn", "longrope")
    kind = c.choice("rope.scaling.type", {kind: kind for kind in kinds}, "linear")
    factor = c.number("rope.scaling.factor", c.number("rope.scale_linear", 0.0)) or 1.0
    gain = c.number("rope.scaling.attn_factor", 1.0)
    short = "rope_factors_short.weight"
    long = "rope_factors_long.weight"
    if "rope_freqs.weight" in shapes:
        short = long = "rope_freqs.weight"
    if short in shapes or kind == "longrope":
        if (
            kind == "yarn"
            or factor != 1.0
            or any(tuple(shapes.get(name, ())) != (pairs,) for name in (short, long))
        ):
            raise c.wrong(
                "rope.scaling.type",
                f"{kind!r} by {factor} does not go with the divisors in {short}",
            )
        divisors = {"short_factor": list(vector(short)), "long_factor": list(vector(long))}
        return {"rope_type": "longrope", **divisors, "attention_factor": gain}
    if gain != 1.0:
        raise c.wrong(
            "rope.scaling.attn_factor", f"is {gain}, and there are no divisors it belongs to"
        )
    if kind == "yarn":
        return {"rope_type": "yarn", "factor": factor, **yarn(c)}
    return {"rope_type": "linear", "factor": factor} if kind == "linear" and factor != 1.0 else {}


def yarn(c: Reader) -> Config:
    c.must("rope.scaling.yarn_ext_factor", 1.0)
    c.must("rope.scaling.yarn_log_multiplier", 0.0)
    words = {
        "yarn_attn_factor": "attention_factor",
        "yarn_beta_fast": "beta_fast",
        "yarn_beta_slow": "beta_slow",
    }
    return {word: c.optional_number(f"rope.scaling.{key}") for key, word in words.items()}


def experts(c: Reader, shapes: Shapes) -> Config:
    """The sizes of experts are their tensors'; a layer without a router is dense."""
    if not c.whole("expert_count", 0):
        return {}
    c.must("expert_gating_func", 1)  # softmax
    c.must("expert_weights_scale", 1.0)
    layers = range(c.size("block_count"))
    dense = [i for i in layers if f"blk.{i}.ffn_gate_inp.weight" not in shapes]
    first = f"blk.{next((i for i in layers if i not in dense), 0)}."
    found: Config = {"mlp_only_layers": dense}
    for key, word, tensor in EXPERT_SIZES:
        if f"{first}{tensor}.weight" in shapes:
            found[word] = shapes[f"{first}{tensor}.weight"][-1]
            c.must(key, found[word])
    return found


# ---- what the file holds -------------------------------------------------------------------------


def names_of(model: Model, shapes: Shapes) -> Names:
    held = {
        name.split(".", 2)[2] for name in shapes if name.startswith("blk.") and name.count(".") > 2
    }
    gated = any(isinstance(layer.mlp, Mlp) and layer.mlp.gated for layer in model.layers)
    names = replace(NAMES, mlp_up=NAMES.mlp_up if gated else "ffn_up")
    if "attn_qkv.weight" in held:
        names = replace(names, attn_qkv=Fused("attn_qkv"))
    if gated and "ffn_gate.weight" not in held:
        names = replace(names, mlp_up=Fused("ffn_up"))
    if "ffn_gate_up_exps.weight" in held:
        names = replace(names, expert_up=Fused("ffn_gate_up_exps"))
    if "attn_norm_2.weight" in held:  # Falcon's second norm is the one before attention
        names = replace(
            names, extra={**names.extra, "attn_norm": "attn_norm_2", "mlp_norm": "attn_norm"}
        )
    return names


def as_converted(
    model: Model, names: Names, shapes: Shapes, permuted: bool, scale: float | None
) -> Model:
    def norm(spec: Norm | None, name: str) -> Norm | None:
        if spec is None:
            return None
        return replace(
            spec, bias=spec.kind == "layer" and f"{name}.bias" in shapes, unit_offset=False
        )

    def layer(at: str, spec: Layer) -> Layer:
        attention = spec.attention
        mlp = spec.mlp
        position = spec.attention.position
        if permuted and isinstance(position, Rope):
            position = replace(position, interleaved=True)
        attention = replace(
            attention,
            position=position,
            bias=f"{at}attn_q.bias" in shapes or f"{at}attn_qkv.bias" in shapes,
            out_bias=f"{at}attn_output.bias" in shapes,
            scale=scale or attention.scale,
            qk_norm=norm(attention.qk_norm, at + names.extra["q_norm"]),
        )
        mlp = replace(mlp, bias=f"{at}ffn_up.bias" in shapes) if isinstance(mlp, Mlp) else mlp
        norms: Config = {role: norm(getattr(spec, role), at + names.extra[role]) for role in NORMS}
        return replace(spec, attention=attention, mlp=mlp, **norms)

    return replace(
        model,
        layers=tuple(layer(names.layer.format(i=i), spec) for i, spec in enumerate(model.layers)),
        embed_norm=norm(model.embed_norm, names.extra["embed_norm"]),
        final_norm=norm(model.final_norm, names.final_norm),
        head_bias="output.bias" in shapes,
    )
