"""Everything that can be refused before anything runs is refused here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

from compress.artifacts.eager_model import EagerModel
from compress.artifacts.graph_model import GraphModel
from compress.common.errors import CompressError, PipelineInvalid
from compress.core.loss import Loss
from compress.core.metrics import Metric, default_metric
from export.onnx.stage import OnnxModel
from export.torchscript.stage import TorchScriptModel
from pipelines.config.declared_dependencies import check_declared
from pipelines.config.registry import stages
from pipelines.config.validation_errors import did_you_mean
from pipelines.planning.gate_targets import check_runtime
from pipelines.planning.requirement_checks import check_loss, check_needs, missing_programs
from pipelines.planning.stage_selection import downstream_of, stage_named, upstream_of

if TYPE_CHECKING:
    from collections.abc import Container

    from compress.artifacts.artifact import Artifact
    from compress.core.stage import Stage
    from pipelines.config.pipeline import Pipeline

SOURCE = "source"


@dataclass(frozen=True)
class PlannedStage:
    """A stage with its name and the names of what it reads."""

    index: int
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
        """Names of all artifacts without which the stage is not made and judged."""
        return tuple(dict.fromkeys((*self.reads, *self.compared)))


@dataclass(frozen=True)
class Plan:
    """A road that can be walked."""

    stages: tuple[PlannedStage, ...]
    loss: Loss
    metric: Metric
    warnings: tuple[str, ...]
    """What will stop a later stage, while those before it can run."""
    baseline: str
    """The model compared with: as a leading `train` stage leaves it, else as it came in."""
    again: frozenset[str]
    """Names of what is made whatever the store holds."""
    cut: bool
    """Whether stages of the pipeline are left out."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the stages in their order."""
        return tuple(p.name for p in self.stages)

    def stage(self, name: str) -> PlannedStage:
        """Return the stage of a name."""
        return self.stages[self.names.index(name)]

    def needs(self, name: str) -> tuple[str, ...]:
        """Return the names of all artifacts without which a stage is not made and judged."""
        return () if name == SOURCE else self.stage(name).needs

    def ordered(self, names: Container[str]) -> tuple[str, ...]:
        """Return those of some names that are the source's or stages', in their order."""
        return tuple(name for name in (SOURCE, *self.names) if name in names)

    def branch(self, name: str) -> tuple[str, ...]:
        """Return the names on the road from the source to a stage's input, in their order."""
        road: list[str] = []
        while name != SOURCE:
            name = self.stage(name).input
            road.insert(0, name)
        return tuple(road)

    @property
    def route(self) -> str:
        """The names of the stages in their order, for people."""
        return " → ".join(self.names)

    def described(self) -> dict[str, Any]:
        """Return the stages and the warnings, for machines."""
        stages = [{"name": p.name, "stage": p.stage.stage, "input": p.input} for p in self.stages]
        return {"stages": stages, "warnings": self.warnings}

    @property
    def leaves(self) -> tuple[str, ...]:
        """Stages whose artifact no other stage reads: what is shipped."""
        read = {name for p in self.stages for name in p.reads}
        return tuple(p.name for p in self.stages if p.name not in read)


def build_plan(
    pipeline: Pipeline, start: str | None = None, until: str | None = None, *, force: bool = False
) -> Plan:
    """Check names, order, types, requirements and device, without importing torch where possible.

    Args:
        pipeline: the pipeline.
        start: name of a stage that runs again, with those whose artifacts are made of its own.
        until: name of a stage; those that it does not need are left out.
        force: everything runs again.

    Raises:
        PipelineInvalid: one line: the place, what was found, what was expected.
        Unavailable: a library or the device is missing.
    """
    stages = planned = _names(pipeline)
    baseline, again = _baseline(stages), frozenset[str]()
    if start is not None:
        again = downstream_of(stages, stage_named(pipeline, stages, "--from", start))
    if until is not None:
        planned = upstream_of(stages, {*stage_named(pipeline, stages, "--until", until), baseline})
    _check_types(pipeline, stages)
    _check_formats(pipeline, stages)
    if start is not None and again.isdisjoint(p.name for p in planned):
        raise PipelineInvalid(
            f"--until {until!r} needs nothing of --from {start!r}; nothing would run again"
        )
    check_needs(pipeline, planned)
    loss, metric = _task(pipeline)
    if loss.name is not None:
        check_loss(pipeline, planned, loss)
    check_declared(pipeline)
    return Plan(
        stages=planned,
        loss=loss,
        metric=metric,
        warnings=missing_programs(planned),
        baseline=baseline,
        again=again | {SOURCE, *(p.name for p in planned)} if force else again,
        cut=len(planned) < len(stages),
    )


def _baseline(stages: tuple[PlannedStage, ...]) -> str:
    trained = [p for p in stages if p.stage.stage == "train" and p.input == SOURCE]
    # Where several train what came in, none of them is what the others are compared with.
    return stages[0].name if trained == [stages[0]] else SOURCE


def _names(pipeline: Pipeline) -> tuple[PlannedStage, ...]:
    planned: list[PlannedStage] = []
    for index, stage in enumerate(pipeline.stages):
        name = stage.title
        if name == SOURCE or name in {p.name for p in planned}:
            raise PipelineInvalid(
                f"{pipeline.place('stages', index)}: the name {name!r} is taken; give the stage "
                "another one with `name:`"
            )
        previous = planned[-1].name if planned else SOURCE
        known = {SOURCE, *(p.name for p in planned)}
        references = [("input", stage.input)] if stage.input else []
        references += [("teacher", other) for other in stage.extra_inputs]
        for key, other in references:
            if other not in known:
                raise PipelineInvalid(
                    f"{pipeline.place('stages', index, key)}: no earlier stage is named {other!r}; "
                    f"{did_you_mean(other, known)}"
                )
        for i, gate in enumerate(stage.gates):
            if gate.against is not None and gate.against not in known:
                check_runtime(pipeline, index, i, known)
        compared = tuple(g.against for g in stage.gates if g.against in known)
        stage = _resolve_paths(pipeline, index, stage)
        planned.append(PlannedStage(index, name, stage.input or previous, stage, compared))
    return tuple(planned)


def _resolve_paths(pipeline: Pipeline, index: int, stage: Stage[Any, Any]) -> Stage[Any, Any]:
    try:
        return stage.resolve_paths(pipeline.folder, pipeline.code_folder)
    except CompressError as error:
        raise type(error)(f"{pipeline.place('stages', index)}: {error}") from error


def _check_types(pipeline: Pipeline, planned: tuple[PlannedStage, ...]) -> None:
    written = {SOURCE: _kind_of_source(pipeline)}
    for p in planned:
        found, wanted = written[p.input], _kinds(p.stage.reads())
        if not issubclass(found, wanted):
            kinds = " or ".join(kind.kind for kind in wanted)
            fitting = [name for name, kind in written.items() if issubclass(kind, wanted)]
            mend = (
                f"name one with `input:` ({', '.join(fitting)})" if fitting else "add one before it"
            )
            if written[SOURCE] is not EagerModel and not fitting:
                mend = f"begin with another form of the model, or with {_readers(found)}"
            raise PipelineInvalid(
                f"{pipeline.place('stages', p.index)} ({p.name}): reads {kinds}, and {p.input!r} "
                f"writes {found.kind}; {mend}"
            )
        for other in p.stage.extra_inputs:
            if not issubclass(written[other], p.stage.extra_input_types):
                kinds = " or ".join(kind.kind for kind in p.stage.extra_input_types)
                raise PipelineInvalid(
                    f"{pipeline.place('stages', p.index)} ({p.name}): {other!r} writes "
                    f"{written[other].kind}, and with these settings a teacher must be {kinds}"
                )
        written[p.name] = p.stage.writes()


def _kinds(reads: Any) -> tuple[type[Artifact], ...]:
    """Return the members of an artifact type or union."""
    return get_args(reads) or (reads,)


def _check_formats(pipeline: Pipeline, planned: tuple[PlannedStage, ...]) -> None:
    """Refuse what a stage would refuse only after the one before it has done its work."""
    named = {p.name: p.stage for p in planned}
    for p in planned:
        formats = named[p.input].activation_formats if p.input != SOURCE else frozenset()
        problem = p.stage.unsupported_input_reason(formats)
        if problem:
            raise PipelineInvalid(
                f"{pipeline.place('stages', p.index)} ({p.name}): input {p.input!r}: {problem}"
            )


def _readers(found: type[Artifact]) -> str:
    """Return the stages that read a kind of artifact."""
    reading = (n for n, s in stages().items() if issubclass(found, _kinds(s.reads())))
    return ", ".join(reading)


def _kind_of_source(pipeline: Pipeline) -> type[Artifact]:
    """Return the kind of artifact that the model comes in as."""
    kinds: dict[str, type[Artifact]] = {
        kind.kind: kind for kind in (EagerModel, GraphModel, OnnxModel, TorchScriptModel)
    }
    return kinds[pipeline.model.kind]


def _task(pipeline: Pipeline) -> tuple[Loss, Metric]:
    """Return the loss and the metric, as far as the file alone tells."""
    key, spec = "loss", pipeline.metric
    try:
        loss = Loss(pipeline.loss, folder=pipeline.code_folder)
        loss.check()
        if spec is None:
            return loss, default_metric(loss)
        key, arguments = "metric", tuple(sorted(spec.arguments.items()))
        metric = Metric(spec.name, arguments, spec.higher_is_better, pipeline.code_folder, loss)
        metric.check()
    except CompressError as error:
        raise type(error)(f"{pipeline.place(key)}: {error}") from error
    return loss, metric
