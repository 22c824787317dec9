"""Runs slow functions, such as reading files, on threads beside the steps."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

T = TypeVar("T")


def run_in_background(function: Callable[[], T]) -> Future[T]:
    """Run a function on a thread that does not keep the process alive."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, name="background", daemon=True).start()
    return future
