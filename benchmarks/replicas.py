"""Prefix-affine routing against round robin: chats of several rounds on two engines behind one door.

    python benchmarks/replicas.py [--chats 24] [--rounds 4] [--at-once 6] [--model PATH]

Every chat sends its whole history again with each round, as chat clients do. Told: which share of the prompts' tokens
was found in an engine's cache, and the time to the first token of rounds after the first. Both ways of routing run in
turns over the same engines, which begin each turn with other chats, so nothing of a former turn helps.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import time
from collections.abc import Mapping
from random import Random
from statistics import median, quantiles

from bloomery.config import Config
from bloomery.describe import plan_for
from bloomery.engine.client import EngineClient
from bloomery.engine.replicas import Affinity, Replicas, Routing, share
from bloomery.messages import EngineRequest, ResolvedSampling


class RoundRobin:
    """One after the other, whoever knows what."""

    def __init__(self) -> None:
        self.turn = itertools.count()

    def pick(self, request: EngineRequest, loads: Mapping[int, int]) -> int:
        engines = sorted(loads)
        return engines[next(self.turn) % len(engines)]


async def chat(
    engines: Replicas, name: str, rounds: int, random: Random, vocab: int, firsts: list[float]
) -> None:
    history: list[int] = [
        random.randrange(3, vocab) for _ in range(160)
    ]  # a system prompt of its own
    for number in range(rounds):
        history += [random.randrange(3, vocab) for _ in range(random.randrange(30, 90))]
        asked = EngineRequest(
            f"{name} {number}", tuple(history), ResolvedSampling(temperature=0.0), 24
        )
        begun = time.perf_counter()
        first = 0.0
        async for news in engines.stream([asked]):
            if news.ids and not first:
                first = time.perf_counter() - begun
            history += news.ids
        if number:
            firsts.append(first)


async def turn(
    engines: Replicas, routing: Routing, seed: int, args: argparse.Namespace, vocab: int
) -> tuple[float, list[float]]:
    engines.routing = routing
    before = engines.stats
    firsts = list[float]()
    random = Random(seed)
    waiting = [
        chat(engines, f"{seed} {number}", args.rounds, Random(random.random()), vocab, firsts)
        for number in range(args.chats)
    ]
    gate = asyncio.Semaphore(args.at_once)

    async def one(work: object) -> None:
        async with gate:
            await work  # type: ignore[misc]

    await asyncio.gather(*map(one, waiting))
    now = engines.stats
    hit = (now.prefix_hit - before.prefix_hit) / (now.prefix_queried - before.prefix_queried)
    return hit, firsts


async def measure(args: argparse.Namespace) -> None:
    plan, _ = plan_for(
        Config(
            args.model,
            device=args.device,
            threads=args.threads,
            max_model_len=1024,
            kv_cache_gib=args.kv_gib,
        )
    )
    engines = Replicas([EngineClient(share(plan, number, 2)) for number in range(2)])
    await engines.start()
    capacities = [await client.ready() for client in engines.clients]
    found: dict[str, list[tuple[float, list[float]]]] = {"round robin": [], "affinity": []}
    for seed in range(args.turns):
        for name in found:
            routing: Routing = RoundRobin() if name == "round robin" else Affinity(2)
            found[name].append(
                await turn(
                    engines, routing, 2 * seed + (name == "affinity"), args, capacities[0].vocab
                )
            )
            print(f"{name}: {found[name][-1][0]:.0%} of prompt tokens found", flush=True)
    await engines.close()
    print("\n| routing | prompt tokens found | first token, median | p90 |\n|---|---|---|---|")
    for name, turns in found.items():
        firsts = [first for _, each in turns for first in each]
        hit = sum(share for share, _ in turns) / len(turns)
        print(
            f"| {name} | {hit:.0%} | {1000 * median(firsts):.0f} ms | {1000 * quantiles(firsts, n=10)[8]:.0f} ms |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="default: the embedded one")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--kv-gib", type=float, default=0.5, dest="kv_gib")
    parser.add_argument("--chats", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--at-once", type=int, default=6, dest="at_once")
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
