"""Reads LoRA adapters: the tensors of a PEFT or GGUF file become the values of a device slot.

An adapter names its matrices after the layers of the model it was trained with. Each target of the
model (adapter_memory.py) looks for the layers it consists of (adapter_modules.py), under every name
and layout that they may have: q, k and v separate or fused, experts separate or stacked. The rows
of B are then arranged exactly as the rows of the base weights (weights.py), and a rank keeps its
own part. So every family and every weight format works through the same code.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from bloomery.adapter_sizes import AdapterValues
from bloomery.artifacts import safetensors
from bloomery.artifacts.lora import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    AdapterConfig,
    check_adapter_files,
    read_adapter_config,
    read_gguf_adapter,
    refuse,
)
from bloomery.artifacts.module_patterns import PatternMatcher
from bloomery.errors import CheckpointError, InvalidRequest
from bloomery.models.adapter_memory import (
    AdapterMemory,
    AdapterTarget,
    ConvertedAdapter,
    SlotMemory,
    TableTarget,
    view_lookup,
)
from bloomery.models.adapter_modules import (
    EXPERT_MODULE,
    AdapterModule,
    AdapterModules,
    Stored,
    layer_of,
    translate_names,
)
from bloomery.models.checkpoint import CPU, FileSource, from_safetensors
from bloomery.models.weights import (
    arrange_parts,
    arrange_qkv,
    arrange_recurrent_in,
    is_interleaved,
    names_of,
)
from bloomery.quant.lazy_tensor import LazyTensor
from bloomery.spec import AttentionSpec, FusedTensor, RopeSpec, SplitTensors, TensorNames

ReadRows = Callable[[str, int], torch.Tensor]  # a layer's name and rows -> [rows, columns]

STACKED_MODULE = re.compile(r".*\bexperts(\.base_layer)*")
# Names of the same layers in models that other libraries have split or fused, in one folder.
QKV_LAYOUTS: tuple[Stored, ...] = (
    SplitTensors(("q_proj", "k_proj", "v_proj")),
    FusedTensor("qkv_proj"),
    FusedTensor("query_key_value"),
)
GATE_UP_LAYOUTS: tuple[Stored, ...] = (
    SplitTensors(("gate_proj", "up_proj")),
    SplitTensors(("w1", "w3")),
    FusedTensor("gate_up_proj"),
)
EXPERT_UP_LAYOUTS: tuple[Stored, ...] = (*GATE_UP_LAYOUTS, "up_proj")
EXPERT_DOWN_LAYOUTS: tuple[Stored, ...] = ("down_proj", "w2")

# Rows of a table that are compared with the base model's at a time. A whole table would need as
# much memory of the device again. Chosen.
COMPARED_IDS = 8192


class LowRankPair(NamedTuple):
    """The matrices of one module; B has the scale in it."""

    a: torch.Tensor  # [rank, in]
    b: torch.Tensor  # [out, rank]
    bias: torch.Tensor | None = None  # [out], that the product of A and B has


@dataclass(frozen=True)
class AdapterReader:
    """Reads adapters for one rank of a model.

    module_names: what the modules are called where adapters are trained, if the checkpoint has
        other names (GGUF).
    permuted: the checkpoint stores the rows of q and k for interleaved rope, and adapters do not.
    """

    memory: AdapterMemory
    names: TensorNames
    module_names: TensorNames
    num_layers: int  # of the whole model
    permuted: bool = False

    def read(self, path: str, allowed_folders: Sequence[str] = ()) -> ConvertedAdapter:
        """Read an adapter into host memory; raises InvalidRequest if it cannot be used.

        One below `allowed_folders` must have its files there, too.
        """
        try:
            location = check_adapter_files(path, allowed_folders)
            with PatternMatcher(location / CONFIG_FILE) as matcher:
                return AdapterConversion(self, location, matcher).convert()
        except (CheckpointError, OSError) as error:
            raise InvalidRequest(str(error), "model") from None


class AdapterConversion:
    """The conversion of one adapter for one rank."""

    def __init__(self, reader: AdapterReader, location: Path, matcher: PatternMatcher):
        self.reader = reader
        self.is_gguf = location.is_file()
        self.config: AdapterConfig
        if self.is_gguf:
            if reader.module_names is reader.names:
                raise refuse(
                    location,
                    "a GGUF adapter needs a base model that is a GGUF file, too; serve that file, "
                    "or load the PEFT adapter that this one was converted from",
                )
            self.path = location
            file, self.config = read_gguf_adapter(location)
            self.source = FileSource.gguf(file)
            self.names = reader.names
        else:
            self.path = location / WEIGHTS_FILE
            self.config = read_adapter_config(location, matcher)
            header = safetensors.read_safetensors_header(self.path)
            self.source = FileSource(
                self.path,
                {name: from_safetensors(self.path, entry) for name, entry in header.items()},
            )
            self.names = reader.module_names
        self.modules = AdapterModules(
            self.source.names(),
            self.names,
            self._list_exact_names(),
            self.config,
            self.path,
            self.is_gguf,
        )
        self.largest_rank = 0
        # Values that this rank has of the matrices that were converted, by their use in a step.
        self.num_values = Counter[str]()

    def convert(self) -> ConvertedAdapter:
        """Find the matrices of every target and lay them out as in a device slot."""
        memory = self.reader.memory
        values = self._convert_targets(memory.layers)
        outer_values = self._convert_targets(memory.outer)
        tables = {}
        for index, table_target in enumerate(memory.tables):
            table = self._convert_table(table_target)
            if table is not None:
                tables[index] = table.contiguous()
                if table_target.name == self.reader.names.head:
                    self.num_values["head"] += table.numel()
        own_layers = {layer_of(target.prefix) for target in memory.targets}
        self.modules.check_all_used(own_layers, self.reader.num_layers)
        num_targets = sum(
            any(role in module.tensors for role in ("a", "weight"))
            for module in self.modules.by_path.values()
        )
        if not num_targets:
            raise refuse(self.path, "the file has no LoRA matrices; save the adapter again")
        adapter = ConvertedAdapter(
            values,
            outer_values if bool(outer_values.any()) else None,
            tables,
            self.largest_rank,
            num_targets,
            AdapterValues(
                self.num_values["matrices"], self.num_values["experts"], self.num_values["head"]
            ),
        )
        problem = memory.check_outer_memory(adapter)
        if problem is not None:
            raise refuse(self.path, problem)
        return adapter

    def _convert_targets(self, memory: SlotMemory) -> torch.Tensor:
        """Lay out the matrices of these targets: [values of a slot]."""
        values = torch.zeros(memory.slot_size(), dtype=self.reader.memory.dtype)
        for target, views in zip(memory.targets, memory.split(values)):
            if target.is_expert:
                self._convert_experts(target, *views)
            else:
                self._convert_linear(target, *views)
        return values

    def _list_exact_names(self) -> set[tuple[int | None, str]]:
        """Return the layers and names of all modules that the checkpoint's names stand for."""
        names = set()
        for target in self.reader.memory.targets:
            stored = translate_names(target.stored, self.reader.names, self.names)
            names |= {(layer_of(target.prefix), name) for name in self._names(target, stored)}
        return names

    # ---- matrices ----

    def _load(self, module: AdapterModule, role: str, dims: int = 2) -> torch.Tensor | None:
        """Load a tensor of a module in float32."""
        name = module.tensors.get(role)
        if name is None:
            return None
        shape = self.source.shape(name)
        if len(shape) != dims or 0 in shape:
            raise refuse(self.path, f"{name} has shape {list(shape)}; save the adapter again")
        loaded = self.source.tensor(name, shape).load(torch.float32, CPU)
        if not bool(torch.isfinite(loaded.sum())):  # one pass: a sum keeps what is not finite
            raise refuse(
                self.path,
                f"{name} has values that are not finite: the training has failed, or the file is "
                "damaged",
            )
        return loaded

    def _load_pair(self, module: AdapterModule) -> LowRankPair | None:
        """Load A and B of a module, and check their rank."""
        if not {"a", "b"} & module.tensors.keys():
            return None
        a = self._load(module, "a")
        b = self._load(module, "b")
        if a is None or b is None:
            missing = "lora_A" if a is None else "lora_B"
            raise refuse(self.path, f"{module.path} has no {missing}; save the adapter again")
        rank = len(a)
        if b.shape[1] != rank:
            raise refuse(
                self.path,
                f"{module.path}: lora_A has shape {list(a.shape)} and lora_B {list(b.shape)}; "
                "they do not belong together",
            )
        expected = self.config.expected_rank(module.path)
        if expected and rank != expected:
            raise refuse(
                self.path,
                f"{module.path} has rank {rank}, and adapter_config.json says {expected}; the two "
                "files belong to different adapters",
            )
        bias = self._load(module, "b_bias", dims=1)
        return self._scale_pair(module.path, a, b, rank, bias)

    def _scale_pair(
        self,
        path: str,
        a: torch.Tensor,
        b: torch.Tensor,
        rank: int,
        bias: torch.Tensor | None,
    ) -> LowRankPair:
        """Put the adapter's scale into B."""
        if rank > self.reader.memory.max_rank:
            raise refuse(
                self.path,
                f"{path} has rank {rank}, above max_lora_rank "
                f"{self.reader.memory.max_rank}; start the server with --max-lora-rank {rank}",
            )
        self.largest_rank = max(self.largest_rank, rank)
        scale = self.config.scale(path, rank)
        b = b * scale
        dtype = self.reader.memory.dtype
        if max(float(a.abs().max()), float(b.abs().max())) > torch.finfo(dtype).max:
            name = str(dtype).removeprefix("torch.")
            raise refuse(
                self.path,
                f"{path} has values too large for {name}, in which the server computes; check "
                "lora_alpha, or start the server with --dtype bfloat16",
            )
        return LowRankPair(a, b, None if bias is None else bias * scale)

    def _check_shape(
        self, module: AdapterModule, pair: LowRankPair, outputs: int, inputs: int
    ) -> None:
        """Refuse matrices that do not fit the layer."""
        if pair.a.shape[1] != inputs or pair.b.shape[0] != outputs:
            raise refuse(
                self.path,
                f"{module.path} has {pair.a.shape[1]} inputs and {pair.b.shape[0]} outputs, and "
                f"this model {inputs} and {outputs}{self.modules.describe_base()}; load it into a "
                "server of its base model",
            )

    # ---- linear layers ----

    def _convert_linear(
        self, target: AdapterTarget, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor
    ) -> None:
        """Fill the matrices of one slot: a [1, parts * rank, in], b [1, out, rank], bias [out]."""
        layer = layer_of(target.prefix)
        for stored in self._layouts(target):
            modules = {name: self.modules.find(layer, name) for name in self._names(target, stored)}
            if any(module is not None for module in modules.values()):
                break
        else:
            stored = translate_names(target.stored, self.reader.names, self.names)
            modules = {
                name: self.modules.find_in_other_folder(layer, name)
                for name in self._names(target, stored)
            }
        if not any(modules.values()):
            return
        pairs: dict[str, LowRankPair | None] = {}
        for name, module in modules.items():
            pairs[name] = None if module is None else self._load_pair(module)
        arranged = ArrangedLayer(self, target, stored, modules, pairs)
        arranged.write(a, b, bias)

    def _names(self, target: AdapterTarget, stored: Stored) -> tuple[str, ...]:
        """Return the names of the layers of a target; a gate may be one of its own."""
        names = names_of(stored)
        mixer = target.mixer
        if not isinstance(mixer, AttentionSpec) or mixer.gate is None:
            return names
        if mixer.gate.stored == "separate":
            names = (*names, self.names.extra["attn_gate"])
        return names

    def _layouts(self, target: AdapterTarget) -> Iterator[Stored]:
        """Yield the names under which an adapter may have the layers of a target."""
        stored = translate_names(target.stored, self.reader.names, self.names)
        yield stored
        others: tuple[Stored, ...] = ()
        if isinstance(target.mixer, AttentionSpec):
            others = QKV_LAYOUTS
        elif target.mixer is None and len(target.parts) == 2:
            others = GATE_UP_LAYOUTS
        yield rename_shared(stored)
        first = names_of(stored)[0]
        folder = "".join(first.rpartition(".")[:2])
        for other in others:
            yield add_folder(other, folder)

    # ---- experts ----

    def _convert_experts(
        self, target: AdapterTarget, a: torch.Tensor, b: torch.Tensor, _: torch.Tensor
    ) -> None:
        """Fill the matrices of all experts: a [experts, parts * rank, in], b [experts, out, rank].

        Experts are separate modules, or one module with the matrices of all experts.
        """
        layer = layer_of(target.prefix)
        modules = self.modules.in_layer(layer)
        stored = translate_names(target.stored, self.reader.names, self.names)
        if self.is_gguf:
            self._convert_gguf_experts(target, stored, a, b)
            return
        stacked = self._find_stacked(target, modules)
        layout = FusedTensor("stacked", interleaved=is_interleaved(stored))
        for expert in range(target.adapters.num_experts):
            if stacked is None:
                self._convert_expert(target, expert, modules, a[expert], b[expert])
            else:
                own = {layout.name: LowRankPair(stacked.a[expert], stacked.b[expert])}
                ArrangedLayer(self, target, layout, {}, own).write(a[expert], b[expert], None)

    def _convert_gguf_experts(
        self, target: AdapterTarget, stored: Stored, a: torch.Tensor, b: torch.Tensor
    ) -> None:
        """Fill the matrices of all experts from modules with those of all experts each."""
        layer = layer_of(target.prefix)
        modules = {name: self.modules.find(layer, name) for name in self._names(target, stored)}
        stacks = {
            name: None if module is None else self._load_stacked(module, target)
            for name, module in modules.items()
        }
        if not any(modules.values()):
            return
        for expert in range(target.adapters.num_experts):
            own = {
                name: None if stack is None else LowRankPair(stack.a[expert], stack.b[expert])
                for name, stack in stacks.items()
            }
            ArrangedLayer(self, target, stored, modules, own).write(a[expert], b[expert], None)

    def _find_stacked(
        self, target: AdapterTarget, modules: list[AdapterModule]
    ) -> LowRankPair | None:
        """Return the matrices of all experts in one module, recognised by their shape.

        A is [experts * rank, in] and B [out, rank * experts], or both are [experts, ...].
        """
        for module in modules:
            if module.path in self.modules.used or not STACKED_MODULE.fullmatch(module.name):
                continue
            pair = self._load_stacked(module, target)
            if pair.a.shape[2] == target.inputs and pair.b.shape[1] == sum(target.parts):
                self.modules.used.add(module.path)
                return pair
        return None

    def _load_stacked(self, module: AdapterModule, target: AdapterTarget) -> LowRankPair:
        """Load a [experts, rank, in] and b [experts, out, rank]."""
        num_experts = target.adapters.num_experts
        names = [module.tensors.get(role) for role in ("a", "b")]
        if None in names:
            raise refuse(self.path, f"{module.path} lacks lora_A or lora_B; save it again")
        dims = len(self.source.shape(str(names[0])))
        a = self._load(module, "a", dims)
        b = self._load(module, "b", dims)
        assert a is not None and b is not None
        if dims == 2:
            if len(a) % num_experts or b.shape[1] != len(a):
                raise refuse(
                    self.path,
                    f"{module.path}: lora_A has shape {list(a.shape)} and lora_B {list(b.shape)}, "
                    f"which do not belong to {num_experts} experts",
                )
            a = a.unflatten(0, (num_experts, -1))
            b = b.unflatten(1, (-1, num_experts)).permute(2, 0, 1)
        rank = a.shape[1]
        if a.shape[0] != num_experts or b.shape[0] != num_experts or b.shape[2] != rank:
            raise refuse(
                self.path,
                f"{module.path}: lora_A has shape {list(a.shape)} and lora_B {list(b.shape)}, "
                f"which do not belong to {num_experts} experts",
            )
        # The patterns of adapter_config.json name the parameters of such a module.
        is_up = target.stored == self.reader.names.expert_up
        parameter = "gate_up_proj" if is_up else "down_proj"
        path = module.path.replace(".base_layer", "")
        return self._scale_pair(f"{path}.{parameter}", a, b, rank, None)

    def _convert_expert(
        self,
        target: AdapterTarget,
        expert: int,
        modules: list[AdapterModule],
        a: torch.Tensor,
        b: torch.Tensor,
    ) -> None:
        """Fill the matrices of one expert from modules of its own."""
        own = {}
        for module in modules:
            match = EXPERT_MODULE.fullmatch(module.name)
            if match and int(match[2]) == expert:
                own[match[3]] = module
        if not own:
            return
        stored = translate_names(target.stored, self.reader.names, self.names)
        is_up = target.stored == self.reader.names.expert_up
        layouts = EXPERT_UP_LAYOUTS if is_up else EXPERT_DOWN_LAYOUTS
        for layout in (stored, *layouts):
            names = names_of(layout)
            by_name = {name: own.get(name.rpartition(".")[2]) for name in names}
            if any(module is not None for module in by_name.values()):
                break
        else:
            return
        pairs: dict[str, LowRankPair | None] = {}
        for name, expert_module in by_name.items():
            pairs[name] = None
            if expert_module is not None:
                self.modules.used.add(expert_module.path)
                pairs[name] = self._load_pair(expert_module)
        ArrangedLayer(self, target, layout, by_name, pairs).write(a, b, None)

    # ---- tables ----

    def _convert_table(self, target: TableTarget) -> torch.Tensor | None:
        """Return this rank's part of a whole table; None if the adapter has none of its own."""
        name = translate_names(target.name, self.reader.names, self.names)
        module = self.modules.find(None, str(name))
        if module is None:
            return None
        table = self._load(module, "weight")
        if table is None:
            return None
        if tuple(table.shape) != target.shape:
            raise refuse(
                self.path,
                f"{module.path} has shape {list(table.shape)}, and this model "
                f"{list(target.shape)}; the adapter has added tokens or is of another model: "
                "merge it into its base model",
            )
        if target.has_bias and "bias" in module.tensors:
            raise refuse(self.path, f"{module.path} replaces a head with a bias; merge the adapter")
        tables = target.tables
        is_part = tables.num_ids < len(table)
        has_low_rank = bool({"a", "b"} & module.tensors.keys())
        table = table[tables.first_id : tables.first_id + tables.num_ids]
        own = table.to(self.reader.memory.dtype)
        # Ranks must agree whether a step changes the table, so none compares its part. Beside
        # low-rank matrices, which all ranks have, PEFT saves the table of the base model.
        if is_part and not has_low_rank:
            return own
        ids = torch.arange(tables.num_ids, device=self.reader.memory.device)
        unchanged = all(
            torch.equal(target.matrix.gather(some_ids).to(own.dtype).cpu(), own_rows)
            for some_ids, own_rows in zip(ids.split(COMPARED_IDS), own.split(COMPARED_IDS))
        )
        return None if unchanged else own


class ArrangedLayer:
    """The matrices of the layers of one target, arranged like the rows of the base weights."""

    def __init__(
        self,
        conversion: AdapterConversion,
        target: AdapterTarget,
        stored: Stored,
        modules: Mapping[str, AdapterModule | None],
        pairs: Mapping[str, LowRankPair | None],
    ):
        self.conversion = conversion
        self.target = target
        self.stored = stored
        self.modules = modules
        self.pairs = pairs
        self.names = list(pairs)
        self.rank = conversion.reader.memory.padded_rank

    def write(self, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Fill a [(1,) parts * rank, in], b [(1,) out, rank] and bias [out] of one slot."""
        target = self.target
        # The last column says which of the adapter's layers a row belongs to.
        arranged = self._arrange(self._read_rows)
        layer_of_row = arranged[:, -1].long()
        self._count_values(layer_of_row)
        columns = layer_of_row[:, None] * self.rank + torch.arange(self.rank)
        rows = arranged.gather(1, columns)
        first_row = 0
        for part, size in enumerate(target.parts):
            pair = self.pairs[self.names[int(layer_of_row[first_row])]]
            first_row += size
            if pair is not None:
                self._write_a(a, part, pair.a)
        b.view(-1, self.rank).copy_(self._select_rows(rows))
        if bias is not None:
            self._write_bias(bias)

    def _count_values(self, layer_of_row: torch.Tensor) -> None:
        """Count the values that this rank has of A and B, by their use (see AdapterValues)."""
        target = self.target
        ranks = torch.tensor([0 if pair is None else len(pair.a) for pair in self.pairs.values()])
        b_values = int(self._select_rows(ranks[layer_of_row]).sum())
        a_values = target.adapters.inputs * int(ranks[layer_of_row.unique()].sum())
        use = "matrices"
        if target.is_embedding:
            use = "embedding"  # looked up: a step reads a few rows
        elif target.is_expert:
            use = "experts"
        elif target.stored == self.conversion.reader.names.head:
            use = "head"
        self.conversion.num_values[use] += a_values + b_values

    def _write_a(self, a: torch.Tensor, part: int, values: torch.Tensor) -> None:
        """Fill A of one part. That of an embedding is stored transposed."""
        cols = self.target.shard.cols
        own = values if cols is None else values[:, slice(*cols)]
        if self.target.is_embedding:
            view_lookup(a[None])[0, :, : len(own)] = own.t()
            return
        a = a.view(-1, self.target.adapters.inputs)
        a[part * self.rank : part * self.rank + len(own)] = own

    def _write_bias(self, bias: torch.Tensor) -> None:
        """Fill the difference to the base model's bias."""
        target = self.target
        has_bias = any(
            (module is not None and "bias" in module.tensors)
            or (pair is not None and pair.bias is not None)
            for module, pair in zip(self.modules.values(), self.pairs.values())
        )
        if not has_bias or not target.shard.bias:
            return
        added = self._select_rows(self._arrange(self._read_added_bias))[:, 0]
        trained = self._select_rows(self._arrange(self._read_bias))[:, 0]
        is_trained = ~trained.isnan()
        if target.bias is None:
            if bool(is_trained.any()):
                path = next(module.path for module in self.modules.values() if module)
                raise refuse(
                    self.conversion.path, f"{path} has a bias, and the base model has none there"
                )
            bias.copy_(added)
            return
        base = target.bias.float().cpu()
        bias.copy_(added + torch.where(is_trained, trained - base, 0.0))

    def _arrange(self, read: ReadRows) -> torch.Tensor:
        """Arrange what `read` returns for each stored tensor like the rows of the weights."""

        def read_lazily(name: str, rows: int) -> LazyTensor:
            stored = LazyTensor.from_tensor(read(name, rows))
            return stored.deinterleave() if is_interleaved(self.stored) else stored

        target = self.target
        spec = target.mixer
        if spec is None:
            arranged = arrange_parts(read_lazily, self.stored, target.parts)
            return arranged.load(torch.float32, CPU)
        if not isinstance(spec, AttentionSpec):
            arranged = arrange_recurrent_in(read_lazily, self.stored, spec)
            return arranged.load(torch.float32, CPU)
        assert not isinstance(self.stored, str)
        arranged = arrange_qkv(read_lazily, self.stored, spec)
        loaded = arranged.load(torch.float32, CPU)
        missing = sum(target.parts) - len(loaded)
        if missing:  # the gate is a layer of its own
            name = self.conversion.names.extra["attn_gate"]
            loaded = torch.cat((loaded, read(name, missing)))
        return self._permute(loaded, spec)

    def _permute(self, rows: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        """Bring the rows of q and k into the order for interleaved rope, if the weights have it."""
        permuted = self.conversion.reader.permuted and not self.conversion.is_gguf
        if not permuted or not isinstance(spec.position, RopeSpec):
            return rows
        count = sum(self.target.parts[:2])
        heads = rows[:count].unflatten(0, (-1, 2, spec.head_dim // 2))
        return torch.cat((heads.transpose(1, 2).flatten(0, 2), rows[count:]))

    def _select_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows of this rank."""
        ranges = self.target.shard.rows
        return rows if ranges is None else torch.cat([rows[start:end] for start, end in ranges])

    def _read_rows(self, name: str, rows: int) -> torch.Tensor:
        """Return B of one layer in columns of its own, and the number of the layer."""
        index = self.names.index(name)
        out = torch.zeros(rows, len(self.names) * self.rank + 1)
        out[:, -1] = index
        pair = self.pairs[name]
        if pair is not None:
            module = self.modules.get(name)
            if module is not None:
                self.conversion._check_shape(module, pair, rows, self.target.inputs)
            first = index * self.rank
            out[:, first : first + pair.b.shape[1]] = pair.b
        return out

    def _read_bias(self, name: str, rows: int) -> torch.Tensor:
        """Return the trained bias of one layer [rows, 1]; NaN where it has none."""
        module = self.modules.get(name)
        trained = None if module is None else self.conversion._load(module, "bias", dims=1)
        return self._as_column(trained, rows, float("nan"))

    def _read_added_bias(self, name: str, rows: int) -> torch.Tensor:
        """Return the bias of one layer's B [rows, 1]."""
        pair = self.pairs[name]
        return self._as_column(None if pair is None else pair.bias, rows, 0.0)

    def _as_column(self, values: torch.Tensor | None, rows: int, default: float) -> torch.Tensor:
        if values is None:
            return torch.full((rows, 1), default)
        if len(values) != rows:
            raise refuse(
                self.conversion.path, f"a bias has {len(values)} values, and this model {rows}"
            )
        return values[:, None]


def rename_shared(stored: Stored) -> Stored:
    """Return the name that a shared expert has in other versions of a model."""

    def rename(name: str) -> str:
        if ".shared_experts." in name:
            return name.replace(".shared_experts.", ".shared_expert.")
        return name.replace(".shared_expert.", ".shared_experts.")

    if isinstance(stored, SplitTensors):
        return SplitTensors(tuple(map(rename, stored.names)))
    if isinstance(stored, FusedTensor):
        return replace(stored, name=rename(stored.name))
    return rename(stored)


def add_folder(stored: Stored, folder: str) -> Stored:
    """Put the names into a folder."""
    if isinstance(stored, SplitTensors):
        return SplitTensors(tuple(folder + name for name in stored.names))
    if isinstance(stored, FusedTensor):
        return replace(stored, name=folder + stored.name)
    return folder + stored
