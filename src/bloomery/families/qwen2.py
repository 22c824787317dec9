"""Qwen2 and 2.5: a Llama with biases on q, k and v, and windows in its upper layers where switched on."""

from __future__ import annotations

from bloomery.families import Family
from bloomery.families.llama import DEFAULTS, NAMES, layer, model
from bloomery.families.reader import Reader, defaults
from bloomery.families.window import windows
from bloomery.spec import Model

QWEN = DEFAULTS | defaults(
    vocab=151936, mlp=22016, kv_heads=32, context=32768, sliding_window=4096, max_window_layers=28
)


def uses_window(c: Reader) -> bool:
    on, window = c.flag("use_sliding_window", False), c.get("sliding_window")
    return on and window is not None


def upper_windows(c: Reader) -> tuple[int | None, ...]:
    """Layers from max_window_layers on slide, if any do."""
    on, first = uses_window(c), c.whole("max_window_layers")
    return windows(c, lambda i: on and i >= first)


def qwen2(c: Reader) -> Model:
    c.must("use_mrope", False)
    return model(c, [layer(c, bias=True, out_bias=False, window=size) for size in upper_windows(c)])


FAMILIES = {"qwen2": Family(qwen2, NAMES, QWEN)}
