"""Make two libraries faster that tests run, without changing what they compute.

Triton's interpreter runs our kernels on a CPU, and gguf reads files for transformers. Both spend
most of their time on work without effect. Every kernel, operation and memory access runs as before.
A release of these libraries that lacks the replaced functions is used as it is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

from numpy import ndarray


class PatchedLanguage:
    """Patch triton.language once a launch instead of once a call of a device function.

    The interpreter replaces the functions of triton.language when a launch begins and restores them
    when it ends. It also replaces them at every call of a device function inside of the launch,
    where nearly always all of them are replaced already.
    """

    def __init__(self, patch_language: Callable[[Any], Any], languages: list[Any]):
        self.patch_language = patch_language
        self.languages = languages
        self.launch_scope: Any = None  # the replacements of the launch that runs
        self.patched: set[str] = set()  # the names of the language modules replaced by it
        self.names_by_module: dict[str, frozenset[str]] = {}

    def __call__(self, function: Any) -> Any:
        names = self.names_by_module.get(function.__module__)
        if names is None:
            names = self.find_language_modules(function)
            self.names_by_module[function.__module__] = names
        if self.launch_scope is None:
            return self.begin_launch(function, names)
        if not names <= self.patched:
            scope = self.patch_language(function)
            self.launch_scope._changes.extend(scope._changes)
            self.patched |= names
        return self.launch_scope

    def find_language_modules(self, function: Any) -> frozenset[str]:
        values = function.__globals__.values()
        return frozenset(
            language.__name__
            for language in self.languages
            if any(value is language for value in values)
        )

    def begin_launch(self, function: Any, names: frozenset[str]) -> Any:
        scope = self.patch_language(function)
        restore_language = scope.restore

        def end_launch() -> None:
            self.launch_scope = None
            self.patched = set()
            restore_language()

        scope.restore = end_launch
        self.launch_scope = scope
        self.patched = set(names)
        return scope


def speed_up_libraries() -> None:
    """Replace the slow functions of the libraries that have been imported."""
    speed_up_interpreter()
    speed_up_gguf()


def speed_up_interpreter() -> None:
    interpreter: Any = sys.modules.get("triton.runtime.interpreter")
    replaced = ("_patch_lang", "_get_np_dtype", "interpreter_builder", "tl")
    if interpreter is None or not all(hasattr(interpreter, name) for name in replaced):
        return
    if isinstance(interpreter._patch_lang, PatchedLanguage):
        return
    languages = [interpreter.tl, interpreter.tl.core]
    interpreter._patch_lang = PatchedLanguage(interpreter._patch_lang, languages)

    # Checks of integer overflow end in device_assert, which does nothing unless `debug` is set.
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)

    # The original builds a table of all dtypes at every call. The result depends on the scalar
    # type only. Pointer types cannot be hashed; all of them are uint64 addresses.
    original = interpreter._get_np_dtype
    find_cached = lru_cache(maxsize=None)(original)

    def find_numpy_dtype(dtype: Any) -> Any:
        scalar = dtype.scalar
        return original(scalar) if scalar.is_ptr() else find_cached(scalar)

    interpreter._get_np_dtype = find_numpy_dtype


def speed_up_gguf() -> None:
    gguf: Any = sys.modules.get("gguf")
    if gguf is None or not hasattr(gguf.GGUFReader, "_get"):
        return
    if hasattr(gguf.get_tensor_name_map, "cache_info"):
        return

    # transformers asks for the same map, of thousands of names, once for every module of a model.
    gguf.get_tensor_name_map = lru_cache(maxsize=None)(gguf.get_tensor_name_map)

    class PlainArrayReader(gguf.GGUFReader):
        """Reads fields as plain arrays: slices of numpy.memmap are slow."""

        def _get(self, *arguments: Any, **options: Any) -> Any:
            if type(self.data) is not ndarray:
                self.data = self.data.view(ndarray)
            return super()._get(*arguments, **options)

    gguf.GGUFReader = PlainArrayReader
