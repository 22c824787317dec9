"""`bloomery models`: open models, whether they fit this machine, and how fast they would answer.

Nothing is downloaded and no model is loaded; the figures come from recommend.py.
"""

from __future__ import annotations

import argparse
import json

from bloomery.config import resolve_device
from bloomery.hardware import HardwareSpec, detect_hardware, find_hardware, usable_memory_bytes
from bloomery.recommend import CONTEXT_TOKENS, ModelFit, list_fits

COLUMNS = "{:<10} {:>9} {:>10}  {}"


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--gpu", metavar="NAME", help="hardware to list models for; default: this machine"
    )
    parser.add_argument("--json", action="store_true", help="print the list as JSON")


def run_command(args: argparse.Namespace) -> int:
    if args.gpu:
        hardware = find_hardware(args.gpu)
    else:
        hardware = detect_hardware(resolve_device("auto"))
    memory_bytes = usable_memory_bytes(hardware)
    fits = list(list_fits(hardware, memory_bytes))
    if args.json:
        print(json.dumps([{**fit.to_dict(), "fits": fit.fits} for fit in fits], indent=1))
    else:
        print(format_list(hardware, memory_bytes, fits))
    return 0


def format_list(hardware: HardwareSpec, memory_bytes: float, fits: list[ModelFit]) -> str:
    lines = [
        f"{hardware.title}, {memory_bytes / 1e9:.0f} GB of memory, {hardware.bandwidth / 1e9:.0f} "
        "GB/s" + ("" if hardware.measured else " (not measured; see bloomery plan --measure)"),
        "",
        COLUMNS.format("", "weights", "speed", "start with"),
    ]
    for fit in fits:
        state = "too large"
        if fit.fits:
            state = "good" if fit.is_comfortable else "slow"
        speed = f"{fit.tokens_per_second:.0f} tok/s" if fit.fits else "-"
        gated = "  (needs approval on the Hub)" if fit.gated else ""
        command = f"bloomery run {fit.arguments}{gated}"
        lines.append(COLUMNS.format(state, f"{fit.gigabytes:.1f} GB", speed, command))
    lines += [
        "",
        "The speed is what one user can expect. A model fits if there is room for "
        f"{CONTEXT_TOKENS} tokens of context beside it.",
        "Any other model: a folder, a .gguf file or a Hub id; `bloomery plan MODEL` says what it "
        "needs.",
    ]
    return "\n".join(lines)
