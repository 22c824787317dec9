"""Drives a load on a server in real time and shows how it goes. Refuses to publish what a profiler has slowed."""

from __future__ import annotations

import asyncio
import random
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import msgspec

from bloomery.tools.bench.client import Client, Target
from bloomery.tools.bench.load import Arrival
from bloomery.tools.bench.summary import Record, Targets, percentile, summarise
from bloomery.config import profiler
from bloomery.errors import ConfigError

# Words of one token each in most vocabularies.
WORDS = (
    "river stone green walk table seven cloud paper north glass field light music train plant house voice night water "
    "bread chair coast cover dance dream earth event final floor force front fruit grand guard heart horse human image "
    "issue judge large layer level local lunch major march metal model money month motor mouth novel ocean order panel "
    "party peace phone piece pilot place plain plane point power press price pride prize proof queen radio range reply"
).split()


class Driver:
    """Sends every arrival at its time, sessions in order, and keeps the records."""

    def __init__(self, client: Client, arrivals: Sequence[Arrival], seed: int = 0):
        self.client = client
        self.arrivals = arrivals
        self.records = [Record(0.0, arrival.prompt) for arrival in arrivals]
        self.chance = random.Random(seed)
        self.begun = 0.0
        self.flying = self.over = 0

    async def run(self) -> list[Record]:
        lines: dict[str, list[int]] = defaultdict(list)
        for i, arrival in enumerate(self.arrivals):
            lines[arrival.session or f" {i}"].append(i)
        self.begun = time.perf_counter()
        await asyncio.gather(*(self._line(line) for line in lines.values()))
        return self.records

    async def _line(self, line: Sequence[int]) -> None:
        """One session: each request at its time, or after the former's answer."""
        said: list[tuple[str, str]] = []
        for i in line:
            arrival = self.arrivals[i]
            if arrival.arrival is not None:
                await asyncio.sleep(self.begun + arrival.arrival - time.perf_counter())
            elif arrival.after:
                await asyncio.sleep(arrival.after)
            new = max(1, arrival.prompt - arrival.prefix)
            asked = ("user", " ".join(self.chance.choices(WORDS, k=new)))
            said = [*said, asked] if arrival.prefix else [asked]
            self.flying += 1
            answer = await self.client.send(said, arrival.output, self.records[i], arrival.priority)
            self.flying -= 1
            self.over += 1
            said.append(("assistant", answer))


async def target_of(url: str, api: str, model: str | None, key: str | None, **more: Any) -> Target:
    """What the server speaks and what its model is called, asked of itself."""
    client = Client(Target(url, "chat", "", key))
    status, body = await client.get("/v1/models")
    if status == 0:
        raise ConfigError(f"nobody answers at {url}; is the server up?")
    if api == "auto":
        api = "chat" if status == 200 else "tgi"
    if model is None and status == 200 and api != "tgi":
        try:
            model = str(msgspec.json.decode(body)["data"][0]["id"])
        except (msgspec.DecodeError, KeyError, IndexError, TypeError):
            raise ConfigError(f"{url}/v1/models names no model; give --model") from None
    if model is None and api == "tgi":  # which asks for no name: for the report
        model = (await about(client)).get("model_id")
    return Target(url, api, model or "default", key, **more)


async def about(client: Client) -> dict[str, Any]:
    """What the server says of itself, if it has anything to say."""
    status, body = await client.get("/info")
    try:
        found = msgspec.json.decode(body) if status == 200 else {}
    except msgspec.DecodeError:
        return {}
    return found if isinstance(found, dict) else {}


async def check_unwatched(client: Client) -> None:
    """Refuse figures that would not count: with a profiler here, or one that the server admits to."""
    who = "this process is"
    why = profiler()
    if why is None:
        who, why = "the server says that it is", (await about(client)).get("profiling")
    if why:
        raise ConfigError(
            f"{who} being profiled ({why}): numbers taken so are not numbers. Stop the profiler and run again"
        )


# ---- a run -----------------------------------------------------------------------------------------


async def drive(
    target: Target, arrivals: Sequence[Arrival], targets: Targets, warmup: int, seed: int
) -> dict[str, Any]:
    client = Client(target)
    await check_unwatched(client)
    if warmup:
        warm = [
            Arrival(0.0, arrival.prompt, min(8, arrival.output)) for arrival in arrivals[:warmup]
        ]
        await Driver(client, warm, seed + 1).run()
    driver = Driver(client, arrivals, seed)
    before = _spent()
    begun = time.perf_counter()
    view = asyncio.create_task(show(driver)) if sys.stderr.isatty() else None
    records = await driver.run()
    if view:
        view.cancel()
    share = (_spent() - before) / (time.perf_counter() - begun)
    client.close()
    await check_unwatched(client)
    result = summarise(records, targets)
    return result | {"client_cpu_share": round(share, 3), "curves": curves(records)}


def _spent() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def curves(records: Sequence[Record]) -> dict[str, list[list[float]]]:
    """What the report draws: distributions as (ms, percent), and tokens by second."""
    good = [record for record in records if record.answered]
    found = {
        "first_token": [record.first for record in good],
        "between_tokens": [gap for record in good for gap in record.gaps()],
        "end_to_end": [record.done - record.sent for record in good],
    }
    drawn = {}
    for name, values in found.items():
        ordered = sorted(values)
        drawn[name] = (
            [[round((percentile(ordered, p) or 0.0) * 1e3, 3), p] for p in range(0, 101, 2)]
            if ordered
            else []
        )
    origin = min((record.sent for record in records), default=0.0)
    per_second: dict[int, float] = defaultdict(float)
    for record in good:
        for stamp in record.stamps:
            per_second[int(stamp - origin)] += record.tokens / len(record.stamps)
    seconds = range(max(per_second, default=-1) + 1)  # those without a token too
    drawn["tokens_by_second"] = [
        [float(second), round(per_second.get(second, 0.0), 1)] for second in seconds
    ]
    return drawn


async def show(driver: Driver) -> None:
    """The live view: a bar, and what the last second brought."""
    from rich.console import Console
    from rich.live import Live
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    def frame(rate: float) -> Table:
        recent = driver.records[max(0, driver.over - 256) : driver.over + driver.flying]
        firsts = sorted(record.first for record in recent if len(record.stamps))
        middle = percentile(firsts, 50) or 0.0
        tail = percentile(firsts, 99) or 0.0
        failed = sum(record.error is not None for record in driver.records)
        table = Table.grid(padding=(0, 2))
        for width in (16, None, None, None):
            table.add_column(no_wrap=True, width=width)
        table.add_row(
            ProgressBar(len(driver.arrivals), driver.over),
            f"{driver.over}/{len(driver.arrivals)} done, {driver.flying} open{f', {failed} failed' if failed else ''}",
            f"{rate:,.0f} pieces/s",
            f"first {middle * 1e3:,.0f} ms, p99 {tail * 1e3:,.0f}",
        )
        return table

    seen = 0
    with Live(frame(0.0), console=Console(stderr=True), auto_refresh=False, transient=True) as live:
        while True:
            await asyncio.sleep(0.5)
            pieces = sum(len(record.stamps) for record in driver.records)
            live.update(frame((pieces - seen) / 0.5), refresh=True)
            seen = pieces
