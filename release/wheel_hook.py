"""Puts compiled CPU kernels into a wheel, which hatchling builds.

Without BLOOMERY_WHEEL_KERNELS in the environment the wheel is pure Python, as `pip install` from
the sources makes it, and the kernels are compiled on the user's machine. `make dist` sets it to a
folder of libraries, and BLOOMERY_WHEEL_PLATFORM to the platform tag for which they were compiled.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class KernelWheelHook(BuildHookInterface):
    """Adds the libraries to the wheel and tags it with their platform."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        folder = os.environ.get("BLOOMERY_WHEEL_KERNELS")
        if folder is None or version == "editable":
            return
        libraries = sorted(Path(folder).glob("*.so"))
        if not libraries:
            raise FileNotFoundError(f"BLOOMERY_WHEEL_KERNELS: no libraries in {folder}")
        for library in libraries:
            target = f"bloomery/native/prebuilt/{library.name}"
            build_data["force_include"][str(library)] = target
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{os.environ['BLOOMERY_WHEEL_PLATFORM']}"
