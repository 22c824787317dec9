"""The engine process: `python -m bloomery.engine_main [cpu] [json] DESCRIPTOR`, started by engine/birth.py alone.

A composition root: here the engine meets its executor. The plan comes over the socket whose descriptor it inherits.
With `cpu` it is known that the worker will be here and on a CPU: all that needs is imported before the plan has come.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import socket
import sys
import threading
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

# Torch imports its compiler's shape rules and its exporter for everybody: 0.7 of its 2 seconds. A CPU's steps are
# native operations and plain torch; neither ever asks these. Nor is Triton any use here.
LEFT_OUT = ("torch._meta_registrations", "torch.export")


def prepare() -> None:
    """What a worker on a CPU imports, without what it never uses."""
    gc.disable()  # what is imported stays
    sys.modules.update({name: ModuleType(name) for name in LEFT_OUT})
    sys.modules["triton"] = None  # type: ignore[assignment]  # which means that there is none
    linking = threading.Thread(target=link)
    linking.start()
    from bloomery.engine.process import die_with_parent

    die_with_parent()
    import numpy  # while torch's library is linked, all that can do without it

    import bloomery.describe

    linking.join()
    import bloomery.executors.local

    gc.freeze()
    gc.enable()


def link() -> None:
    """A third of torch's import is the linking of its library, which another core can do: no lock is held over it."""
    found = find_spec("torch")
    with contextlib.suppress(OSError):  # a torch of another make links itself when it is imported
        if found is not None and found.origin is not None:
            ctypes.CDLL(str(Path(found.origin).parent / "lib" / "libtorch_cpu.so"))


def main() -> int:
    *wishes, descriptor = sys.argv[1:]
    style = "json" if "json" in wishes else "human"
    if "cpu" in wishes:
        try:
            prepare()
        except (
            ImportError,
            AttributeError,
        ) as error:  # another torch, which does want what was left out
            print(
                f"engine: torch is imported once more, and whole: {error}",
                file=sys.stderr,
                flush=True,
            )
            os.execv(
                sys.executable, [sys.executable, "-m", "bloomery.engine_main", style, descriptor]
            )
    from bloomery.engine.process import serve
    from bloomery.executors.chosen import chosen
    from bloomery.logs import write

    write(style, "engine: %(message)s")
    return serve(socket.socket(fileno=int(descriptor)), chosen)


if __name__ == "__main__":
    sys.exit(main())
