"""Bloomery: an inference server for open large language models."""
__version__ = "0.1.0"
