"""Gemma 3: a Gemma 2 with norms on q and k, whose window layers have their own rope base; also as
the text part of a vision model.
"""

from __future__ import annotations

from bloomery.families import ModelFamily
from bloomery.families.gemma import build_gemma, read_norm
from bloomery.families.gemma2 import GEMMA2, GEMMA2_NAMES, read_sandwich_layer
from bloomery.families.reader import ConfigReader, defaults
from bloomery.families.rope import read_layer_rope
from bloomery.families.vision import build_vision_family
from bloomery.families.window import read_layer_windows
from bloomery.spec import ModelSpec

GEMMA3 = GEMMA2 | defaults(
    vocab=262208, context=131072, final_logit_softcapping=None, attn_logit_softcapping=None
)


def read_gemma3_text(config: ConfigReader) -> ModelSpec:
    period = config.size("sliding_window_pattern", 6)
    theta = config.number("rope_theta", 1e6)
    local_theta = config.number("rope_local_base_freq", 1e4)
    layers = []
    for window in read_layer_windows(config, lambda i: (i + 1) % period != 0):
        position = read_layer_rope(config, window, theta, local_theta)
        layers.append(
            read_sandwich_layer(config, window=window, qk_norm=read_norm(config), position=position)
        )
    return build_gemma(config, layers)


TEXT = {"gemma3_text": ModelFamily(read_gemma3_text, GEMMA2_NAMES, GEMMA3)}
FAMILIES = TEXT | {"gemma3": build_vision_family(TEXT, GEMMA2_NAMES)}
