"""How fast a step could be: bytes to read, operations to do, messages between devices, for any model on any machine.

The floor is what the hardware cannot beat: kernel by kernel the larger of bytes over bandwidth and operations over
their rate, every device at work all the time. What is expected of our own code is the floor plus what a few constants
say, fitted to measured steps (`Calibration`). Pure arithmetic over a spec: no torch, no files, no clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import ceil, hypot
from typing import NamedTuple, Protocol

from bloomery.errors import ConfigError
from bloomery.spec import Layer, Mlp, Model, Moe, Norm

# ---- what a model weighs -------------------------------------------------------------------------


@dataclass(frozen=True)
class Parameters:
    """Values by what a step does with them."""

    matrices: int  # in the layers, read by every step
    experts: int  # in the layers, read by the steps that choose them
    embed: int  # looked up: a few rows a step
    head: int  # the last product; the embedding again where tied
    vectors: int  # norms and biases
    tied: bool
    largest: int  # the largest single matrix

    @property
    def total(self) -> int:
        return (
            self.matrices
            + self.experts
            + self.embed
            + self.vectors
            + (0 if self.tied else self.head)
        )


def parameters(model: Model) -> Parameters:
    width = model.embed_dim or model.hidden
    projections = 2 * width * model.hidden if model.embed_dim else 0
    layers = Counter(model.layers)
    matrices = sum(count * sum(_matrices(layer, model.hidden)) for layer, count in layers.items())
    experts = sum(count * _experts(layer, model.hidden) for layer, count in layers.items())
    vectors = sum(count * _vectors(layer, model.hidden) for layer, count in layers.items())
    vectors += _norm(model.final_norm, model.hidden) + _norm(model.embed_norm, model.hidden)
    return Parameters(
        matrices=matrices + projections,
        experts=experts,
        embed=model.vocab * width + model.positions * model.hidden,
        head=model.vocab * width,
        vectors=vectors + (model.vocab if model.head_bias else 0),
        tied=model.tied,
        largest=max(max(_matrices(layer, model.hidden)) for layer in layers),
    )


def _matrices(layer: Layer, hidden: int) -> tuple[int, ...]:
    attention = layer.attention
    mlp = layer.mlp
    heads = attention.num_heads * attention.head_dim
    qkv = hidden * (heads + 2 * attention.num_kv_heads * attention.head_dim)
    if isinstance(mlp, Mlp):
        return qkv, heads * hidden, *_mlp(mlp, hidden)
    shared = _mlp(mlp.shared, hidden) if mlp.shared else ()
    return qkv, heads * hidden, hidden * (mlp.experts + mlp.shared_gate), *shared


def _mlp(mlp: Mlp, hidden: int) -> tuple[int, int]:
    return hidden * mlp.size * (2 if mlp.gated else 1), mlp.size * hidden


def _experts(layer: Layer, hidden: int) -> int:
    return layer.mlp.experts * sum(_mlp(layer.mlp.mlp, hidden)) if isinstance(layer.mlp, Moe) else 0


def _norm(norm: Norm | None, size: int) -> int:
    return size * (norm.weight + norm.bias) if norm else 0


def _vectors(layer: Layer, hidden: int) -> int:
    attention = layer.attention
    mlp = layer.mlp
    norms = (layer.attn_norm, layer.attn_post_norm, layer.mlp_norm, layer.mlp_post_norm)
    total = sum(_norm(norm, hidden) for norm in (*norms, layer.attn_sum_norm, layer.mlp_sum_norm))
    q = attention.num_heads * attention.head_dim
    kv = attention.num_kv_heads * attention.head_dim
    total += (q + 2 * kv) * attention.bias + hidden * attention.out_bias
    if attention.qk_norm:
        spans = (attention.head_dim,) * 2 if attention.qk_norm_over == "head" else (q, kv)
        total += sum(_norm(attention.qk_norm, span) for span in spans)
    if isinstance(mlp, Mlp):
        total += (mlp.size * (2 if mlp.gated else 1) + hidden) * mlp.bias
    return total


def kv_bytes_per_token(model: Model, kv_bits: float = 16) -> float:
    """Keys and values of one position in every layer."""
    return (
        sum(2 * layer.attention.num_kv_heads * layer.attention.head_dim for layer in model.layers)
        * kv_bits
        / 8
    )


def kv_bytes(model: Model, length: int, kv_bits: float = 16) -> float:
    """Keys and values one sequence of `length` attends to: layers with a window see no more than that."""
    return sum(
        2 * a.num_kv_heads * a.head_dim * min(length, a.window or length) * kv_bits / 8
        for a in (layer.attention for layer in model.layers)
    )


def scores_bytes(heads: int, tokens: int) -> float:
    """The matrix of all queries times all keys, which plain attention stores in 16 bits and Flash Attention never."""
    return heads * tokens * tokens * 2.0


def activation_bytes(model: Model, tokens: int, sampled: int, bits: float = 16) -> float:
    """What a step needs beside weights and cache, linear in its tokens: the widest moment of a layer, then logits."""

    def widest(layer: Layer) -> int:
        attention = layer.attention
        mlp = layer.mlp
        inner = mlp if isinstance(mlp, Mlp) else replace(mlp.mlp, size=mlp.mlp.size * mlp.top_k)
        block = inner.size * (
            3 if inner.gated else 2
        )  # what goes into the activation, and what comes out
        return max(
            block, (2 * attention.num_heads + 2 * attention.num_kv_heads) * attention.head_dim
        )

    layer = max(map(widest, set(model.layers)))
    return tokens * (3 * model.hidden + layer) * bits / 8 + sampled * model.vocab * 4


@dataclass(frozen=True)
class Precision:
    """How the layers' matrices are kept, and how embedding and head are; norms and biases stay as they were."""

    name: str
    bits: float  # a value, scales and zeros of its group included
    outer: float = 16
    compute: str = (
        "bf16"  # what the products are done in; a device without units for it takes wider ones
    )
    kinds: Mapping[str, float] = field(
        default_factory=dict
    )  # of a mixture: the share of the values kept in each way
    unpacked: float = 0.0  # bits a value of the largest matrix takes once more where a library unpacks it to multiply


def _named(*precisions: Precision) -> Mapping[str, Precision]:
    return {precision.name: precision for precision in precisions}


DOUBLE = (
    4 + 8 / 64 + 32 / (64 * 256)
)  # blocks of 64 with a maximum of 8 bits, of which 256 have one of 32
# What `--quantize` makes of a checkpoint: embedding and head take 8 bits, for they are the last to be rounded.
PRECISIONS: Mapping[str, Precision] = _named(
    Precision("fp32", 32, 32, "fp32"),
    Precision("bf16", 16),
    Precision("fp8", 8, 8, "fp8"),  # one scale a row: nothing
    Precision("int8", 8, 8, "int8"),
    Precision("w8a8", 8, 8, "int8"),
    Precision("int4", 4 + 32 / 128, 8, "int4"),  # groups of 128: a scale and a zero of 16 bits
    Precision("int4-64", 4 + 32 / 64, 8, "int4"),
    Precision("nf4", DOUBLE, 8, "nf4"),
    Precision("fp4", DOUBLE, 8, "nf4"),
)
# What a library without kernels of its own keeps (bitsandbytes): embedding and head stay as they are, and a matrix is
# unpacked to multiply: outliers of 8 bits to 16; blocks of 64 with a maximum of 32 bits to 16 and then to 32.
LIBRARY: Mapping[str, Precision] = _named(
    Precision("bf16", 16),
    Precision("int8", 8, compute="int8", unpacked=16),
    Precision("nf4", 4 + 32 / 64, compute="nf4", unpacked=48),
)


def weights_bytes(model: Model, precision: Precision) -> float:
    count = parameters(model)
    outer = count.total - count.matrices - count.experts - count.vectors
    wide = count.vectors * max(precision.outer, 16)
    return ((count.matrices + count.experts) * precision.bits + outer * precision.outer + wide) / 8


def peak_bytes(model: Model, precision: Precision) -> float:
    """Weights, and the largest matrix once more as a library without kernels for the format unpacks it."""
    return weights_bytes(model, precision) + parameters(model).largest * precision.unpacked / 8


# ---- what a machine can do -------------------------------------------------------------------------


PACKED: Mapping[str, tuple[float, float]] = {
    "fp8": (0.74, 0.57),
    "int8": (0.95, 0.7),
    "int4": (0.94, 0.5),
    "nf4": (0.5, 0.29),
}


@dataclass(frozen=True)
class Calibration:
    """What our own code adds to the floor, in as few constants as explain the measured steps."""

    memory: float = 0.99  # share of the bandwidth that products reach
    compute: float = 0.8  # share of the rate that large products reach
    tile: float = 0.93  # share of `compute` where weights are unpacked on the way
    # share of `memory` that products with packed weights reach: one position in the whole step, more
    packed: Mapping[str, tuple[float, float]] = field(default_factory=lambda: dict(PACKED))
    unpacking: tuple[float, float] = (
        4e-6,
        7e-6,
    )  # seconds a layer that such products add: one position, more
    attention: float = 1.0  # share of `memory` at which keys and values are read
    draw: float = 0.0  # times that a line's logits are read to draw its token
    launch: float = 3.4e-6  # seconds lost at each border between two kernels
    kernels: tuple[int, int] = (5, 10)  # kernels a layer: one position in the whole step, more
    step: float = 4e-6  # seconds a step beside its layers
    eager: float = 45e-6  # seconds a kernel takes to start where a step is not captured
    captured: int = 2048  # positions up to which a step with pieces of prompts is
    mixed: float = 20e-6  # seconds a layer, where streams go on beside pieces of prompts
    sequence: float = (
        0.052e-6  # seconds a sequence adds to each layer beside what it reads and computes
    )


@dataclass(frozen=True)
class Machine:
    """One device. Rates are the vendor's where nothing was measured."""

    name: str
    title: str
    memory: float  # bytes
    bandwidth: float  # bytes a second
    rates: Mapping[str, float]  # operations a second by type of number, dense
    link: float = 25e9  # bytes a second a device sends to its neighbours
    link_latency: float = 20e-6  # seconds a small message to all takes
    measured: bool = False  # bandwidth and rates were seen, not read
    calibration: Calibration = field(default=Calibration())

    @property
    def cpu(self) -> bool:
        """Whether it has no arithmetic of 16 bits: our mark of a processor."""
        return "bf16" not in self.rates

    def rate(self, compute: str, how: str = "") -> float:
        """Numbers a device has no units for are converted to the next wider ones."""
        kind = compute
        while kind + how not in self.rates:
            if kind not in WIDER:
                raise ConfigError(
                    f"machine {self.name!r}: no rate for {compute}; known: {', '.join(self.rates)}"
                )
            kind = WIDER[kind]
        return self.rates[kind + how]

    def mean_rate(self, kinds: Mapping[str, float], how: str = "") -> float:
        """Of matrices kept in several ways, by the share of values in each."""
        return 1 / sum(share / self.rate(kind, how) for kind, share in kinds.items())


WIDER: Mapping[str, str] = {
    "nf4": "int4",
    "Q4_K": "int4",
    "int4": "int8",
    "Q6_K": "int8",
    "fp8": "int8",
    "int8": "bf16",
    "bf16": "fp32",
}
# of rates: one row times a matrix that no cache holds, a few times any
ROW = ", a row"
FEW = ", few rows"
# What a processor's own kernels reach is measured, so little is left to say.
CPU = Calibration(
    memory=1.0,
    compute=1.0,
    unpacking=(0.0, 0.0),
    launch=1.5e-6,
    kernels=(10, 10),
    step=150e-6,
    eager=50e-6,
    captured=0,
    mixed=0.0,
    sequence=2e-6,
    draw=1.0,
)
# Rates of a processor in proportion to that of floats, as a Zen 3 has them. Q4_K and Q6_K are ways of their own to keep
# 4 and 8 bits; "attend" are single queries over keys, "prompt" many.
ZEN = {
    "fp32": 1.0,
    "int4": 2.0,
    "Q4_K": 1.4,
    "int8": 1.3,
    "Q6_K": 1.2,
    "attend": 0.2,
    "prompt": 0.35,
    "fp32" + FEW: 0.4,
    "fp32" + ROW: 0.07,
    "int4" + ROW: 0.38,
    "Q4_K" + ROW: 0.32,
    "int8" + ROW: 0.25,
    "Q6_K" + ROW: 0.22,
}


def _cpu(
    name: str, title: str, gib: int, gigabytes: float, gigaflops: float, measured: bool = False
) -> Machine:
    """Ranks talk through memory, by way of the system."""
    rates = {kind: ratio * gigaflops * 1e9 for kind, ratio in ZEN.items()}
    return Machine(name, title, gib * 2**30, gigabytes * 1e9, rates, 10e9, 50e-6, measured, CPU)


def _gpu(
    name: str, title: str, mib: int, gigabytes: float, teraflops: Mapping[str, float], **more: float
) -> Machine:
    rates = {kind: value * 1e12 for kind, value in teraflops.items()}
    return Machine(name, title, mib * 2**20, gigabytes * 1e9, rates, **more)  # type: ignore[arg-type]


NVLINK3: Mapping[str, float] = {"link": 300e9, "link_latency": 9e-6}
NVLINK4: Mapping[str, float] = {"link": 450e9, "link_latency": 7e-6}
MACHINES: Mapping[str, Machine] = {
    machine.name: machine
    for machine in (
        _gpu(
            "b200",
            "NVIDIA B200",
            183359,
            8000,
            {"fp32": 75, "bf16": 2250, "fp8": 4500},
            link=900e9,
            link_latency=6e-6,
        ),
        # copies at 4.25 TB/s and multiplies at 800 TFLOP/s as measured; 4.8 and 989 by its data sheet
        _gpu(
            "h200",
            "NVIDIA H200",
            143771,
            4250,
            {"fp32": 67, "bf16": 800, "fp8": 1424},
            **NVLINK4,
            measured=True,
        ),
        _gpu(
            "h100",
            "NVIDIA H100 SXM",
            81559,
            3350,
            {"fp32": 67, "bf16": 989, "fp8": 1979},
            **NVLINK4,
        ),
        _gpu("a100-80", "NVIDIA A100 80 GB", 81920, 2039, {"fp32": 19.5, "bf16": 312}, **NVLINK3),
        _gpu("a100-40", "NVIDIA A100 40 GB", 40960, 1555, {"fp32": 19.5, "bf16": 312}, **NVLINK3),
        _gpu("l40s", "NVIDIA L40S", 46068, 864, {"fp32": 91.6, "bf16": 362, "fp8": 733}),
        _gpu("l4", "NVIDIA L4", 23034, 300, {"fp32": 30.3, "bf16": 121, "fp8": 242}),
        _gpu("a10", "NVIDIA A10", 23028, 600, {"fp32": 31.2, "bf16": 125}),
        _gpu("rtx4090", "NVIDIA RTX 4090", 24564, 1008, {"fp32": 82.6, "bf16": 165, "fp8": 330}),
        _gpu("rtx3090", "NVIDIA RTX 3090", 24576, 936, {"fp32": 35.6, "bf16": 71}),
        _gpu(
            "t4", "NVIDIA T4", 15360, 320, {"fp32": 8.1, "bf16": 65}, link=12e9, link_latency=30e-6
        ),
        _cpu("zen3-2", "2 cores of AMD Zen 3", 24, 25.5, 180, measured=True),
        _cpu("apple-m2", "Apple M2, CPU", 16, 100, 1100),
    )
}


def machine(name: str) -> Machine:
    found = MACHINES.get(name.lower()) or next(
        (m for m in MACHINES.values() if m.name.startswith(name.lower())), None
    )
    if found is None:
        raise ConfigError(f"no machine is called {name!r}; known: {', '.join(MACHINES)}")
    return found


# ---- a step ---------------------------------------------------------------------------------------


class Share(Protocol):
    """One sequence's part of a step: `count` positions from `start` on, the last of which may give a token."""

    @property
    def start(self) -> int: ...
    @property
    def count(self) -> int: ...
    @property
    def samples(self) -> bool: ...


class Work(NamedTuple):
    """A step in the four numbers its time depends on; Roofline says what they are."""

    tokens: int
    attended: int
    sampled: int
    pairs: int


def work(shares: Iterable[Share]) -> Work:
    tokens = attended = sampled = pairs = 0
    for share in shares:
        count = share.count
        end = share.start + share.count
        tokens += count
        attended += end
        sampled += share.samples
        pairs += end if count == 1 else count * (share.start + end + 1) // 2
    return Work(tokens, attended, sampled, pairs)


@dataclass(frozen=True)
class Floor:
    """One step, counted over all devices, and the seconds it takes at least."""

    seconds: float
    bytes: float
    operations: float
    messages: int  # collectives and hops from stage to stage
    communication: (
        float  # seconds of the messages, were nothing else done meanwhile; no part of `seconds`
    )

    @property
    def ms(self) -> float:
        return self.seconds * 1e3


class Products(NamedTuple):
    """Matrices that a step multiplies, in seconds at full speed."""

    read: float
    work: float  # each row
    kind: str | None  # how their values are packed
    row: float = 0.0  # of a processor's own kernels: the first row, as measured,
    few: float = 0.0  # and each of a few


class Roofline:
    """A model on a machine, compiled: a step's floor is a handful of multiplications.

    `tokens` positions are computed, `sampled` of them give a token. `attended` cache positions are read: for each
    sequence its length after the step, once, so when decoding the sum of lengths. `pairs` are queries times the keys
    each sees: when decoding the same number, and the default; a prompt of n tokens has n(n + 1) / 2.
    With `pp` the seconds are those of a step's way through all stages, in which others may follow it.
    """

    def __init__(
        self,
        model: Model,
        machine: Machine,
        precision: Precision = PRECISIONS["bf16"],
        kv_bits: float = 16,
        tp: int = 1,
        pp: int = 1,
    ):
        self.model = model
        self.machine = machine
        self.tp = tp
        self.pp = pp
        self.calibration = machine.calibration
        count = parameters(model)
        hidden = model.hidden
        weight_bits = precision.bits
        outer = precision.outer
        compute = precision.compute
        wide = "fp32" if max(outer, weight_bits) > 16 or compute == "fp32" else "bf16"
        kind = _kind(weight_bits, compute)
        head_kind = _kind(outer, "fp8" if compute == "fp8" else None)
        kinds = precision.kinds or {kind or wide: 1.0}
        head_kinds = {head_kind or wide: 1.0}
        self.bandwidth = machine.bandwidth * tp
        self.rate = machine.mean_rate(kinds) * tp
        self.matrices_values = count.matrices
        self.head_values = count.head
        self.matrices_bytes = (count.matrices * weight_bits + count.vectors * max(outer, 16.0)) / 8
        self.head_bytes = count.head * outer / 8
        self.weight_bytes = weight_bits / 8
        # (experts, chosen) -> values of one expert in all layers alike; bytes are `weight_bits` each
        self.experts: dict[tuple[int, int], int] = {}
        # window (0: none) -> bytes a cache position takes in all layers alike, heads repeated among ranks included
        self.cache: dict[int, float] = {}
        self.sums = 1 + sum(1 if layer.parallel else 2 for layer in model.layers)  # over all ranks
        self.pairs: dict[
            int, int
        ] = {}  # window -> operations a pair of query and key takes in all layers alike
        for layer in model.layers:
            attention = layer.attention
            mlp = layer.mlp
            if isinstance(mlp, Moe):
                key = (mlp.experts, mlp.top_k)
                self.experts[key] = self.experts.get(key, 0) + sum(_mlp(mlp.mlp, hidden))
            window = attention.window or 0
            each = 2 * ceil(attention.num_kv_heads / tp) * tp * attention.head_dim
            self.cache[window] = self.cache.get(window, 0) + each * kv_bits / 8
            self.pairs[window] = (
                self.pairs.get(window, 0) + 4 * attention.num_heads * attention.head_dim
            )

        def products(
            values: int, size: float, kept: Mapping[str, float], packed: str | None
        ) -> Products:
            read = size / self.bandwidth
            work = 2 * values / (machine.mean_rate(kept) * tp)
            if not machine.cpu:
                return Products(read, work, packed)
            few = {
                kind + FEW * (kind + FEW in machine.rates): share for kind, share in kept.items()
            }
            row, each = (
                2 * values / (machine.mean_rate(*how) * tp) for how in ((kept, ROW), (few,))
            )
            return Products(read, work, packed, row, each)

        self.matrices = products(self.matrices_values, self.matrices_bytes, kinds, kind)
        self.head = products(self.head_values, self.head_bytes, head_kinds, head_kind)
        self.sparse = tuple(  # products with all experts, and how many of them a token misses
            (
                products(number * values, number * values * self.weight_bytes, kinds, kind),
                1 - chosen / number,
            )
            for (number, chosen), values in self.experts.items()
        )
        # seconds: keys and values are never packed; a processor has a kernel for single queries and one for prompts
        self.logits_read = 4 * model.vocab / self.bandwidth
        self.unpack = 1 + 16 / weight_bits
        rates = [
            machine.rate(kind if kind in machine.rates else wide) * tp
            for kind in ("attend", "prompt")
        ]
        self.seen = tuple(
            (window, each / self.bandwidth, *(self.pairs[window] / rate for rate in rates))
            for window, each in self.cache.items()
        )

    def step(self, tokens: int, attended: int, sampled: int, pairs: int | None = None) -> float:
        """Seconds the step takes at least."""
        seconds = max(self.matrices.read, self.matrices.work * tokens)
        for products, missed in self.sparse:
            seconds += max(
                products.read * (1 - missed**tokens), products.work * tokens * (1 - missed)
            )
        if sampled:
            seconds += max(self.head.read, self.head.work * sampled)
        return seconds + max(
            self._attention(tokens, attended, attended if pairs is None else pairs)
        )

    def _attention(self, tokens: int, attended: int, pairs: int) -> tuple[float, float]:
        """Seconds of reading keys and values, and of their products; more pairs than positions are a prompt's."""
        read = work = 0.0
        for window, each, alone, together in self.seen:
            most = window * tokens or pairs
            read += each * min(attended, most)
            work += (together if pairs > attended else alone) * min(pairs, most)
        return read, work

    def floor(self, tokens: int, attended: int, sampled: int, pairs: int | None = None) -> Floor:
        """The same with what it is made of."""
        pairs = attended if pairs is None else pairs
        read = self.matrices_bytes + (self.head_bytes if sampled else 0)
        work = 2.0 * self.matrices_values * tokens + 2.0 * self.head_values * sampled
        for (number, chosen), values in self.experts.items():
            read += number * values * self.weight_bytes * (1 - (1 - chosen / number) ** tokens)
            work += 2 * chosen * values * tokens
        for window, each in self.cache.items():
            read += each * min(attended, window * tokens or attended)
            work += self.pairs[window] * min(pairs, window * tokens or pairs)
        messages, sent = self.messages(tokens, sampled)
        seconds = max(self.step(tokens, attended, sampled, pairs), sent / self.machine.link)
        return Floor(seconds, read, work, messages, self.communication(tokens, sampled))

    def messages(self, tokens: int, sampled: int) -> tuple[int, float]:
        """Tensor parallel: two sums over all ranks a layer, one where its blocks are parallel, one for the embedding;
        the logits gathered at the end. Pipeline parallel: hidden states, of 16 bits, from stage to stage."""
        hidden = tokens * self.model.hidden * 2.0
        count = self.pp - 1
        sent = (self.pp - 1) * hidden
        if self.tp > 1:
            count += self.sums + (1 if sampled else 0)
            sent += (
                self.sums * 2 * (self.tp - 1) / self.tp * hidden
                + sampled * self.model.vocab / self.tp * 4
            )
        return count, sent

    def communication(self, tokens: int, sampled: int) -> float:
        """Seconds of all messages: a latency each, and bytes over the link."""
        if self.tp == self.pp == 1:
            return 0.0
        count, sent = self.messages(tokens, sampled)
        return count * self.machine.link_latency + sent / self.machine.link

    def expected(self, tokens: int, attended: int, sampled: int, pairs: int | None = None) -> float:
        """Seconds our own code should take. Reading and computing overlap in part: their sum is a right angle's."""
        c = self.calibration
        decoding = tokens == sampled
        layers = len(self.model.layers)
        seconds = self._product(self.matrices, tokens, 1.0, decoding)
        for products, missed in self.sparse:
            seconds += self._product(products, tokens * (1 - missed), 1 - missed**tokens, decoding)
        if sampled:
            seconds += (
                self._product(self.head, sampled, 1.0, True)
                + c.draw * self.logits_read * sampled / c.memory
            )
        read, work = self._attention(tokens, attended, attended if pairs is None else pairs)
        seconds += hypot(read / (c.memory * c.attention), work / c.compute)
        seconds += c.step + layers * (c.kernels[tokens > 1] * c.launch + sampled * c.sequence)
        if self.matrices.kind is not None:
            seconds += layers * c.unpacking[tokens > 1]
        if not decoding:
            seconds += layers * c.mixed * (sampled > 1)
            if tokens > c.captured:
                begun = layers * c.kernels[1] * c.eager
                seconds = (
                    seconds + begun if self.machine.cpu else max(seconds, begun)
                )  # a GPU's host works ahead
        return seconds + self.communication(tokens, sampled)

    def usual(self) -> tuple[tuple[int, int, int, float], ...]:
        """Steps of all sizes that come, and what they should take: see messages.Capacity."""
        singles = [(n, n * length) for n in (1, 8, 64, 256) for length in (100, 2000)]
        prompts = [
            (n, before) for n in (32, 128, 256, 512, 1024, 2048, 8192) for before in (0, 1000)
        ]
        return (
            *[(n, keys, 0, self.expected(n, keys, n)) for n, keys in singles],
            *[
                (
                    n,
                    0,
                    n * (before + n // 2),
                    self.expected(n, before + n, 1, n * (before + n // 2)),
                )
                for n, before in prompts
            ],
        )

    def _product(self, products: Products, rows: float, share: float, decoding: bool) -> float:
        """`rows` times a share of the matrices. Packed ones are multiplied as they are or, where arithmetic is most of
        it, unpacked first."""
        c = self.calibration
        read = products.read * share
        work = products.work * rows
        if products.row:
            first = max(products.row, products.read) * share
            each = products.few if decoding else products.work
            return hypot(first / c.memory, each * rows / c.compute)
        if products.kind is None:
            return hypot(read / c.memory, work / c.compute)
        packed = read / (c.memory * c.packed[products.kind][rows > 1])
        if products.kind == "fp8":
            return hypot(packed, work / c.compute)
        return min(
            hypot(packed, work / (c.compute * c.tile)),
            read * self.unpack / c.memory + work / c.compute,
        )


def _kind(bits: float, stated: str | None) -> str | None:
    """How weights of so many bits are unpacked; None where they need not be."""
    if bits >= 16:
        return None
    return stated if stated in PACKED else "int4" if bits < 6 else "int8"
