"""Implementations of engine.executor.Executor: ways to run the workers that compute steps."""
