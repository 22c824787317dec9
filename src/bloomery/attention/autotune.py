"""Measures from which length on the attention library is faster for a prefill; caches the result.

Prefill steps of one length run through our kernel and through the library, the longest first, until
the library is no longer faster. Shorter prefills use our kernel. All prefills use it if the library
is absent, raises or is never faster. The measured work includes gathering the KV cache for the
library. It runs as a CUDA graph, so the host's time is not part of it.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator
from math import inf
from pathlib import Path
from typing import Any

import torch

from bloomery.attention.base import AttentionMetadata, kv_cache_shape
from bloomery.attention.triton_paged import TritonPagedAttention, library_supports
from bloomery.kernels import launch, paged_decode, paged_prefill
from bloomery.kernels.quantized_kv_cache import kv_cache_nbytes, view_kv_cache, write_key_or_value
from bloomery.measurement_cache import load_measurements, measurement_path, save_measurement
from bloomery.spec import AttentionSpec

log = logging.getLogger("bloomery.attention")

CACHE_FILE = "attention.json"  # in the cache folder
PROMPT_LENS = (512, 1024, 2048, 4096, 8192)  # new positions of a prefill
TOKENS_PER_STEP = 4096  # a step has as many prompts as fit, and at least one
BLOCK_SIZE = 64  # positions, the default on a GPU
MIN_GAIN = 0.03  # fraction by which the library must be faster
NUM_REPLAYS = 7  # of each CUDA graph; the fastest counts

# prompt length -> seconds of a step by our kernel and by the library
MeasureStep = Callable[[int], tuple[float, ...]]


def tune_library_min_len(
    specs: Iterable[AttentionSpec],
    dtype: torch.dtype,
    kv_cache_dtype: torch.dtype,
    device: torch.device,
    cache_file: Path | None = None,
) -> int | None:
    """Return the number of new positions from which a prefill should go to the library.

    Measures the first of these layers that the library supports. None means never.
    """
    spec = next((spec for spec in specs if library_supports(spec, dtype)), None)
    if spec is None:
        return None
    heads = AttentionSpec(spec.num_heads, spec.num_kv_heads, spec.head_dim)
    with torch.cuda.device(device):
        key = measurement_key(heads, dtype, kv_cache_dtype, device)
        bench = PrefillBench(heads, dtype, kv_cache_dtype, device)
        return load_or_measure(key, bench.measure, cache_file or measurement_path(CACHE_FILE))


def unmeasured_prefills(
    specs: Iterable[AttentionSpec],
    dtype: torch.dtype,
    kv_cache_dtype: torch.dtype,
    device: torch.device,
    cache_file: Path | None = None,
) -> Iterator[Callable[[], object]]:
    """Yield what `tune_library_min_len` would run by our kernel, if nothing is cached."""
    spec = next((spec for spec in specs if library_supports(spec, dtype)), None)
    if spec is None:
        return
    heads = AttentionSpec(spec.num_heads, spec.num_kv_heads, spec.head_dim)
    key = measurement_key(heads, dtype, kv_cache_dtype, device)
    if is_valid_entry(load_measurements(cache_file or measurement_path(CACHE_FILE)).get(key)):
        return
    bench = PrefillBench(heads, dtype, kv_cache_dtype, device)
    kernel = TritonPagedAttention(library_min_len=None)
    for prompt_len in PROMPT_LENS:
        inputs = bench.make_inputs(prompt_len, prompts_per_step(prompt_len))
        yield bench.attention_call(kernel, *inputs)


def measurement_key(
    heads: AttentionSpec, dtype: torch.dtype, kv_cache_dtype: torch.dtype, device: torch.device
) -> str:
    """Return the key of a cached measurement: everything that the result depends on."""
    source = "".join(inspect.getsource(module) for module in (paged_decode, paged_prefill))
    fingerprint = hashlib.sha256(source.encode()).hexdigest()[:12]
    return (
        f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, "
        f"triton {launch.triton.__version__}, cuDNN {torch.backends.cudnn.version()}, "
        f"kernel {fingerprint}, {heads.num_heads} heads on {heads.num_kv_heads} of "
        f"{heads.head_dim}, {dtype} over {kv_cache_dtype}"
    )


def load_or_measure(key: str, measure_step: MeasureStep, cache_file: Path) -> int | None:
    """Return the cached threshold, or measure and cache it; log it with its times."""
    entry = load_measurements(cache_file).get(key, {})
    cached = is_valid_entry(entry)
    if cached:
        min_len = entry["min_len"]
        times = entry["times"]
    else:
        min_len, times = measure_and_save(key, measure_step, cache_file)
    log.info(
        "prefills go to the attention library %s; ms by our kernel and by the library%s: %s",
        "never" if min_len is None else f"from {min_len} new positions on",
        ", from the cache" if cached else "",
        times,
    )
    return min_len


def is_valid_entry(entry: Any) -> bool:
    """Whether a value read from the cache file has the expected form."""
    if not isinstance(entry, dict) or "times" not in entry:
        return False
    return isinstance(entry.get("min_len", ""), int | None)


def measure_and_save(
    key: str, measure_step: MeasureStep, cache_file: Path
) -> tuple[int | None, str]:
    """Measure the threshold; cache it unless the library raised, as memory may have been short."""
    min_len, seconds = find_library_min_len(measure_step)
    times = ", ".join(
        f"{prompt_len}: {1e3 * kernel:.3f} {1e3 * library:.3f}"
        for prompt_len, (kernel, library) in seconds.items()
    )
    if all(library < inf for _, library in seconds.values()):
        try:
            save_measurement(cache_file, key, {"min_len": min_len, "times": times})
        except OSError as error:
            log.warning("attention will be measured again at the next start: %s", error)
    return min_len, times


def find_library_min_len(
    measure_step: MeasureStep,
) -> tuple[int | None, dict[int, tuple[float, ...]]]:
    """Return the smallest length from which on the library is faster, and all measured times."""
    min_len = None
    seconds = dict[int, tuple[float, ...]]()
    for prompt_len in reversed(PROMPT_LENS):
        seconds[prompt_len] = measure_step(prompt_len)
        kernel, library = seconds[prompt_len]
        if library * (1 + MIN_GAIN) > kernel:
            break
        min_len = prompt_len
    return min_len, seconds


def prompts_per_step(prompt_len: int) -> int:
    """Return how many prompts of this length a measured step has."""
    return max(TOKENS_PER_STEP // prompt_len, 1)


class PrefillBench:
    """Times prefill steps of random numbers on the device."""

    def __init__(
        self,
        heads: AttentionSpec,
        dtype: torch.dtype,
        kv_cache_dtype: torch.dtype,
        device: torch.device,
    ):
        self.heads = heads
        self.dtype = dtype
        self.kv_cache_dtype = kv_cache_dtype
        self.device = device

    @torch.inference_mode()
    def measure(self, prompt_len: int) -> tuple[float, ...]:
        """Return the seconds of a step of such prompts by our kernel and by the library."""
        kernel = TritonPagedAttention(library_min_len=None)
        library = TritonPagedAttention(library_min_len=1)
        try:
            inputs = self.make_inputs(prompt_len, prompts_per_step(prompt_len))
            return time_on_device(
                self.attention_call(kernel, *inputs), self.attention_call(library, *inputs)
            )
        except (RuntimeError, AttributeError) as error:
            # The library is absent, does not support this device, or memory is short.
            log.info("the attention library is not used: %s", error)
            return 0.0, inf

    @torch.inference_mode()
    def make_inputs(
        self, prompt_len: int, num_prompts: int
    ) -> tuple[AttentionMetadata, torch.Tensor, torch.Tensor]:
        """Lay out whole prompts in consecutive blocks; returns metadata, queries and KV cache."""
        num_tokens = prompt_len * num_prompts
        num_blocks = prompt_len // BLOCK_SIZE  # of each prompt
        tables = [
            range(prompt * num_blocks, (prompt + 1) * num_blocks) for prompt in range(num_prompts)
        ]
        query_lens = [prompt_len] * num_prompts
        metadata = AttentionMetadata.from_host(
            query_lens, query_lens, tables, BLOCK_SIZE, self.device
        )
        shape = kv_cache_shape(self.heads, num_tokens // BLOCK_SIZE, BLOCK_SIZE)
        num_bytes = kv_cache_nbytes(shape, self.kv_cache_dtype)
        memory = torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)
        cache = view_kv_cache(memory, shape, self.kv_cache_dtype)
        for half in range(2):
            states = torch.randn(shape[1:], dtype=self.dtype, device=self.device)
            write_key_or_value(states, half, cache, metadata.slot_mapping)
        q = torch.randn(
            num_tokens,
            self.heads.num_heads,
            self.heads.head_dim,
            dtype=self.dtype,
            device=self.device,
        )
        return metadata, q, cache

    def attention_call(
        self,
        backend: TritonPagedAttention,
        metadata: AttentionMetadata,
        q: torch.Tensor,
        cache: torch.Tensor,
    ) -> Callable[[], torch.Tensor]:
        """Return a function that runs one layer's attention over these inputs."""
        plan = backend.prepare(metadata)
        return lambda: backend.attend(q, cache, self.heads, plan)


def time_on_device(*calls: Callable[[], object]) -> tuple[float, ...]:
    """Return the seconds of each call on the device: the fastest of NUM_REPLAYS graph replays.

    Replays of the calls alternate. Each call runs once before, to compile its kernels.
    """
    for call in calls:
        call()
    main_stream = torch.cuda.current_stream()
    fastest = [inf] * len(calls)
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.current_stream().wait_stream(main_stream)
        graphs = [capture_graph(call) for call in calls]
        for _ in range(NUM_REPLAYS):
            for i, graph in enumerate(graphs):
                start = torch.cuda.Event(enable_timing=True)
                end = torch.cuda.Event(enable_timing=True)
                start.record()
                graph.replay()
                end.record()
                end.synchronize()
                fastest[i] = min(fastest[i], start.elapsed_time(end) / 1000)
    return tuple(fastest)


def capture_graph(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Capture the call into a CUDA graph on the current stream."""
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode="thread_local")
    try:
        call()
    finally:
        graph.capture_end()
    return graph
