"""Workloads: the arrival times of requests, and their lengths.

Arrivals are generated from a pattern or read from a trace file. `bloomery bench` sends them to real
servers, and `bloomery plan --simulate` runs them in virtual time. This module knows neither.

A trace has one JSON object per line: {"arrival": seconds, "prompt": tokens, "output": tokens}.
Optional keys are "session", "prefix" (how many tokens of the session's previous request and answer
the prompt begins with), "after" (instead of "arrival": seconds after the session's previous answer)
and "priority".
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from math import exp, inf
from pathlib import Path
from typing import Any

from bloomery.errors import ConfigError

THINK_SECONDS = 1.0  # between an answer and the next message of a conversation
PATTERN_HELP = "closed:CLIENTS, poisson:RATE, burst:SIZE:SECONDS or chat:RATE:TURNS"


@dataclass(frozen=True, slots=True)
class RequestArrival:
    """One request of a workload. The field names are the keys of a trace."""

    arrival: float | None  # seconds from the start; None: `after` the session's previous answer
    prompt: int  # tokens
    output: int  # tokens
    session: str = ""
    prefix: int = 0  # tokens at the start of the prompt that repeat the session's history
    after: float = 0.0  # seconds
    priority: int = 0


LengthSampler = Callable[[random.Random], tuple[int, int]]  # returns tokens of prompt and output


# ---- traces --------------------------------------------------------------------------------------


def read_trace(path: Path) -> list[RequestArrival]:
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: the trace cannot be read: {error}") from None
    arrivals = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            arrivals.append(_parse_arrival(json.loads(line)))
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                f"{path}, line {number}: {error}; expected: arrival, prompt and output, as numbers"
            ) from None
    if not arrivals:
        raise ConfigError(f"{path}: no arrivals")
    return arrivals


def _parse_arrival(entry: Any) -> RequestArrival:
    """Check one line of a trace. Raises ValueError, TypeError or KeyError."""
    if not isinstance(entry, dict):
        raise ValueError("not an object")
    known_keys = {field.name for field in fields(RequestArrival)}
    if unknown_keys := entry.keys() - known_keys:
        raise ValueError(f"unknown key {', '.join(sorted(unknown_keys))}")
    session = str(entry.get("session", ""))
    arrival = entry.get("arrival")
    if arrival is None and not session:
        raise ValueError("neither arrival nor session")
    if arrival is not None:
        arrival = float(arrival)
    prompt = int(entry["prompt"])
    output = int(entry["output"])
    if prompt < 1 or output < 1 or not (arrival is None or arrival >= 0):
        raise ValueError("prompt and output must be at least 1, arrival at least 0")
    return RequestArrival(
        arrival,
        prompt,
        output,
        session,
        prefix=int(entry.get("prefix", 0)),
        after=float(entry.get("after", 0)),
        priority=int(entry.get("priority", 0)),
    )


# ---- lengths -------------------------------------------------------------------------------------


def parse_lengths(text: str) -> LengthSampler:
    """Parse IN:OUT: `128:64` is fixed, `100-1024:64` uniform, `sharegpt` like conversations."""
    if text == "sharegpt":
        return _sample_sharegpt_lengths
    try:
        prompt_text, output_text = text.split(":")
        min_prompt, max_prompt = _parse_range(prompt_text)
        min_output, max_output = _parse_range(output_text)
    except ValueError:
        raise ConfigError(
            f"lengths {text!r}: give IN:OUT, such as 128:64 or 100-1024:64, or sharegpt"
        ) from None
    if not (1 <= min_prompt <= max_prompt and 1 <= min_output <= max_output):
        raise ConfigError(f"lengths {text!r}: must be at least 1, with the smaller first")

    def sample_lengths(rng: random.Random) -> tuple[int, int]:
        return rng.randint(min_prompt, max_prompt), rng.randint(min_output, max_output)

    return sample_lengths


def _parse_range(text: str) -> tuple[int, int]:
    ends = text.split("-")
    return int(ends[0]), int(ends[-1])


def _sample_sharegpt_lengths(rng: random.Random) -> tuple[int, int]:
    """Lengths of ShareGPT conversations: log-normal, cut at 1,024 tokens.

    The medians are 60 and 150 tokens, the means near 160 and 200.
    """
    prompt = int(exp(rng.gauss(4.1, 1.4)))
    output = int(exp(rng.gauss(5.0, 0.9)))
    return min(max(prompt, 4), 1024), min(max(output, 4), 1024)


# ---- patterns ------------------------------------------------------------------------------------


def generate_arrivals(
    pattern: str, count: int, sample_lengths: LengthSampler, seed: int = 0
) -> list[RequestArrival]:
    """Generate `count` arrivals.

    `closed:N`: N clients, each sends its next request when the last is answered. `poisson:R`: R
    requests per second. `burst:N:S`: N at once every S seconds. `chat:R:TURNS`: R new conversations
    per second, of TURNS requests each.
    """
    kind, *numbers = pattern.split(":")
    rng = random.Random(seed)
    try:
        values = [float(number) for number in numbers]
        if not all(0 < value < inf for value in values):
            raise ValueError("all numbers must be above 0")
        return list(_GENERATORS[kind](count, sample_lengths, rng, *values))
    except (KeyError, ValueError, TypeError):
        raise ConfigError(
            f"unknown pattern {pattern!r}; expected: {PATTERN_HELP}, with numbers above 0, or a "
            "trace file"
        ) from None


def _at_least_one(number: float) -> int:
    if number < 1:
        raise ValueError("at least 1")
    return int(number)


def _generate_closed(
    count: int, sample_lengths: LengthSampler, rng: random.Random, clients: float
) -> Iterator[RequestArrival]:
    num_clients = _at_least_one(clients)
    for i in range(count):
        arrival = 0.0 if i < num_clients else None
        session = f"client {i % num_clients}"
        yield RequestArrival(arrival, *sample_lengths(rng), session=session)


def _generate_poisson(
    count: int, sample_lengths: LengthSampler, rng: random.Random, rate: float
) -> Iterator[RequestArrival]:
    arrival = 0.0
    for _ in range(count):
        yield RequestArrival(arrival, *sample_lengths(rng))
        arrival += rng.expovariate(rate)


def _generate_bursts(
    count: int, sample_lengths: LengthSampler, rng: random.Random, size: float, interval: float
) -> Iterator[RequestArrival]:
    burst_size = _at_least_one(size)
    for i in range(count):
        yield RequestArrival(i // burst_size * interval, *sample_lengths(rng))


def _generate_chats(
    count: int, sample_lengths: LengthSampler, rng: random.Random, rate: float, turns: float
) -> Iterator[RequestArrival]:
    """Each prompt repeats the whole conversation and adds a message."""
    num_turns = _at_least_one(turns)
    start = 0.0
    for first in range(0, count, num_turns):
        session = f"conversation {first // num_turns}"
        history = 0
        for turn in range(min(num_turns, count - first)):
            message, output = sample_lengths(rng)
            arrival = None if turn else start
            yield RequestArrival(
                arrival, history + message, output, session, prefix=history, after=THINK_SECONDS
            )
            history += message + output
        start += rng.expovariate(rate)


_GENERATORS: dict[str, Callable[..., Iterator[RequestArrival]]] = {
    "closed": _generate_closed,
    "poisson": _generate_poisson,
    "burst": _generate_bursts,
    "chat": _generate_chats,
}
