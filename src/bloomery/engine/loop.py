"""The engine loop: schedule a step, submit it to the executor, update the scheduler.

Several steps may be in flight. While steps are short and the batch cannot change, the loop queues
more of them than usual, so a short stall of the host does not idle the device. A request that
arrives meanwhile waits at most MAX_QUEUED_SECONDS for the queued steps.

A request with a grammar first waits until its grammar is compiled on another thread. A step with
such requests is submitted like any other, but samples only when it has their masks. A mask depends
on the token before it, so masks are computed when the previous step has ended, while the device
computes the step that needs them.

A request with a LoRA adapter first waits until the adapter is in host memory
(engine/adapter_store.py). Adapters are read on other threads, so no step waits for that.

This module also sums step timings and reports how close the engine runs to its hardware limit.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from math import inf
from typing import Any, NamedTuple, Protocol

from bloomery.engine.adapter_store import AdapterStore, AdapterUse
from bloomery.engine.executor import Executor, PendingStep
from bloomery.engine.scheduler import LORA_IS_OFF, Scheduler
from bloomery.engine.sequence import TokenMatcher
from bloomery.errors import BloomeryError, InvalidRequest
from bloomery.messages import (
    AdapterInfo,
    AdapterRefusal,
    EngineRequest,
    ScheduledStep,
    StepTiming,
    TokenOutput,
    add_timings,
)

log = logging.getLogger("bloomery.engine")

# The next step is queued this long before the current one is expected to end: seconds, and a
# fraction of the current step. The larger of the two counts.
QUEUE_AHEAD_SECONDS = 3e-3
QUEUE_AHEAD_FRACTION = 0.07
MAX_QUEUED_SECONDS = 4e-3  # total duration of the short steps in flight
# Seconds. Predictions of the step time are not good enough to risk a longer idle device.
MAX_BATCHING_WINDOW_SECONDS = 0.1
# Seconds. A result that arrives within this time was complete before the loop asked for it.
IMMEDIATE_RESULT_SECONDS = 3e-4
MAX_STEPS_IN_FLIGHT = 8
# Seconds that an otherwise idle loop waits for a grammar or an adapter before it looks for messages
# again.
IDLE_WAIT_SECONDS = 2e-3

UTILIZATION_INTERVAL_SECONDS = 1.0  # between two samples of the timing sums
UTILIZATION_SAMPLES = 5  # samples that the reported utilization covers
LOG_INTERVAL_SECONDS = 60.0  # between two log lines about the utilization
WARMUP_STEPS = 32  # kernels may still be compiling in these
PLAN_CHECK_STEPS = 128  # steps in one span that is compared with the plan
SLOW_FACTOR = 1.5  # a span is slow if it takes this many times the planned time
MAX_SLOW_SPANS = 3  # slow spans in a row before the engine warns


class InFlightEntry(NamedTuple):
    """A submitted step, its pending result and the time of its submission in seconds."""

    step: ScheduledStep
    pending: PendingStep
    submitted: float


class PendingGrammar(NamedTuple):
    """A request whose grammar is being compiled, and when it arrived."""

    request: EngineRequest
    matcher: Future[Any]
    arrival_time: float


class MaskSource(Protocol):
    """Makes matchers of grammars, and the masks of their next tokens (structured/matcher.py)."""

    def create_matcher(self, request: EngineRequest) -> Future[Any]:
        """Compile the grammar of a request in the background, to a TokenMatcher."""
        ...

    def compute_masks(self, matchers: Sequence[Any]) -> Any:
        """Return the masks [matchers, words] int32."""
        ...


class EngineLoop:
    """Continuous batching over one scheduler and one executor."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        max_in_flight: int = 1,
        clock: Callable[[], float] = time.monotonic,
        on_submit: Callable[[ScheduledStep], None] | None = None,
        create_mask_builder: Callable[[], MaskSource] | None = None,
        max_cpu_loras: int = 0,
    ):
        """`on_submit` is called with every step right before the executor gets it.

        `create_mask_builder` is called by `prepare_grammars`, or when the first request with a
        grammar arrives. `max_cpu_loras` is the number of LoRA adapters in host memory.
        """
        self.scheduler = scheduler
        self.executor = executor
        self.max_in_flight = max_in_flight
        self.clock = clock
        self.on_submit = on_submit
        self.in_flight: deque[InFlightEntry] = deque()
        self.last_step_end = 0.0  # when a step last ended, as far as is known
        self.last_step_seconds = inf
        self.timing = StepTiming()  # sum over all steps
        self.create_mask_builder = create_mask_builder
        self.mask_builder: MaskSource | None = None
        self.pending_grammars: dict[str, PendingGrammar] = {}  # by request id
        self.unmasked: InFlightEntry | None = None  # the newest step, if it waits for its masks
        self.adapter_store: AdapterStore | None = None  # None: LoRA is off
        if max_cpu_loras:
            self.adapter_store = AdapterStore(executor, max_cpu_loras, scheduler.forget_adapter)
        self.adapter_answers: list[AdapterInfo | AdapterRefusal] = []

    def add(self, request: EngineRequest) -> None:
        now = self.clock()
        if not request.lora or self._acquire_adapter(request, now):
            self._add_ready(request, now)

    def _add_ready(self, request: EngineRequest, arrival_time: float) -> None:
        """Add a request whose adapter, if it has one, is in host memory."""
        try:
            if request.grammar:
                self._compile_grammar(request, arrival_time)
            else:
                self._schedule(request, arrival_time)
        except BaseException:
            self._release_adapter(request)
            raise

    def _schedule(
        self, request: EngineRequest, arrival_time: float, matcher: TokenMatcher | None = None
    ) -> None:
        version = ""
        if request.lora and self.adapter_store is not None:
            version = self.adapter_store.version_of(request.lora)
        self.scheduler.add(request, arrival_time, matcher, version)

    def abort(self, request_id: str) -> bool:
        pending = self.pending_grammars.pop(request_id, None)
        if pending is not None:
            self._release_adapter(pending.request)
            return True
        if self.adapter_store is not None and self.adapter_store.cancel(request_id):
            return True
        return self.scheduler.abort(request_id)

    def holds(self, request_id: str) -> bool:
        """Whether a request with this id has not ended."""
        if request_id in self.scheduler.by_request or request_id in self.pending_grammars:
            return True
        return self.adapter_store is not None and self.adapter_store.holds(request_id)

    @property
    def busy(self) -> bool:
        """Whether any step is in flight, any request has not ended, or an adapter is read."""
        if self.in_flight or self.pending_grammars or self.scheduler.busy:
            return True
        return self.adapter_store is not None and self.adapter_store.is_busy

    def prepare_grammars(self) -> None:
        """Start to load what requests with a grammar need, so that the first need not wait."""
        if self.mask_builder is None and self.create_mask_builder is not None:
            self.mask_builder = self.create_mask_builder()

    def compute_batching_window(self) -> float:
        """Return for how many seconds the next step may stay open for more requests.

        The step in flight is expected to run that much longer. A request that arrives within the
        window joins the next step instead of waiting behind it.
        """
        if len(self.in_flight) != 1 or self.max_in_flight != 2 or self.scheduler.stages > 1:
            return 0.0
        expected_seconds = self.scheduler.predict_oldest_step_seconds()
        begin = max(self.in_flight[0].submitted, self.last_step_end)
        lead = max(QUEUE_AHEAD_SECONDS, QUEUE_AHEAD_FRACTION * expected_seconds)
        window = begin + expected_seconds - lead - self.clock()
        return min(max(window, 0.0), MAX_BATCHING_WINDOW_SECONDS)

    def step(self) -> list[TokenOutput]:
        """Fill up the steps in flight, wait for the oldest one and return its outputs."""
        now = self.clock()
        outputs = self.scheduler.finish_expired(now)
        if self.adapter_store is not None:
            outputs += self._poll_adapters(self.adapter_store, now)
        if self.pending_grammars:
            outputs += self._admit_compiled()
        while self._wants_another_step():
            step = self.scheduler.schedule(now)
            if step is None:
                break
            if self.on_submit is not None:
                self.on_submit(step)
            entry = InFlightEntry(step, self.executor.submit(step), now)
            self.in_flight.append(entry)
            if step.masked:
                self.unmasked = entry
                outputs += self._provide_masks()
        if not self.in_flight:
            return outputs
        step, pending, submitted = self.in_flight.popleft()
        wait_begin = self.clock()
        step_output = pending.result()
        now = self.clock()
        begin = max(submitted, self.last_step_end)
        step_seconds = now - begin
        self.last_step_end = now
        timing = step_output.timing
        if timing is not None:
            self.timing = add_timings(self.timing, timing)
        if timing is not None and timing.steps == 1 and self.scheduler.stages == 1:
            # Use the device's own time. A late host would measure too long a time for this step and
            # none for the next one, which is already complete. The idle time before the step does
            # not count either. It would make predicted steps longer, so the batching window would
            # be longer, and the device would idle even more.
            step_seconds = timing.device
            if now - wait_begin < IMMEDIATE_RESULT_SECONDS:
                self.last_step_end = min(now, begin + step_seconds)
        self.last_step_seconds = step_seconds
        outputs += self.scheduler.update(step, step_output, step_seconds)
        return outputs + self._provide_masks()

    def _wants_another_step(self) -> bool:
        """Decide whether to submit one more step before waiting for the oldest.

        Beyond `max_in_flight`, steps must be short and the batch must not change. All steps in
        flight are then decode steps. A new request adds a prefill, so the step that ended last was
        at least as long as they are, and its duration is a safe estimate.
        """
        if self.unmasked is not None:
            return False
        count = len(self.in_flight)
        if count < self.max_in_flight or self.max_in_flight < 2:
            return count < self.max_in_flight
        queued_seconds = (count + 1) * self.last_step_seconds
        is_queue_short = count < MAX_STEPS_IN_FLIGHT and queued_seconds <= MAX_QUEUED_SECONDS
        return is_queue_short and self.scheduler.can_queue_ahead

    # ---- requests with a grammar -----------------------------------------------------------------

    def _compile_grammar(self, request: EngineRequest, arrival_time: float) -> None:
        """Start to compile the grammar of a request. It is scheduled when that is done."""
        if self.holds(request.id):
            raise InvalidRequest(f"request id {request.id!r} is already in use", "id")
        self.prepare_grammars()
        if self.mask_builder is None:
            raise InvalidRequest(
                "structured output needs the tokenizer, and this engine was started without it",
                "structured_outputs",
            )
        matcher = self.mask_builder.create_matcher(request)
        self.pending_grammars[request.id] = PendingGrammar(request, matcher, arrival_time)

    def _admit_compiled(self) -> list[TokenOutput]:
        """Schedule the requests whose grammars are compiled, and end those that failed."""
        outputs = []
        futures = [pending.matcher for pending in self.pending_grammars.values()]
        if not self.in_flight and not self.scheduler.busy:
            wait(futures, IDLE_WAIT_SECONDS, "FIRST_COMPLETED")
        for request, future, arrival_time in list(self.pending_grammars.values()):
            if not future.done():
                continue
            del self.pending_grammars[request.id]
            error = ""
            try:
                matcher = future.result()
                error = matcher.error
                if not error:
                    self._schedule(request, arrival_time, matcher)
            except BloomeryError as refusal:
                error = str(refusal)
            except Exception:
                log.exception("a grammar could not be compiled")
                error = "the engine could not compile the grammar of this request"
            if error:
                self._release_adapter(request)
                outputs.append(refuse_request(request, error))
        return outputs

    def _provide_masks(self) -> list[TokenOutput]:
        """Give the newest step its masks, as soon as all tokens before them are known.

        Returns the outputs of requests that end here, because no token may follow.
        """
        entry = self.unmasked
        if entry is None or self.mask_builder is None:
            return []
        sequences = self.scheduler.in_flight[-1].masked
        live = [sequence for sequence in sequences if sequence.finish_reason is None]
        # One pending token is that of the step itself.
        if any(sequence.num_pending > 1 for sequence in live):
            return []
        outputs = []
        matchers: list[Any] = [sequence.matcher for sequence in live]
        live_masks = self.mask_builder.compute_masks(matchers)
        can_continue = live_masks.any(axis=1).tolist()
        for sequence, matcher, has_token in zip(live, matchers, can_continue, strict=True):
            if matcher.error:
                outputs.append(self.scheduler.fail_sequence(sequence, matcher.error))
            elif not has_token:
                outputs.append(self.scheduler.stop_sequence(sequence))
        masks = live_masks
        still_live = [sequence for sequence in live if sequence.finish_reason is None]
        if len(still_live) < len(sequences):
            # A sequence that has ended samples any token; the result is ignored.
            import numpy as np  # the API process imports this module and needs no numpy

            masks = np.full((len(sequences), live_masks.shape[1]), -1, np.int32)
            rows = [i for i, sequence in enumerate(sequences) if sequence.finish_reason is None]
            live_rows = [i for i, sequence in enumerate(live) if sequence.finish_reason is None]
            masks[rows] = live_masks[live_rows]
        self.unmasked = None
        entry.pending.provide_masks(masks)
        return outputs

    # ---- requests with an adapter ----------------------------------------------------------------

    def load_adapter(self, name: str, path: str) -> None:
        """Read an adapter into host memory; `take_adapter_answers` says when that is done."""
        if self.adapter_store is None:
            self.adapter_answers.append(AdapterRefusal(name, LORA_IS_OFF))
            return
        info = self.adapter_store.preload(name, path, self.clock())
        if info is not None:
            self.adapter_answers.append(info)

    def unload_adapter(self, name: str) -> None:
        """Drop an adapter when the requests that use it have ended."""
        if self.adapter_store is not None:
            self._release_ended_adapters(self.adapter_store)
            self.adapter_store.retire(name)

    def take_adapter_answers(self) -> list[AdapterInfo | AdapterRefusal]:
        """Return which adapters have been loaded or refused since the last call."""
        answers = self.adapter_answers
        self.adapter_answers = []
        return answers

    @property
    def num_waiting_for_files(self) -> int:
        """Requests that are not scheduled yet because their adapter is not in host memory."""
        return 0 if self.adapter_store is None else self.adapter_store.num_waiting

    def _acquire_adapter(self, request: EngineRequest, now: float) -> bool:
        """Return whether the request's adapter is in host memory. If not, the request waits."""
        if self.adapter_store is None:
            raise InvalidRequest(LORA_IS_OFF, "model")
        if self.holds(request.id):
            raise InvalidRequest(f"request id {request.id!r} is already in use", "id")
        self._release_ended_adapters(self.adapter_store)
        use = AdapterUse(request.lora, request.lora_path, request, now)
        return self.adapter_store.acquire(use, now)

    def _release_adapter(self, request: EngineRequest) -> None:
        """Note that a request has ended that was never scheduled."""
        if request.lora and self.adapter_store is not None:
            self.adapter_store.release(request.lora)

    def _release_ended_adapters(self, store: AdapterStore) -> None:
        for name in self.scheduler.ended_adapters:
            store.release(name)
        self.scheduler.ended_adapters.clear()

    def _poll_adapters(self, store: AdapterStore, now: float) -> list[TokenOutput]:
        """Schedule the requests whose adapters are in host memory, and end those that failed."""
        self._release_ended_adapters(store)
        if not store.is_busy:
            return []
        is_idle = not self.in_flight and not self.scheduler.busy
        events = store.poll(now, IDLE_WAIT_SECONDS if is_idle else 0.0)
        self.adapter_answers += events.answers
        outputs = []
        for use, error in events.failed:
            assert use.request is not None
            outputs.append(refuse_request(use.request, error))
        for use in events.ready:
            assert use.request is not None
            try:
                self._add_ready(use.request, use.arrival_time)
            except BloomeryError as refusal:
                outputs.append(refuse_request(use.request, str(refusal)))
        return outputs


def refuse_request(request: EngineRequest, error: str) -> TokenOutput:
    """Return the only output of a request that never ran."""
    return TokenOutput(request.id, len(request.emitted), finish="error", error=error)


# ---- step timings --------------------------------------------------------------------------------


class UtilizationMonitor:
    """Reports how close steps run to the hardware limit. It has no clock of its own.

    Utilization is the roofline floor of some steps over the time they took. A log line once a
    minute says where the rest of the time went. After the warm-up the monitor also logs once
    whether steps take as long as the plan expects.
    """

    def __init__(self) -> None:
        self.samples: deque[tuple[float, StepTiming]] = deque(maxlen=UTILIZATION_SAMPLES)
        self.utilization: float | None = None
        self.last_log_time = 0.0
        self.last_logged = StepTiming()
        self.span_begin: StepTiming | None = None  # of the plan check; None during the warm-up
        self.slow_spans = 0
        self.plan_checked = False

    def observe(self, timing: StepTiming, now: float) -> float | None:
        """Record the timing sums at `now` and return the recent utilization. None: no steps ran."""
        if self.samples and now - self.samples[-1][0] < UTILIZATION_INTERVAL_SECONDS:
            return self.utilization
        oldest = self.samples[0][1] if self.samples else StepTiming()
        self.utilization = compute_utilization(subtract_timings(timing, oldest))
        self.samples.append((now, timing))
        if now - self.last_log_time >= LOG_INTERVAL_SECONDS:
            recent = subtract_timings(timing, self.last_logged)
            if recent.steps:
                log.info("%s", describe_timing(recent))
            self.last_log_time = now
            self.last_logged = timing
        self._check_plan(timing)
        return self.utilization

    def _check_plan(self, timing: StepTiming) -> None:
        """Compare spans of steps with the plan and log the verdict once.

        One span near the plan is enough, since kernels may have been compiling in the others.
        """
        if self.span_begin is None:
            self.span_begin = timing if timing.steps >= WARMUP_STEPS else None
            return
        if self.plan_checked or timing.steps < self.span_begin.steps + PLAN_CHECK_STEPS:
            return
        span = subtract_timings(timing, self.span_begin)
        self.span_begin = timing
        ratio = (span.device + span.idle) / max(span.expected, 1e-9)
        if ratio <= SLOW_FACTOR:
            self.plan_checked = True
            log.info(
                "as planned: steps take %.2f times the expected time; %s",
                ratio,
                describe_timing(span),
            )
            return
        self.slow_spans += 1
        if self.slow_spans == MAX_SLOW_SPANS:
            self.plan_checked = True
            log.warning(
                "steps take %.1f times what the plan for this model and machine expects: %s. "
                "Other programs may be using the machine, or its speed differs from what "
                "`bloomery plan --measure` would measure.",
                ratio,
                describe_timing(span),
            )


def compute_utilization(timing: StepTiming) -> float | None:
    """Return the roofline floor over the time taken, None if no time passed."""
    seconds = timing.device + timing.idle
    return timing.floor / seconds if seconds > 0 else None


def break_down_time(timing: StepTiming) -> dict[str, float]:
    """Return the seconds lost by cause. Together with the floor they add up to the whole time.

    Padding and communication are calculated, not measured, so each is limited to the time that
    remains after the causes before it.
    """
    remaining = max(timing.device - timing.floor, 0.0)
    seconds_by_cause = {"device idle": timing.idle}
    limited_causes = {
        "padding": timing.padding,
        "masks": timing.masks,
        "sampling": timing.sampling,
        "communication": timing.communication,
    }
    for cause, seconds in limited_causes.items():
        seconds_by_cause[cause] = min(seconds, remaining)
        remaining -= seconds_by_cause[cause]
    seconds_by_cause["kernels"] = remaining
    return seconds_by_cause


def describe_timing(timing: StepTiming) -> str:
    """Return one line: the utilization, and the share of each cause in the rest of the time."""
    seconds = max(timing.device + timing.idle, 1e-9)
    steps = max(timing.steps, 1)
    shares = {cause: spent / seconds for cause, spent in break_down_time(timing).items()}
    causes = ", ".join(f"{cause} {share:.0%}" for cause, share in shares.items() if share >= 0.005)
    step_ms = 1e3 * seconds / steps
    floor_ms = 1e3 * timing.floor / steps
    return (
        f"{timing.floor / seconds:.0%} of the limit: {timing.steps} steps of {step_ms:.2f} ms, "
        f"floor {floor_ms:.2f} ms; {causes or 'nothing else'}; "
        f"host busy {timing.host / seconds:.0%}"
    )


def subtract_timings(left: StepTiming, right: StepTiming) -> StepTiming:
    names = StepTiming.__slots__
    return StepTiming(*(getattr(left, name) - getattr(right, name) for name in names))
