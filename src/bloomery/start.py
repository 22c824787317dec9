"""What `bloomery serve` does first: on a CPU the engine process begins to import torch, the longest of all waits,
before its parent has imported anything. Then serve.py takes over. A composition root.
"""

from __future__ import annotations

from bloomery.config import Config, ServerConfig, device
from bloomery.engine.birth import bear, command
from bloomery.logs import resolved


def start(config: Config, wishes: ServerConfig) -> int:
    one = config.tp * config.pp * wishes.replicas == 1 and config.executor == "auto"
    on_cpu = one and device(config.device) == "cpu"
    engine = bear(command(resolved(wishes.log_format), on_cpu)) if on_cpu else None
    try:
        from bloomery.serve import serve

        return serve(config, wishes, engine)
    finally:
        if engine is not None:  # nobody has come to own it, or it has ended already
            engine.end()
