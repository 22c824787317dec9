"""Two network namespaces as two hosts, a Ray node in each, a pipeline stage on each: the tokens of one process.

    sudo .venv/bin/python -m tests.parallel.two_hosts      (Linux, root, with ray installed)

The hosts share nothing of the network but a cable between them: what a rank says to another goes through it or not at
all, and what listens on the loopback cannot be reached from the other side.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HOSTS = {"bloomery-a": "10.77.0.1", "bloomery-b": "10.77.0.2"}
PORT = 6399
PROMPT = list(range(3, 20))


def answer(folder: str, **wishes: object) -> list[int]:
    from bloomery import LLM, SamplingParams

    llm = LLM(
        folder,
        skip_tokenizer_init=True,
        device="cpu",
        threads=1,
        block_size=4,
        kv_cache_gib=0.01,
        **wishes,
    )
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, detokenize=False)
    (out,) = llm.generate([PROMPT], params, use_tqdm=False)
    llm.close()
    return list(out.outputs[0].token_ids)


def run(*words: str, check: bool = True) -> str:
    return subprocess.run(words, text=True, stdout=subprocess.PIPE, check=check).stdout


def inside(host: str, *words: str) -> str:
    return run("ip", "netns", "exec", host, *words)


def cable() -> None:
    (one, address), (other, peer) = HOSTS.items()
    for host in HOSTS:
        run("ip", "netns", "add", host)
        inside(host, "ip", "link", "set", "lo", "up")
    run(
        "ip",
        "link",
        "add",
        "bloom0",
        "netns",
        one,
        "type",
        "veth",
        "peer",
        "name",
        "bloom1",
        "netns",
        other,
    )
    for host, name, at in ((one, "bloom0", address), (other, "bloom1", peer)):
        inside(host, "ip", "addr", "add", f"{at}/24", "dev", name)
        inside(host, "ip", "link", "set", name, "up")


def node(host: str, *words: str) -> subprocess.Popen[bytes]:
    """Ray on that host, until it is told to end."""
    ray = str(Path(sys.executable).parent / "ray")
    common = ("--num-cpus=1", "--disable-usage-stats", "--block")
    return subprocess.Popen(
        ["ip", "netns", "exec", host, ray, "start", *words, *common], stdout=subprocess.DEVNULL
    )


def both_up() -> None:
    import ray

    deadline = time.monotonic() + 120
    while True:
        with contextlib.suppress(ConnectionError):
            ray.init(address="auto", logging_level="ERROR")
            while sum(node["Alive"] for node in ray.nodes()) < 2:
                time.sleep(1)
            return ray.shutdown()
        if time.monotonic() > deadline:
            raise TimeoutError("Ray's nodes do not come up")
        time.sleep(2)


def main() -> int:
    from tests.parity.cases import CASES, make_checkpoint

    (one, address), (other, peer) = HOSTS.items()
    nodes: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        make_checkpoint(next(case for case in CASES if case.name == "llama"), Path(folder))
        want = answer(folder)
        try:
            cable()
            at = f"{address}:{PORT}"
            os.environ.update(
                RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32), RAY_ADDRESS=at
            )
            head = (
                "--head",
                f"--node-ip-address={address}",
                f"--port={PORT}",
                "--include-dashboard=false",
            )
            nodes.append(
                node(one, *head, f"--temp-dir={folder}/ray")
            )  # where it is remembered when it is gone
            time.sleep(10)
            nodes.append(node(other, f"--address={at}", f"--node-ip-address={peer}"))
            code = (
                "from tests.parallel.two_hosts import answer, both_up; both_up()\n"
                f"print(answer({folder!r}, pp=2, executor='ray'))"
            )
            got = inside(one, sys.executable, "-W", "ignore", "-c", code).splitlines()[-1]
        finally:
            for started in reversed(nodes):
                started.terminate()
                started.wait()
            for host in HOSTS:
                run("ip", "netns", "del", host, check=False)
    print("equal" if got == str(want) else f"DIFFERS: {got} for {want}")
    return 0 if got == str(want) else 1


if __name__ == "__main__":
    sys.exit(main())
