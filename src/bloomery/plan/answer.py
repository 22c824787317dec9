"""What `bloomery plan` does with its flags. No torch unless --measure asks for it."""

from __future__ import annotations

import argparse
import json
import sys

from bloomery.config import cores, device
from bloomery.errors import ConfigError
from bloomery.machines import here, overridden, recall, remember
from bloomery.plan.forecast import Forecast, Layout, Wish
from bloomery.plan.subject import Subject, subject
from bloomery.plan.words import advice, plot, size, text
from bloomery.roofline import PRECISIONS, machine

KV_BITS = {"bf16": 16.0, "fp8": 8.0, "int8": 8.0, "fp32": 32.0}


def wish_of(args: argparse.Namespace, about: Subject) -> Wish:
    if args.gpu:
        found = machine(args.gpu)
        found = overridden(found, recall().get(found.title))
    else:
        found = here(device("auto"))
    cpu, model = found.cpu, about.model
    precision = PRECISIONS[args.precision] if args.precision else about.kept(cpu)
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
    from bloomery.runtime.measure import measured

    where = device("auto")
    title, seen = here(where).title, measured(where, cores())
    speeds = "".join(f"\n  {kind:16}{size(value, 'FLOP'):>12}/s" for kind, value in seen.rates.items())
    print(f"{title}: reads {size(seen.bandwidth)}/s{speeds}", file=sys.stderr)
    if seen.doubt:
        print(f"Is the machine in use? {seen.doubt}. Run it again when it is quiet.", file=sys.stderr)
    print(f"Remembered in {remember(title, seen.bandwidth, seen.rates)}.", file=sys.stderr)


def answer(args: argparse.Namespace) -> int:
    if args.measure:
        measure()
    about = subject(args.model, args.revision)
    plan = Forecast(about, wish_of(args, about))
    if args.simulate:
        from bloomery.simulate import run as simulate

        return simulate(plan.chosen, args.simulate, args.calibration, args.json)
    if args.plot:
        plot(plan, args.plot)
    print(json.dumps(plan.as_json() | {"advice": advice(plan)}, indent=1) if args.json else text(plan))
    return 0
