"""Prefix-affinity routing against round robin: chats of several rounds on two replicas.

    PYTHONPATH=src python benchmarks/replicas.py [--chats 24] [--rounds 4] [--concurrency 6]

Every chat sends its complete history again with each round, as chat clients do. The command prints
the share of prompt tokens with a prefix hit, and the TTFT of rounds after the first. Both routers
run alternately on the same engines. Each run has other chats, so no prefix of an earlier run helps.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import time
from collections.abc import Mapping
from random import Random
from statistics import mean, median, quantiles

from bloomery.config import EngineConfig
from bloomery.describe import build_engine_plan
from bloomery.engine.client import EngineClient
from bloomery.engine.replicas import ReplicaSet, plan_for_replica
from bloomery.engine.routing import PrefixAffinityRouter, RequestRouter
from bloomery.messages import EngineRequest, ResolvedSampling

NUM_REPLICAS = 2
SYSTEM_PROMPT_TOKENS = 160
ANSWER_TOKENS = 24


class RoundRobinRouter:
    """Sends requests to the engines in turn, whatever their prefix caches hold."""

    def __init__(self) -> None:
        self.request_numbers = itertools.count()

    def choose(self, request: EngineRequest, loads: Mapping[int, int]) -> int:
        engines = sorted(loads)
        return engines[next(self.request_numbers) % len(engines)]

    def forget(self, engine: int) -> None:
        """Nothing is remembered about an engine."""


async def run_chat(
    replicas: ReplicaSet,
    name: str,
    num_rounds: int,
    random: Random,
    vocab: int,
    ttft_seconds: list[float],
) -> None:
    """Run one chat with a system prompt of its own; append the TTFT of its later rounds."""
    history = [random.randrange(3, vocab) for _ in range(SYSTEM_PROMPT_TOKENS)]
    sampling = ResolvedSampling(temperature=0.0)
    for number in range(num_rounds):
        history += [random.randrange(3, vocab) for _ in range(random.randrange(30, 90))]
        request = EngineRequest(f"{name} {number}", tuple(history), sampling, ANSWER_TOKENS)
        begin = time.perf_counter()
        ttft = 0.0
        async for output in replicas.stream([request]):
            if output.ids and not ttft:
                ttft = time.perf_counter() - begin
            history += output.ids
        if number > 0:
            ttft_seconds.append(ttft)


async def run_chats(
    replicas: ReplicaSet, router: RequestRouter, seed: int, args: argparse.Namespace, vocab: int
) -> tuple[float, list[float]]:
    """Run all chats with one router; return the prefix hit rate and the TTFTs in seconds."""
    replicas.router = router
    before = replicas.stats
    ttft_seconds = list[float]()
    random = Random(seed)
    concurrency = asyncio.Semaphore(args.concurrency)

    async def run_one(name: str, chat_random: Random) -> None:
        async with concurrency:
            await run_chat(replicas, name, args.rounds, chat_random, vocab, ttft_seconds)

    chats = [run_one(f"{seed} {i}", Random(random.random())) for i in range(args.chats)]
    await asyncio.gather(*chats)
    after = replicas.stats
    num_queried = after.prefix_queried - before.prefix_queried
    num_hits = after.prefix_hit - before.prefix_hit
    return num_hits / num_queried, ttft_seconds


async def measure(args: argparse.Namespace) -> None:
    """Run the chats with both routers and print a table."""
    config = EngineConfig(
        args.model,
        device=args.device,
        threads=args.threads,
        max_model_len=1024,
        kv_cache_gib=args.kv_cache_gib,
    )
    plan, _ = build_engine_plan(config)
    plans = [plan_for_replica(plan, number, NUM_REPLICAS) for number in range(NUM_REPLICAS)]
    replicas = ReplicaSet([EngineClient(replica_plan) for replica_plan in plans])
    await replicas.start()
    capacities = [await client.ready() for client in replicas.clients]
    vocab = capacities[0].vocab
    results: dict[str, list[tuple[float, list[float]]]] = {"round robin": [], "affinity": []}
    seeds = itertools.count()
    for _ in range(args.repeat):
        for name, runs in results.items():
            router: RequestRouter = RoundRobinRouter()
            if name == "affinity":
                router = PrefixAffinityRouter(NUM_REPLICAS)
            hit_rate, ttft_seconds = await run_chats(replicas, router, next(seeds), args, vocab)
            runs.append((hit_rate, ttft_seconds))
            print(f"{name}: {hit_rate:.0%} of prompt tokens hit the prefix cache", flush=True)
    await replicas.close()
    print("\n| routing | prefix hits | TTFT median | TTFT p90 |\n|---|---|---|---|")
    for name, runs in results.items():
        mean_hit_rate = mean(hit_rate for hit_rate, _ in runs)
        ttft_ms = [1000 * seconds for _, ttft_seconds in runs for seconds in ttft_seconds]
        p50_ms = median(ttft_ms)
        p90_ms = quantiles(ttft_ms, n=10)[8]
        print(f"| {name} | {mean_hit_rate:.0%} | {p50_ms:.0f} ms | {p90_ms:.0f} ms |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="default: the embedded model")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--kv-cache-gib", type=float, default=0.5)
    parser.add_argument("--chats", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=2, help="runs of each router")
    parser.add_argument("--concurrency", type=int, default=6, help="chats at the same time")
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
