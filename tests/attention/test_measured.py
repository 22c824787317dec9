"""Which prompts the library gets: by times that are made up, by the file that remembers them, and over real layouts."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from math import inf
from pathlib import Path

import pytest
import torch

from bloomery.attention import measured
from bloomery.attention.choose import choose
from bloomery.attention.measured import LENGTHS, MARGIN, Bench, compared, library_from, settled
from bloomery.attention.torch_paged import TorchPaged
from bloomery.attention.triton_paged import TritonPaged, known
from bloomery.kernels.launch import interpreted
from bloomery.spec import Alibi, Attention

CPU = torch.device("cpu")


def by(
    ratios: dict[int, float], asked: list[int] | None = None
) -> Callable[[int], tuple[float, float]]:
    """As if the library took so many times what our kernel takes; where nothing is said, just as long."""

    def seconds(length: int) -> tuple[float, float]:
        if asked is not None:
            asked.append(length)
        return 1e-6 * length, 1e-6 * length * ratios.get(length, 1.0)

    return seconds


@pytest.mark.parametrize(
    ("ratios", "least"),
    [
        ({}, None),
        (dict.fromkeys(LENGTHS, 0.5), LENGTHS[0]),
        ({8192: 0.8, 4096: 0.9, 2048: 0.95}, 2048),
        ({8192: 0.8, 4096: 1 / (1 + MARGIN) + 1e-3}, 8192),
        ({8192: 1.1, 4096: 0.5}, None),  # who loses the longest has not won
        ({8192: 0.8, 4096: 1.2, 2048: 0.5}, 8192),  # nor by chance
        ({8192: inf}, None),
    ],
)
def test_the_smallest_length_from_which_on_it_wins(
    ratios: dict[int, float], least: int | None
) -> None:
    asked: list[int] = []
    found, times = compared(by(ratios, asked))
    assert found == least and list(times) == asked == sorted(asked, reverse=True)
    assert least == LENGTHS[0] or len(asked) == [None, *reversed(LENGTHS)].index(least) + 1, (
        "no more than is needed"
    )


def test_it_is_measured_once_and_remembered(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "deep" / "attention.json"
    asked = list[int]()
    caplog.set_level(logging.INFO, "bloomery.attention")
    assert settled("card", by({8192: 0.5}, asked), path) == 8192 and asked == [8192, 4096]
    assert settled("card", by({}, asked), path) == 8192 and len(asked) == 2
    assert (
        settled("other card", by({}, asked), path) is None
        and settled("other card", by({8192: 0.5}), path) is None
    )
    assert json.loads(path.read_text()).keys() == {"card", "other card"} and list(
        path.parent.iterdir()
    ) == [path]
    said = [record.getMessage() for record in caplog.records]
    assert (
        "from 8192 new positions on" in said[0]
        and "8192: 8.192 4.096, 4096: 4.096 4.096" in said[0]
    )
    assert "as measured before" in said[1] and "never" in said[2]


def test_what_cannot_be_read_or_written_is_measured_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "attention.json"
    for content in (
        "no JSON",
        '{"card": "2048"}',
        '{"card": {"from": "2048", "told": ""}}',
        '{"card": {"from": 64}}',
    ):
        path.write_text(content)
        assert settled("card", by({8192: 0.5}), path) == 8192
    (tmp_path / "file").touch()
    assert settled("card", by({8192: 0.5}), tmp_path / "file" / "attention.json") == 8192
    assert "measured again at the next start" in caplog.text


def test_a_refusal_is_not_remembered(tmp_path: Path) -> None:
    path = tmp_path / "attention.json"
    assert settled("card", by({8192: inf}), path) is None and not path.exists()
    assert settled("card", by({8192: 0.5, 4096: inf}), path) == 8192 and not path.exists()


@pytest.mark.parametrize(
    "error",
    [RuntimeError("no such plan"), torch.OutOfMemoryError("none left"), AttributeError("op")],
)
def test_what_goes_wrong_counts_against_the_library(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def timed(*all_work: Callable[[], object]) -> tuple[float, ...]:
        raise error

    monkeypatch.setattr(measured, "timed", timed)
    bench = Bench(Attention(2, 1, 64), torch.float16, torch.float16, CPU)
    assert bench.seconds(512) == (0.0, inf) and compared(bench.seconds) == (
        None,
        {8192: (0.0, inf)},
    )


@pytest.mark.parametrize("kv", [torch.float16, torch.int8])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_what_is_timed_is_attention(kv: torch.dtype) -> None:
    """Two prompts as they would be timed: both ways give what the reference gives."""
    torch.manual_seed(0)
    bench = Bench(Attention(2, 1, 64), torch.float16, kv, CPU)
    ragged, q, cache = bench.material(128, 2)
    backends = (
        [TritonPaged(library=None), TritonPaged(library=1)]
        if interpreted()
        else [TritonPaged(library=1)]
    )
    want = TorchPaged().attend(q, cache, bench.shape, TorchPaged().plan(ragged))
    for backend in backends:
        found = bench.attending(backend, ragged, q, cache)()
        torch.testing.assert_close(found, want, rtol=4e-3, atol=4e-3)


def test_nothing_is_measured_where_nothing_can_be_chosen(tmp_path: Path) -> None:
    alibi = Attention(4, 4, 64, Alibi())
    capped = Attention(4, 2, 64, softcap=20.0)
    plain = Attention(4, 2, 128)
    assert (
        not known(alibi, torch.float16)
        and not known(capped, torch.float16)
        and known(plain, torch.bfloat16)
    )
    assert not known(plain, torch.float32) and not known(Attention(4, 2, 96), torch.float16)
    path = tmp_path / "attention.json"
    assert (
        library_from([alibi, capped], torch.float16, torch.float16, CPU, path) is None
        and not path.exists()
    )
    assert isinstance(choose([plain], torch.float32, CPU, kv=torch.float32), TorchPaged)
