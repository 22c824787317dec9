"""The entry points of both commands: `bloomery`, also as `python -m bloomery`, and TGI's launcher.

Importing the modules of a command takes a moment. Ctrl-C in that moment ends the process at once
and silently. Python's own handler would print a traceback from the middle of an import, or lose the
interrupt there. Commands that handle Ctrl-C call `cli.raise_on_interrupt` when they have imported
what they need; the server has its own handler.
"""

import signal
import sys


def end_on_interrupt() -> None:
    """Let Ctrl-C end the process, unless it is ignored, as by nohup."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def main() -> int:
    """Run `bloomery`; return its exit status."""
    end_on_interrupt()
    from bloomery import cli

    return cli.main()


def run_launcher() -> int:
    """Run `text-generation-launcher`; return its exit status."""
    end_on_interrupt()
    from bloomery import launcher

    return launcher.main()


if __name__ == "__main__":
    sys.exit(main())
