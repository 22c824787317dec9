"""What `bloomery plan` does with its flags. No torch unless --measure asks for it."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace

from bloomery.config import cores, device
from bloomery.errors import ConfigError
from bloomery.machines import here, overridden, recall, remember
from bloomery.tools.plan.forecast import Forecast, Layout, Wish, held
from bloomery.tools.plan.subject import Subject, subject
from bloomery.tools.plan.words import advice, plot, size, text
from bloomery.roofline import PRECISIONS, machine

KV_BITS = {"bf16": 16.0, "fp8": 8.0, "int8": 8.0, "fp32": 32.0}


def wish_of(args: argparse.Namespace, about: Subject) -> Wish:
    if args.gpu:
        found = machine(args.gpu)
        found = overridden(found, recall().get(found.title))
    else:
        found = here(device("auto"))
    cpu = found.cpu
    model = about.model
    precision = held(PRECISIONS[args.precision] if args.precision else about.kept(cpu), found)
    layout = layout_of(args)
    wide = (
        cpu and precision.bits >= 16
    )  # a CPU's products of fewer bits round their inputs: 16 bits do for the cache
    kv_bits = KV_BITS[args.kv or ("fp32" if wide else "bf16")]
    if kv_bits == 8:
        kv_bits += 32 / model.layers[0].attention.head_dim  # a scale a head
    return Wish(
        found, precision, kv_bits, args.context, args.goal, args.devices, layout, args.price
    )


def layout_of(args: argparse.Namespace) -> Layout | None:
    """As the flags say; devices that TP and PP leave over are replicas."""
    if not (args.tp or args.pp or args.replicas):
        return None
    one = Layout(args.tp or 1, args.pp or 1)
    layout = replace(one, replicas=args.replicas or max((args.devices or 0) // one.devices, 1))
    if args.devices and layout.devices != args.devices:
        raise ConfigError(
            f"{layout} takes {layout.devices} devices, and --devices says {args.devices}"
        )
    return layout


def measure() -> None:
    """The one part that imports torch."""
    from bloomery.runtime.measure import measured

    where = device("auto")
    title = here(where).title
    seen = measured(where, cores())
    speeds = "".join(
        f"\n  {kind:16}{size(value, 'FLOP'):>12}/s" for kind, value in seen.rates.items()
    )
    print(f"{title}: reads {size(seen.bandwidth)}/s{speeds}", file=sys.stderr)
    if seen.doubt:
        print(
            f"Is the machine in use? {seen.doubt}. Run it again when it is quiet.", file=sys.stderr
        )
        if title in recall():
            print("What is remembered of it stays as it is.", file=sys.stderr)
            return
    print(f"Remembered in {remember(title, seen.bandwidth, seen.rates)}.", file=sys.stderr)


def answer(args: argparse.Namespace) -> int:
    if args.calibration and not args.simulate:
        raise ConfigError(
            "--calibration says how long the steps of --simulate take; give a trace too"
        )
    if args.measure:
        measure()
    about = subject(args.model, args.revision)
    plan = Forecast(about, wish_of(args, about))
    if args.simulate:
        from bloomery.tools.simulate import run as simulate

        return simulate(plan.chosen, args.simulate, args.calibration, args.json)
    if args.plot:
        plot(plan, args.plot)
    print(
        json.dumps(plan.as_json() | {"advice": advice(plan)}, indent=1) if args.json else text(plan)
    )
    return 0
