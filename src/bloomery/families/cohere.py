"""Cohere's Command R: layer norms without bias, both blocks behind one, interleaved rotary, scaled logits. Command R7B
(cohere2): windowed layers turn, the others see everything and no position."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from bloomery.families import Family
from bloomery.families.llama import DEFAULTS, NAMES, attention, mlp, model
from bloomery.families.reader import Reader, defaults
from bloomery.families.rope import rope
from bloomery.families.window import windows
from bloomery.spec import Attention, Layer, Model, Norm

COHERE2 = DEFAULTS | defaults(
    vocab=256000,
    hidden=8192,
    mlp=22528,
    layers=40,
    heads=64,
    context=8192,
    tied=True,
    logit_scale=0.0625,
    sliding_window=4096,
)
COHERE = COHERE2 | {"rope_theta": 500000.0}


def around(c: Reader, blocks: Iterable[Attention]) -> Model:
    for switch in ("use_parallel_block", "use_gated_activation"):
        c.must(switch, True)
    norm = Norm("layer", c.number("layer_norm_eps", 1e-5))
    return model(
        c,
        [Layer(block, mlp(c), attn_norm=norm, parallel=True) for block in blocks],
        final_norm=norm,
        # the first Command R was trained on for longer than its position table says
        context=c.size("model_max_length", c.size("max_position_embeddings")),
        logit_scale=c.number("logit_scale", 1.0),
    )


def cohere(c: Reader) -> Model:
    norm = Norm("layer", c.number("layer_norm_eps", 1e-5)) if c.flag("use_qk_norm", False) else None
    position = rope(c, c.head_dim(), interleaved=True)
    return around(
        c, [attention(c, position=position, qk_norm=norm, qk_norm_over="each")] * len(c.layers())
    )


def cohere2(c: Reader) -> Model:
    c.must("use_qk_norm", False)
    c.must("position_embedding_type", "rope_gptj")
    plain = attention(c, position=rope(c, c.head_dim(), interleaved=True))
    pattern = c.size("sliding_window_pattern", 4)
    sizes = windows(c, lambda i: (i + 1) % pattern != 0)
    return around(
        c,
        [replace(plain, window=size, position=plain.position if size else None) for size in sizes],
    )


FAMILIES = {"cohere": Family(cohere, NAMES, COHERE), "cohere2": Family(cohere2, NAMES, COHERE2)}
