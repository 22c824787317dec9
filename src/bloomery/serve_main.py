"""The entry point of `bloomery serve`. It exists only to start the engine process early.

On a CPU, importing torch is the longest part of the start-up. The engine process begins with that
before this process has imported the HTTP server (serve.py), so both imports run side by side.
"""

from __future__ import annotations

from bloomery.config import EngineConfig, ServerConfig, resolve_device
from bloomery.ipc import build_engine_command, spawn_child
from bloomery.logs import resolve_log_format


def prestart_engine_and_serve(config: EngineConfig, server_config: ServerConfig) -> int:
    """Start the engine process if possible, then serve; return the exit status."""
    num_ranks = config.tensor_parallel_size * config.pipeline_parallel_size
    is_single_worker = num_ranks * server_config.replicas == 1 and config.executor == "auto"
    prestarted = None
    if is_single_worker and resolve_device(config.device) == "cpu":
        log_format = resolve_log_format(server_config.log_format)
        prestarted = spawn_child(build_engine_command(log_format, preload_cpu=True))
    try:
        from bloomery.serve import serve

        return serve(config, server_config, prestarted)
    finally:
        if prestarted is not None:  # serve() has not taken it over, or has already ended it
            prestarted.kill()
