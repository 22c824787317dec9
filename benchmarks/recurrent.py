"""Checks and times the kernels of recurrent mixers on one GPU.

    PYTHONPATH=src:. python3 benchmarks/recurrent.py check   compare with the torch references
    PYTHONPATH=src:. python3 benchmarks/recurrent.py bench   times of decodes and prefills
    PYTHONPATH=src:. python3 benchmarks/recurrent.py profile times of each kernel
    PYTHONPATH=src:. python3 benchmarks/recurrent.py tune    launch parameters

A further argument selects the cases whose name contains it. Outputs are filled with NaN beforehand,
and blocks that no sequence has written hold NaN. Times are medians of replays of one CUDA graph of
many calls. The floor is the bytes of inputs, outputs and states at HBM_BYTES_PER_SECOND.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import product
from typing import NamedTuple

import torch

from benchmarks.kernels import HBM_BYTES_PER_SECOND, measure_microseconds
from bloomery.kernels import delta_net_kernels, mamba2_kernels
from bloomery.kernels.gated_delta_net import (
    gated_delta_net,
    gated_delta_net_reference,
    gated_delta_net_triton,
)
from bloomery.kernels.mamba2 import mamba2, mamba2_reference, mamba2_triton
from bloomery.kernels.short_conv import short_conv, short_conv_reference
from bloomery.kernels.state_cache import view_states
from bloomery.spec import (
    GatedDeltaNetSpec,
    Mamba2Spec,
    RecurrentSpec,
    ShortConvSpec,
    recurrent_in_sizes,
    state_parts,
)
from tests.kernels.oracles import ERROR_LIMITS, relative_error, run_in_poisoned_memory
from tests.kernels.recurrent_cases import RecurrentCase, RunMixer, make_case

BLOCK_ROWS = 32  # state rows of a block, as Qwen3.6-35B-A3B has them with pages of 16
CALLS = 20  # in one CUDA graph


class MixerKind(NamedTuple):
    """A mixer of a published model, and a small one with odd sizes."""

    spec: RecurrentSpec
    small: RecurrentSpec
    kernel: RunMixer
    reference: RunMixer


MIXERS = {
    "delta net": MixerKind(
        GatedDeltaNetSpec(16, 32, 128, 128),  # Qwen3.6-35B-A3B
        GatedDeltaNetSpec(2, 6, 48, 80, beta_scale=2.0, tiled_heads=True),
        gated_delta_net,
        gated_delta_net_reference,
    ),
    "mamba2": MixerKind(
        Mamba2Spec(64, 64, 128, num_groups=8),  # Nemotron-3-Nano-30B-A3B
        Mamba2Spec(6, 40, 48, num_groups=2),
        mamba2,
        mamba2_reference,
    ),
    "short conv": MixerKind(
        ShortConvSpec(1024),  # LFM2-350M
        ShortConvSpec(40, conv_width=4, bias=True),
        short_conv,
        short_conv_reference,
    ),
}
STEPS: dict[str, tuple[Sequence[int], Sequence[int]]] = {
    "decodes": ([1] * 5, [1, 2, 3, 70, 900]),
    "mixed": ([1, 1, 1, 130, 7, 64], [5, 1, 40, 130, 200, 65]),
    "many": ([1, *[2] * 40, 66, 70], [3, *[5] * 40, 66, 100]),
    "chunks": ([500, 3, 700], [500, 1003, 1700]),
    "slices": ([1] * 9, [1, 2, 3, 70, 900, 5, 6, 7, 8]),
}


def check_case(kind: MixerKind, spec: RecurrentSpec, step: str, dtype: torch.dtype) -> float:
    """The largest relative error of outputs and states."""
    torch.manual_seed(0)
    query_lens, seq_lens = STEPS[step]
    case = make_case(spec, query_lens, seq_lens, dtype, "cuda", BLOCK_ROWS)
    expected, expected_memory = case.run(kind.reference)
    captured = case.without_host_lengths()
    result, memory = run_in_poisoned_memory(lambda: captured.run(kind.kernel))
    blocks = case.states.metadata.state_pieces
    parts = state_parts(spec)
    errors = [relative_error(result, expected)]
    for view, expected_view in zip(
        view_states(memory, blocks, parts), view_states(expected_memory, blocks, parts), strict=True
    ):
        errors.append(relative_error(view.read(), expected_view.read()))
    return max(errors)


def run_checks(name_filter: str) -> int:
    """Print the errors of all cases; returns 1 if one is too large."""
    failed = 0
    for name, kind in MIXERS.items():
        for size, spec in (("real", kind.spec), ("small", kind.small)):
            for step in STEPS:
                for dtype in (torch.bfloat16, torch.float32):
                    label = f"{name} {size} {step} {str(dtype).removeprefix('torch.')}"
                    if name_filter not in label:
                        continue
                    try:
                        error = check_case(kind, spec, step, dtype)
                    except Exception as problem:
                        print(f"FAILED {label}: {problem!r}"[:600], flush=True)
                        failed = 1
                        continue
                    # Products of 32-bit floats are summed in another order than by the reference.
                    limit = ERROR_LIMITS[dtype] * (1 if dtype == torch.bfloat16 else 10)
                    good = error < limit
                    failed |= not good
                    print(f"{'ok    ' if good else 'FAILED'} {label}: {error:.1e}", flush=True)
    return failed


def timed_cases() -> Iterator[tuple[str, Callable[[], object], float]]:
    """Name, step and bytes of each timed case."""
    shapes = {
        "decode 1": ([1], [500]),
        "decode 8": ([1] * 8, [500] * 8),
        "decode 64": ([1] * 64, [500] * 64),
        "decode 256": ([1] * 256, [500] * 256),
        "prefill 512": ([512], [512]),
        "prefill 8192": ([8192], [8192]),
        "prefill 8 x 1024": ([1024] * 8, [1024] * 8),
    }
    for name, kind in MIXERS.items():
        state_values = sum(part.rows * part.width for part in state_parts(kind.spec))
        for shape, (query_lens, seq_lens) in shapes.items():
            case = make_case(
                kind.spec, query_lens, seq_lens, torch.bfloat16, "cuda", BLOCK_ROWS, 0
            ).without_host_lengths()

            def step(case: RecurrentCase = case, kind: MixerKind = kind) -> object:
                for _ in range(CALLS - 1):
                    kind.kernel(case.projected, case.spec, case.weights, case.states)
                return kind.kernel(case.projected, case.spec, case.weights, case.states)

            tokens = sum(query_lens)
            num_bytes = 2 * 4 * state_values * len(query_lens)
            num_bytes += 2 * tokens * sum(recurrent_in_sizes(kind.spec)) * 1.4
            yield f"{name} {shape}", step, num_bytes


def run_benchmarks(name_filter: str) -> None:
    """Print the time of each case and its floor."""
    for name, step, num_bytes in timed_cases():
        if name_filter in name:
            microseconds = measure_microseconds(step, CALLS)
            floor = num_bytes / HBM_BYTES_PER_SECOND * 1e6
            print(f"{name:30} {microseconds:9.1f} us, floor {floor:7.1f} us", flush=True)


def run_profile(name_filter: str) -> None:
    """Print the time of each kernel in one call."""
    for name, step, _ in timed_cases():
        if name_filter not in name:
            continue
        step()
        torch.cuda.synchronize()
        with torch.profiler.profile() as profiler:
            step()
            torch.cuda.synchronize()
        print(name, flush=True)
        kernels = [row for row in profiler.key_averages() if row.device_time_total]
        for row in sorted(kernels, key=lambda row: -row.device_time_total):
            microseconds = row.device_time_total / CALLS
            print(f"    {row.key[:60]:60} {microseconds:9.1f} us", flush=True)


def delta_net_variants(kind: str) -> list[RunMixer]:
    """The gated delta net with launch parameters to compare, the usual ones first."""
    usual = delta_net_kernels.TILING
    if kind == "decode":
        variants = [usual, *(replace(usual, decode_warps=warps) for warps in (4, 16))]
        for width, warps in product((32, 64, 128), (4, 8)):
            variants.append(replace(usual, many_decodes=1, decode_slice=width, slice_warps=warps))
    else:
        variants = [usual]
        variants += [replace(usual, prepare_warps=warps) for warps in (2, 4)]
        for value_slice, warps, stages in product((16, 32, 64), (4, 8), (1, 2, 3)):
            variants.append(
                replace(usual, value_slice=value_slice, scan_warps=warps, scan_stages=stages)
            )
    return [partial(gated_delta_net_triton, tiling=tiling) for tiling in dict.fromkeys(variants)]


def mamba2_variants(kind: str) -> list[RunMixer]:
    """Mamba-2 with launch parameters to compare, the usual ones first."""
    if kind == "decode":
        return [mamba2_triton]
    variants = [mamba2_kernels.TILING]
    for chunk, head_slice, warps, stages in product((64, 128), (16, 32, 64), (4, 8), (1, 2)):
        variants.append(mamba2_kernels.Mamba2Tiling(chunk, head_slice, warps, stages))
    return [partial(mamba2_triton, tiling=tiling) for tiling in dict.fromkeys(variants)]


def compile_variant(spec: RecurrentSpec, kind: str, mixer: RunMixer) -> None:
    """Compile the kernels of a variant with little work; a variant may not fit."""
    lens = [1] if kind == "decode" else [70]
    case = make_case(spec, lens, lens, torch.bfloat16, "cuda", BLOCK_ROWS, 0)
    with suppress(Exception):
        case.without_host_lengths().run(mixer)


def run_tuning(name_filter: str) -> None:
    """Print the times of launch parameters, the fastest first."""
    shapes = {
        "decode 64": ([1] * 64, [500] * 64),
        "prefill 8192": ([8192], [8192]),
        "prefill 8 x 1024": ([1024] * 8, [1024] * 8),
    }
    variants_of = {"delta net": delta_net_variants, "mamba2": mamba2_variants}
    for (name, find_variants), (shape, lens) in product(variants_of.items(), shapes.items()):
        if name_filter not in f"{name} {shape}":
            continue
        spec = MIXERS[name].spec
        kind = shape.split()[0]
        variants = find_variants(kind)
        with ThreadPoolExecutor(12) as threads:
            list(threads.map(partial(compile_variant, spec, kind), variants))
        case = make_case(spec, *lens, torch.bfloat16, "cuda", BLOCK_ROWS, 0)
        case = case.without_host_lengths()
        timings = []
        for mixer in variants:

            def step(mixer: RunMixer = mixer, case: RecurrentCase = case) -> object:
                for _ in range(CALLS - 1):
                    mixer(case.projected, case.spec, case.weights, case.states)
                return mixer(case.projected, case.spec, case.weights, case.states)

            label = getattr(mixer, "keywords", {}).get("tiling", "usual")
            try:
                timings.append((measure_microseconds(step, CALLS), str(label)))
            except Exception as problem:
                print(f"{label}: {problem!r}"[:200], flush=True)
        print(f"{name} {shape}, the usual one first in the code: {variants[0]}"[:120], flush=True)
        for microseconds, label in sorted(timings)[:8]:
            print(f"    {microseconds:9.1f} us {label}", flush=True)


if __name__ == "__main__":
    command = sys.argv[1] if len(sys.argv) > 1 else ""
    chosen = sys.argv[2] if len(sys.argv) > 2 else ""
    if command == "check":
        sys.exit(run_checks(chosen))
    commands = {"bench": run_benchmarks, "profile": run_profile, "tune": run_tuning}
    if command not in commands:
        sys.exit(__doc__)
    commands[command](chosen)
