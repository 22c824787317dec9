"""`bloomery bench` against a fake server whose metrics are known, and against our own server."""

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
from bloomery.config import active_profiler
from tests.chaos.http import free_port
from tests.tools.bench.paced_server import PacedServer, run_paced_server
from tests.waiting import WAIT_SECONDS, wait_until


def run_bench(url: str, path: Path, *arguments: str, code: int = 0) -> dict[str, Any]:
    """Run the command, check its exit status, and return the JSON it wrote."""
    assert main(["bench", url, "--json", str(path), "--warmup", "0", *arguments]) == code
    return json.loads(path.read_text())  # type: ignore[no-any-return]


@pytest.mark.parametrize("api", ["chat", "completions", "tgi"])
def test_metrics_are_those_of_the_server(api: str, tmp_path: Path) -> None:
    """TTFT and pace are the server's. A busy machine can only make them longer."""
    with run_paced_server(PacedServer()) as server:
        result = run_bench(
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
    assert result["answered"] == result["requests"] == 12 and result["errors"] == {}
    assert result["output_tokens"] == 12 * 16 and result["tokens_per_piece"] == 1
    ttft = result["ttft_ms"]["mean"]
    tpot = result["tpot_ms"]["mean"]
    e2e_latency = result["e2e_latency_ms"]["mean"]
    assert ttft >= 59
    # A late token does not delay the next one, so the sum is at least the paced time.
    assert 209 <= ttft + 15 * tpot <= e2e_latency + 0.1
    assert 12 * e2e_latency <= 4 * 1000 * result["seconds"] + 1
    assert result["itl_ms"]["n"] == 12 * 15
    assert result["itl_ms"]["mean"] == pytest.approx(tpot, rel=1e-3)
    assert result["tokens_per_second"] == pytest.approx(12 * 16 / result["seconds"], rel=1e-3)
    assert sum(result["ttft_bands"].values()) == 12
    tokens_by_second = result["curves"]["tokens_by_second"]
    assert sum(tokens for _, tokens in tokens_by_second) == pytest.approx(12 * 16, abs=1)


def test_api_and_model_are_detected(tmp_path: Path) -> None:
    with run_paced_server(PacedServer(ttft=0.0, gap=0.0)) as server:
        result = run_bench(server.url, tmp_path / "a.json", "-n", "1", "--lengths", "5:2")
        assert (result["api"], result["model"]) == ("chat", "clock")
        assert server.requests[0]["ignore_eos"] is True
    with run_paced_server(PacedServer(ttft=0.0, gap=0.0, has_openai_api=False)) as server:
        assert run_bench(server.url, tmp_path / "b.json", "-n", "1")["api"] == "tgi"
    assert main(["bench", server.url]) == 1  # the server has stopped


def test_connections_are_reused_and_conversations_grow(tmp_path: Path) -> None:
    turns = [{"arrival": 0, "prompt": 5, "output": 3, "session": "a"}]
    turns += [
        {"after": 0.01, "prompt": 5 + 8 * i, "output": 3, "session": "a", "prefix": 8 * i}
        for i in (1, 2)
    ]
    trace = tmp_path / "talk.jsonl"
    trace.write_text("\n".join(map(json.dumps, turns)))
    with run_paced_server(PacedServer(ttft=0.01, gap=0.0)) as server:
        result = run_bench(server.url, tmp_path / "a.json", "--pattern", str(trace))
        assert result["answered"] == 3
        messages = [request["messages"] for request in server.requests]
        assert [len(conversation) for conversation in messages] == [1, 3, 5]
        assert messages[2][1] == {"role": "assistant", "content": " tick tick tick"}
        assert messages[2][:3] == messages[1]
        # One connection carries all three requests. The questions about model and profiler,
        # before and after the run, open their own.
        assert server.num_connections <= 1 + 3


def test_failures_are_counted_and_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with run_paced_server(PacedServer(ttft=0.0, gap=0.001, fail_every=4)) as server:
        result = run_bench(
            server.url, tmp_path / "a.json", "-n", "8", "--pattern", "closed:2", code=1
        )
        assert result["answered"] == 6 and list(result["errors"].values()) == [2]
        assert "HTTP 503" in capsys.readouterr().err
    with run_paced_server(PacedServer(ttft=0.0, gap=0.001, drop_every=3)) as server:
        result = run_bench(
            server.url, tmp_path / "b.json", "-n", "6", "--pattern", "closed:1", code=1
        )
        assert result["answered"] == 4
        assert "connection was lost" in next(iter(result["errors"]))


def test_open_arrivals_do_not_wait_for_answers(tmp_path: Path) -> None:
    """A burst of twelve on a server that answers none of them before all have arrived."""
    with run_paced_server(PacedServer(ttft=0.0, gap=0.0, min_requests=12)) as server:
        result = run_bench(
            server.url,
            tmp_path / "a.json",
            "--pattern",
            "burst:12:1",
            "-n",
            "12",
            "--lengths",
            "4:2",
        )
        assert result["answered"] == 12 and server.num_connections >= 12


def test_a_run_under_a_profiler_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.json"
    with run_paced_server(PacedServer(ttft=0.0, gap=0.0, profiling="nsys")) as server:
        assert main(["bench", server.url, "-n", "1", "--json", str(path)]) == 1
        assert "profiled (nsys)" in capsys.readouterr().err
    with run_paced_server(PacedServer(ttft=0.0, gap=0.0)) as server:
        sys.setprofile(lambda *_: None)
        try:
            assert main(["bench", server.url, "-n", "1", "--json", str(path)]) == 1
        finally:
            sys.setprofile(None)
        monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "1")
        assert main(["bench", server.url, "-n", "1", "--json", str(path)]) == 1
        assert "NSYS_PROFILING_SESSION_ID" in capsys.readouterr().err
    assert not path.exists()


def test_python_profilers_are_noticed() -> None:
    """Since Python 3.12 cProfile uses sys.monitoring, and sys.getprofile does not show it."""
    with cProfile.Profile():
        profiler = active_profiler({})
    assert profiler is not None
    assert active_profiler({}) is None


def test_runs_side_by_side_on_one_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [tmp_path / "first.json", tmp_path / "second.json"]
    for path, gap in zip(paths, (0.0, 0.005), strict=True):
        with run_paced_server(PacedServer(ttft=0.0, gap=gap)) as server:
            label = "<b>&" if gap else ""
            ttft_target = "321" if gap else "654"
            run_bench(server.url, path, "-n", "4", "--label", label, "--ttft-ms", ttft_target)
    page = tmp_path / "report.html"
    assert main(["bench", "--report", *map(str, paths), "-o", str(page)]) == 0
    text = page.read_text()
    assert text.count("<svg") == 4 and "first" in text
    assert "<td>654, 100</td><td>321, 100</td>" in text, "goodput shows the targets of each run"
    assert "&lt;b&gt;&amp;" in text and "<b>&<" not in text, "labels are escaped"
    assert "<script" not in text and "http://www.w3.org" in text
    assert "first token (TTFT), ms p99" in capsys.readouterr().out


def test_runs_with_the_same_label_stay_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.json"
    page = tmp_path / "report.html"
    with run_paced_server(PacedServer(ttft=0.0, gap=0.0)) as server:
        run_bench(server.url, path, "-n", "1", "--label", "<b>&")
    capsys.readouterr()
    assert main(["bench", "--report", str(path), str(path), "-o", str(page)]) == 0
    assert capsys.readouterr().out.splitlines()[0].split() == ["<b>&", "<b>&", "(2)"]
    assert main(["bench", "--report", str(page), "-o", str(page)]) == 1, "not the JSON of a run"
    assert main(["bench"]) == 1


def test_wrong_arguments_are_refused_before_any_load(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong_flags = ("-n 0", "--warmup -1", "--ttft-ms nan", "--json nowhere/a.json", "-o .")
    wrong_patterns = (
        "poisson:nan",
        "poisson:inf",
        "nowhere.txt",
        str(tmp_path / "nowhere.jsonl"),
    )
    with run_paced_server(PacedServer(ttft=0.0, gap=0.0)) as server:
        for flags in wrong_flags:
            with pytest.raises(SystemExit):
                main(["bench", server.url, *flags.split()])
        for pattern in wrong_patterns:
            assert main(["bench", server.url, "--pattern", pattern]) == 1
        assert server.requests == []
    for url in ("http://127.0.0.1:99999", "http://[::1", "127.0.0.1:80"):
        assert main(["bench", url]) == 1
        assert f"{url!r} is not the URL of a server" in capsys.readouterr().err
    incomplete = tmp_path / "part.json"
    incomplete.write_text('{"curves": {}}')
    assert main(["bench", "--report", str(incomplete), "-o", str(tmp_path / "page.html")]) == 1


def test_priorities_of_a_trace_are_sent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.txt"
    trace.write_text('{"arrival": 0, "prompt": 5, "output": 3, "priority": -2}\n')
    with run_paced_server(PacedServer(ttft=0.0, gap=0.0, fail_every=3)) as server:
        for api, code in (("chat", 0), ("tgi", 0), ("chat", 1)):
            flags = ("--pattern", str(trace), "--api", api)
            run_bench(f"{server.url}/v1", tmp_path / "a.json", *flags, code=code)
        priorities = [request.get("parameters", request)["priority"] for request in server.requests]
        assert priorities == [-2] * 3
    assert "run 1: 1 x HTTP 503" in capsys.readouterr().err


def test_our_own_server_can_be_measured(tmp_path: Path) -> None:
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
    environment = os.environ | {"BLOOMERY_MAX_NUM_SEQS": "8"}
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, env=environment)
    url = f"http://127.0.0.1:{port}"
    try:
        assert wait_until(lambda: is_ready(url), 240), "the server does not get ready"
        for api in ("chat", "completions", "tgi"):
            result = run_bench(
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
            assert result["answered"] == 2 and result["errors"] == {}
            # TGI's API has no ignore_eos, so its answers may end early.
            assert result["output_tokens"] == 12 or api == "tgi"
    finally:
        process.terminate()
        process.wait(WAIT_SECONDS)


def is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=WAIT_SECONDS):
            return True
    except OSError:
        return False
