"""The LoRA adapters in a rank's host memory, and the thread that reads them.

Steps go on while an adapter is read and converted. A device slot gets its adapter from here, by
copies that are queued before the step that needs it.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import torch

from bloomery.adapter_sizes import AdapterValues
from bloomery.errors import InvalidRequest
from bloomery.messages import AdapterInfo
from bloomery.models.adapter_files import AdapterReader
from bloomery.models.adapter_memory import ConvertedAdapter
from bloomery.roofline import StepAdapter
from bloomery.runtime.rows import BatchOrder, PlacedRequest

log = logging.getLogger("bloomery.adapters")

# Seconds after which the reading thread hands over Python's global lock. A step takes the lock
# again after every launch, and by default it would wait 5 ms each time.
SWITCH_SECONDS = 1e-4


class WorkerAdapters:
    """Adapters by name, converted for this rank's part of the model."""

    def __init__(
        self,
        reader: AdapterReader,
        prepare: Callable[[ConvertedAdapter], None],
        allowed_folders: Sequence[str] = (),
    ):
        """`prepare` is called on the thread with each adapter that has been read.

        Adapters below `allowed_folders` must have their files there whenever they are read.
        """
        self.reader = reader
        self.allowed_folders = allowed_folders
        self.prepare = prepare
        self.adapters: dict[str, ConvertedAdapter] = {}
        self.values_in_slot: dict[int, AdapterValues] = {}
        self.lock = threading.Lock()
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="adapters")

    def load(self, name: str, path: str) -> Future[AdapterInfo]:
        """Read an adapter on the thread; the exception is InvalidRequest if it cannot be used."""
        return self.thread.submit(self._read, name, path)

    def _read(self, name: str, path: str) -> AdapterInfo:
        try:
            with short_switch_interval():
                adapter = self.reader.read(path, self.allowed_folders)
            self.prepare(adapter)
        except InvalidRequest:
            raise
        except torch.OutOfMemoryError as error:
            raise InvalidRequest(
                f"{path}: there is no memory for the adapter's embedding or head ({error}); start "
                "the server with a lower --gpu-memory-utilization or with fewer --max-loras",
                "model",
            ) from error
        except Exception as error:
            log.exception("adapter %s could not be read", name)
            raise InvalidRequest(
                f"{path}: the adapter cannot be read ({error}); check its files", "model"
            ) from error
        with self.lock:
            self.adapters[name] = adapter
        return AdapterInfo(name, adapter.rank, adapter.num_bytes, adapter.num_targets)

    def unload(self, name: str) -> None:
        """Forget an adapter. The copy into a slot that is under way still ends."""
        with self.lock:
            self.adapters.pop(name, None)

    def fill_slot(self, slot: int, name: str) -> bool:
        """Copy an adapter into a device slot, counted from 0.

        Returns whether captured steps do not know its memory: see AdapterMemory.note_outer.
        """
        with self.lock:
            adapter = self.adapters[name]
        self.values_in_slot[slot] = adapter.own_values
        return self.reader.memory.load(slot, adapter)

    def list_step_adapters(
        self, order: BatchOrder, chunks: Sequence[PlacedRequest]
    ) -> list[StepAdapter]:
        """Return the adapters of a step, with the number of their tokens."""
        slots = [] if order.adapter_slots is None else order.adapter_slots.tolist()
        num_tokens = Counter[int](slots)
        num_sampled = Counter(num_tokens)
        for scheduled, row in chunks:
            num_tokens[row.adapter_slot] += scheduled.count + len(scheduled.drafts)
            num_sampled[row.adapter_slot] += scheduled.samples
        return [
            StepAdapter(self.values_in_slot[slot], count, num_sampled[slot])
            for slot, count in num_tokens.items()
            if slot >= 0
        ]


@contextmanager
def short_switch_interval() -> Iterator[None]:
    """Let other threads of this process get Python's global lock sooner."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(min(usual, SWITCH_SECONDS))
    try:
        yield
    finally:
        sys.setswitchinterval(usual)
