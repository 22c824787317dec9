"""The choice of prefills for the attention library: fake times, the cache file, real layouts."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from math import inf
from pathlib import Path

import pytest
import torch

from bloomery.attention import autotune
from bloomery.attention.autotune import (
    MIN_GAIN,
    PROMPT_LENS,
    PrefillBench,
    find_library_min_len,
    load_or_measure,
    tune_library_min_len,
)
from bloomery.attention.select import select_backend, tune_backend
from bloomery.attention.torch_paged import TorchPagedAttention
from bloomery.attention.triton_paged import TritonPagedAttention, library_supports
from bloomery.kernels.launch import triton_interpreted
from bloomery.spec import AlibiSpec, AttentionSpec

CPU = torch.device("cpu")


def fake_times(
    ratios: dict[int, float], measured: list[int] | None = None
) -> Callable[[int], tuple[float, float]]:
    """Return a fake measurement: the library takes `ratio` times as long as our kernel.

    `ratios` has the ratio of each prompt length, 1 by default. Measured prompt lengths are appended
    to `measured`.
    """

    def measure_step(prompt_len: int) -> tuple[float, float]:
        if measured is not None:
            measured.append(prompt_len)
        kernel = 1e-6 * prompt_len
        return kernel, kernel * ratios.get(prompt_len, 1.0)

    return measure_step


@pytest.mark.parametrize(
    ("ratios", "min_len"),
    [
        ({}, None),
        (dict.fromkeys(PROMPT_LENS, 0.5), PROMPT_LENS[0]),
        ({8192: 0.8, 4096: 0.9, 2048: 0.95}, 2048),
        ({8192: 0.8, 4096: 1 / (1 + MIN_GAIN) + 1e-3}, 8192),
        ({8192: 1.1, 4096: 0.5}, None),  # slower at the longest: shorter lengths do not count
        ({8192: 0.8, 4096: 1.2, 2048: 0.5}, 8192),
        ({8192: inf}, None),
    ],
)
def test_the_threshold_is_the_smallest_length_from_which_the_library_is_faster(
    ratios: dict[int, float], min_len: int | None
) -> None:
    measured: list[int] = []
    threshold, seconds = find_library_min_len(fake_times(ratios, measured))
    assert threshold == min_len
    assert list(seconds) == measured == sorted(measured, reverse=True)
    # Nothing is measured below the first length at which the library is slower.
    num_needed = [None, *reversed(PROMPT_LENS)].index(min_len) + 1
    assert min_len == PROMPT_LENS[0] or len(measured) == num_needed


def test_the_threshold_is_measured_once_and_cached(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "deep" / "attention.json"
    measured = list[int]()
    caplog.set_level(logging.INFO, "bloomery.attention")
    assert load_or_measure("card", fake_times({8192: 0.5}, measured), path) == 8192
    assert measured == [8192, 4096]
    assert load_or_measure("card", fake_times({}, measured), path) == 8192
    assert len(measured) == 2
    assert load_or_measure("other card", fake_times({}, measured), path) is None
    assert load_or_measure("other card", fake_times({8192: 0.5}), path) is None
    assert json.loads(path.read_text()).keys() == {"card", "other card"}
    assert list(path.parent.iterdir()) == [path]
    messages = [record.getMessage() for record in caplog.records]
    assert "from 8192 new positions on" in messages[0]
    assert "8192: 8.192 4.096, 4096: 4.096 4.096" in messages[0]
    assert "from the cache" in messages[1] and "never" in messages[2]


def test_an_unreadable_cache_file_is_measured_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "attention.json"
    for content in (
        "no JSON",
        '{"card": "2048"}',
        '{"card": {"min_len": "2048", "times": ""}}',
        '{"card": {"min_len": 64}}',
    ):
        path.write_text(content)
        assert load_or_measure("card", fake_times({8192: 0.5}), path) == 8192
    (tmp_path / "file").touch()
    unwritable = tmp_path / "file" / "attention.json"
    assert load_or_measure("card", fake_times({8192: 0.5}), unwritable) == 8192
    assert "measured again at the next start" in caplog.text


def test_a_failure_of_the_library_is_not_cached(tmp_path: Path) -> None:
    path = tmp_path / "attention.json"
    assert load_or_measure("card", fake_times({8192: inf}), path) is None
    assert not path.exists()
    assert load_or_measure("card", fake_times({8192: 0.5, 4096: inf}), path) == 8192
    assert not path.exists()


@pytest.mark.parametrize(
    "error",
    [RuntimeError("no such plan"), torch.OutOfMemoryError("none left"), AttributeError("op")],
)
def test_an_error_counts_against_the_library(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing_timer(*calls: Callable[[], object]) -> tuple[float, ...]:
        raise error

    monkeypatch.setattr(autotune, "time_on_device", failing_timer)
    bench = PrefillBench(AttentionSpec(2, 1, 64), torch.float16, torch.float16, CPU)
    assert bench.measure(512) == (0.0, inf)
    assert find_library_min_len(bench.measure) == (None, {8192: (0.0, inf)})


@pytest.mark.parametrize("kv_cache_dtype", [torch.float16, torch.int8])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_the_timed_work_is_attention(kv_cache_dtype: torch.dtype) -> None:
    """Kernel and library give the reference's result for two prompts as they are timed."""
    torch.manual_seed(0)
    bench = PrefillBench(AttentionSpec(2, 1, 64), torch.float16, kv_cache_dtype, CPU)
    metadata, q, cache = bench.make_inputs(128, 2)
    backends = [TritonPagedAttention(library_min_len=1)]
    if triton_interpreted():
        backends.append(TritonPagedAttention(library_min_len=None))
    reference = TorchPagedAttention()
    expected = reference.attend(q, cache, bench.heads, reference.prepare(metadata))
    for backend in backends:
        actual = bench.attention_call(backend, metadata, q, cache)()
        torch.testing.assert_close(actual, expected, rtol=4e-3, atol=4e-3)


def test_nothing_is_measured_if_the_library_supports_no_layer(tmp_path: Path) -> None:
    alibi = AttentionSpec(4, 4, 64, AlibiSpec())
    softcap = AttentionSpec(4, 2, 64, softcap=20.0)
    plain = AttentionSpec(4, 2, 128)
    assert not library_supports(alibi, torch.float16)
    assert not library_supports(softcap, torch.float16)
    assert library_supports(plain, torch.bfloat16)
    assert not library_supports(plain, torch.float32)
    assert not library_supports(AttentionSpec(4, 2, 96), torch.float16)
    assert not library_supports(AttentionSpec(4, 2, 64, sinks=True), torch.float16)
    path = tmp_path / "attention.json"
    min_len = tune_library_min_len([alibi, softcap], torch.float16, torch.float16, CPU, path)
    assert min_len is None and not path.exists()
    backend = select_backend([plain], torch.float32, CPU)
    assert isinstance(backend, TorchPagedAttention)
    tune_backend(backend, [plain], torch.float32, torch.float32, CPU)  # nothing to measure
