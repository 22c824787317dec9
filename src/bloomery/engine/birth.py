"""An engine process, started. It needs next to nothing, so that one can begin before its parent has imported the rest.

No path to find, no port to reach, nothing to clean up: the other end of the line is inherited, and both ends are gone
with their processes.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import NamedTuple

from bloomery.config import child_environment

COMMAND = (sys.executable, "-m", "bloomery.engine_main")


def command(style: str, on_cpu: bool = False) -> tuple[str, ...]:
    """Of an engine that writes its log so, and may get ready for a plan on a CPU before it is told one."""
    return (*COMMAND, *(("cpu",) if on_cpu else ()), style)


class Born(NamedTuple):
    process: subprocess.Popen[bytes]
    line: socket.socket

    def end(self) -> None:
        self.line.close()
        self.process.kill()
        self.process.wait()


def bear(command: Sequence[str]) -> Born:
    """The descriptor of its end follows the command."""
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            # A process group of its own: Ctrl-C in a terminal is for the parent, which then ends the child.
            process = subprocess.Popen(
                [*command, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                process_group=0,
                env=child_environment(),
            )
        except OSError:
            ours.close()
            raise
    return Born(process, ours)
