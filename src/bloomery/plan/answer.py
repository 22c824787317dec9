"""What `bloomery plan` does with its flags. No torch unless --measure asks for it."""

from __future__ import annotations

import argparse
import json
import sys

from bloomery.config import device
from bloomery.errors import ConfigError
from bloomery.machines import here, overridden, recall, remember
from bloomery.plan.forecast import Forecast, Layout, Wish
from bloomery.plan.subject import subject
from bloomery.plan.words import advice, plot, size, text
from bloomery.roofline import PRECISIONS, Precision, machine
from bloomery.spec import Model

KV_BITS = {"bf16": 16.0, "fp8": 8.0, "int8": 8.0, "fp32": 32.0}


def wish_of(args: argparse.Namespace, model: Model, stored: Precision) -> Wish:
    if args.gpu:
        found = machine(args.gpu)
        found = overridden(found, recall().get(found.title))
    else:
        found = here(device("auto"))
    cpu = found.cpu
    kept = PRECISIONS["fp32"] if cpu and stored.bits == 16 else stored  # a CPU has no arithmetic of 16 bits
    precision = PRECISIONS[args.precision] if args.precision else kept
    if any(value is not None and value < 1 for value in (args.context, args.devices, args.tp, args.pp, args.replicas)):
        raise ConfigError("--context, --devices, --tp, --pp and --replicas count from 1")
    layout = None
    if args.tp or args.pp or args.replicas:
        layout = Layout(args.tp or 1, args.pp or 1, args.replicas or 1)
    wide = cpu and precision.bits >= 16  # a CPU's products of fewer bits round their inputs: 16 bits do for the cache
    kv_bits = KV_BITS[args.kv or ("fp32" if wide else "bf16")]
    if kv_bits == 8:
        kv_bits += 32 / model.layers[0].attention.head_dim  # a scale a head
    return Wish(found, precision, kv_bits, args.context, args.goal, args.devices, layout, args.price)


def measure() -> None:
    """The one part that imports torch."""
    from bloomery.runtime.measure import rates

    where = device("auto")
    bandwidth, found = rates(where)
    path = remember(here(where).title, bandwidth, found)
    speeds = ", ".join(f"{kind} {value / 1e12:.3g} TFLOP/s" for kind, value in found.items())
    print(f"{here(where).title}: reads {size(bandwidth)}/s, {speeds}; remembered in {path}", file=sys.stderr)


def answer(args: argparse.Namespace) -> int:
    if args.measure:
        measure()
    about = subject(args.model, args.revision)
    plan = Forecast(about, wish_of(args, about.model, about.stored))
    if args.simulate:
        from bloomery.simulate import run as simulate

        return simulate(plan.chosen, args.simulate, args.calibration, args.json)
    if args.plot:
        plot(plan, args.plot)
    print(json.dumps(plan.as_json() | {"advice": advice(plan)}, indent=1) if args.json else text(plan))
    return 0
