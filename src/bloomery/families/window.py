"""Which layers look through a sliding window: `layer_types` where the file has it, else the family's own rule."""

from __future__ import annotations

from collections.abc import Callable

from bloomery.families.reader import Reader

KINDS = {"sliding_attention": True, "full_attention": False}


def windows(c: Reader, rule: Callable[[int], bool]) -> tuple[int | None, ...]:
    """For each layer the size of its window, or None where it sees everything; `rule(i)`: layer i slides."""
    kinds = c.items("layer_types", str)
    unknown = next((kind for kind in kinds if kind not in KINDS), None)
    if unknown is not None:
        raise c.wrong("layer_types", f"{unknown!r} is not known. Known: {', '.join(KINDS)}")
    if kinds and len(kinds) != len(c.layers()):
        raise c.wrong("layer_types", f"names {len(kinds)} layers of {len(c.layers())}")
    slides = [KINDS[kind] for kind in kinds] or [rule(i) for i in c.layers()]
    return tuple(c.size("sliding_window") if sliding else None for sliding in slides)
