"""What adapters need outside of the decoder layers: all of it fits and is allocated, or nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from bloomery.artifacts.locate import locate_model
from bloomery.models.adapter_files import AdapterReader
from bloomery.models.adapter_memory import OUTER_MARGIN_BYTES, AdapterMemory, ConvertedAdapter
from bloomery.models.load import load_model
from bloomery.quant.lora import TableAdapters
from tests.parity.adapters import RANK, save_adapter
from tests.parity.cases import CASES, make_checkpoint

CPU = torch.device("cpu")
SLOTS = 3


@pytest.fixture
def reader(tmp_path: Path) -> AdapterReader:
    """A reader of adapters of the model in `tmp_path`, which has one called `both` beside it."""
    model = make_checkpoint(next(case for case in CASES if case.name == "llama"), tmp_path / "base")
    save_adapter(
        model,
        tmp_path / "both",
        ["q_proj"],
        modules_to_save=["embed_tokens", "lm_head"],
    )
    memory = AdapterMemory(SLOTS, RANK, torch.float32, CPU)
    artifact = locate_model(str(tmp_path / "base"))
    loaded = load_model(artifact, "auto", torch.float32, CPU, adapter_memory=memory)
    assert loaded.adapter_reader is not None
    return loaded.adapter_reader


@pytest.fixture
def adapter(reader: AdapterReader, tmp_path: Path) -> ConvertedAdapter:
    """An adapter with an embedding, a head, and low-rank matrices of the head."""
    adapter = reader.read(str(tmp_path / "both"))
    assert len(adapter.tables) == 2
    adapter.outer_values = torch.ones(reader.memory.outer.slot_size())
    return adapter


def test_everything_that_an_adapter_needs_is_checked_together(
    reader: AdapterReader, adapter: ConvertedAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = reader.memory
    own_values = memory.outer.slot_size() + sum(table.numel() for table in adapter.tables.values())
    needed = SLOTS * own_values * 4 + OUTER_MARGIN_BYTES
    free = needed
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, 0))
    memory.device = torch.device("cuda")
    assert memory.check_outer_memory(adapter) is None
    free = needed - 1
    problem = memory.check_outer_memory(adapter)
    assert problem is not None and "--gpu-memory-utilization" in problem
    memory.device = CPU
    memory.allocate_outer(adapter)
    memory.device = torch.device("cuda")
    free = 0
    assert memory.check_outer_memory(adapter) is None, "it needs nothing any more"


def test_a_failed_allocation_leaves_nothing(
    reader: AdapterReader, adapter: ConvertedAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = reader.memory
    last = memory.tables[max(adapter.tables)].tables
    allocate = TableAdapters.allocate

    def run_out(
        tables: TableAdapters, num_slots: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        allocate(tables, num_slots, dtype, device)
        if tables is last:
            raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(TableAdapters, "allocate", run_out)
        with pytest.raises(torch.OutOfMemoryError):
            memory.allocate_outer(adapter)
    assert not memory.outer.is_allocated
    assert all(target.adapters.matrices is None for target in memory.outer.targets)
    assert not any(target.tables.is_allocated for target in memory.tables)
    assert all(embedding.lookup is None for embedding in memory.embeddings)
    memory.allocate_outer(adapter)
    assert memory.note_outer(adapter) and not memory.note_outer(adapter)


def test_tables_are_compared_with_those_of_the_base_model_in_parts(
    reader: AdapterReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the last row of the head differs."""
    path = tmp_path / "both" / "adapter_model.safetensors"
    tensors = load_file(path)
    (name,) = (name for name in tensors if "lm_head" in name)
    head = reader.memory.tables[1]
    tensors[name] = head.matrix.gather(torch.arange(head.tables.num_ids)).clone()
    monkeypatch.setattr(f"{AdapterReader.__module__}.COMPARED_IDS", 7)
    for is_changed in (False, True):
        tensors[name][-1] += int(is_changed)
        save_file(tensors, path)
        assert (1 in reader.read(str(tmp_path / "both")).tables) == is_changed


def test_a_part_of_a_table_is_kept_whatever_it_holds(reader: AdapterReader, tmp_path: Path) -> None:
    """Otherwise the ranks of a group, which hold different parts, could run different steps."""
    path = tmp_path / "both" / "adapter_model.safetensors"
    tensors = load_file(path)
    (name,) = (name for name in tensors if "lm_head" in name)
    head = reader.memory.tables[1]
    tensors[name] = head.matrix.gather(torch.arange(head.tables.num_ids)).clone()
    save_file(tensors, path)
    head.tables.num_ids -= 1
    assert 1 in reader.read(str(tmp_path / "both")).tables
