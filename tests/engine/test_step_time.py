"""The step-time model: what it learns, steps that were never measured, and stalls."""

from __future__ import annotations

import random

import pytest

from bloomery.engine.step_time import StepFeatures, StepTimeModel


def gpu_seconds(features: StepFeatures) -> float:
    """Return the seconds of a step on a device that is memory-bound below 128 tokens."""
    return (
        4e-3
        + 2.4e-5 * max(features.num_tokens - 128, 0)
        + 3e-8 * features.decode_keys
        + 1e-9 * features.prefill_pairs
    )


# Steps whose times a plan expects. The first is a step of one token.
PLANNED_STEPS = [StepFeatures(1, 100), StepFeatures(64, 6400), StepFeatures(2048, 0, 2e6)]


def create_planned_model() -> StepTimeModel:
    """Create a model that expects the times of `gpu_seconds` and has measured nothing."""
    return StepTimeModel([(*features, gpu_seconds(features)) for features in PLANNED_STEPS])


def test_the_model_learns_step_times() -> None:
    def true_seconds(features: StepFeatures) -> float:
        return (
            1e-3
            + max(4e-3, 24e-6 * features.num_tokens)
            + 3e-8 * features.decode_keys
            + 6e-10 * features.prefill_pairs
        )

    rng = random.Random(0)
    model = StepTimeModel()
    for _ in range(3000):
        num_decodes = rng.randint(1, 200)
        chunk = rng.choice([0, 0, 100, 400, 1500])
        decode_keys = num_decodes * rng.randint(100, 3000)
        features = StepFeatures(num_decodes + chunk, decode_keys, chunk * rng.randint(50, 2000))
        model.observe(features, true_seconds(features) * rng.uniform(0.95, 1.05))
    for features in (
        StepFeatures(1, 500),
        StepFeatures(64, 64_000),
        StepFeatures(200, 400_000),
        StepFeatures(1200, 100_000, 1e6),
    ):
        assert model.predict(features) == pytest.approx(true_seconds(features), rel=0.15)
    chunk = model.predict_prefill_tokens_within(StepFeatures(100, 100_000), 0.03, 1000)
    filled = StepFeatures(100 + chunk, 100_000, chunk * 1000)
    assert true_seconds(filled) == pytest.approx(0.03, rel=0.15)


def test_the_model_survives_stalls_and_follows_a_machine_that_became_slower() -> None:
    model = StepTimeModel()
    features = StepFeatures(8, 800)
    for i in range(400):
        model.observe(features, 30.0 if i % 50 == 49 else 0.01)
    assert model.predict(features) == pytest.approx(0.01, rel=0.1)
    for _ in range(2000):
        model.observe(features, 0.03)
    assert model.predict(features) == pytest.approx(0.03, rel=0.1)


@pytest.mark.parametrize("slowdown", [0.2, 1.0, 50.0])
def test_steps_never_measured_are_predicted_in_proportion_to_the_plan(slowdown: float) -> None:
    """A plan that is wrong about the machine is still right about how steps compare."""

    def planned_seconds(features: StepFeatures) -> float:
        return (
            4e-3
            + 2e-5 * features.num_tokens
            + 3e-8 * features.decode_keys
            + 1e-9 * features.prefill_pairs
        )

    def true_seconds(features: StepFeatures) -> float:
        return slowdown * planned_seconds(features)

    planned = [
        StepFeatures(1, 100),
        StepFeatures(64, 64000),
        StepFeatures(128, 0, 9e4),
        StepFeatures(512, 0, 4e5),
        StepFeatures(4096, 0, 2e7),
    ]
    model = StepTimeModel([(*features, planned_seconds(features)) for features in planned])
    rng = random.Random(3)
    for _ in range(2000):
        num_decodes = rng.randint(2, 64)
        features = StepFeatures(num_decodes, num_decodes * rng.randint(100, 1000))
        model.observe(features, true_seconds(features) * rng.uniform(0.95, 1.05))
    for features in planned:
        assert model.predict(features) == pytest.approx(true_seconds(features), rel=0.15)
    batch1_seconds = true_seconds(StepFeatures(1))
    assert model.batch1_seconds == pytest.approx(batch1_seconds, rel=0.15)
    # Batch-1 steps with a very long context must not change the time without keys much.
    long_context = StepFeatures(1, 200_000)
    for _ in range(100):
        model.observe(long_context, true_seconds(long_context))
    assert model.batch1_seconds == pytest.approx(batch1_seconds, rel=0.3)


def test_a_batch1_step_never_measured_is_not_extrapolated_from_batches() -> None:
    """Times of steps with dozens of rows rise so steeply that the fit is far too low at one."""

    def true_seconds(features: StepFeatures) -> float:
        return (
            4e-3
            + 8e-5 * max(features.num_tokens - 32, 0)
            + 3e-8 * features.decode_keys
            + 2e-9 * features.prefill_pairs
        )

    planned = [
        StepFeatures(1, 100),
        StepFeatures(8, 800),
        StepFeatures(64, 6400),
        StepFeatures(256, 0, 3e4),
        StepFeatures(2048, 0, 2e6),
    ]
    model = StepTimeModel([(*features, true_seconds(features)) for features in planned])
    rng = random.Random(3)
    for _ in range(2000):
        num_decodes = rng.randint(40, 64)
        features = StepFeatures(num_decodes, num_decodes * rng.randint(100, 300))
        model.observe(features, true_seconds(features) * rng.uniform(0.95, 1.05))
    batch1_seconds = true_seconds(StepFeatures(1))
    assert model.predict(StepFeatures(1)) < 0.7 * batch1_seconds, "the fit must be far off"
    assert model.batch1_seconds == pytest.approx(batch1_seconds, rel=0.15)


@pytest.mark.parametrize("stalled_step", [0, 300])
def test_a_stall_hardly_changes_the_batch1_time_if_none_was_measured(stalled_step: int) -> None:
    """Prefill steps that take a hundred times what the plan expects do not change it either."""
    model = create_planned_model()
    decodes = StepFeatures(40, 8000)
    prefill = StepFeatures(512, 0, 1e5)
    for step in range(600):
        model.observe(decodes, 20.0 if step == stalled_step else 1.5 * gpu_seconds(decodes))
        if step % 5 == 0:
            model.observe(prefill, 100 * gpu_seconds(prefill))
    assert model.batch1_seconds == pytest.approx(1.5 * gpu_seconds(StepFeatures(1)), rel=0.1)


def test_the_first_batch1_step_is_checked_against_measured_batches() -> None:
    """The step may be a stall, and the cost of its keys may not be known well."""
    model = create_planned_model()
    decodes = StepFeatures(40, 8000)
    single = StepFeatures(1, 100)
    for _ in range(300):
        model.observe(decodes, gpu_seconds(decodes))
    model.observe(single, 2 * gpu_seconds(single))
    assert model.batch1_seconds == pytest.approx(gpu_seconds(StepFeatures(1)), rel=0.15)
    for _ in range(100):
        model.observe(single, 2 * gpu_seconds(single))
    assert model.batch1_seconds == pytest.approx(2 * gpu_seconds(StepFeatures(1)), rel=0.1)


def test_a_stall_hardly_changes_a_measured_batch1_time() -> None:
    """After a stall, such as a suspended machine, no correcting measurement may come for long."""
    model = create_planned_model()
    single = StepFeatures(1, 100)
    for step in range(60):
        model.observe(single, 20.0 if step == 50 else gpu_seconds(single))
    assert model.batch1_seconds == pytest.approx(gpu_seconds(StepFeatures(1)), rel=0.15)
    for _ in range(60):  # the model follows a machine that became ten times slower
        model.observe(single, 10 * gpu_seconds(single))
    assert model.batch1_seconds == pytest.approx(10 * gpu_seconds(StepFeatures(1)), rel=0.15)
