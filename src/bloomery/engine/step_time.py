"""Predicts how many seconds a step takes, from the steps measured so far (StepTimeModel).

The model is linear in six features of a step:
  - a constant: weights are read and kernels are launched in every step;
  - tokens computed, and the tokens beyond each of two knees: matrix products change from
    memory-bound to compute-bound around there, so each token costs more beyond a knee;
  - keys that decode requests attend to;
  - query-key pairs of prefill chunks.

Coefficients are never negative. They are fitted by least squares on the relative error and forget
slowly: one stall changes little, and a machine that became slower is noticed within a few hundred
steps. The engine's plan may give expected times for typical steps. Kinds of steps that were never
measured are predicted from these expectations, scaled by how the measured steps compare.

No clock, no I/O, no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

# Tokens in a step. Chosen: the measured products of an 8B model on an H200 bend near 128 and 512
# tokens (STEP_MILLISECONDS in tests/engine/virtual_device.py).
KNEES = (128, 512)
# Each feature is divided by its scale, so that all coefficients are of similar size (about a
# millisecond) and coordinate descent converges in few sweeps. Chosen.
FEATURE_SCALES = (1.0, 1e2, 1e2, 1e2, 1e5, 1e6)
# Seconds per scaled feature, used before anything is measured or expected: 5 ms a step, 1 us a
# token, 10 us more beyond the first knee, 50 ns a key, 1 ns a pair. Chosen: the order of magnitude
# of an 8B model on a GPU.
DEFAULT_COEFFICIENTS = (5e-3, 1e-4, 1e-3, 0.0, 5e-3, 1e-3)
# Weight of the starting coefficients, in measured steps. Chosen: far below one step.
PRIOR_WEIGHT = 1e-2
# Relative penalty on a coefficient that departs from the scaled expectation. Chosen: small, so that
# it decides only between explanations that fit the measured steps equally well.
CORRECTION_PENALTY = 1e-3
# Factor by which the weight of a measured step decays with each later one. Chosen: a step counts
# half after 350 steps, a few seconds of serving.
DECAY_PER_STEP = 0.998
# Sweeps of coordinate descent per measured step. Chosen: the descent starts at the last solution,
# so few sweeps are enough.
DESCENT_SWEEPS = 4
# Passes over the expected steps when the model is created. Chosen: enough for the fit to converge.
EXPECTATION_PASSES = 16
# Share of the newest measurement in the moving average of batch-1 steps. Chosen.
BATCH1_UPDATE_SHARE = 0.1


class StepFeatures(NamedTuple):
    """The quantities of a step that its time depends on."""

    num_tokens: int = 0  # positions computed
    decode_keys: int = 0  # keys that requests with one new position attend to, summed
    prefill_pairs: float = 0.0  # queries times keys of requests with several new positions


class NonNegativeFit:
    """Least squares with coefficients of at least zero, updated one observation at a time.

    Uses coordinate descent that starts from the solution of the previous observation.
    """

    def __init__(self, initial: Sequence[float], penalties: Sequence[float]):
        size = len(initial)
        self.coefficients = list(initial)
        self.penalties = penalties
        self.gram = [[PRIOR_WEIGHT * (i == j) for j in range(size)] for i in range(size)]
        self.moment = [PRIOR_WEIGHT * value for value in initial]

    def observe(self, features: Sequence[float]) -> None:
        """Add one observation. `features` are divided by the measured time: the target is 1."""
        gram = self.gram
        moment = self.moment
        coefficients = self.coefficients
        for i, feature in enumerate(features):
            moment[i] = DECAY_PER_STEP * moment[i] + feature
            gram[i] = [
                DECAY_PER_STEP * entry + feature * other_feature
                for entry, other_feature in zip(gram[i], features, strict=True)
            ]
        for _ in range(DESCENT_SWEEPS):
            for i, row in enumerate(gram):
                diagonal = row[i]
                if diagonal <= 1e-12:
                    continue
                total = sum([a * b for a, b in zip(row, coefficients, strict=True)])
                other_terms = total - diagonal * coefficients[i]
                penalized = diagonal * (1 + self.penalties[i])
                coefficients[i] = max((moment[i] - other_terms) / penalized, 0.0)


class StepTimeModel:
    """Learns from measured steps and predicts the times of other steps."""

    def __init__(self, expected_steps: Sequence[tuple[int, int, int, float]] = ()) -> None:
        """`expected_steps` holds features and seconds of typical steps, as EngineCapacity does.

        The first of them is a step of one token.
        """
        self.num_observed = 0
        # Moving average over batch-1 steps, without the time for their keys. 0: none measured.
        self.measured_batch1_seconds = 0.0
        self.expected_batch1_seconds = expected_steps[0][3] if expected_steps else 0.0
        # Expected over measured time, averaged over the steps without prefill.
        self.expected_ratio = 1.0
        self.num_decode_only = 0
        num_features = len(DEFAULT_COEFFICIENTS)
        prior = NonNegativeFit(DEFAULT_COEFFICIENTS, [0.0] * num_features)
        for _ in range(EXPECTATION_PASSES):
            for num_tokens, decode_keys, prefill_pairs, seconds in expected_steps:
                features = StepFeatures(num_tokens, decode_keys, prefill_pairs)
                prior.observe(scale_features(features, seconds))
        self.expected_coefficients = tuple(prior.coefficients)
        # The first coefficient scales the expectation. The others are corrections for each feature.
        # Kinds of steps that were never measured thus follow the scale of the measured ones.
        initial = [1.0, *[0.0] * num_features]
        penalties = [0.0, *[CORRECTION_PENALTY] * num_features]
        self.fit = NonNegativeFit(initial, penalties)
        self.coefficients = list(self.expected_coefficients)

    def predict(self, features: StepFeatures) -> float:
        """Return the predicted seconds of a step.

        The factors 1e-2, 1e-5 and 1e-6 here and below are the inverse of FEATURE_SCALES.
        """
        constant, *_, per_key, per_pair = self.coefficients
        return (
            constant
            + self._predict_token_seconds(features.num_tokens)
            + per_key * 1e-5 * features.decode_keys
            + per_pair * 1e-6 * features.prefill_pairs
        )

    def _predict_token_seconds(self, num_tokens: float) -> float:
        per_token, beyond_first, beyond_second = self.coefficients[1:4]
        first_knee, second_knee = KNEES
        scaled = per_token * num_tokens
        if num_tokens > first_knee:
            second_part = 0.0
            if num_tokens > second_knee:
                second_part = beyond_second * (num_tokens - second_knee)
            scaled += beyond_first * (num_tokens - first_knee) + second_part
        return scaled * 1e-2

    @property
    def batch1_seconds(self) -> float:
        """Seconds of a step in which one request decodes one token, without its keys.

        A fit to full batches predicts this step badly. If no such step was measured, the plan's
        expectation is a better estimate, corrected by how slow decode steps are.
        """
        seconds = (
            self.measured_batch1_seconds
            or self.expected_batch1_seconds / self.expected_ratio
            or self.predict(StepFeatures(1))
        )
        return max(seconds, 1e-6)

    def predict_prefill_token_seconds(self, context_tokens: int = 0) -> float:
        """Seconds of one more prefill token, after `context_tokens`, in a compute-bound step."""
        per_token = sum(self.coefficients[1:4]) * 1e-2
        return max(per_token + self.coefficients[5] * 1e-6 * context_tokens, 1e-9)

    def predict_prefill_tokens_within(
        self, features: StepFeatures, seconds: float, context_tokens: int
    ) -> int:
        """Return how many prefill tokens can join a step before it takes longer than `seconds`.

        Each of them attends to `context_tokens` keys.
        """
        spare_seconds = seconds - self.predict(features)
        num_tokens = features.num_tokens
        per_token = self.coefficients[1] * 1e-2 + self.coefficients[5] * 1e-6 * context_tokens
        for knee, increase in zip(KNEES, self.coefficients[2:4], strict=True):
            below_knee = max(knee - num_tokens, 0)
            if spare_seconds <= per_token * below_knee:
                break
            spare_seconds -= per_token * below_knee
            num_tokens += below_knee
            per_token += increase * 1e-2
        beyond_knee = int(spare_seconds / max(per_token, 1e-9))
        return num_tokens - features.num_tokens + max(beyond_knee, 0)

    def observe(self, features: StepFeatures, seconds: float) -> None:
        """Learn from a measured step. Measurements without a duration are ignored."""
        if seconds <= 0:
            return
        relative = scale_features(features, seconds)
        expected = zip(self.expected_coefficients, relative, strict=True)
        expected_ratio = sum([coefficient * feature for coefficient, feature in expected])
        if not features.prefill_pairs:
            self.num_decode_only += 1
            update_share = max(1 - DECAY_PER_STEP, 1 / self.num_decode_only)
            change = (expected_ratio - self.expected_ratio) * update_share
            self.expected_ratio = max(self.expected_ratio + change, 1e-9)
        if features.num_tokens == 1:
            self._observe_batch1(features, seconds)
        self.fit.observe([expected_ratio, *relative])
        scale, *corrections = self.fit.coefficients
        self.coefficients = [
            scale * coefficient + correction
            for coefficient, correction in zip(self.expected_coefficients, corrections, strict=True)
        ]
        self.num_observed += 1

    def _observe_batch1(self, features: StepFeatures, seconds: float) -> None:
        key_seconds = self.coefficients[4] * 1e-5 * features.decode_keys
        without_keys = max(seconds - key_seconds, 0.1 * seconds)
        average = (
            self.measured_batch1_seconds
            or self.expected_batch1_seconds / self.expected_ratio
            or without_keys
        )
        # A step counts at most as twice the average. A longer step is a stall. If it is not, it
        # repeats and the average follows.
        change = min(without_keys, 2 * average) - average
        self.measured_batch1_seconds = average + change * BATCH1_UPDATE_SHARE


def scale_features(features: StepFeatures, seconds: float) -> list[float]:
    """Return the scaled features divided by the measured time, so that errors are relative."""
    num_tokens, decode_keys, prefill_pairs = features
    beyond_knees = [max(num_tokens - knee, 0) for knee in KNEES]
    unscaled = (1.0, num_tokens, *beyond_knees, decode_keys, prefill_pairs)
    return [value / scale / seconds for value, scale in zip(unscaled, FEATURE_SCALES, strict=True)]
