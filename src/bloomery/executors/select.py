"""Selects the executor for a plan: a local worker, ranks in processes, or actors of Ray."""

from __future__ import annotations

from bloomery.config import EnginePlan
from bloomery.engine.executor import Executor, LoadProgress
from bloomery.errors import ConfigError


def select_executor(
    plan: EnginePlan, report: LoadProgress | None = None, progress: bool = False
) -> Executor:
    """Create the executor that the plan asks for, and import nothing of the others.

    `report` receives load progress; `progress` shows it as a bar in the terminal.
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
