"""The names of the metrics in /metrics: our own, vLLM's and TGI's, with their help texts.

Dashboards and autoscalers made for vLLM or TGI read this server by their own names.
"""

from __future__ import annotations

from typing import NamedTuple

PREFIXES = ("bloomery_", "vllm:", "tgi_")


class MetricNames(NamedTuple):
    """A help text, and the names after each prefix: none, one, or several with spaces between."""

    help_text: str
    own: str = ""
    vllm: str = ""
    tgi: str = ""


# Keys that end in "length" are counts; the others are seconds.
HISTOGRAMS = {
    "ttft": MetricNames(
        "TTFT: time to first token",
        own="time_to_first_token_seconds",
        vllm="time_to_first_token_seconds",
    ),
    "itl": MetricNames(
        "ITL: time between two tokens of a sequence",
        own="inter_token_seconds",
        vllm="inter_token_latency_seconds time_per_output_token_seconds",
    ),
    "tpot": MetricNames(
        "TPOT: mean inference time of a request per output token",
        vllm="request_time_per_output_token_seconds",
        tgi="request_mean_time_per_token_duration",
    ),
    "end_to_end": MetricNames(
        "arrival to last token",
        own="request_seconds",
        vllm="e2e_request_latency_seconds",
        tgi="request_duration",
    ),
    "queue": MetricNames(
        "time in the queue",
        own="queue_seconds",
        vllm="request_queue_time_seconds",
        tgi="request_queue_duration",
    ),
    "inference": MetricNames(
        "first step to last token",
        vllm="request_inference_time_seconds",
        tgi="request_inference_duration",
    ),
    "prefill": MetricNames("first step to first token", vllm="request_prefill_time_seconds"),
    "decode": MetricNames("first token to last", vllm="request_decode_time_seconds"),
    "validation": MetricNames(
        "parsing, checking and tokenizing", tgi="request_validation_duration"
    ),
    "prompt_length": MetricNames(
        "prompt tokens", vllm="request_prompt_tokens", tgi="request_input_length"
    ),
    "output_length": MetricNames(
        "generated tokens", vllm="request_generation_tokens", tgi="request_generated_tokens"
    ),
    "longest_output_length": MetricNames(
        "tokens of a request's longest answer", vllm="request_max_num_generation_tokens"
    ),
    "answers_length": MetricNames("answers to a prompt", vllm="request_params_n"),
    "cached_length": MetricNames(
        "prefix hit: prompt tokens in the cache", tgi="request_skipped_tokens"
    ),
    "step_tokens_length": MetricNames(
        "tokens computed in a step", own="step_tokens", vllm="iteration_tokens_total"
    ),
    "step_sequences_length": MetricNames(
        "sequences in a step", own="step_sequences", tgi="batch_next_size"
    ),
    "max_tokens_length": MetricNames(
        "max_tokens of a sequence", vllm="request_params_max_tokens", tgi="request_max_new_tokens"
    ),
}
# The keys are those of ServerMetrics._current_values: fields of EngineStats and StepTiming, and
# values of the server.
GAUGES = {
    "running": MetricNames(
        "requests in the running batch",
        own="running",
        vllm="num_requests_running",
        tgi="batch_current_size",
    ),
    "waiting": MetricNames(
        "requests in the queue", own="waiting", vllm="num_requests_waiting", tgi="queue_size"
    ),
    "kv_usage": MetricNames(
        "share of the KV cache in use",
        own="kv_usage_ratio",
        vllm="kv_cache_usage_perc gpu_cache_usage_perc",
    ),
    "kv_tokens": MetricNames("KV cache tokens in use", tgi="batch_current_max_tokens"),
    "kv_capacity": MetricNames("tokens that fit the KV cache", tgi="batch_max_total_tokens"),
    "checkpoints": MetricNames("recurrent states from which a prompt can go on", own="checkpoints"),
    "checkpoint_usage": MetricNames(
        "share of the KV cache that these states take", own="checkpoint_usage_ratio"
    ),
    "ready": MetricNames("whether requests are answered", own="ready"),
    "limit": MetricNames(
        "share of the hardware's limit reached in the last seconds", own="limit_ratio"
    ),
    "adapters_in_memory": MetricNames(
        "LoRA adapters in host memory", own="lora_adapters_in_memory"
    ),
    "waiting_for_adapters": MetricNames(
        "requests that wait for a device slot or the file of their LoRA adapter",
        own="lora_waiting",
    ),
}
COUNTERS = {
    "prefix_queried": MetricNames(
        "tokens looked up in the prefix cache",
        own="prefix_queried_tokens",
        vllm="prefix_cache_queries",
    ),
    "prefix_hit": MetricNames(
        "tokens found in the prefix cache", own="prefix_hit_tokens", vllm="prefix_cache_hits"
    ),
    "checkpoints_saved": MetricNames("recurrent states saved", own="checkpoints_saved"),
    "checkpoint_hits": MetricNames(
        "prompts that went on from a saved recurrent state", own="checkpoint_hits"
    ),
    "checkpoints_evicted": MetricNames(
        "saved recurrent states that were evicted", own="checkpoints_evicted"
    ),
    "preemptions": MetricNames("preemptions", own="preemptions", vllm="num_preemptions"),
    "steps": MetricNames("steps of the engine", own="steps"),
    "step_seconds": MetricNames("seconds the steps took", own="step_seconds"),
    "scheduling_overhead_seconds": MetricNames(
        "seconds by which long requests were delayed for short ones",
        own="scheduling_overhead_seconds",
    ),
    "floor": MetricNames("least seconds the hardware needs for the steps", own="floor_seconds"),
    "expected": MetricNames("seconds the steps were predicted to take", own="expected_seconds"),
    "device": MetricNames("seconds the device worked on steps", own="device_seconds"),
    "idle": MetricNames("seconds the device waited for the host", own="device_idle_seconds"),
    "host": MetricNames("seconds the host took to launch steps", own="host_seconds"),
    "sampling": MetricNames("seconds of the sampler outside CUDA graphs", own="sampling_seconds"),
    "padding": MetricNames("seconds lost on padding rows of CUDA graphs", own="padding_seconds"),
    "communication": MetricNames("seconds of messages between ranks", own="communication_seconds"),
    "masks": MetricNames("seconds the device waited for grammars", own="masks_seconds"),
    "prompt_tokens": MetricNames("prompt tokens", own="prompt_tokens", vllm="prompt_tokens"),
    "generated_tokens": MetricNames(
        "generated tokens", own="generated_tokens", vllm="generation_tokens"
    ),
    "restarts": MetricNames("engines started after the first one", own="engine_restarts"),
    "requests": MetricNames("requests to generate", own="requests", tgi="request_count"),
    "success": MetricNames(
        "requests answered in full", own="requests_succeeded", tgi="request_success"
    ),
    "adapter_slot_loads": MetricNames(
        "loads of LoRA adapters into device slots", own="lora_slot_loads"
    ),
    "adapter_file_loads": MetricNames(
        "LoRA adapters read from disk into host memory", own="lora_file_loads"
    ),
    "adapter_evictions": MetricNames(
        "LoRA adapters that left host memory", own="lora_host_evictions"
    ),
}
