"""How long a step takes, learnt from the steps that were measured: plain least squares, no clock, no torch.

A step costs something by itself (weights are read, kernels start); something a position, more beyond each of two knees,
for products turn from reading weights to arithmetic somewhere there; something a key that a single position attends to,
and something a pair of query and key within a chunk. Prices are never below zero; they are fitted to the relative error
and forget slowly, so that one stall changes little and a slower machine is noticed within a few hundred steps. What was
expected of steps before any was measured stays what is believed of those that never are, in proportion.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

KNEES = (128, 512)
UNITS = (1.0, 1e2, 1e2, 1e2, 1e5, 1e6)  # of the prices: keeps them of one size
GUESS = (5e-3, 1e-4, 1e-3, 0.0, 5e-3, 1e-3)  # before anything was measured or expected
TRUST = 1e-2  # weight of the guess, far below that of one measured step
SHRINK = 1e-3  # by which a price of its own is worth less than the expectation scaled
MEMORY = 0.998  # what an observation still counts one step later
SWEEPS = 4
RECENT = 0.1  # weight of the latest step of one position


class Work(NamedTuple):
    tokens: int = 0  # positions computed
    attended: int = 0  # keys that sequences of one new position attend to
    pairs: float = 0.0  # queries times keys, of sequences of several


class Fit:
    """Prices that are not below zero, by coordinate descent from where the last observation left off."""

    def __init__(self, guess: Sequence[float], shrink: Sequence[float]):
        count = len(guess)
        self.prices = list(guess)
        self.shrink = shrink
        self.gram = [[TRUST * (i == j) for j in range(count)] for i in range(count)]
        self.moment = [TRUST * price for price in guess]

    def learn(self, features: Sequence[float]) -> None:
        """Of an observation, as parts of it: its prices should add up to one."""
        gram = self.gram
        moment = self.moment
        prices = self.prices
        for i, feature in enumerate(features):
            moment[i] = MEMORY * moment[i] + feature
            gram[i] = [
                MEMORY * known + feature * other
                for known, other in zip(gram[i], features, strict=True)
            ]
        for _ in range(SWEEPS):
            for i, line in enumerate(gram):
                if line[i] > 1e-12:
                    rest = (
                        sum([a * b for a, b in zip(line, prices, strict=True)])
                        - line[i] * prices[i]
                    )
                    prices[i] = max((moment[i] - rest) / (line[i] * (1 + self.shrink[i])), 0.0)


class Pace:
    def __init__(self, expected: Sequence[tuple[int, int, int, float]] = ()) -> None:
        """`expected`: steps and their seconds, as Capacity has them."""
        self.steps = 0  # that were measured
        self.single = 0.0  # a step of one position, without its keys; 0: there was none
        self.first = expected[0][3] if expected else 0.0  # what is expected of it
        # of their time, what is expected of steps without prompts; how many there were
        self.share = 1.0
        self.plain = 0
        prior = Fit(GUESS, [0.0] * len(GUESS))
        for _ in range(SWEEPS * SWEEPS if expected else 0):
            for tokens, attended, pairs, seconds in expected:
                prior.learn(parts(Work(tokens, attended, pairs), seconds))
        self.expected = tuple(prior.prices)
        # How many times what was expected a step takes, and what each part of it costs beyond that: so a kind of step
        # that was never measured is believed to be as much slower as the others are.
        self.fit = Fit([1.0, *[0.0] * len(GUESS)], [0.0, *[SHRINK] * len(GUESS)])
        self.prices = list(self.expected)

    def seconds(self, work: Work) -> float:
        step, *_, key, pair = self.prices
        return (
            step
            + self._positions(work.tokens)
            + key * 1e-5 * work.attended
            + pair * 1e-6 * work.pairs
        )

    def _positions(self, tokens: float) -> float:
        token, first, second = self.prices[1:4]
        low, high = KNEES
        found = token * tokens
        if tokens > low:
            found += first * (tokens - low) + (second * (tokens - high) if tokens > high else 0.0)
        return found * 1e-2

    @property
    def lone(self) -> float:
        """A step of one sequence that goes on by one. Prices fitted to full batches say little of it: where none was
        measured, what is expected of it says more."""
        return max(self.single or self.first / self.share or self.seconds(Work(1)), 1e-6)

    def marginal(self, context: int = 0) -> float:
        """One more position of a chunk, in a step that is bound by arithmetic, after `context` others."""
        return max(sum(self.prices[1:4]) * 1e-2 + self.prices[5] * 1e-6 * context, 1e-9)

    def room(self, work: Work, seconds: float, context: int) -> int:
        """Positions of chunks that may join the work before the step takes longer than that."""
        spare = seconds - self.seconds(work)
        tokens = work.tokens
        price = self.prices[1] * 1e-2 + self.prices[5] * 1e-6 * context
        for knee, more in zip(KNEES, self.prices[2:4], strict=True):
            cheap = max(knee - tokens, 0)
            if spare <= price * cheap:
                break
            spare = spare - price * cheap
            tokens = tokens + cheap
            price += more * 1e-2
        return tokens - work.tokens + max(int(spare / max(price, 1e-9)), 0)

    def learn(self, work: Work, seconds: float) -> None:
        if seconds <= 0:
            return
        features = parts(work, seconds)
        share = sum(
            [a * b for a, b in zip(self.expected, features, strict=True)]
        )  # of its time, that was expected
        if not work.pairs:
            self.plain += 1
            self.share = max(
                self.share + (share - self.share) * max(1 - MEMORY, 1 / self.plain), 1e-9
            )
        if work.tokens == 1:
            alone = max(seconds - self.prices[4] * 1e-5 * work.attended, 0.1 * seconds)
            before = self.single or self.first / self.share or alone
            # Twice as long at most: more is a stall, or it comes again.
            self.single = before + (min(alone, 2 * before) - before) * RECENT
        self.fit.learn([share, *features])
        times, *own = self.fit.prices
        self.prices = [times * price + more for price, more in zip(self.expected, own, strict=True)]
        self.steps += 1


def parts(work: Work, seconds: float) -> list[float]:
    """What prices are multiplied by, as parts of the time it took: errors are relative ones."""
    tokens, attended, pairs = work
    raw = (1.0, tokens, *(max(tokens - knee, 0) for knee in KNEES), attended, pairs)
    return [value / unit / seconds for value, unit in zip(raw, UNITS, strict=True)]
