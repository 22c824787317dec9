"""The bridge between the towers: ways to run workers, all behind engine.executor.Executor."""
