"""Runs the `bloomery` command line as `python -m bloomery`."""

import sys

from bloomery.cli import main

sys.exit(main())
