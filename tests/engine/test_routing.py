"""The routing rule: prefix affinity, then load. Server and simulator make the same choice."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random

from bloomery.engine.client import EngineClient
from bloomery.engine.replicas import ReplicaSet, RoutedRequest
from bloomery.engine.routing import (
    AFFINITY_SLACK_REQUESTS,
    PREFIX_CHUNK_TOKENS,
    PrefixAffinityRouter,
)
from bloomery.hardware import find_hardware
from bloomery.messages import EngineRequest, EngineStatus, ResolvedSampling
from bloomery.roofline import PRECISIONS
from bloomery.tools.plan.estimate import DeviceLayout, PlacedModel
from bloomery.tools.plan.model_source import read_model_source
from bloomery.tools.simulate import SimulatedFleet
from tests.chaos.fake_engine import fake_plan

SHAPES = Path(__file__).parents[2] / "benchmarks" / "shapes"


def create_request(prompt: list[int], cache_salt: str = "") -> EngineRequest:
    return EngineRequest("r", tuple(prompt), ResolvedSampling(), 12, cache_salt=cache_salt)


def test_a_prompt_goes_where_its_prefix_is_known() -> None:
    router = PrefixAffinityRouter(3)
    idle = {0: 0, 1: 0, 2: 0}
    prefix = list(range(3 * PREFIX_CHUNK_TOKENS))
    first = router.choose(create_request(prefix), idle)
    at_limit = {**idle, first: AFFINITY_SLACK_REQUESTS}
    assert router.choose(create_request([*prefix, 1, 2, 3]), at_limit) == first
    over_limit = {**idle, first: AFFINITY_SLACK_REQUESTS + 1}
    assert router.choose(create_request(prefix), over_limit) != first, "too much load there"
    other_salt = create_request(prefix, cache_salt="other")
    assert router.choose(other_salt, {**idle, first: 1}) != first, "another salt shares nothing"
    elsewhere = router.choose(create_request([9] * 50), {**idle, first: 1})
    assert elsewhere != first
    router.forget(first)
    assert router.choose(create_request(prefix), {first: 2, elsewhere: 1}) == elsewhere


def test_without_a_known_prefix_the_load_decides() -> None:
    router = PrefixAffinityRouter(3)
    loads = Counter({0: 0, 1: 0, 2: 0})
    for number in range(30):
        loads[router.choose(create_request([number] * 40), loads)] += 1
    assert set(loads.values()) == {10}


def create_ready_client() -> EngineClient:
    """Create a client that reports "ready" without an engine process."""
    client = EngineClient(fake_plan())
    client.reported_status = EngineStatus("ready")
    return client


def test_simulator_and_replicas_choose_the_same_engine_for_the_same_arrivals() -> None:
    random = Random(7)
    num_engines = 3
    model = read_model_source(str(SHAPES / "llama-8b.json")).model
    layout = DeviceLayout(1, 1, num_engines)
    placed = PlacedModel(model, find_hardware("h200"), PRECISIONS["bf16"], 16, layout)
    fleet = SimulatedFleet(placed)
    replicas = ReplicaSet([create_ready_client() for _ in range(num_engines)])
    prefixes = [[i] * PREFIX_CHUNK_TOKENS * 2 for i in range(6)]
    chosen: list[int] = []
    for number in range(300):
        prompt = [*random.choice(prefixes), *(random.randrange(50) for _ in range(60))]
        request = replace(create_request(prompt), id=str(number))
        simulated = fleet.replicas.index(fleet.route(request))
        assert replicas._choose_engine(request) == simulated, f"arrival {number}"
        chosen.append(simulated)
        fleet.replicas[simulated].num_open += 1
        replicas.open_requests[simulated][request.id] = RoutedRequest(request, 0.0, [])
        if random.random() < 0.8:  # a request of a random engine ends
            busy = [n for n in range(num_engines) if fleet.replicas[n].num_open]
            engine = random.choice(busy)
            fleet.replicas[engine].num_open -= 1
            replicas.open_requests[engine].popitem()
    assert set(chosen) == set(range(num_engines)), "every engine is used"
