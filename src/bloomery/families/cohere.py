"""Cohere's Command R: one layer norm without bias before parallel blocks, interleaved rope, scaled
logits.
"""

from __future__ import annotations

from collections.abc import Iterable

from bloomery.families import ModelFamily
from bloomery.families.dense import read_attention, read_mlp, read_model
from bloomery.families.llama import DEFAULTS, NAMES
from bloomery.families.reader import ConfigReader, defaults
from bloomery.families.rope import read_rope
from bloomery.spec import AttentionSpec, LayerSpec, ModelSpec, NormSpec

COHERE2 = (
    DEFAULTS
    | defaults(vocab=256000, hidden=8192, mlp=22528, layers=40, heads=64, context=8192, tied=True)
    | defaults(logit_scale=0.0625, sliding_window=4096)
)
COHERE = COHERE2 | {"rope_theta": 500000.0}


def build_cohere(config: ConfigReader, blocks: Iterable[AttentionSpec]) -> ModelSpec:
    """Build a model of parallel layers with these attention blocks."""
    for switch in ("use_parallel_block", "use_gated_activation"):
        config.require(switch, True)
    norm = NormSpec("layer", config.number("layer_norm_eps", 1e-5))
    return read_model(
        config,
        [LayerSpec(block, read_mlp(config), attn_norm=norm, parallel=True) for block in blocks],
        final_norm=norm,
        # The first Command R was trained for a longer context than max_position_embeddings says.
        context=config.size("model_max_length", config.size("max_position_embeddings")),
        logit_scale=config.number("logit_scale", 1.0),
    )


def read_cohere(config: ConfigReader) -> ModelSpec:
    qk_norm = None
    if config.flag("use_qk_norm", False):
        qk_norm = NormSpec("layer", config.number("layer_norm_eps", 1e-5))
    position = read_rope(config, config.head_dim(), interleaved=True)
    attention = read_attention(config, position=position, qk_norm=qk_norm, qk_norm_over="each")
    return build_cohere(config, [attention] * len(config.layers()))


FAMILIES = {
    "cohere": ModelFamily(read_cohere, NAMES, COHERE),
}
