"""`bloomery bench` against a server whose every figure is known, and against our own."""

from __future__ import annotations

import cProfile
import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from bloomery.cli import main
from bloomery.config import profiler
from tests.tools.bench.metronome import Metronome, ticking
from tests.chaos.http import free_port
from tests.waiting import LONG, until


def measured(url: str, path: Path, *arguments: str, code: int = 0) -> dict[str, Any]:
    assert main(["bench", url, "--json", str(path), "--warmup", "0", *arguments]) == code
    return json.loads(path.read_text())  # type: ignore[no-any-return]


@pytest.mark.parametrize("api", ["chat", "completions", "tgi"])
def test_figures_are_those_of_the_server(api: str, tmp_path: Path) -> None:
    """Waiting and pace as the server keeps them; a busy machine may only make them longer, and no part longer than the
    whole."""
    with ticking(Metronome()) as server:
        found = measured(
            server.url,
            tmp_path / "a.json",
            "--api",
            api,
            "--pattern",
            "closed:4",
            "-n",
            "12",
            "--lengths",
            "20:16",
        )
    assert found["answered"] == found["requests"] == 12 and found["errors"] == {}
    assert found["output_tokens"] == 12 * 16 and found["tokens_per_piece"] == 1
    first, pace, whole = (
        found[name]["mean"] for name in ("first_token_ms", "per_token_ms", "end_to_end_ms")
    )
    assert (
        first >= 59 and 209 <= first + 15 * pace <= whole + 0.1
    )  # a token that is late does not delay the next
    assert 12 * whole <= 4 * 1000 * found["seconds"] + 1
    assert found["between_tokens_ms"]["n"] == 12 * 15
    assert found["between_tokens_ms"]["mean"] == pytest.approx(pace, rel=1e-3)
    assert found["tokens_per_second"] == pytest.approx(12 * 16 / found["seconds"], rel=1e-3)
    assert sum(found["first_token_bands"].values()) == 12
    assert sum(tokens for _, tokens in found["curves"]["tokens_by_second"]) == pytest.approx(
        12 * 16, abs=1
    )


def test_the_dialect_and_the_model_are_asked_for(tmp_path: Path) -> None:
    with ticking(Metronome(first=0.0, gap=0.0)) as server:
        found = measured(server.url, tmp_path / "a.json", "-n", "1", "--lengths", "5:2")
        assert (found["api"], found["model"]) == ("chat", "clock") and server.asked[0][
            "ignore_eos"
        ] is True
    with ticking(Metronome(first=0.0, gap=0.0, models=False)) as server:
        assert measured(server.url, tmp_path / "b.json", "-n", "1")["api"] == "tgi"
    assert main(["bench", server.url]) == 1  # nobody there any more


def test_connections_are_kept_and_conversations_grow(tmp_path: Path) -> None:
    with ticking(Metronome(first=0.01, gap=0.0)) as server:
        trace = tmp_path / "talk.jsonl"
        turns = [{"arrival": 0, "prompt": 5, "output": 3, "session": "a"}]
        turns += [
            {"after": 0.01, "prompt": 5 + 8 * i, "output": 3, "session": "a", "prefix": 8 * i}
            for i in (1, 2)
        ]
        trace.write_text("\n".join(map(json.dumps, turns)))
        assert measured(server.url, tmp_path / "a.json", "--pattern", str(trace))["answered"] == 3
        assert [len(asked["messages"]) for asked in server.asked] == [1, 3, 5]
        assert server.asked[2]["messages"][1] == {"role": "assistant", "content": " tick tick tick"}
        assert server.asked[2]["messages"][:3] == server.asked[1]["messages"]
        assert (
            server.connections <= 1 + 3
        )  # one for all three requests; the questions before and after take their own


def test_failures_are_counted_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ticking(Metronome(first=0.0, gap=0.001, fail_every=4)) as server:
        found = measured(
            server.url, tmp_path / "a.json", "-n", "8", "--pattern", "closed:2", code=1
        )
        assert found["answered"] == 6 and list(found["errors"].values()) == [2]
        assert "HTTP 503" in capsys.readouterr().err
    with ticking(Metronome(first=0.0, gap=0.001, drop_every=3)) as server:
        found = measured(
            server.url, tmp_path / "b.json", "-n", "6", "--pattern", "closed:1", code=1
        )
        assert found["answered"] == 4 and "connection was lost" in next(iter(found["errors"]))


def test_open_arrivals_do_not_wait_for_answers(tmp_path: Path) -> None:
    """A burst of twelve on a server that answers nobody before it has been asked by all."""
    with ticking(Metronome(first=0.0, gap=0.0, together=12)) as server:
        found = measured(
            server.url,
            tmp_path / "a.json",
            "--pattern",
            "burst:12:1",
            "-n",
            "12",
            "--lengths",
            "4:2",
        )
        assert found["answered"] == 12 and server.connections >= 12


def test_nothing_is_published_from_under_a_profiler(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.json"
    with ticking(Metronome(first=0.0, gap=0.0, profiling="nsys")) as server:
        assert main(["bench", server.url, "-n", "1", "--json", str(path)]) == 1
        assert "profiled (nsys)" in capsys.readouterr().err
    with ticking(Metronome(first=0.0, gap=0.0)) as server:
        sys.setprofile(lambda *_: None)
        try:
            assert main(["bench", server.url, "-n", "1", "--json", str(path)]) == 1
        finally:
            sys.setprofile(None)
        monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "1")
        assert main(["bench", server.url, "-n", "1", "--json", str(path)]) == 1
        assert "NSYS_PROFILING_SESSION_ID" in capsys.readouterr().err
    assert not path.exists()


def test_a_profiler_of_python_is_noticed_by_any_python() -> None:
    """From Python 3.12 on cProfile is one of several that sys.monitoring knows, and no sys.setprofile is seen."""
    with cProfile.Profile():
        seen = profiler({})
    assert seen is not None and profiler({}) is None


def test_runs_side_by_side_on_one_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [tmp_path / "first.json", tmp_path / "second.json"]
    for path, pace in zip(paths, (0.0, 0.005), strict=True):
        with ticking(Metronome(first=0.0, gap=pace)) as server:
            target = ("--first-token-ms", "321" if pace else "654")
            measured(server.url, path, "-n", "4", "--label", "<b>&" if pace else "", *target)
    page = tmp_path / "report.html"
    assert main(["bench", "--report", *map(str, paths), "-o", str(page)]) == 0
    text = page.read_text()
    assert text.count("<svg") == 4 and "first" in text
    assert "<td>654, 100</td><td>321, 100</td>" in text, (
        "goodput is told with the targets of each run"
    )
    assert "&lt;b&gt;&amp;" in text and "<b>&<" not in text  # names are data
    assert "<script" not in text and "http://www.w3.org" in text
    assert "first token, ms p99" in capsys.readouterr().out
    assert main(["bench", "--report", *[str(paths[1])] * 2, "-o", str(page)]) == 0
    assert capsys.readouterr().out.splitlines()[0].split() == ["<b>&", "<b>&", "(2)"], (
        "one name, and still two runs"
    )
    assert main(["bench", "--report", str(page), "-o", str(page)]) == 1  # not a run's JSON
    assert main(["bench"]) == 1


def test_what_cannot_be_measured_is_refused_before_any_load(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ticking(Metronome(first=0.0, gap=0.0)) as server:
        for flags in (
            "-n 0",
            "--warmup -1",
            "--first-token-ms nan",
            "--json nowhere/a.json",
            "-o .",
        ):
            with pytest.raises(SystemExit):
                main(["bench", server.url, *flags.split()])
        for pattern in (
            "poisson:nan",
            "poisson:inf",
            "nowhere.txt",
            str(tmp_path / "nowhere.jsonl"),
        ):
            assert main(["bench", server.url, "--pattern", pattern]) == 1
        assert server.asked == []
    for url in ("http://127.0.0.1:99999", "http://[::1", "127.0.0.1:80"):
        assert main(["bench", url]) == 1
        assert f"{url!r} is not the URL of a server" in capsys.readouterr().err
    part = tmp_path / "part.json"
    part.write_text('{"curves": {}}')
    assert main(["bench", "--report", str(part), "-o", str(tmp_path / "page.html")]) == 1


def test_a_trace_has_any_name_and_its_priorities_are_sent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.txt"
    trace.write_text('{"arrival": 0, "prompt": 5, "output": 3, "priority": -2}\n')
    with ticking(Metronome(first=0.0, gap=0.0, fail_every=3)) as server:
        for api, code in (("chat", 0), ("tgi", 0), ("chat", 1)):
            measured(
                f"{server.url}/v1",
                tmp_path / "a.json",
                "--pattern",
                str(trace),
                "--api",
                api,
                code=code,
            )
        assert [asked.get("parameters", asked)["priority"] for asked in server.asked] == [-2] * 3
    assert "run 1: 1 x HTTP 503" in capsys.readouterr().err


def test_our_own_server(tmp_path: Path) -> None:
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "bloomery",
        "serve",
        "--port",
        str(port),
        "--threads",
        "1",
        "--kv-cache-gib",
        "0.2",
    ]
    process = subprocess.Popen(
        command, stderr=subprocess.DEVNULL, env=os.environ | {"BLOOMERY_MAX_SEQUENCES": "8"}
    )
    url = f"http://127.0.0.1:{port}"
    try:
        assert until(lambda: ready(url), 240), "the server does not get ready"
        for api in ("chat", "completions", "tgi"):
            found = measured(
                url,
                tmp_path / f"{api}.json",
                "--api",
                api,
                "-n",
                "2",
                "--pattern",
                "closed:2",
                "--lengths",
                "12:6",
            )
            assert found["answered"] == 2 and found["errors"] == {}
            assert (
                found["output_tokens"] == 12 or api == "tgi"
            )  # TGI's dialect has no way to forbid an early end
    finally:
        process.terminate()
        process.wait(LONG)


def ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=LONG):
            return True
    except OSError:
        return False
