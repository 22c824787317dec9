"""`python -m bloomery` is `bloomery`."""

import sys

from bloomery.cli import main

sys.exit(main())
