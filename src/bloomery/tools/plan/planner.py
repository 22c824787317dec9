"""Runs `bloomery plan`: turns its flags into an estimate and prints it.

Imports torch only for --measure.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace

from bloomery.config import (
    EnginePlan,
    count_physical_cores,
    resolve_device,
    resolve_max_cpu_loras,
)
from bloomery.errors import ConfigError
from bloomery.hardware import (
    HardwareSpec,
    detect_hardware,
    find_hardware,
    load_measured_rates,
    save_measured_rates,
    with_measured_rates,
)
from bloomery.roofline import PRECISIONS
from bloomery.tools.plan.estimate import (
    AdapterLimits,
    DeviceLayout,
    PlanEstimate,
    PlanOptions,
    loaded_precision,
)
from bloomery.tools.plan.model_source import ModelSource, read_model_source
from bloomery.tools.plan.report import format_quantity, format_report, give_advice, write_plot

KV_BITS = {"bf16": 16.0, "fp8": 8.0, "int8": 8.0, "fp32": 32.0}


def run_plan(args: argparse.Namespace) -> int:
    if args.calibration and not args.simulate:
        raise ConfigError(
            "--calibration says how long the steps of --simulate take; give a trace too"
        )
    if args.measure:
        measure_hardware()
    source = read_model_source(args.model, args.revision)
    estimate = PlanEstimate(source, build_options(args, source))
    if args.simulate:
        from bloomery.tools.simulate import run_simulation

        return run_simulation(estimate.chosen, args.simulate, args.calibration, args.json)
    if args.plot:
        write_plot(estimate, args.plot)
    if args.json:
        print(json.dumps(estimate.as_json() | {"advice": give_advice(estimate)}, indent=1))
    else:
        print(format_report(estimate))
    return 0


def build_options(args: argparse.Namespace, source: ModelSource) -> PlanOptions:
    hardware = select_hardware(args.gpu)
    precision = source.loaded_precision(hardware.is_cpu)
    if args.precision:
        precision = PRECISIONS[args.precision]
    precision = loaded_precision(precision, hardware)
    # On a CPU, kernels for quantized weights round their inputs anyway, so 16 bits suffice for
    # the KV cache.
    needs_fp32 = hardware.is_cpu and precision.bits >= 16
    kv_bits = KV_BITS[args.kv_cache_dtype or ("fp32" if needs_fp32 else "bf16")]
    if kv_bits == 8:
        attentions = source.model.attentions
        num_heads = sum(attention.num_kv_heads for attention in attentions)
        num_values = sum(attention.num_kv_heads * attention.head_dim for attention in attentions)
        kv_bits += 32 * num_heads / num_values  # one fp32 scale per head
    return PlanOptions(
        hardware=hardware,
        precision=precision,
        kv_bits=kv_bits,
        context=args.context,
        goal=args.goal,
        devices=args.devices,
        layout=build_layout(args),
        price=args.price,
        adapters=build_adapter_limits(args),
    )


def build_adapter_limits(args: argparse.Namespace) -> AdapterLimits | None:
    """The LoRA adapters the flags ask for, with the defaults of a server."""
    given = (args.max_loras, args.max_lora_rank, args.max_cpu_loras)
    if not args.enable_lora:
        if any(given):
            raise ConfigError(
                "--max-loras, --max-lora-rank and --max-cpu-loras say how many LoRA adapters there "
                "are: give --enable-lora too"
            )
        return None
    max_loras = args.max_loras or EnginePlan.max_loras
    return AdapterLimits(
        max_loras,
        args.max_lora_rank or EnginePlan.max_lora_rank,
        resolve_max_cpu_loras(max_loras, args.max_cpu_loras),
    )


def select_hardware(name: str | None) -> HardwareSpec:
    """The hardware of this name, or this machine's own."""
    if name is None:
        return detect_hardware(resolve_device("auto"))
    hardware = find_hardware(name)
    return with_measured_rates(hardware, load_measured_rates().get(hardware.title))


def build_layout(args: argparse.Namespace) -> DeviceLayout | None:
    """The layout the flags ask for. Devices that TP and PP leave over become replicas."""
    tp = args.tensor_parallel_size
    pp = args.pipeline_parallel_size
    if not (tp or pp or args.replicas):
        return None
    replica = DeviceLayout(tp or 1, pp or 1)
    replicas = args.replicas or max((args.devices or 0) // replica.devices, 1)
    layout = replace(replica, replicas=replicas)
    if args.devices and layout.devices != args.devices:
        raise ConfigError(
            f"{layout} takes {layout.devices} devices, and --devices says {args.devices}"
        )
    return layout


def measure_hardware() -> None:
    """Measure this machine's bandwidth and rates, and save them unless they are doubtful."""
    from bloomery.runtime.device_measurement import measure_device

    device = resolve_device("auto")
    title = detect_hardware(device).title
    measurement = measure_device(device, count_physical_cores())
    rates = [
        f"\n  {name:16}{format_quantity(rate, 'FLOP'):>12}/s"
        for name, rate in measurement.rates.items()
    ]
    bandwidth = format_quantity(measurement.bandwidth)
    print(f"{title}: reads {bandwidth}/s{''.join(rates)}", file=sys.stderr)
    if measurement.warning:
        print(
            f"Is the machine in use? {measurement.warning}. Run it again when it is quiet.",
            file=sys.stderr,
        )
        if title in load_measured_rates():
            print("The saved measurement stays as it is.", file=sys.stderr)
            return
    path = save_measured_rates(title, measurement.bandwidth, measurement.rates)
    print(f"Saved in {path}.", file=sys.stderr)
