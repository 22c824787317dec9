"""Sliding windows by layer: from `layer_types` if present, else by a rule of the family."""

from __future__ import annotations

from collections.abc import Callable

from bloomery.families.reader import ConfigReader

HAS_WINDOW = {"sliding_attention": True, "full_attention": False}


def read_layer_windows(
    config: ConfigReader, has_window_by_default: Callable[[int], bool] | None = None
) -> tuple[int | None, ...]:
    """Return the window of each layer, None for full attention.

    If the config has no `layer_types`, `has_window_by_default(i)` decides for layer i. Without a
    rule, all layers have a window or none has, whether or not the config states one.
    """
    rule = has_window_by_default or (lambda i: config.get("sliding_window") is not None)
    has_window = config.layer_choices("layer_types", HAS_WINDOW, rule)
    return tuple(config.size("sliding_window") if windowed else None for windowed in has_window)
