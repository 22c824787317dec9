"""Scheduling policies in virtual time: the real scheduler, a model of a device, no GPU.

    PYTHONPATH=src python3 benchmarks/policy.py                   # the load of mixed_latency.py
    PYTHONPATH=src python3 benchmarks/policy.py --devices         # the same on every virtual device
    PYTHONPATH=src python3 benchmarks/policy.py --steps 1000000   # a rough load: does any starve?

All figures come from the simulation. The virtual devices and loads are in
tests/engine/virtual_device.py. The planner was tuned on one of these devices only.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from bloomery.engine.chunk_planner import LatencyTargets
from bloomery.engine.policy import FairPolicy, FcfsPolicy
from tests.engine.virtual_device import (
    CPU_MIXED_LOAD,
    GPU_MIXED_LOAD,
    H200,
    SLOWER_H200,
    TWO_CORES,
    MixedLoad,
    MixedLoadResult,
    VirtualDevice,
    measure_first_token_waits,
    measure_mixed_load,
    simulate_mixed_load,
    simulate_rough_load,
)


class DeviceCase(NamedTuple):
    """A virtual device and the load it gets."""

    device: VirtualDevice
    load: MixedLoad
    max_num_seqs: int
    duration_factor: float  # over the seconds that the command line gives


DEVICES = {
    "H200 (tuned)": DeviceCase(H200, GPU_MIXED_LOAD, 272, 1.0),
    "H200, 20 % slower": DeviceCase(SLOWER_H200, GPU_MIXED_LOAD, 272, 1.0),
    "two CPU cores": DeviceCase(TWO_CORES, CPU_MIXED_LOAD, 32, 5.0),
}


def format_result(policy: str, result: MixedLoadResult) -> str:
    """Return one line of figures."""
    return (
        f"{policy:5} short requests {result.short_slowdown_p50:.2f}x solo at p50, "
        f"{result.short_slowdown_p99:.2f}x at p99 ({result.num_short} done); "
        f"long {result.long_throughput:.0f} tok/s, ITL {1e3 * result.long_itl_p50:.0f} ms at p50, "
        f"{1e3 * result.long_itl_p99:.0f} at p99; {result.num_preemptions} preemptions, "
        f"{result.num_steps} steps, overhead {result.overhead:.1%}"
    )


def compare_policies(name: str, seconds: float, seed: int, targets: LatencyTargets) -> None:
    """Print the figures of the mixed load on one device with both policies."""
    device, load, max_num_seqs, duration_factor = DEVICES[name]
    num_blocks = 12000
    fair = FairPolicy(max_num_seqs, num_blocks, targets)
    results = {}
    for policy_name, policy in (("fcfs", FcfsPolicy()), ("fair", fair)):
        engine = simulate_mixed_load(
            policy,
            seconds * duration_factor,
            load,
            seed,
            device=device,
            max_num_seqs=max_num_seqs,
            num_blocks=num_blocks,
        )
        results[policy_name] = measure_mixed_load(engine, load)
    print(name)
    for policy_name, result in results.items():
        print(" ", format_result(policy_name, result))
    fair_result = results["fair"]
    loss = 1 - fair_result.long_throughput / results["fcfs"].long_throughput
    itl_ratio = fair_result.long_itl_p99 / fair.planner.inter_token_target
    print(
        f"  fair: slowdown p99 {fair_result.short_slowdown_p99:.2f} "
        f"(target {targets.slowdown_target}), long throughput -{loss:.1%}, "
        f"ITL p99 {itl_ratio:.2f}x the target"
    )


def print_rough_load(max_steps: int, targets: LatencyTargets) -> None:
    """Print the times to the first token (TTFT) under the rough load with both policies."""
    for name, policy in (("fcfs", FcfsPolicy()), ("fair", FairPolicy(16, 400, targets))):
        engine = simulate_rough_load(policy, max_steps)
        print(
            f"{name}: {engine.num_steps} steps, {engine.now:.0f} s, "
            f"{len(engine.timelines)} requests, {len(engine.unfinished)} unfinished, "
            f"{engine.scheduler.num_preemptions} preemptions, "
            f"overhead {engine.policy.overhead_seconds / engine.now:.1%}"
        )
        for kind, waits in measure_first_token_waits(engine).items():
            print(
                f"  {kind:7} {waits.num_finished:7} answered; TTFT {waits.median:.3f} s at p50, "
                f"{waits.longest:.2f} s at most"
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, help="simulate the rough load for this many steps")
    parser.add_argument("--seconds", type=float, default=40.0, help="duration of the mixed load")
    parser.add_argument("--seed", type=int, default=1, help="seed of the mixed load")
    parser.add_argument(
        "--devices", action="store_true", help="simulate the mixed load on every device"
    )
    parser.add_argument(
        "--max-overhead",
        type=float,
        default=LatencyTargets().max_overhead,
        help="share of the time that long requests may lose for short ones",
    )
    args = parser.parse_args()
    targets = LatencyTargets(max_overhead=args.max_overhead)
    if args.steps is not None:
        print_rough_load(args.steps, targets)
        return
    names = list(DEVICES) if args.devices else ["H200 (tuned)"]
    for name in names:
        compare_policies(name, args.seconds, args.seed, targets)


if __name__ == "__main__":
    main()
