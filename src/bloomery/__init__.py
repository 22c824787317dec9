"""Bloomery: an inference server for open large language models."""

from typing import Any

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncLLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    """The offline API, imported when first asked for: a part of the package must not drag in the whole."""
    if name == "SamplingParams":
        from bloomery.sampling import SamplingParams

        return SamplingParams
    if name in ("LLM", "AsyncLLM"):
        from bloomery import llm

        return getattr(llm, name)
    raise AttributeError(f"module 'bloomery' has no attribute {name!r}")
