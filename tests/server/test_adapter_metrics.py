"""Metrics by LoRA adapter have a bounded number of labels, and their sums stay right."""

from __future__ import annotations

from bloomery.server.adapter_metrics import MAX_FOUND_LABELS, OTHER_ADAPTERS, AdapterMetrics


def counts_of(metrics: AdapterMetrics, name: str) -> dict[str, float]:
    """The samples of one metric by label."""
    samples = {metric: values for metric, _, values in metrics.collect()}
    return {labels["adapter"]: value for labels, value in samples[f"bloomery_adapter_{name}"]}


def answer(metrics: AdapterMetrics, name: str) -> None:
    """A request that finds its adapter, loads it into a slot, and is answered."""
    metrics.add_found(name)
    metrics.open([name])
    metrics.observe_slots(("",), (name,))
    metrics.observe_answer(name, 5, 3)
    metrics.observe_slots((name,), ("",))
    metrics.close([name])


def test_adapters_that_requests_find_share_a_label_beyond_the_limit() -> None:
    metrics = AdapterMetrics()
    metrics.add_loaded("smith")
    names = [f"org/name@{number}" for number in range(3 * MAX_FOUND_LABELS)]
    for name in (*names, *names):
        answer(metrics, name)
    answer(metrics, "smith")
    assert not metrics.open_requests
    num_others = 2 * MAX_FOUND_LABELS
    for key, each in (
        ("requests", 2),
        ("prompt_tokens", 10),
        ("generated_tokens", 6),
        ("loads", 2),
        ("evictions", 2),
    ):
        counts = counts_of(metrics, key)
        assert len(counts) == MAX_FOUND_LABELS + 2
        assert counts["smith"] == each / 2, "what was loaded keeps its label"
        assert counts[names[0]] == each
        assert counts[OTHER_ADAPTERS] == each * num_others


def test_unloading_ends_a_label_and_makes_room() -> None:
    metrics = AdapterMetrics()
    for number in range(MAX_FOUND_LABELS):
        answer(metrics, f"a{number}")
    metrics.drop("a0")
    assert "a0" not in counts_of(metrics, "requests")
    metrics.observe_answer("a0", 1, 1)  # its last requests end after it was unloaded
    assert counts_of(metrics, "requests")[OTHER_ADAPTERS] == 1
    answer(metrics, "b")
    assert counts_of(metrics, "requests")["b"] == 1
    # Loading one that a request had found takes no room.
    metrics.add_loaded("a1")
    answer(metrics, "c")
    assert counts_of(metrics, "requests")["c"] == 1
    assert counts_of(metrics, "requests")["a1"] == 1


def test_a_hundred_loads_leave_no_labels() -> None:
    metrics = AdapterMetrics()
    for number in range(3 * MAX_FOUND_LABELS):
        name = f"job{number}"
        metrics.add_loaded(name)
        answer(metrics, name)
        metrics.drop(name)
    assert counts_of(metrics, "requests") == {}
