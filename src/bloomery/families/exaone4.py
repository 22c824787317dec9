"""EXAONE 4: norms only after each block, and norms on q and k per head. In models with windows,
layers with full attention have no position encoding (NoPE).
"""

from __future__ import annotations

from bloomery.families import ModelFamily
from bloomery.families.dense import read_model
from bloomery.families.llama import DEFAULTS
from bloomery.families.olmo2 import OLMO2_NAMES, read_post_norm_layer
from bloomery.families.reader import ConfigReader, defaults
from bloomery.families.rope import read_rope
from bloomery.families.window import read_layer_windows
from bloomery.spec import ModelSpec

EXAONE4 = DEFAULTS | defaults(
    vocab=102400, mlp=16384, kv_heads=32, rms_norm_eps=1e-5, sliding_window=4096
)


def read_exaone4(config: ConfigReader) -> ModelSpec:
    rope = read_rope(config, config.head_dim())
    uses_windows = config.get("sliding_window") is not None
    config.get("sliding_window_pattern")  # repeats layer_types, as a number or as "LLLG"

    def has_window(i: int) -> bool:
        return uses_windows and (i + 1) % config.size("sliding_window_pattern", 4) != 0

    layers = []
    for window in read_layer_windows(config, has_window):
        has_rope = window is not None or not uses_windows
        position = rope if has_rope else None
        layers.append(
            read_post_norm_layer(
                config, bias=False, out_bias=False, position=position, window=window
            )
        )
    return read_model(config, layers)


FAMILIES = {"exaone4": ModelFamily(read_exaone4, OLMO2_NAMES, EXAONE4)}
