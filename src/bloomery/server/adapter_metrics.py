"""Counts by LoRA adapter, under a bounded number of labels.

Where requests find adapters by their Hub ids, clients decide how many names there are. Prometheus
keeps a time series for every label it has ever seen. So only the first MAX_FOUND_LABELS of these
adapters have labels of their own. All others share the label OTHER_ADAPTERS, so that sums over
adapters are right. What operators and clients with a key have loaded always has a label. A label
ends when its adapter is unloaded, which makes room for another one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from bloomery.engine.adapter_catalog import adapter_name_of

MAX_FOUND_LABELS = 100  # chosen: each adapter has six time series
OTHER_ADAPTERS = "other"

COUNTS = {
    "requests": "answered prompts of a LoRA adapter",
    "prompt_tokens": "prompt tokens of a LoRA adapter",
    "generated_tokens": "generated tokens of a LoRA adapter",
    "loads": "loads of a LoRA adapter into a device slot",
    "evictions": "times another LoRA adapter took the device slot",
}


class AdapterMetrics:
    """The counters of all adapters, and which of them have labels."""

    def __init__(self) -> None:
        self.loaded_labels: set[str] = set()  # of adapters that somebody has loaded
        self.found_labels: set[str] = set()  # of adapters that requests have found
        self.counters: dict[str, Counter[str]] = {key: Counter() for key in COUNTS}  # by label
        self.open_requests: Counter[str] = Counter()  # by name; only names of open requests

    # ---- labels ------------------------------------------------------------------------------

    def add_loaded(self, name: str) -> None:
        """Give a label to an adapter that an operator or a client with a key has loaded."""
        self.loaded_labels.add(name)
        self.found_labels.discard(name)

    def add_found(self, name: str) -> None:
        """Give a label to an adapter that a request has found, if there is room for it."""
        if name not in self.loaded_labels and len(self.found_labels) < MAX_FOUND_LABELS:
            self.found_labels.add(name)

    def drop(self, name: str) -> None:
        """End the label of an adapter that was unloaded, and its counts."""
        self.loaded_labels.discard(name)
        self.found_labels.discard(name)
        for counter in self.counters.values():
            counter.pop(name, None)

    def label_of(self, name: str) -> str:
        is_labeled = name in self.loaded_labels or name in self.found_labels
        return name if is_labeled else OTHER_ADAPTERS

    # ---- observations ------------------------------------------------------------------------

    def open(self, names: Iterable[str]) -> None:
        """Count requests that begin."""
        self.open_requests.update(names)

    def close(self, names: Iterable[str]) -> None:
        """Count requests that have ended."""
        self.open_requests.subtract(names)
        self.open_requests = +self.open_requests  # without those that have none

    def observe_answer(self, name: str, num_prompt_tokens: int, num_generated: int) -> None:
        """Count an answered prompt."""
        label = self.label_of(name)
        self.counters["requests"][label] += 1
        self.counters["prompt_tokens"][label] += num_prompt_tokens
        self.counters["generated_tokens"][label] += num_generated

    def observe_slots(self, before: Sequence[str], after: Sequence[str]) -> None:
        """Count which adapters were loaded into a device slot and which ones lost theirs."""
        for old, new in zip(before or [""] * len(after), after, strict=False):
            if old != new and new:
                self.counters["loads"][self.label_of(adapter_name_of(new))] += 1
            if old != new and old:
                self.counters["evictions"][self.label_of(adapter_name_of(old))] += 1

    # ---- reading -----------------------------------------------------------------------------

    def collect(self) -> Iterator[tuple[str, str, list[tuple[dict[str, str], float]]]]:
        """Yield the name, the help text and the samples of each metric."""
        for key, help_text in COUNTS.items():
            samples: list[tuple[dict[str, str], float]] = [
                ({"adapter": label}, count) for label, count in self.counters[key].items() if count
            ]
            yield f"bloomery_adapter_{key}", help_text, samples
