"""Who asks for how much, and when: arrivals as data, drawn from a pattern or read from a trace file.

Used on real servers by `bloomery bench` and in virtual time by `bloomery plan --simulate`; knows neither.
A trace is JSON lines: {"arrival": seconds, "prompt": tokens, "output": tokens}, and if wished "session" with "prefix"
(with how many tokens of the session's former request and answer the prompt begins), "after" instead of "arrival"
(seconds after the session's former request was answered), "priority".
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


@dataclass(frozen=True, slots=True)
class Arrival:
    arrival: float | None  # seconds from the start; None: `after` the session's last answer
    prompt: int
    output: int
    session: str = ""
    prefix: int = 0  # tokens it has in common with the session
    after: float = 0.0
    priority: int = 0


Lengths = Callable[[random.Random], tuple[int, int]]  # prompt, output


def read(path: Path) -> list[Arrival]:
    found = []
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: a trace that cannot be read: {error}") from None
    for i, line in enumerate(lines, 1):
        if line.strip():
            try:
                found.append(_arrival(json.loads(line)))
            except (ValueError, TypeError, KeyError) as error:
                raise ConfigError(
                    f"{path}, line {i}: {error}; wanted: arrival, prompt and output, as numbers"
                ) from None
    if not found:
        raise ConfigError(f"{path}: no arrivals")
    return found


def _arrival(entry: Any) -> Arrival:
    if not isinstance(entry, dict):
        raise ValueError("not an object")
    known = {field.name for field in fields(Arrival)}
    if unknown := entry.keys() - known:
        raise ValueError(f"{', '.join(sorted(unknown))} is not known")
    session = str(entry.get("session", ""))
    at = entry.get("arrival")
    if at is None and not session:
        raise ValueError("neither arrival nor session")
    prompt = int(entry["prompt"])
    output = int(entry["output"])
    if prompt < 1 or output < 1 or not (at is None or float(at) >= 0):
        raise ValueError("prompt and output count from 1, arrival from 0")
    prefix = int(entry.get("prefix", 0))
    after = float(entry.get("after", 0))
    priority = int(entry.get("priority", 0))
    return Arrival(
        None if at is None else float(at), prompt, output, session, prefix, after, priority
    )


# ---- lengths ---------------------------------------------------------------------------------------


def lengths(text: str) -> Lengths:
    """`128:64` fixed; `100-1024:100-1024` uniform; `sharegpt`: as people talk to assistants, short with a long tail."""
    if text == "sharegpt":
        return _sharegpt
    parts = text.split(":")
    try:
        (a, b), (c, d) = (tuple(map(int, (part.split("-") * 2)[:2])) for part in parts)
    except ValueError:
        raise ConfigError(
            f"lengths {text!r}: give IN:OUT, such as 128:64 or 100-1024:64, or sharegpt"
        ) from None
    if not (1 <= a <= b and 1 <= c <= d):
        raise ConfigError(f"lengths {text!r}: from 1 upwards, the smaller first")
    return lambda chance: (chance.randint(a, b), chance.randint(c, d))


def _sharegpt(chance: random.Random) -> tuple[int, int]:
    """Log-normal with medians of 60 and 150 tokens and means near 160 and 200, cut at 1,024: conversations' lengths."""
    prompt = exp(chance.gauss(4.1, 1.4))
    output = exp(chance.gauss(5.0, 0.9))
    return min(max(int(prompt), 4), 1024), min(max(int(output), 4), 1024)


# ---- patterns --------------------------------------------------------------------------------------


def pattern(text: str, count: int, length: Lengths, seed: int = 0) -> list[Arrival]:
    """`closed:N` N clients who ask again once answered; `poisson:R` R a second; `burst:N:S` N at once every S seconds;
    `chat:R:TURNS` R conversations a second begin, of so many rounds each."""
    kind, *numbers = text.split(":")
    chance = random.Random(seed)
    try:
        values = [float(number) for number in numbers]
        crowd = kind != "poisson" and values[kind == "chat"]  # of whom there must be one
        if not all(0 < value < inf for value in values) or 0 < crowd < 1:
            raise ValueError("nobody would come")
        return list(_PATTERNS[kind](count, length, chance, *values))
    except (KeyError, ValueError, TypeError, IndexError):
        wanted = "closed:CLIENTS, poisson:RATE, burst:SIZE:SECONDS or chat:RATE:TURNS, all above 0, or a trace file"
        raise ConfigError(f"pattern {text!r} is not one; wanted: {wanted}") from None


def _closed(
    count: int, length: Lengths, chance: random.Random, clients: float
) -> Iterator[Arrival]:
    for i in range(count):
        first = i < int(clients)
        yield Arrival(0.0 if first else None, *length(chance), session=f"client {i % int(clients)}")


def _poisson(count: int, length: Lengths, chance: random.Random, rate: float) -> Iterator[Arrival]:
    at = 0.0
    for _ in range(count):
        yield Arrival(at, *length(chance))
        at += chance.expovariate(rate)


def _burst(
    count: int, length: Lengths, chance: random.Random, size: float, gap: float
) -> Iterator[Arrival]:
    for i in range(count):
        yield Arrival(i // int(size) * gap, *length(chance))


def _chat(
    count: int, length: Lengths, chance: random.Random, rate: float, turns: float
) -> Iterator[Arrival]:
    """A turn's prompt is all that was said before, and a new question; a second of thought lies between."""
    at = 0.0
    for i in range(0, count, int(turns)):
        said = 0
        for turn in range(min(int(turns), count - i)):
            question, answer = length(chance)
            yield Arrival(
                None if turn else at, said + question, answer, f"talk {i // int(turns)}", said, 1.0
            )
            said += question + answer
        at += chance.expovariate(rate)


_PATTERNS: dict[str, Callable[..., Iterator[Arrival]]] = {
    "closed": _closed,
    "poisson": _poisson,
    "burst": _burst,
    "chat": _chat,
}
