"""Building blocks of the families whose layers have one block each, or share blocks.

It defines no family.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bloomery.families.reader import ConfigReader

# The letters of `hybrid_override_pattern`, and the names of `layers_block_type`.
BLOCK_KINDS = {
    "M": "recurrent",
    "*": "attention",
    "-": "mlp",
    "E": "moe",
    "mamba": "recurrent",
    "linear_attention": "recurrent",
    "attention": "attention",
    "full_attention": "attention",
    "mlp": "mlp",
    "moe": "moe",
}


def read_block_kinds(config: ConfigReader, default_pattern: str) -> list[str]:
    """Return the kind of each layer. `num_hidden_layers` has no effect where they are listed."""
    key = "layers_block_type"
    names = config.list_of(key, str)
    if not names:
        key = "hybrid_override_pattern"
        names = tuple(config.text(key, default_pattern))
    kinds = [config.look_up(key, BLOCK_KINDS, name) for name in names]
    config.get("num_hidden_layers")
    if not 0 < len(names) <= 10_000:
        raise config.error(key, f"names {len(names)} layers, which no model has")
    return kinds


def name_shared_blocks(
    layers: Sequence[int],
    num_blocks: int,
    folder: str,
    low_rank: Mapping[str, str],
    own_copies: bool,
) -> dict[str, tuple[str, ...]]:
    """Return where these layers find a block that takes turns with `num_blocks` - 1 others.

    The block lies in `folder` of one of the layers that share it; with `own_copies`, first in that
    of the layer itself. `low_rank` has, for each matrix with low-rank parts, the name of the list
    with the parts of all uses.
    """
    aliases = {}
    for use, i in enumerate(layers):
        layer = f"model.layers.{i}."
        sharing = [f"model.layers.{j}." for j in layers[use % num_blocks :: num_blocks]]
        if own_copies:
            sharing.insert(0, layer)
        aliases[layer + folder] = tuple(prefix + folder for prefix in sharing)
        for matrix, parts in low_rank.items():
            for number, part in enumerate(("low_rank_down", "low_rank_up")):
                places = tuple(f"{prefix}{parts}.{use}.{number}" for prefix in sharing)
                aliases[f"{layer}{matrix}.{part}"] = places
    return aliases
