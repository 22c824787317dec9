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
        return self.matrices + self.experts + self.embed + self.vectors + (0 if self.tied else self.head)


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
    attention, mlp = layer.attention, layer.mlp
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
    attention, mlp = layer.attention, layer.mlp
    norms = (layer.attn_norm, layer.attn_post_norm, layer.mlp_norm, layer.mlp_post_norm)
    total = sum(_norm(norm, hidden) for norm in (*norms, layer.attn_sum_norm, layer.mlp_sum_norm))
    q, kv = attention.num_heads * attention.head_dim, attention.num_kv_heads * attention.head_dim
    total += (q + 2 * kv) * attention.bias + hidden * attention.out_bias
    if attention.qk_norm:
        spans = (attention.head_dim,) * 2 if attention.qk_norm_over == "head" else (q, kv)
        total += sum(_norm(attention.qk_norm, span) for span in spans)
    if isinstance(mlp, Mlp):
        total += (mlp.size * (2 if mlp.gated else 1) + hidden) * mlp.bias
    return total


def kv_bytes_per_token(model: Model, kv_bits: float = 16) -> float:
    """Keys and values of one position in every layer."""
    return sum(2 * layer.attention.num_kv_heads * layer.attention.head_dim for layer in model.layers) * kv_bits / 8


def kv_bytes(model: Model, length: int, kv_bits: float = 16) -> float:
    """Keys and values one sequence of `length` attends to: layers with a window see no more than that."""
    return sum(
        2 * a.num_kv_heads * a.head_dim * min(length, a.window or length) * kv_bits / 8
        for a in (layer.attention for layer in model.layers)
    )


def scores_bytes(heads: int, tokens: int, bits: float = 16) -> float:
    """The matrix of all queries times all keys, which plain attention stores and Flash Attention never does."""
    return heads * tokens * tokens * bits / 8


def activation_bytes(model: Model, tokens: int, sampled: int, bits: float = 16) -> float:
    """What a step needs beside weights and cache, linear in its tokens: the widest moment of a layer, then logits."""

    def widest(layer: Layer) -> int:
        attention, mlp = layer.attention, layer.mlp
        inner = mlp if isinstance(mlp, Mlp) else replace(mlp.mlp, size=mlp.mlp.size * mlp.top_k)
        block = inner.size * (3 if inner.gated else 2)  # what goes into the activation, and what comes out
        return max(block, (2 * attention.num_heads + 2 * attention.num_kv_heads) * attention.head_dim)

    layer = max(map(widest, set(model.layers)))
    return tokens * (3 * model.hidden + layer) * bits / 8 + sampled * model.vocab * 4


@dataclass(frozen=True)
class Precision:
    """How the layers' matrices are kept, and how embedding, head and vectors are."""

    name: str
    bits: float  # a value, scales and zeros of its group included
    outer: float = 16
    compute: str = "bf16"  # what the products are done in; a device without units for it takes wider ones
    unpacked: float = 0.0  # bits a value of the largest matrix takes once more where a library unpacks it to multiply


PRECISIONS: Mapping[str, Precision] = {
    p.name: p
    for p in (
        Precision("fp32", 32, 32, "fp32"),
        Precision("bf16", 16),
        Precision("fp8", 8, compute="fp8"),  # one scale a row: nothing
        Precision("int8", 8, compute="int8", unpacked=16),  # one scale a row; outliers are multiplied in 16 bits
        Precision("int4", 4 + 32 / 128, compute="int8"),  # groups of 128: a scale and a zero of 16 bits
        Precision(
            "nf4", 4 + 32 / 64, compute="int8", unpacked=48
        ),  # blocks of 64: a 32-bit maximum; unpacked to 16, then 32 bits
        Precision("nf4-double", 4 + 8 / 64 + 32 / 64 / 256, compute="int8"),  # the maxima quantised in their turn
    )
}


def weights_bytes(model: Model, precision: Precision) -> float:
    count = parameters(model)
    outer = count.total - count.matrices - count.experts
    return ((count.matrices + count.experts) * precision.bits + outer * precision.outer) / 8


def peak_bytes(model: Model, precision: Precision) -> float:
    """Weights, and the largest matrix once more as a library without kernels for the format unpacks it."""
    return weights_bytes(model, precision) + parameters(model).largest * precision.unpacked / 8


# ---- what a machine can do -------------------------------------------------------------------------


@dataclass(frozen=True)
class Calibration:
    """What our own code adds to the floor, in as few constants as explain the measured steps."""

    memory: float = 0.97  # share of the bandwidth that products reach
    compute: float = 0.777  # share of the rate that large products reach
    packed: float = 0.6  # share of `memory` where weights must be unpacked on the way
    attention: float = 1.0  # share of `memory` at which keys and values are read
    launch: float = 3e-6  # seconds lost at each border between two kernels
    kernels: tuple[int, int] = (5, 10)  # kernels a layer: one position in the whole step, more
    step: float = 5e-6  # seconds a step beside its layers
    eager: float = 45e-6  # seconds a kernel takes to start where a step is not captured
    captured: int = 1280  # positions up to which a step with pieces of prompts is
    mixed: float = 20e-6  # seconds a layer, where streams go on beside pieces of prompts
    sequence: float = 0.075e-6  # seconds a sequence adds to each layer beside what it reads and computes


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

    def rate(self, compute: str) -> float:
        """Numbers a device has no units for are converted to the next wider ones."""
        wider = {"fp8": "bf16", "int8": "bf16", "bf16": "fp32"}
        while compute not in self.rates:
            if compute not in wider:
                raise ConfigError(f"machine {self.name!r}: no rate for {compute}; known: {', '.join(self.rates)}")
            compute = wider[compute]
        return self.rates[compute]


CPU = Calibration(0.9, 0.63, 0.72, 0.25, 1e-6, (10, 10), step=100e-6, eager=0.0, mixed=0.0, sequence=5e-6)


def _cpu(name: str, title: str, gib: int, gigabytes: float, gigaflops: float, measured: bool = False) -> Machine:
    """Whole numbers of 8 bits go twice as fast as floats; ranks talk through memory, by way of the system."""
    rates = {"fp32": gigaflops * 1e9, "int8": 2 * gigaflops * 1e9}
    return Machine(name, title, gib * 2**30, gigabytes * 1e9, rates, 10e9, 50e-6, measured, CPU)


def _gpu(name: str, title: str, mib: int, gigabytes: float, teraflops: Mapping[str, float], **more: float) -> Machine:
    rates = {kind: value * 1e12 for kind, value in teraflops.items()}
    return Machine(name, title, mib * 2**20, gigabytes * 1e9, rates, **more)  # type: ignore[arg-type]


NVLINK3: Mapping[str, float] = {"link": 300e9, "link_latency": 9e-6}
NVLINK4: Mapping[str, float] = {"link": 450e9, "link_latency": 7e-6}
MACHINES: Mapping[str, Machine] = {
    machine.name: machine
    for machine in (
        _gpu(
            "b200", "NVIDIA B200", 183359, 8000, {"fp32": 75, "bf16": 2250, "fp8": 4500}, link=900e9, link_latency=6e-6
        ),
        # copies at 4.25 TB/s and multiplies at 800 TFLOP/s as measured; 4.8 and 989 by its data sheet
        _gpu("h200", "NVIDIA H200", 143771, 4250, {"fp32": 67, "bf16": 800, "fp8": 1424}, **NVLINK4, measured=True),
        _gpu("h100", "NVIDIA H100 SXM", 81559, 3350, {"fp32": 67, "bf16": 989, "fp8": 1979}, **NVLINK4),
        _gpu("a100-80", "NVIDIA A100 80 GB", 81920, 2039, {"fp32": 19.5, "bf16": 312}, **NVLINK3),
        _gpu("a100-40", "NVIDIA A100 40 GB", 40960, 1555, {"fp32": 19.5, "bf16": 312}, **NVLINK3),
        _gpu("l40s", "NVIDIA L40S", 46068, 864, {"fp32": 91.6, "bf16": 362, "fp8": 733}),
        _gpu("l4", "NVIDIA L4", 23034, 300, {"fp32": 30.3, "bf16": 121, "fp8": 242}),
        _gpu("a10", "NVIDIA A10", 23028, 600, {"fp32": 31.2, "bf16": 125}),
        _gpu("rtx4090", "NVIDIA RTX 4090", 24564, 1008, {"fp32": 82.6, "bf16": 165, "fp8": 330}),
        _gpu("rtx3090", "NVIDIA RTX 3090", 24576, 936, {"fp32": 35.6, "bf16": 71}),
        _gpu("t4", "NVIDIA T4", 15360, 320, {"fp32": 8.1, "bf16": 65}, link=12e9, link_latency=30e-6),
        _cpu("zen3-2", "2 cores of AMD Zen 3", 24, 25.5, 180, measured=True),
        _cpu("apple-m2", "Apple M2, CPU", 16, 100, 1100),
    )
}


def machine(name: str) -> Machine:
    found = MACHINES.get(name.lower()) or next((m for m in MACHINES.values() if m.name.startswith(name.lower())), None)
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
        count, end = share.count, share.start + share.count
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
    message_bytes: float  # what one device sends
    communication: float  # seconds of the messages, were nothing else done meanwhile; no part of `seconds`

    @property
    def ms(self) -> float:
        return self.seconds * 1e3


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
        weight_bits: float = 16,
        kv_bits: float = 16,
        tp: int = 1,
        pp: int = 1,
        outer_bits: float | None = None,
        compute: str | None = None,
    ):
        self.model, self.machine, self.tp, self.pp = model, machine, tp, pp
        self.calibration = machine.calibration
        count, hidden = parameters(model), model.hidden
        outer = outer_bits if outer_bits is not None else max(16.0, weight_bits)
        compute = compute or ("fp32" if weight_bits > 16 else "bf16" if weight_bits == 16 else "int8")
        if weight_bits < 16 and "int8" in machine.rates:
            compute = "int8"  # packed weights meet packed activations there
        self.packed, self.outer_packed = weight_bits < 16 and compute != "fp8", outer < 16
        self.bandwidth, self.rate = machine.bandwidth * tp, machine.rate(compute) * tp
        self.matrices_bytes = (count.matrices * weight_bits + count.vectors * outer) / 8
        self.matrices_values = count.matrices
        self.head_bytes, self.head_values = count.head * outer / 8, count.head
        # (experts, chosen) -> values of one expert in all layers alike; bytes are `weight_bits` each
        self.experts: dict[tuple[int, int], int] = {}
        # window (0: none) -> bytes a cache position takes in all layers alike, heads repeated among ranks included
        self.cache: dict[int, float] = {}
        self.pair_operations = 0
        for layer in model.layers:
            attention, mlp = layer.attention, layer.mlp
            if isinstance(mlp, Moe):
                key = (mlp.experts, mlp.top_k)
                self.experts[key] = self.experts.get(key, 0) + sum(_mlp(mlp.mlp, hidden))
            each = 2 * ceil(attention.num_kv_heads / tp) * tp * attention.head_dim * kv_bits / 8
            self.cache[attention.window or 0] = self.cache.get(attention.window or 0, 0) + each
            self.pair_operations += 4 * attention.num_heads * attention.head_dim
        self.weight_bytes = weight_bits / 8
        # seconds
        self.matrices_read = self.matrices_bytes / self.bandwidth
        self.matrices_work = 2 * self.matrices_values / self.rate
        self.head_read, self.head_work = self.head_bytes / self.bandwidth, 2 * self.head_values / self.rate
        self.cache_read = tuple((window, each / self.bandwidth) for window, each in self.cache.items())
        self.pair_rate = machine.rate("fp32" if compute == "fp32" else "bf16") * tp  # keys and values are never packed
        self.pair_work = self.pair_operations / self.pair_rate
        self.expert_terms = tuple(
            (number, 1 - chosen / number, number * values * self.weight_bytes / self.bandwidth,
             2 * chosen * values / self.rate)
            for (number, chosen), values in self.experts.items()
        )  # fmt: skip

    def step(self, tokens: int, attended: int, sampled: int, pairs: int | None = None) -> float:
        """Seconds the step takes at least."""
        seconds = max(self.matrices_read, self.matrices_work * tokens)
        for _, missed, read, work in self.expert_terms:
            seconds += max(read * (1 - missed**tokens), work * tokens)
        if sampled:
            seconds += max(self.head_read, self.head_work * sampled)
        read = 0.0
        for window, each in self.cache_read:
            read += each * (min(attended, window * tokens) if window else attended)
        return seconds + max(read, self.pair_work * (attended if pairs is None else pairs))

    def floor(self, tokens: int, attended: int, sampled: int, pairs: int | None = None) -> Floor:
        """The same with what it is made of."""
        pairs = attended if pairs is None else pairs
        read = self.matrices_bytes + (self.head_bytes if sampled else 0)
        work = 2.0 * self.matrices_values * tokens + 2.0 * self.head_values * sampled + self.pair_operations * pairs
        for (number, chosen), values in self.experts.items():
            read += number * values * self.weight_bytes * (1 - (1 - chosen / number) ** tokens)
            work += 2 * chosen * values * tokens
        for window, each in self.cache.items():
            read += each * (min(attended, window * tokens) if window else attended)
        messages, sent = self.messages(tokens, sampled)
        seconds = max(self.step(tokens, attended, sampled, pairs), sent / self.machine.link)
        return Floor(seconds, read, work, messages, sent, self.communication(tokens, sampled))

    def messages(self, tokens: int, sampled: int, bits: float = 16) -> tuple[int, float]:
        """Tensor parallel: two sums over all ranks a layer, one for the embedding, the logits gathered at the end.
        Pipeline parallel: hidden states from stage to stage."""
        hidden = tokens * self.model.hidden * bits / 8
        count, sent = self.pp - 1, (self.pp - 1) * hidden
        if self.tp > 1:
            sums = 2 * len(self.model.layers) + 1
            count += sums + (1 if sampled else 0)
            sent += sums * 2 * (self.tp - 1) / self.tp * hidden + sampled * self.model.vocab / self.tp * 4
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
        memory = c.memory * (c.packed if self.packed else 1.0)
        seconds = hypot(self.matrices_read / memory, self.matrices_work * tokens / c.compute)
        for _, missed, read, work in self.expert_terms:
            seconds += hypot(read * (1 - missed**tokens) / memory, work * tokens / c.compute)
        if sampled:
            seconds += hypot(
                self.head_read / (c.memory * (c.packed if self.outer_packed else 1.0)),
                self.head_work * sampled / c.compute,
            )
        read = sum(each * (min(attended, window * tokens) if window else attended) for window, each in self.cache_read)
        seconds += hypot(
            read / (c.memory * c.attention), self.pair_work * (attended if pairs is None else pairs) / c.compute
        )
        layer = c.kernels[tokens > 1] * c.launch + sampled * c.sequence
        seconds += c.step + len(self.model.layers) * layer
        if tokens > sampled:
            seconds += len(self.model.layers) * c.mixed * (sampled > 1)
            if tokens > c.captured:
                seconds = max(seconds, len(self.model.layers) * c.kernels[1] * c.eager)
        return seconds + self.communication(tokens, sampled)
