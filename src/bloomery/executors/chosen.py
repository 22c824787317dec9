"""Which executor runs a plan: the worker in this very process, ranks in processes of their own, or actors of Ray."""

from __future__ import annotations

from bloomery.config import Plan
from bloomery.engine.executor import Executor, Report
from bloomery.errors import ConfigError


def chosen(plan: Plan, report: Report | None = None, progress: bool = False) -> Executor:
    """Only what the plan needs is imported."""
    if plan.executor == "ray":
        try:
            from bloomery.executors.ray import Actors
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"--executor ray needs {error.name}: pip install 'bloomery[ray]'"
            ) from None
        return Actors(report)
    if plan.tp * plan.pp > 1:
        from bloomery.executors.processes import Processes

        return Processes(report)
    from bloomery.executors.local import Local

    return Local(progress, report)
