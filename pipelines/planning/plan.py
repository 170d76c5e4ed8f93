"""The stages that a run executes, in order, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from compress.pipelines.config.model_spec import SOURCE

if TYPE_CHECKING:
    from collections.abc import Container

    from compress.core.metrics import Metric
    from compress.core.objectives.loss import Loss
    from compress.core.objectives.task import Task
    from compress.core.stage import Stage


@dataclass(frozen=True)
class PlannedStage:
    """A stage with its name and the names of the artifacts that it reads."""

    index: int
    """Position in the pipeline file, with each matrix expanded."""
    name: str
    input: str
    stage: Stage[Any, Any]
    compared: tuple[str, ...]
    """Names of the artifacts that its gates compare with."""

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of all artifacts that the stage reads, its input first."""
        return (self.input, *self.stage.extra_inputs)

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of all artifacts that running the stage and evaluating its gates takes."""
        return tuple(dict.fromkeys((*self.reads, *self.compared)))


@dataclass(frozen=True)
class Plan:
    """A checked order of stages, with the loss and the metric that apply to all of them."""

    stages: tuple[PlannedStage, ...]
    loss: Loss
    metric: Metric
    task_reason: str
    """What the task was inferred from, such as `as loss is mse`; empty where the file names it."""
    warnings: tuple[str, ...]
    """What will stop a later stage, while those before it can run."""
    baseline: str
    """Name of the model that measurements compare with: the result of a leading `train` stage, else
    the imported model."""
    again: frozenset[str]
    """Names of the stages that run whatever the store holds."""
    cut: bool
    """Whether stages of the pipeline are left out."""

    @property
    def task(self) -> Task | None:
        """What the model is for, where it is known."""
        return self.loss.task

    @property
    def task_line(self) -> str:
        """The task and what it was inferred from; empty where the file names it."""
        return (
            f"task: {self.task.name}, {self.task_reason}" if self.task and self.task_reason else ""
        )

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the stages in their order."""
        return tuple(p.name for p in self.stages)

    def stage(self, name: str) -> PlannedStage:
        """Return the stage of a name."""
        return self.stages[self.names.index(name)]

    def needs(self, name: str) -> tuple[str, ...]:
        """Return the names of all artifacts that a stage and its gates need; none for `source`."""
        return () if name == SOURCE else self.stage(name).needs

    def ordered(self, names: Container[str]) -> tuple[str, ...]:
        """Return the known stage names among `names`, in pipeline order, `source` first."""
        return tuple(name for name in (SOURCE, *self.names) if name in names)

    def branch(self, name: str) -> tuple[str, ...]:
        """Return the names of a stage's ancestors by input, from `source` to its input."""
        ancestors: list[str] = []
        while name != SOURCE:
            name = self.stage(name).input
            ancestors.insert(0, name)
        return tuple(ancestors)

    @property
    def route(self) -> str:
        """The names of the stages in their order, for people."""
        return " → ".join(self.names)

    @property
    def leaves(self) -> tuple[str, ...]:
        """Stages whose artifact no other stage reads: what is deployed."""
        read = {name for p in self.stages for name in p.reads}
        return tuple(p.name for p in self.stages if p.name not in read)
