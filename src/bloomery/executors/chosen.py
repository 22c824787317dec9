"""Which executor runs a plan: the worker in this very process, ranks in processes of their own, or actors of Ray."""

from __future__ import annotations

from bloomery.config import Plan
from bloomery.engine.executor import Executor, Report, Result
from bloomery.errors import ConfigError
from bloomery.messages import Capacity, Step


class Chosen:
    def __init__(self, progress: bool = False, report: Report | None = None):
        self.progress, self.report = progress, report
        self.executor: Executor | None = None

    def start(self, plan: Plan) -> Capacity:
        """Only what the plan needs is imported."""
        if plan.executor == "ray":
            try:
                from bloomery.executors.ray import Actors
            except ModuleNotFoundError as error:
                raise ConfigError(f"--executor ray needs {error.name}: pip install 'bloomery[ray]'") from None
            self.executor = Actors(self.report)
        elif plan.tp * plan.pp > 1:
            from bloomery.executors.processes import Processes

            self.executor = Processes(self.report)
        else:
            from bloomery.executors.local import Local

            self.executor = Local(self.progress, self.report)
        return self.executor.start(plan)

    def submit(self, step: Step) -> Result:
        if self.executor is None:
            raise RuntimeError("submit before start")
        return self.executor.submit(step)

    def spare(self) -> int:
        return 0 if self.executor is None else self.executor.spare()

    def close(self) -> None:
        if self.executor is not None:
            self.executor.close()
