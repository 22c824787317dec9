"""The main module of the engine process: runs the engine with the executor of its plan.

    python -m bloomery.engine_main [cpu|cuda] [human|json] [debug|info|warning|error] DESCRIPTOR

The plan arrives over the inherited socket DESCRIPTOR. With `cpu` or `cuda`, the process imports
everything that a local worker on this device needs before the plan arrives. The log format is
`human` by default and the log level `info`.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import signal
import sys
import threading
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any


def preload_worker(device: str) -> None:
    """Import the modules of a worker and start its device. The import of torch takes longest."""
    gc.disable()  # imports create little garbage, and collecting it would only take time
    linking = threading.Thread(target=link_torch_library)
    linking.start()
    from bloomery.ipc import die_with_parent

    die_with_parent()
    # Nothing needs cleaning up yet, and an exception amid the import of torch aborts the process.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # While torch's library is linked, import modules that do not need it.
    import_module("numpy")
    import_module("bloomery.describe")
    linking.join()
    import_module("bloomery.executors.local")
    if device == "cuda":
        import_module("bloomery.runtime.device").create_cuda_context()
    gc.freeze()
    atexit.register(gc.unfreeze)  # extension modules report frozen objects as leaks at exit
    gc.enable()


def link_torch_library() -> None:
    """Link torch's CPU library ahead of `import torch`.

    Linking takes a third of the time of the import. It does not hold Python's global lock, so
    another thread can do it meanwhile.
    """
    torch_spec = find_spec("torch")
    if torch_spec is None or torch_spec.origin is None:
        return
    library = Path(torch_spec.origin).parent / "lib" / "libtorch_cpu.so"
    # A build of torch without this file links its library when it is imported.
    with contextlib.suppress(OSError):
        ctypes.CDLL(str(library))


def load_vocabulary(plan: Any) -> object:
    """Load the TokenVocabulary of an EnginePlan's model, for structured output."""
    from bloomery.artifacts.locate import ModelArtifact
    from bloomery.structured.matcher import TokenVocabulary
    from bloomery.text.load import load_tokenizer
    from bloomery.text.tokenizer_pool import release_free_memory

    artifact = ModelArtifact(
        plan.name, "gguf" if plan.kind == "gguf" else "folder", Path(plan.path), "plan"
    )
    vocabulary = TokenVocabulary(load_tokenizer(artifact))
    release_free_memory()  # that of the tokenizer, which is not needed any more
    return vocabulary


def main() -> int:
    *options, descriptor = sys.argv[1:]
    if options and options[0] in ("cpu", "cuda"):
        preload_worker(options[0])
    from bloomery.config import LOG_LEVELS
    from bloomery.engine.engine_process import run_engine_process
    from bloomery.executors.select import select_executor
    from bloomery.hardware import has_ample_memory, has_spare_cores
    from bloomery.logs import configure_logging

    log_format = "json" if "json" in options else "human"
    log_level = next((name for name in options if name in LOG_LEVELS), "info")
    configure_logging(log_format, "engine: %(message)s", log_level)
    return run_engine_process(
        int(descriptor),
        select_executor,
        load_vocabulary,
        prepare_grammars=has_ample_memory(),
        has_spare_cores=has_spare_cores(),
    )


if __name__ == "__main__":
    sys.exit(main())
