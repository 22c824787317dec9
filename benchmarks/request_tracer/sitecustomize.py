"""Records which source files of bloomery a process executes. For benchmarks/readability.py.

Python imports this module at start when its folder is on PYTHONPATH. It works in the server process
and in its child processes. REQUEST_TRACE_FOLDER names a folder through which the benchmark controls
it: when a file called `start` appears, recording begins anew; when `stop` appears, the files seen
so far are written to `files.PID`.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

PACKAGE = f"{os.sep}src{os.sep}bloomery{os.sep}"
POLL_SECONDS = 0.02
executed_files: set[str] = set()


def record_call(frame: FrameType, event: str, argument: Any) -> None:
    """A profile function: note the file of every Python function that is called."""
    code = frame.f_code
    if event == "call" and code.co_name != "<module>" and PACKAGE in code.co_filename:
        executed_files.add(code.co_filename.partition(PACKAGE)[2])


def watch_folder(folder: Path) -> None:
    started = False
    stopped = False
    while not stopped:
        time.sleep(POLL_SECONDS)
        if not started and (folder / "start").exists():
            started = True
            executed_files.clear()
            (folder / f"started.{os.getpid()}").touch()
        if started and (folder / "stop").exists():
            stopped = True
            partial = folder / f"partial.{os.getpid()}"
            partial.write_text("\n".join(sorted(executed_files)))
            partial.rename(folder / f"files.{os.getpid()}")


def install() -> None:
    folder = os.environ.get("REQUEST_TRACE_FOLDER")
    if not folder:
        return
    threading.Thread(target=watch_folder, args=(Path(folder),), daemon=True).start()
    sys.setprofile(record_call)
    threading.setprofile(record_call)


install()
