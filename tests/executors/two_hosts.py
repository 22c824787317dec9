"""A pipeline over two network namespaces that act as two hosts gives the tokens of one process.

    sudo .venv/bin/python -m tests.executors.two_hosts      (Linux, root, with ray installed)

Each namespace holds one Ray node and one pipeline stage. The two are connected only by a virtual
cable, so messages between ranks go through it or not at all, and the loopback of one host cannot be
reached from the other.
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
from typing import Any, NamedTuple

RAY_PORT = 6399
STARTUP_SECONDS = 120
PROMPT = list(range(3, 20))


class VirtualHost(NamedTuple):
    namespace: str
    interface: str
    address: str


FIRST_HOST = VirtualHost("bloomery-a", "bloom0", "10.77.0.1")
SECOND_HOST = VirtualHost("bloomery-b", "bloom1", "10.77.0.2")
HOSTS = (FIRST_HOST, SECOND_HOST)


def generate(folder: str, **options: Any) -> list[int]:
    from bloomery import LLM, SamplingParams

    llm = LLM(
        folder,
        skip_tokenizer_init=True,
        device="cpu",
        threads=1,
        block_size=4,
        kv_cache_gib=0.01,
        **options,
    )
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, detokenize=False)
    (output,) = llm.generate([PROMPT], params, use_tqdm=False)
    llm.close()
    return list(output.outputs[0].token_ids)


def run(*command: str, check: bool = True) -> str:
    return subprocess.run(command, text=True, stdout=subprocess.PIPE, check=check).stdout


def run_inside(host: VirtualHost, *command: str) -> str:
    return run("ip", "netns", "exec", host.namespace, *command)


def connect_hosts() -> None:
    """Create both namespaces and a virtual cable between them."""
    for host in HOSTS:
        run("ip", "netns", "add", host.namespace)
        run_inside(host, "ip", "link", "set", "lo", "up")
    first_end = (FIRST_HOST.interface, "netns", FIRST_HOST.namespace)
    second_end = (SECOND_HOST.interface, "netns", SECOND_HOST.namespace)
    run("ip", "link", "add", *first_end, "type", "veth", "peer", "name", *second_end)
    for host in HOSTS:
        run_inside(host, "ip", "addr", "add", f"{host.address}/24", "dev", host.interface)
        run_inside(host, "ip", "link", "set", host.interface, "up")


def start_ray_node(host: VirtualHost, *options: str) -> subprocess.Popen[bytes]:
    """Run a Ray node on a host until the process is terminated."""
    ray = str(Path(sys.executable).parent / "ray")
    common_options = ("--num-cpus=1", "--disable-usage-stats", "--block")
    command = ["ip", "netns", "exec", host.namespace, ray, "start", *options, *common_options]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)


def wait_for_both_nodes() -> None:
    import ray

    deadline = time.monotonic() + STARTUP_SECONDS
    while True:
        with contextlib.suppress(ConnectionError):
            ray.init(address="auto", logging_level="ERROR")
            while sum(node["Alive"] for node in ray.nodes()) < 2:
                time.sleep(1)
            ray.shutdown()
            return
        if time.monotonic() > deadline:
            raise TimeoutError("the Ray nodes do not come up")
        time.sleep(2)


def main() -> int:
    from tests.parity.cases import CASES, make_checkpoint

    nodes: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        make_checkpoint(next(case for case in CASES if case.name == "llama"), Path(folder))
        expected = str(generate(folder))
        try:
            connect_hosts()
            head_address = f"{FIRST_HOST.address}:{RAY_PORT}"
            os.environ.update(
                RAY_AUTH_MODE="token",
                RAY_AUTH_TOKEN=secrets.token_hex(32),
                RAY_ADDRESS=head_address,
            )
            head_options = (
                "--head",
                f"--node-ip-address={FIRST_HOST.address}",
                f"--port={RAY_PORT}",
                "--include-dashboard=false",
                f"--temp-dir={folder}/ray",  # removed at the end, with all that Ray leaves behind
            )
            nodes.append(start_ray_node(FIRST_HOST, *head_options))
            time.sleep(10)
            join_options = (
                f"--address={head_address}",
                f"--node-ip-address={SECOND_HOST.address}",
            )
            nodes.append(start_ray_node(SECOND_HOST, *join_options))
            code = (
                "from tests.executors.two_hosts import generate, wait_for_both_nodes\n"
                "wait_for_both_nodes()\n"
                f"print(generate({folder!r}, pipeline_parallel_size=2, executor='ray'))"
            )
            output = run_inside(FIRST_HOST, sys.executable, "-W", "ignore", "-c", code)
            tokens = output.splitlines()[-1]
        finally:
            for node in reversed(nodes):
                node.terminate()
                node.wait()
            for host in HOSTS:
                run("ip", "netns", "del", host.namespace, check=False)
    print("equal" if tokens == expected else f"DIFFERS: {tokens} instead of {expected}")
    return 0 if tokens == expected else 1


if __name__ == "__main__":
    sys.exit(main())
