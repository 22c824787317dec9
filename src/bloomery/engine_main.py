"""The engine process: `python -m bloomery.engine_main DESCRIPTOR`, started by EngineClient and by nobody else.

A composition root: here the engine meets its executor. The plan comes over the socket whose descriptor it inherits.
"""

from __future__ import annotations

import logging
import socket
import sys

from bloomery.engine.executor import Executor, Report
from bloomery.engine.process import serve
from bloomery.executors.chosen import Chosen


def chosen(report: Report) -> Executor:
    """Torch is imported later, if at all: after the process has tied its life to its parent's."""
    return Chosen(report=report)


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="engine: %(message)s", stream=sys.stderr)
    return serve(socket.socket(fileno=int(sys.argv[1])), chosen)


if __name__ == "__main__":
    sys.exit(main())
