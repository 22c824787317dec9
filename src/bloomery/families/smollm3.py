"""SmolLM3: a Llama in which every fourth layer has no positions."""

from __future__ import annotations

from dataclasses import replace

from bloomery.families import Family
from bloomery.families.llama import DEFAULTS, NAMES, layer, model
from bloomery.families.qwen2 import uses_window
from bloomery.families.reader import Reader, defaults
from bloomery.families.window import windows
from bloomery.spec import Model

SMOLLM3 = DEFAULTS | defaults(
    vocab=128256,
    hidden=2048,
    layers=36,
    heads=16,
    kv_heads=4,
    context=32768,
    tied=True,
    rope_theta=2e6,
)


def smollm3(c: Reader) -> Model:
    interval = c.size("no_rope_layer_interval", 4)
    count = len(c.layers())
    turns = c.items(
        "no_rope_layers", int, [int((i + 1) % interval != 0) for i in c.layers()]
    )  # 1: this layer turns
    if len(turns) != count:
        raise c.wrong("no_rope_layers", f"names {len(turns)} layers of {count}")
    on = uses_window(c)
    plain = layer(c)
    blocks = [
        replace(plain.attention, window=size, position=plain.attention.position if turn else None)
        for size, turn in zip(windows(c, lambda i: on and not turns[i]), turns)
    ]
    return model(c, [replace(plain, attention=block) for block in blocks])


FAMILIES = {"smollm3": Family(smollm3, NAMES, SMOLLM3)}
