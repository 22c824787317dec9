"""Who holds what of a model that is spread over ranks: the arithmetic of tensor and pipeline parallelism, all of it.

A rank's share of a spec is a spec: fewer heads, narrower MLPs, fewer layers. Attention, caches and kernels see nothing
else. Inner dimensions need not divide evenly, heads must. Pure numbers: no torch, no messages between ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from bloomery.errors import ConfigError
from bloomery.spec import Alibi, Attention, Layer, Mlp, Model, Moe

Range = tuple[int, int]
GRAINS = (
    256,
    128,
    64,
    32,
)  # formats keep values in blocks of so many; a cut inside of one may not be possible
UNEVEN = 1.05  # how much more than its even share a rank may get for the sake of whole blocks


@dataclass(frozen=True)
class Part:
    """What a rank keeps of a product."""

    rows: tuple[Range, ...] | None = None  # outputs; None: all
    cols: Range | None = None  # inputs; None: all
    bias: bool = True  # where inputs are split the results are added up, and the bias belongs to one rank alone


WHOLE = Part()


@dataclass(frozen=True)
class Layout:
    """One rank's place among those that share every layer."""

    rank: int = 0
    size: int = 1

    def layer(self, spec: Layer) -> Layer:
        """What is left of a layer on this rank."""
        if self.size == 1:
            return spec
        return replace(spec, attention=self.attention(spec.attention), mlp=self.mlp(spec.mlp))

    def attention(self, spec: Attention) -> Attention:
        if self.size == 1:
            return spec
        (first, end), (kv_first, kv_end) = self.heads(spec)
        position = spec.position
        if isinstance(position, Alibi):
            position = replace(position, first=first, heads=spec.num_heads)
        return replace(
            spec, num_heads=end - first, num_kv_heads=kv_end - kv_first, position=position
        )

    def mlp(self, spec: Mlp | Moe) -> Mlp | Moe:
        """Experts are split like any MLP, each of them over all ranks: so none has more to do than another."""
        if isinstance(spec, Moe):
            shared = spec.shared and self._narrow(spec.shared)
            return replace(spec, mlp=self._narrow(spec.mlp), shared=shared)
        return self._narrow(spec)

    def _narrow(self, spec: Mlp) -> Mlp:
        start, end = self.span(spec.size)
        return replace(spec, size=end - start)

    def heads(self, spec: Attention) -> tuple[Range, Range]:
        """This rank's query heads and key heads; a key head that several ranks need is kept by each of them."""
        each = spec.num_heads // self.size
        first = self.rank * spec.num_kv_heads // self.size
        last = (self.rank + 1) * spec.num_kv_heads // self.size
        return (self.rank * each, (self.rank + 1) * each), (first, max(last, first + 1))

    def span(self, size: int) -> Range:
        """This rank's stretch of an inner dimension: of the largest blocks that are nearly even, or of the smallest."""
        for grain in GRAINS:
            units = -(-size // grain)
            if -(-units // self.size) * grain * self.size <= UNEVEN * size:
                break
        if units < self.size:
            grain = 1
            units = size
        return self.rank * units // self.size * grain, min(
            (self.rank + 1) * units // self.size * grain, size
        )

    def words(self, vocab: int) -> Range:
        """This rank's tokens: as many for each but the last ones, so that they can be put side by side."""
        width = self.width(vocab)
        return min(self.rank * width, vocab), min((self.rank + 1) * width, vocab)

    def width(self, vocab: int) -> int:
        return -(-vocab // self.size)

    # ---- products ----

    def qkv(self, spec: Attention) -> Part:
        """A norm over all heads needs all of q and k on every rank: that is cheaper than another message."""
        if self.size == 1:
            return WHOLE
        q, kv = self.heads(spec)
        k_first = spec.num_heads
        v_first = spec.num_heads + spec.num_kv_heads
        parts = [q, (k_first + kv[0], k_first + kv[1]), (v_first + kv[0], v_first + kv[1])]
        if spans_heads(spec):
            parts[:2] = [(0, v_first)]
        return Part(
            rows=tuple((start * spec.head_dim, end * spec.head_dim) for start, end in parts)
        )

    def out(self, spec: Attention) -> Part:
        (first, end), _ = self.heads(spec)
        return self._summed((first * spec.head_dim, end * spec.head_dim))

    def up(self, spec: Mlp) -> Part:
        if self.size == 1:
            return WHOLE
        start, end = self.span(spec.size)
        halves = (0, spec.size) if spec.gated else (0,)
        return Part(rows=tuple((half + start, half + end) for half in halves))

    def down(self, spec: Mlp) -> Part:
        return self._summed(self.span(spec.size))

    def table(self, vocab: int) -> Part:
        return WHOLE if self.size == 1 else Part(rows=(self.words(vocab),))

    def _summed(self, cols: Range) -> Part:
        return WHOLE if self.size == 1 else Part(cols=cols, bias=self.rank == 0)


def spans_heads(spec: Attention) -> bool:
    return spec.qk_norm is not None and spec.qk_norm_over == "all"


# ---- what can be split ---------------------------------------------------------------------------


def check(model: Model, tp: int, pp: int) -> None:
    """Refuse what cannot be split, and say what can."""
    if pp > len(model.layers):
        raise ConfigError(
            f"pp {pp} is more stages than the model has layers; at most {len(model.layers)} would work"
        )
    if not divides(model, tp):
        heads = sorted(
            {(layer.attention.num_heads, layer.attention.num_kv_heads) for layer in model.layers}
        )
        most = max(count for count, _ in heads)
        working = ", ".join(str(size) for size in range(1, most + 1) if divides(model, size))
        have = " and ".join(f"{count} heads over {kv} key heads" for count, kv in heads)
        raise ConfigError(f"tp {tp} does not divide the model's {have}; {working} would work")


def divides(model: Model, size: int) -> bool:
    def fits(spec: Attention) -> bool:
        kv = spec.num_kv_heads
        return spec.num_heads % size == 0 and (kv % size == 0 or size % kv == 0)

    narrowest = min(
        layer.mlp.mlp.size if isinstance(layer.mlp, Moe) else layer.mlp.size
        for layer in model.layers
    )
    width = -(-model.vocab // size)
    words = (size - 1) * width < model.vocab  # nobody is left without
    return words and narrowest >= size and all(fits(layer.attention) for layer in model.layers)


def cut(layers: Sequence[float], head: float, count: int) -> list[range]:
    """Layers of each stage, so that the slowest is as fast as can be; `layers` and `head` are what each costs."""
    sums = [0.0, *accumulate(layers)]
    most = len(layers)
    # cuts[n]: of the first n layers in the stages so far the smallest maximum, and where each stage begins
    cuts: list[tuple[float, tuple[int, ...]]] = [(total, (0,)) for total in sums]
    for stage in range(1, count):
        extra = head if stage == count - 1 else 0.0
        cuts = [
            min(
                (
                    (max(cuts[k][0], sums[n] - sums[k] + extra), (*cuts[k][1], k))
                    for k in range(stage, n)
                ),
                default=(float("inf"), ()),
            )
            for n in range(most + 1)
        ]
    begins = cuts[most][1]
    return [range(start, end) for start, end in zip(begins, (*begins[1:], most))]
