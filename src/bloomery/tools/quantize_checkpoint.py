"""A checkpoint written again in fewer bits, a layer at a time: one shard a layer, each complete or not there.

An interruption costs the layer it happened in: the same command goes on with the next one. GPTQ wants to know what
reaches each product; calibration text runs through the layers as they are finished, from the shards just written, so a
conversion that was resumed is the same as one that was not.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from bloomery.artifacts.files import strict_json
from bloomery.artifacts.locate import Artifact
from bloomery.artifacts.safetensors import read_header
from bloomery.attention.base import AttentionMetadata, cache_shape
from bloomery.attention.choose import choose
from bloomery.describe import description
from bloomery.errors import ConfigError
from bloomery.families import as_stored
from bloomery.kernels.gemv import After, Norm
from bloomery.models.checkpoint import FileSource
from bloomery.models.decoder import Decoder
from bloomery.models.weights import Weights
from bloomery.parallel.groups import ALONE
from bloomery.quant.base import Format, Product, Ready, Tensors
from bloomery.quant.dense import Dense, DenseFormat, DenseReady
from bloomery.quant.gptq import Gptq
from bloomery.quant.solve import solve
from bloomery.quant.write import WRITERS, Written, configuration, gptq_tensors, misfit
from bloomery.spec import Model, Names

BLOCK = 16  # positions a block of the calibration's cache holds
STATE = "unfinished.json"
BESIDE = (
    "*.json",
    "*.txt",
    "*.model",
    "*.jinja",
    "*.tiktoken",
    "LICENSE*",
)  # what goes with the weights
META = torch.device("meta")
GROUPS = (128, 64, 32, 16, -1)  # to propose, the usual first


@dataclass(frozen=True)
class Wish:
    form: str  # gptq, int4, int8, fp8 or nf4
    bits: int = 4  # of gptq
    group: int = 128  # of gptq and int4; -1: a whole row
    act_order: bool = False
    damping: float = 0.01


def convert(
    artifact: Artifact,
    out: Path,
    wish: Wish,
    samples: Sequence[Sequence[int]],
    dtype: str = "float32",
    device: str = "cpu",
    advance: Callable[[], None] = lambda: None,
) -> None:
    """`samples`: calibration for gptq, as token ids. `advance` is called after each shard: a layer, or all the rest."""
    found = description(artifact)
    source = FileSource.safetensors(artifact.path)
    names = as_stored(found.names, source.names())
    texts = [torch.tensor(sample) for sample in samples]
    job = Job(found.model, names, source, wish, getattr(torch, dtype), torch.device(device), texts)
    count = len(found.model.layers)
    shards = [out / f"model-{i + 1:05}-of-{count + 1:05}.safetensors" for i in range(count + 1)]
    layers = [job.products(i) for i in range(count)]
    check(wish, [product for products in layers for product in products if not product.precise])
    begin(out, wish, samples, source)
    whole = [names.head] if names.head else []
    for i, (shard, products) in enumerate(zip(shards[:-1], layers, strict=True)):
        prefix = names.layer.format(i=i)
        whole += [product.name for product in products if product.precise]
        if not shard.exists():
            rounded = [product for product in products if not product.precise]
            replaced = {f"{product.name}.weight" for product in rounded}
            others = [
                name for name in source.names() if name.startswith(prefix) and name not in replaced
            ]
            save(shard, job.packed(i, rounded) | raw(source, others))
        job.pass_on(i, shard)
        advance()
    inside = tuple(names.layer.format(i=i) for i in range(count))
    save(shards[-1], raw(source, [name for name in source.names() if not name.startswith(inside)]))
    finish(
        artifact.path,
        out,
        shards,
        configuration(wish.form, wish.group, wish.bits, wish.act_order, whole),
    )
    advance()


def check(wish: Wish, products: Sequence[Product]) -> None:
    """All of them, before hours have been spent on some."""

    def reasons(group: int) -> Iterator[str]:
        for product in products:
            if reason := misfit(wish.form, product.shape, group, wish.bits):
                yield f"{product.name}: {reason}"

    if wrong := next(reasons(wish.group), None):
        fitting = [group for group in GROUPS if next(reasons(group), None) is None]
        remedy = (
            f"try --group {fitting[0]}"
            if fitting
            else "choose --format int8 or fp8, which take any size"
        )
        raise ConfigError(f"{wrong}; {remedy}")


# ---- files ---------------------------------------------------------------------------------------


def begin(out: Path, wish: Wish, samples: Sequence[Sequence[int]], source: FileSource) -> None:
    """A new folder, or one that the same conversion left unfinished."""
    files = [
        (file, file.stat())
        for file in sorted({entry.file.resolve() for entry in source.entries.values()})
    ]
    model = [(str(file), found.st_size, found.st_mtime_ns) for file, found in files]
    state = {
        **asdict(wish),
        "model": digest(model),
        "calibration": digest([list(sample) for sample in samples]),
    }
    if out.exists() and any(out.iterdir()):
        if (
            not (out / STATE).is_file()
            or strict_json((out / STATE).read_bytes(), str(out / STATE)) != state
        ):
            raise ConfigError(
                f"{out}: is not empty, and not what this conversion left unfinished; name another folder"
            )
        return
    out.mkdir(parents=True, exist_ok=True)
    (out / "state.part").write_text(json.dumps(state))
    (out / "state.part").replace(out / STATE)


def digest(data: Any) -> str:
    return blake2b(json.dumps(data).encode(), digest_size=8).hexdigest()


def raw(source: FileSource, names: Sequence[str]) -> Written:
    """As the files have them."""
    found: Written = {}
    for name in names:
        with safe_open(source.entries[name].file, "pt") as file:
            found[name] = file.get_tensor(name)
    return found


def save(shard: Path, tensors: Written) -> None:
    """Complete or not there."""
    unfinished = shard.with_suffix(".part")
    save_file(
        {name: tensor.cpu().contiguous() for name, tensor in tensors.items()},
        unfinished,
        {"format": "pt"},
    )
    unfinished.replace(shard)


def finish(
    origin: Path, out: Path, shards: Sequence[Path], quantization: Mapping[str, Any]
) -> None:
    headers = {shard.name: read_header(shard) for shard in shards}
    places = {tensor: shard for shard, header in headers.items() for tensor in header}
    total = sum(entry.end - entry.start for header in headers.values() for entry in header.values())
    listing = {"metadata": {"total_size": total}, "weight_map": places}
    for pattern in BESIDE:
        for file in origin.glob(pattern):
            if file.is_file() and not file.name.endswith(".safetensors.index.json"):
                shutil.copyfile(file, out / file.name)
    (out / "model.safetensors.index.json").write_text(json.dumps(listing, indent=1))
    config = strict_json((origin / "config.json").read_bytes(), str(origin / "config.json"))
    (out / "config.json").write_text(
        json.dumps({**config, "quantization_config": quantization}, indent=1)
    )
    (out / STATE).unlink()


# ---- a layer at a time ---------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Watching(DenseReady):
    """A product that remembers what went into it."""

    products: tuple[Product, ...]
    hessian: torch.Tensor  # [in, in] float32: the sum of x xT

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        self.hessian.addmm_(x.float().T, x.float())
        return super().linear(x, bias)

    def phrase(
        self, x: torch.Tensor, bias: torch.Tensor | None, before: Norm | None, after: After
    ) -> torch.Tensor | None:
        return None


@dataclass(frozen=True)
class Noted(Dense):
    """A dense matrix that knows of which products it was made."""

    products: tuple[Product, ...]
    watched: list[Watching] | None  # where to put what it becomes

    def cat(self, others: Sequence[Self]) -> Self:
        return replace(
            super().cat(others), products=sum((other.products for other in others), self.products)
        )

    def prepare(self, dtype: torch.dtype, device: torch.device) -> Ready:
        if device == META:
            return DenseReady(torch.empty(self.shape, dtype=dtype, device=device))
        if self.watched is None:
            return super().prepare(dtype, device)
        hessian = torch.zeros(self.shape[1], self.shape[1], device=device)
        self.watched.append(
            Watching(self.dense(dtype, device), products=self.products, hessian=hessian)
        )
        return self.watched[-1]


@dataclass(frozen=True)
class Noting:
    """Full precision; keeps a list of what was asked for. `experts` stands in the names of those nobody watches."""

    experts: str = ""
    products: list[Product] = field(default_factory=list)
    watched: list[Watching] = field(default_factory=list)

    def matrix(self, tensors: Tensors, product: Product) -> Noted:
        self.products.append(product)
        watched = (
            None
            if product.precise or (self.experts and self.experts in product.name)
            else self.watched
        )
        weight = DenseFormat().matrix(tensors, product).weight
        return Noted(weight, (product,), watched if product.inside else None)


@dataclass(frozen=True)
class Job:
    model: Model
    names: Names
    source: FileSource
    wish: Wish
    dtype: torch.dtype
    device: torch.device
    samples: list[torch.Tensor]
    states: dict[int, torch.Tensor] = field(
        default_factory=dict
    )  # of a sample, as the next layer gets it

    def decoder(self, i: int, source: FileSource, form: Format, device: torch.device) -> Decoder:
        weights = Weights(source, self.names, self.dtype, device, form)
        return Decoder(self.model, weights, ALONE, range(i, i + 1))

    def products(self, i: int) -> list[Product]:
        noting = Noting()
        self.decoder(i, self.source, noting, META)
        return [product for product in noting.products if product.inside]

    def packed(self, i: int, products: Sequence[Product]) -> Written:
        hessians = self._hessians(i) if self.wish.form == "gptq" else {}
        tensors: Written = {}
        for product in products:
            weight = DenseFormat().matrix(self.source, product).dense(torch.float32, self.device)
            for part, tensor in self._packed(product, weight, hessians.get(product.name)).items():
                tensors[f"{product.name}.{part}"] = tensor
        return tensors

    def _packed(
        self, product: Product, weight: torch.Tensor, hessian: torch.Tensor | None
    ) -> Written:
        wish = self.wish
        width = product.shape[1]
        group = width if wish.group == -1 else wish.group
        if wish.form != "gptq":
            return WRITERS[wish.form](weight, group)
        # Experts see too little of any text: as if each of their inputs mattered alike.
        seen = torch.eye(width, device=weight.device) if hessian is None else hessian
        return gptq_tensors(
            solve(weight, seen, wish.bits, group, wish.act_order, wish.damping), wish.bits
        )

    @torch.inference_mode()
    def _hessians(self, i: int) -> dict[str, torch.Tensor]:
        noting = Noting(self.names.experts.partition("{e}")[0])
        decoder = self.decoder(i, self.source, noting, self.device)
        for number in range(len(self.samples)):
            self._run(decoder, number)
        return {
            product.name: watching.hessian
            for watching in noting.watched
            for product in watching.products
        }

    @torch.inference_mode()
    def pass_on(self, i: int, shard: Path) -> None:
        """Each sample through the finished layer."""
        if self.wish.form != "gptq" or i + 1 == len(self.model.layers):
            return
        decoder = self.decoder(i, self.source.over(shard), Gptq(1), self.device)
        for number in range(len(self.samples)):
            self.states[number] = self._run(decoder, number)

    def _run(self, decoder: Decoder, number: int) -> torch.Tensor:
        tokens = self.samples[number].to(self.device)
        count = len(tokens)
        kind = torch.int64 if self.device.type == "cpu" else torch.int32
        every = torch.arange(count, dtype=kind, device=self.device)
        blocks = -(-count // BLOCK)
        starts, ends = (
            torch.tensor(part, dtype=kind, device=self.device) for part in ([0, count], [count])
        )
        step = AttentionMetadata(
            (count,),
            (count,),
            int(count == 1),
            starts,
            ends,
            every,
            every,
            every[None, :blocks],
            BLOCK,
        )
        spec = decoder.spec.layers[0].attention
        cache = torch.zeros(cache_shape(spec, blocks, BLOCK), dtype=self.dtype, device=self.device)
        backend = choose([spec], self.dtype, self.device)
        decoder.reach(count)
        hidden = self.states.get(number)
        return decoder(tokens, every, every, [cache], backend, backend.plan(step), hidden=hidden)
