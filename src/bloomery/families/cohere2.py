"""Command R7B: a Command R whose window layers have rope and whose full attention layers have no
position.
"""

from __future__ import annotations

from dataclasses import replace

from bloomery.families import ModelFamily
from bloomery.families.cohere import COHERE2, build_cohere
from bloomery.families.dense import read_attention
from bloomery.families.llama import NAMES
from bloomery.families.reader import ConfigReader
from bloomery.families.rope import read_rope
from bloomery.families.window import read_layer_windows
from bloomery.spec import ModelSpec


def read_cohere2(config: ConfigReader) -> ModelSpec:
    config.require("use_qk_norm", False)
    config.require("position_embedding_type", "rope_gptj")
    rope = read_rope(config, config.head_dim(), interleaved=True)
    full_attention = read_attention(config, position=None)
    period = config.size("sliding_window_pattern", 4)
    blocks = []
    for window in read_layer_windows(config, lambda i: (i + 1) % period != 0):
        position = rope if window else None
        blocks.append(replace(full_attention, window=window, position=position))
    return build_cohere(config, blocks)


FAMILIES = {
    "cohere2": ModelFamily(read_cohere2, NAMES, COHERE2),
}
