"""Bloomery: an inference server for open large language models."""

from typing import Any

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncLLM",
    "LoRARequest",
    "SamplingParams",
    "StructuredOutputs",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """Import the offline API on first use, so that submodules can be imported without it."""
    if name in ("SamplingParams", "StructuredOutputs"):
        from bloomery import sampling

        return getattr(sampling, name)
    if name == "LoRARequest":
        from bloomery.engine import adapter_catalog

        return adapter_catalog.LoRARequest
    if name in ("LLM", "AsyncLLM"):
        from bloomery import llm

        return getattr(llm, name)
    raise AttributeError(f"module 'bloomery' has no attribute {name!r}")
