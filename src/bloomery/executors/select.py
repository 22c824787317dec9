"""Selects the executor for a plan: a local worker, rank processes, or Ray actors."""

from __future__ import annotations

from bloomery.config import EnginePlan
from bloomery.engine.executor import Executor, LoadProgress
from bloomery.errors import ConfigError


def select_executor(
    plan: EnginePlan, report: LoadProgress | None = None, progress: bool = False
) -> Executor:
    """Create the executor for a plan. The modules of the other executors are not imported.

    `report` receives the load progress. `progress` shows it as a bar in the terminal.
    """
    if plan.executor == "ray":
        try:
            from bloomery.executors.ray import RayExecutor
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"--executor ray needs {error.name}: pip install 'bloomery[ray]'"
            ) from None
        return RayExecutor(report)
    if plan.tensor_parallel_size * plan.pipeline_parallel_size > 1:
        from bloomery.executors.multiprocess import MultiprocessExecutor

        return MultiprocessExecutor(report)
    from bloomery.executors.local import LocalExecutor

    return LocalExecutor(progress, report)
