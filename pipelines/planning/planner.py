"""Builds the plan of a run, and refuses whatever can be refused before anything runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from compress.artifacts.eager_model import EagerModel
from compress.artifacts.graph_model import GraphModel
from compress.common.errors import CompressError, PipelineInvalid
from compress.core.metrics import Metric, default_metric
from compress.core.objectives.loss import Loss
from compress.core.stage import members_of
from compress.core.validation_errors import did_you_mean
from compress.export.onnx.stage import OnnxModel
from compress.export.torchscript.stage import TorchScriptModel
from compress.pipelines.config.model_spec import SOURCE, HuggingFaceModel
from compress.pipelines.config.registry import stages as known_stages
from compress.pipelines.planning.plan import Plan, PlannedStage
from compress.pipelines.planning.planner import (
    check_loss,
    check_metric,
    check_needs,
    check_runtime,
    explained_task,
    fit_to_task,
    task_of,
)
from compress.quantization.stages.base import QuantizationStage

if TYPE_CHECKING:
    from compress.artifacts.artifact import Artifact
    from compress.pipelines.config.pipeline import PipelineConfig


def build_plan(
    pipeline: PipelineConfig,
    start: str | None = None,
    until: str | None = None,
    *,
    force: bool = False,
) -> Plan:
    """Check names, order, types, requirements and device, without importing torch where possible.

    Args:
        pipeline: the pipeline.
        start: name of a stage that runs again, with all stages made from its artifact.
        until: name of the last stage; those that it does not need are left out.
        force: everything runs again.

    Raises:
        PipelineInvalid: one line: the place, what was found, what was expected.
        Unavailable: a library or the device is missing.
    """
    if not pipeline.stages:
        raise PipelineInvalid(
            f"{pipeline.file} has no stages to run; search with: compress auto {pipeline.file}"
        )
    stages = selected = _resolve_stages(pipeline)
    # The baseline is what a leading `train` stage makes. Where several stages train the imported
    # model, none of them is the one that the others are compared with.
    trained = [p for p in stages if p.stage.stage == "train" and p.input == SOURCE]
    baseline = stages[0].name if trained == [stages[0]] else SOURCE
    again: set[str] = set()
    if start is not None:
        again |= _stages_named(pipeline, stages, "--from", start)
        for planned in stages:
            if not again.isdisjoint(planned.reads):
                again.add(planned.name)
    if until is not None:
        needed = {*_stages_named(pipeline, stages, "--until", until), baseline}
        for planned in reversed(stages):
            if planned.name in needed:
                needed.update(planned.needs)
        selected = tuple(planned for planned in stages if planned.name in needed)
    _check_types(pipeline, stages)
    if start is not None and again.isdisjoint(p.name for p in selected):
        raise PipelineInvalid(
            f"--until {until!r} needs nothing of --from {start!r}; nothing would run again"
        )
    programs = check_needs(pipeline, selected)
    loss, metric, reason = _loss_and_metric(pipeline)
    with explained_task(loss.task, reason):
        selected = fit_to_task(pipeline, selected, loss.task)
        for planned in selected if loss.task else ():
            check_metric(pipeline, planned, metric.name)
    if loss.name is not None:
        check_loss(pipeline, selected, loss)
    for index, name in enumerate(pipeline.depends.files):
        if not (pipeline.folder / name).exists():
            raise PipelineInvalid(
                f"{pipeline.place('depends', 'files', index)}: there is no {name!r} in "
                f"{pipeline.folder.absolute()}; paths are relative to the pipeline file"
            )
    return Plan(
        stages=selected,
        loss=loss,
        metric=metric,
        task_reason=reason,
        warnings=programs,
        baseline=baseline,
        again=frozenset(again | {SOURCE, *(p.name for p in selected)} if force else again),
        cut=len(selected) < len(stages),
    )


def _resolve_stages(pipeline: PipelineConfig) -> tuple[PlannedStage, ...]:
    """Give each stage a unique name and an input, and resolve its paths and references."""
    planned: list[PlannedStage] = []
    for index, stage in enumerate(pipeline.stages):
        name = stage.title
        earlier = {SOURCE, *(p.name for p in planned)}
        if name in earlier:
            raise PipelineInvalid(
                f"{pipeline.place('stages', index)}: the name {name!r} is taken; give the stage "
                "another one with `name:`"
            )
        references = [("input", stage.input)] if stage.input else []
        references += [("teacher", teacher) for teacher in stage.extra_inputs]
        for key, reference in references:
            if reference not in earlier:
                raise PipelineInvalid(
                    f"{pipeline.place('stages', index, key)}: no earlier stage is named "
                    f"{reference!r}; {did_you_mean(reference, earlier)}"
                )
        for i, gate in enumerate(stage.gates):
            if gate.against is not None and gate.against not in earlier:
                check_runtime(pipeline, index, i, earlier)
        compared = tuple(gate.against for gate in stage.gates if gate.against in earlier)
        previous = planned[-1].name if planned else SOURCE
        try:
            resolved = stage.resolve_paths(pipeline.folder, pipeline.code_folder)
        except CompressError as error:
            raise type(error)(f"{pipeline.place('stages', index)}: {error}") from error
        planned.append(PlannedStage(index, name, stage.input or previous, resolved, compared))
    return tuple(planned)


def _stages_named(
    pipeline: PipelineConfig, stages: tuple[PlannedStage, ...], option: str, name: str
) -> frozenset[str]:
    """Return the stage of a name, or all branches of a stage with a matrix."""
    in_file = {p.name: pipeline.name_in_file(p.index) for p in stages}
    if name in in_file:
        return frozenset([name])
    branches = frozenset(branch for branch, written in in_file.items() if written == name)
    if not branches:
        mend = did_you_mean(name, {*in_file, *in_file.values()})
        raise PipelineInvalid(f"{option} {name!r}: no such stage; {mend}")
    return branches


def _check_types(pipeline: PipelineConfig, planned: tuple[PlannedStage, ...]) -> None:
    """Refuse a stage that cannot read the kind of artifact, or activation formats, of its input."""
    imported: dict[str, type[Artifact]] = {
        kind.kind: kind for kind in (EagerModel, GraphModel, OnnxModel, TorchScriptModel)
    }
    written: dict[str, tuple[type[Artifact], ...]] = {SOURCE: (imported[pipeline.model.kind],)}
    formats = {SOURCE: frozenset[str]()} | {p.name: p.stage.activation_formats for p in planned}
    quantized: set[str] = set()
    streams = isinstance(pipeline.model, HuggingFaceModel) and pipeline.model.stream
    for p in planned:
        where = f"{pipeline.place('stages', p.index)} ({p.name})"
        found, readable = written[p.input], members_of(p.stage.reads())
        quantizes = isinstance(p.stage, QuantizationStage)
        if streams and not p.stage.streams:
            takes = ", ".join(n for n, stage in known_stages().items() if stage.streams)
            raise PipelineInvalid(
                f"{where}: holds all weights in memory, and model.stream keeps them on disk; "
                f"leave out `stream`, or use {takes}"
            )
        fitting = [
            name
            for name, kinds in written.items()
            if _are(kinds, readable) and not (quantizes and name in quantized)
        ]
        if quantizes and p.input in quantized:
            raise PipelineInvalid(
                f"{where}: {p.input!r} is quantized already, expected a float model; name one with "
                f"`input:` ({', '.join(fitting)})"
            )
        if not _are(found, readable):
            if fitting:
                mend = f"name one with `input:` ({', '.join(fitting)})"
            elif written[SOURCE] == (EagerModel,):
                mend = "add one before it"
            else:
                readers = [
                    name
                    for name, stage in known_stages().items()
                    if _are(found, members_of(stage.reads()))
                ]
                mend = f"begin with another form of the model, or with {', '.join(readers)}"
            raise PipelineInvalid(
                f"{where}: reads {_named(readable)}, and {p.input!r} writes {_named(found)}; {mend}"
            )
        for teacher in p.stage.extra_inputs:
            if not _are(written[teacher], p.stage.extra_input_types):
                raise PipelineInvalid(
                    f"{where}: {teacher!r} writes {_named(written[teacher])}, and with these "
                    f"settings a teacher must be {_named(p.stage.extra_input_types)}"
                )
        # A stage would refuse these only once its input has been made.
        if problem := p.stage.unsupported_input_reason(formats[p.input]):
            raise PipelineInvalid(f"{where}: input {p.input!r}: {problem}")
        written[p.name] = members_of(p.stage.writes())
        if quantizes:
            quantized.add(p.name)


def _are(written: tuple[type[Artifact], ...], readable: tuple[type[Artifact], ...]) -> bool:
    """Whether each type that a stage may write is one that another reads."""
    return all(issubclass(kind, readable) for kind in written)


def _named(kinds: tuple[type[Artifact], ...]) -> str:
    return " or ".join(kind.kind for kind in kinds)


def _loss_and_metric(pipeline: PipelineConfig) -> tuple[Loss, Metric, str]:
    """Return loss and metric, as far as they follow without the data, and why this is the task."""
    key, spec = "loss", pipeline.metric
    task, reason = task_of(pipeline)
    try:
        loss = Loss(pipeline.loss, folder=pipeline.code_folder, task=task)
        loss.check()
        if spec is None:
            return loss, default_metric(loss), reason
        key, arguments = "metric", tuple(sorted(spec.arguments.items()))
        metric = Metric(spec.name, arguments, spec.higher_is_better, pipeline.code_folder, loss)
        with explained_task(task, reason):
            metric.check()
    except CompressError as error:
        raise type(error)(f"{pipeline.place(key)}: {error}") from error
    return loss, metric, reason
