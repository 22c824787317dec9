"""Sliding windows by layer: from `layer_types` if present, else by a rule of the family."""

from __future__ import annotations

from collections.abc import Callable

from bloomery.families.reader import ConfigReader

HAS_WINDOW = {"sliding_attention": True, "full_attention": False}


def read_layer_windows(
    config: ConfigReader, has_window_by_default: Callable[[int], bool]
) -> tuple[int | None, ...]:
    """Return the window of each layer, None for full attention.

    `has_window_by_default(i)` decides for layer i if the config has no `layer_types`.
    """
    layer_types = config.list_of("layer_types", str)
    num_layers = len(config.layers())
    for layer_type in layer_types:
        if layer_type not in HAS_WINDOW:
            known = ", ".join(HAS_WINDOW)
            raise config.error("layer_types", f"{layer_type!r} is not known. Known: {known}")
    if layer_types and len(layer_types) != num_layers:
        raise config.error("layer_types", f"names {len(layer_types)} layers of {num_layers}")
    has_window = [HAS_WINDOW[layer_type] for layer_type in layer_types]
    if not has_window:
        has_window = [has_window_by_default(i) for i in config.layers()]
    return tuple(config.size("sliding_window") if windowed else None for windowed in has_window)
