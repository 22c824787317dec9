"""Floors and expectations laid out: what fits on how many devices of a kind, how they share the work, how fast it goes.

Arithmetic only: roofline.py says what a step costs, this file asks about all the steps a person would ask about.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from math import ceil
from typing import Any

from bloomery.config import sizes
from bloomery.errors import ConfigError
from bloomery.layout import divides
from bloomery.tools.plan.subject import Subject
from bloomery.roofline import (
    LIBRARY,
    MACHINES,
    PRECISIONS,
    Machine,
    Precision,
    Roofline,
    activation_bytes,
    kv_bytes,
    kv_bytes_per_token,
    parameters,
    peak_bytes,
    scores_bytes,
    weights_bytes,
)
from bloomery.spec import Model

READING = 10.0  # tokens a second a person reads
USED = 0.9  # share of a device's memory that is ours, as --memory has it
GRAPHS = 1 << 30  # bytes a GPU keeps for captured steps
NODE = 8  # devices that one machine's links join; tensor parallelism does not leave it
BATCHES = (1, 8, 64)
COUNTS = (1, 2, 4, 8, 16, 32)
ALIKE = 0.95  # of the most tokens a second: a forecast is no finer than that
PROMPTS = (16_000, 100_000)  # tokens at which memory for attention is shown


@dataclass(frozen=True)
class Layout:
    tp: int = 1
    pp: int = 1
    replicas: int = 1

    @property
    def devices(self) -> int:
        return self.tp * self.pp * self.replicas

    def __str__(self) -> str:
        parts = [f"{kind} {n}" for kind, n in (("TP", self.tp), ("PP", self.pp)) if n > 1]
        each = " x ".join(parts) or "one device"
        return f"{self.replicas} replicas of {each}" if self.replicas > 1 else each


@dataclass(frozen=True)
class Row:
    batch: int  # sequences of one replica
    context: int
    floor_ms: float
    expected_ms: float
    tokens_per_second: float  # of all replicas, as expected
    fits: bool
    bound: str  # what the floor is made of, mostly
    cost: float | None = None  # of a million tokens


def largest_step(model: Model, machine: Machine) -> tuple[int, float]:
    """Its positions, and its activations' bytes."""
    tokens, sequences = sizes(machine.cpu)
    tokens = min(tokens, model.context)
    return tokens, activation_bytes(model, tokens, sequences, 32 if machine.cpu else 16)


def held(precision: Precision, machine: Machine) -> Precision:
    """A CPU has no arithmetic of 16 bits, and keeps in eight, blocks of 32, what its kernels do not read."""
    if not machine.cpu:
        return precision
    if precision.bits == 16:
        return PRECISIONS["fp32"]
    return (
        replace(precision, bits=8.5, compute="int8")
        if precision.compute in ("nf4", "fp8")
        else precision
    )


class Placed:
    """A model at a precision on so many devices."""

    def __init__(
        self, model: Model, machine: Machine, precision: Precision, kv_bits: float, layout: Layout
    ):
        self.model = model
        self.machine = machine
        self.precision = precision
        self.kv_bits = kv_bits
        self.layout = layout
        self.roofline = Roofline(model, machine, precision, kv_bits, layout.tp, layout.pp)

    @cached_property
    def room(self) -> float:
        """Bytes left on each device for keys and values."""
        step = largest_step(self.model, self.machine)[1] / self.layout.tp
        weights = weights_bytes(self.model, self.precision) / (self.layout.tp * self.layout.pp)
        return self.machine.memory * USED - weights - step - (0 if self.machine.cpu else GRAPHS)

    @property
    def share(self) -> float:
        """Of a layer's heads of keys and values, on each device: those that cannot be split are kept by every rank."""
        heads = self.model.layers[0].attention.num_kv_heads
        return ceil(heads / self.layout.tp) / heads

    def sequence_bytes(self, context: int) -> float:
        """Keys and values of one sequence on each device: all of them, for a window hides positions and frees none."""
        return context * kv_bytes_per_token(self.model, self.kv_bits) * self.share / self.layout.pp

    def largest(self, context: int) -> int:
        return max(0, int(self.room // self.sequence_bytes(context)))

    def longest(self) -> int:
        """Positions of one sequence that fit, at most what the model was made for."""
        return bisect(
            range(1, self.model.context + 1), False, key=lambda length: not self.largest(length)
        )

    def expected(self, batch: int, context: int) -> float:
        """Seconds a token: in a pipeline the batch goes in as many groups as there are stages."""
        group = ceil(batch / self.layout.pp)
        return self.roofline.expected(group, group * context, group)

    def row(self, batch: int, context: int, price: float | None = None) -> Row:
        group = ceil(batch / self.layout.pp)
        floor = self.roofline.floor(group, group * context, group)
        expected = self.expected(batch, context)
        speed = batch / expected * self.layout.replicas
        work = floor.operations / self.roofline.rate
        cache = (
            group * kv_bytes(self.model, context, self.kv_bits) * self.share
        )  # what is read of it
        kinds = {
            "computing": work,
            "cache": cache / self.machine.bandwidth,
            "weights": floor.bytes / self.roofline.bandwidth - cache / self.machine.bandwidth,
        }
        cost = price * self.layout.devices / (speed * 3600) * 1e6 if price is not None else None
        fits = batch <= self.largest(context)
        return Row(
            batch,
            context,
            floor.ms,
            expected * 1e3,
            speed,
            fits,
            max(kinds, key=lambda k: kinds[k]),
            cost,
        )

    def users(self, context: int) -> int:
        """Sequences of all replicas that each get READING tokens a second."""
        every = range(1, self.largest(context) + 1)
        return self.layout.replicas * bisect(
            every, 1 / READING, key=lambda batch: self.expected(batch, context)
        )

    def prefill(self, length: int) -> tuple[float, float]:
        """Seconds of one prompt, floor and expected, in steps of 8,192."""
        floor = expected = 0.0
        for start in range(0, length, 8192):
            end = min(start + 8192, length)
            pairs = (end * (end + 1) - start * (start + 1)) // 2
            floor += self.roofline.step(end - start, end, int(end == length), pairs)
            expected += self.roofline.expected(end - start, end, int(end == length), pairs)
        return floor, expected


def layouts(model: Model, devices: int) -> Iterator[Layout]:
    """Ways to use so many devices: ranks must share the heads evenly and a node's links, stages need a layer each."""
    for tp in (n for n in range(1, min(devices, NODE) + 1) if devices % n == 0):
        if not divides(model, tp):
            continue
        for pp in (n for n in range(1, devices // tp + 1) if devices // tp % n == 0):
            if pp <= len(model.layers):
                yield Layout(tp, pp, devices // tp // pp)


@dataclass(frozen=True)
class Wish:
    """What the user said about the machine and the goal."""

    machine: Machine
    precision: Precision
    kv_bits: float = 16
    context: int = 1024
    goal: str = "latency"
    devices: int | None = None
    layout: Layout | None = None
    price: float | None = None


class Forecast:
    """Everything the command says, computed once."""

    def __init__(self, subject: Subject, wish: Wish):
        self.subject = subject
        self.wish = wish
        self.model = subject.model
        self.context = min(wish.context, self.model.context)
        self.needed = self.devices_for(wish.machine, wish.precision)
        count = wish.layout.devices if wish.layout else wish.devices or self.needed or COUNTS[-1]
        self.options = [self.placed(layout) for layout in layouts(self.model, count)]
        self.fitting = [option for option in self.options if option.largest(self.context)]
        if wish.layout:
            if wish.layout not in [option.layout for option in self.options]:
                heads = self.model.layers[0].attention.num_heads
                layers = len(self.model.layers)
                known = "; ".join(str(option.layout) for option in self.options)
                raise ConfigError(
                    f"{wish.layout}: {heads} heads, {layers} layers cannot be shared so. With {count} devices: {known}"
                )
            self.chosen = self.placed(wish.layout)
        else:
            self.chosen = self.best(wish.goal) if self.fitting else self.options[-1]

    def placed(
        self, layout: Layout, machine: Machine | None = None, precision: Precision | None = None
    ) -> Placed:
        machine = machine or self.wish.machine
        precision = precision or self.wish.precision
        return Placed(self.model, machine, held(precision, machine), self.wish.kv_bits, layout)

    def devices_for(self, machine: Machine, precision: Precision) -> int | None:
        """The fewest devices on which one sequence of the context fits."""
        for count in COUNTS:
            if any(
                self.placed(way, machine, precision).largest(self.context)
                for way in layouts(self.model, count)
            ):
                return count
        return None

    def best(self, goal: str) -> Placed:
        if goal == "latency":
            return min(
                self.fitting,
                key=lambda placed: (placed.expected(1, self.context), placed.layout.pp),
            )
        least = ALIKE * max(map(self.throughput, self.fitting))
        alike = [placed for placed in self.fitting if self.throughput(placed) >= least]
        # Of those alike the one whose replicas are smallest: who talks to nobody falls with nobody.
        return min(
            alike,
            key=lambda placed: (placed.layout.tp * placed.layout.pp, -self.throughput(placed)),
        )

    def throughput(self, placed: Placed) -> float:
        """Tokens a second of all replicas, the batch as large as fits, requests half prompt and half answer. The stages
        of a pipeline read the next prompts meanwhile."""
        half = max(self.context // 2, 1)
        batch = max(placed.largest(self.context), 1)
        prompt = placed.prefill(half)[1] / placed.layout.pp
        return (
            placed.layout.replicas
            * half
            / (prompt + half * placed.expected(batch, self.context) / batch)
        )

    def rows(self, contexts: Sequence[int]) -> list[Row]:
        fitting = [context for context in sorted(set(contexts)) if context <= self.model.context]
        return [
            self.chosen.row(batch, context, self.wish.price)
            for context in fitting
            for batch in sorted({*BATCHES, self.chosen.largest(context)} - {0})
        ]

    def as_json(self) -> dict[str, Any]:
        wish = self.wish
        chosen = self.chosen
        model = self.model
        floor, expected = chosen.prefill(self.context)
        return {
            "model": self.subject.name,
            "parameters": parameters(model).total,
            "precision": wish.precision.name,
            "weights_bytes": round(weights_bytes(model, wish.precision)),
            "weights_bytes_by_precision": {
                p.name: round(weights_bytes(model, p)) for p in self.precisions()
            },
            "kv_bytes_per_token": round(kv_bytes_per_token(model, wish.kv_bits)),
            "activation_bytes": round(largest_step(model, wish.machine)[1]),
            "scores_bytes": round(scores_bytes(model.layers[0].attention.num_heads, self.context)),
            "prompt_memory": self.prompt_memory(),
            "library_peak_bytes": {
                name: round(peak_bytes(model, p)) for name, p in LIBRARY.items()
            },
            "machine": asdict(replace(wish.machine, rates=dict(wish.machine.rates))),
            "devices": chosen.layout.devices,
            "layout": asdict(chosen.layout),
            "context": self.context,
            "longest_context": chosen.longest(),
            "largest_batch": chosen.largest(self.context),
            "users": chosen.users(self.context),
            "prefill": {
                "tokens": self.context,
                "floor_ms": floor * 1e3,
                "expected_ms": expected * 1e3,
            },
            "communication_ms": chosen.roofline.communication(1, 1) * 1e3,
            "rows": [asdict(row) for row in self.rows((256, 1024, 8192, self.context))],
            "fits": {
                name: {p.name: self.devices_for(known, p) for p in self.precisions()}
                for name, known in MACHINES.items()
            },
            "options": [
                {
                    **asdict(option.layout),
                    "latency_ms": option.expected(1, self.context) * 1e3,
                    "tokens_per_second": self.throughput(option),
                }
                for option in self.fitting
            ],
        }

    def prompt_memory(self) -> list[dict[str, int]]:
        """What a prompt takes beside weights and cache: all queries times all keys of a layer, or a tile at a time."""
        heads = self.model.layers[0].attention.num_heads
        return [
            {
                "tokens": tokens,
                "scores_bytes": round(scores_bytes(heads, tokens)),
                "tiled_bytes": round(activation_bytes(self.model, tokens, 1)),
            }
            for tokens in sorted({self.context, *PROMPTS})
        ]

    def precisions(self) -> list[Precision]:
        names = (
            ("fp32", "int8", "int4")
            if self.wish.machine.cpu
            else ("bf16", "fp8", "int8", "int4", "nf4")
        )
        named = [PRECISIONS[name] for name in names]
        return named if self.wish.precision in named else [self.wish.precision, *named]
