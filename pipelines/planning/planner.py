"""Builds the plan of a run, and refuses whatever can be refused before anything runs.

Names, order and types of stages, libraries, devices and data that they need, limits that make no
sense for the metric or for what the model is for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress import export  # noqa: F401 - adds the runtimes that it can open
from compress.artifacts.eager_model import EagerModel
from compress.artifacts.graph_model import GraphModel
from compress.artifacts.hf_folder import read_json
from compress.common.errors import ArtifactInvalid, PipelineInvalid, Unavailable, located
from compress.common.requirements import refuse_unmet, require_all
from compress.core.context import Context
from compress.core.gates.gate import Gate
from compress.core.gates.quality import unlikely_points
from compress.core.gates.runtime import BASELINES
from compress.core.metrics import Metric, default_metric, metric_class
from compress.core.objectives.loss import Loss, loss_kinds
from compress.core.objectives.task import TASKS, Task
from compress.core.stage import Stage, members_of
from compress.core.validation_errors import did_you_mean
from compress.export.onnx.stage import OnnxModel
from compress.export.torchscript.stage import TorchScriptModel
from compress.pipelines.config.model_spec import SOURCE, HuggingFaceModel
from compress.pipelines.config.registry import stages as known_stages
from compress.pipelines.planning.plan import Plan, PlannedStage
from compress.quantization.stages.base import QuantizationStage
from compress.quantization.stages.mixed_precision import QuantizeMixed
from compress.training.config.parallel import Parallel
from compress.training.launch.rank_group import need_group, nodes_by_engine

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from compress.artifacts.artifact import Artifact
    from compress.data.splits import Splits
    from compress.pipelines.config.pipeline import PipelineConfig

CLASSIFIERS = ("audio", "image", "text", "video")
OF_HUGGING_FACE = {
    **{f"{kind}-classification": "classification" for kind in CLASSIFIERS},
    "feature-extraction": "embedding",
    # Labels of the masked tokens, and -100 elsewhere.
    "fill-mask": "token-classification",
    "image-segmentation": "segmentation",
    "multiple-choice": "classification",
    "object-detection": "detection",
    "text-generation": "causal-lm",
    "token-classification": "token-classification",
}
"""`model.task`, by its name in transformers' pipelines → the task; others have none here."""
OF_CLASSES = {
    **{f"For{kind.title()}Classification": "classification" for kind in CLASSIFIERS},
    "ForSequenceClassification": "classification",
    "ForMaskedLM": "token-classification",
    "ForSemanticSegmentation": "segmentation",
    "ForMultipleChoice": "classification",
    "ForObjectDetection": "detection",
    "ForCausalLM": "causal-lm",
    "LMHeadModel": "causal-lm",
    "ForTokenClassification": "token-classification",
}
"""End of the name of a model class of transformers → the task."""
OF_PROBLEMS = {"regression": "regression", "multi_label_classification": "multilabel"}
"""`problem_type` in the config of a classifier of transformers → the task."""


def build_plan(
    pipeline: PipelineConfig,
    start: str | None = None,
    until: str | None = None,
    *,
    force: bool = False,
) -> Plan:
    """Check names, order, types, requirements and device, without importing torch where possible.

    All stages run again that are made from the artifact of `start`, or with `force` at all; those
    that `until` does not need are left out. Raises PipelineInvalid; Unavailable: lacks a library.
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
        references += [(_setting_of(stage, other), other) for other in stage.extra_inputs]
        for key, reference in references:
            if reference not in earlier:
                raise PipelineInvalid(
                    f"{pipeline.place('stages', index, key)}: no earlier stage is named "
                    f"{reference!r}; {did_you_mean(reference, earlier)}"
                )
        for i, gate in enumerate(stage.gates):
            own = {name} if gate.on else set()  # the same file here
            if gate.against is not None and gate.against not in earlier | own:
                _check_runtime(pipeline, index, i, earlier)
        compared = tuple(gate.against for gate in stage.gates if gate.against in earlier)
        previous = planned[-1].name if planned else SOURCE
        with located(f"{pipeline.place('stages', index)}: "):
            resolved = stage.resolve_paths(pipeline.folder, pipeline.code_folder)
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
    written: dict[str, tuple[type[Artifact], ...]] = {SOURCE: (imported[pipeline.source_kind],)}
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
        name_one = f"name one with `input:` ({', '.join(fitting)})"
        if quantizes and p.input in quantized:
            raise PipelineInvalid(
                f"{where}: {p.input!r} is quantized already, expected a float model; {name_one}"
            )
        if not _are(found, readable):
            if fitting:
                mend = name_one
            elif written[SOURCE] == (EagerModel,):
                mend = "add one before it"
            else:
                known = known_stages().items()
                readers = [name for name, s in known if _are(found, members_of(s.reads()))]
                mend = f"begin with another form of the model, or with {', '.join(readers)}"
            raise PipelineInvalid(
                f"{where}: reads {_named(readable)}, and {p.input!r} writes {_named(found)}; {mend}"
            )
        for other in p.stage.extra_inputs:
            if not _are(written[other], p.stage.extra_input_types):
                raise PipelineInvalid(
                    f"{where}: {other!r} writes {_named(written[other])}, and with these settings "
                    f"a {_setting_of(p.stage, other)} must be {_named(p.stage.extra_input_types)}"
                )
        # A stage would refuse these only once its input has been made.
        if problem := p.stage.unsupported_input_reason(formats[p.input]):
            raise PipelineInvalid(f"{where}: input {p.input!r}: {problem}")
        written[p.name] = members_of(p.stage.writes())
        if quantizes:
            quantized.add(p.name)


def _setting_of(stage: Stage[Any, Any], other: str) -> str:
    """Return the setting that names another stage, such as `teacher`."""
    return next(key for key, value in stage if value == other and key != "input")


def _are(written: tuple[type[Artifact], ...], readable: tuple[type[Artifact], ...]) -> bool:
    """Whether each type that a stage may write is one that another reads."""
    return all(issubclass(kind, readable) for kind in written)


def _named(kinds: tuple[type[Artifact], ...]) -> str:
    return " or ".join(kind.kind for kind in kinds)


def _loss_and_metric(pipeline: PipelineConfig) -> tuple[Loss, Metric, str]:
    """Return loss and metric, as far as they follow without the data, and why this is the task."""
    spec, (task, reason) = pipeline.metric, task_of(pipeline)
    with located(f"{pipeline.place('loss')}: "):
        loss = Loss(pipeline.loss, folder=pipeline.code_folder, task=task)
        loss.check()
        if spec is None:
            return loss, default_metric(loss), reason
    with located(f"{pipeline.place('metric')}: "):
        arguments = tuple(sorted(spec.arguments.items()))
        metric = Metric(spec.name, arguments, spec.higher_is_better, pipeline.code_folder, loss)
        with explained_task(task, reason):
            metric.check()
    return loss, metric, reason


def check_needs(pipeline: PipelineConfig, planned: Iterable[PlannedStage]) -> tuple[str, ...]:
    """Refuse what stages and gates lack, before the data are loaded; return missing programs."""
    require_all(pipeline.model.requirements, pipeline.place("model"))
    if pipeline.data:
        require_all(pipeline.data.requirements, pipeline.place("data"))
    if pipeline.tracker:
        require_all(pipeline.tracker.requirements, pipeline.place("tracker"))
    if pipeline.device != "cpu":
        # A plan for the CPU is checked without it, within a second.
        import torch

        index = int(pipeline.device.partition(":")[2] or 0)
        if index >= torch.cuda.device_count():
            raise Unavailable(
                f"{pipeline.place('device')}: {pipeline.device!r} asked for and PyTorch "
                f"{torch.__version__} sees {torch.cuda.device_count()} CUDA devices; use "
                "`device: cpu`"
            )
    names = {stage.title for stage in pipeline.stages}
    for p in planned:
        for location, name, step in _with_gates(p):
            if step.needs_data and pipeline.data is None:
                where = f"{pipeline.place(*location)} ({name})"
                raise PipelineInvalid(f"{where}: needs data, and the file has no `data:` section")
        for i, gate in enumerate(p.stage.gates):
            where = f"{pipeline.place('stages', p.index, 'gates', i)} ({gate.gate})"
            for kind in members_of(p.stage.writes()):
                with located(f"{where}: "):
                    if problem := gate.unsuitable_artifact(kind) or gate.unsuitable_device(kind):
                        raise PipelineInvalid(problem)
            for called in (p, *(other for other in planned if other.name == gate.against)):
                refuse_unmet(called.stage.unmet_by_gate(gate), where)
            if gate.against in BASELINES and gate.against not in names:
                runtime = BASELINES[gate.against]
                require_all(runtime.requirements, f"{where}: against {gate.against}")
        if pipeline.metric is not None:
            check_metric(pipeline, p, pipeline.metric.name)
    return check_conditions(pipeline, planned, None)


def check_conditions(
    pipeline: PipelineConfig, planned: Iterable[PlannedStage], data: Splits | None
) -> tuple[str, ...]:
    """Refuse what stages and gates cannot do here; return a line for each missing program."""
    context = Context(root=Path(), data=data, device=pipeline.device)
    programs = []
    for p in planned:
        for path, part in p.stage.nested():
            if isinstance(part, Parallel) and not nodes_by_engine.get():
                with located(f"{pipeline.place('stages', p.index, *path)} ({p.name}): "):
                    need_group(part)
        for location, name, step in _with_gates(p):
            for unmet in step.unmet(context):
                # A gate is evaluated after hours, a stage that needs a program stops by itself.
                if not unmet.is_program or isinstance(step, Gate):
                    where = pipeline.place(*location, *unmet.setting)
                    raise unmet.error(f"{where} ({name}): {unmet.problem}")
                programs.append(
                    f"{name} will stop: {unmet.problem} (the stages before it run and are kept)"
                )
    return tuple(programs)


def _with_gates(
    planned: PlannedStage,
) -> Iterator[tuple[tuple[str | int, ...], str, Stage[Any, Any] | Gate]]:
    """Yield a stage and its gates, each after its location in the file and its name."""
    location = ("stages", planned.index)
    yield location, planned.name, planned.stage
    for i, gate in enumerate(planned.stage.gates):
        yield (*location, "gates", i), gate.gate, gate


def _check_runtime(pipeline: PipelineConfig, index: int, number: int, earlier: Set[str]) -> None:
    """Refuse an `against` that names neither an earlier stage nor a runtime of the float model."""
    gate = pipeline.stages[index].gates[number]
    name, where = str(gate.against), pipeline.place("stages", index, "gates", number, "against")
    if name not in BASELINES or not gate.allows_runtime:
        known = {*earlier, *(BASELINES if gate.allows_runtime else ())}
        raise PipelineInvalid(
            f"{where}: no earlier stage is named {name!r}; {did_you_mean(name, known)}"
        )
    # The stage would be meant as likely as the runtime.
    if name in {stage.title for stage in pipeline.stages}:
        raise PipelineInvalid(
            f"{where}: {name!r} is a runtime, and a stage that is not earlier has that name; "
            "rename the stage"
        )
    takes = BASELINES[name].kinds | BASELINES[name].reads
    if pipeline.source_kind not in takes:
        raise PipelineInvalid(
            f"{where}: {name} runs {' and '.join(sorted(takes))} models, and this one comes in as "
            f"{pipeline.source_kind}; name an earlier stage, or `source`"
        )


def check_metric(pipeline: PipelineConfig, planned: PlannedStage, metric: str) -> None:
    """Refuse limits of a stage that do not fit the metric's direction or unit."""
    if isinstance(planned.stage, QuantizeMixed) and metric_class(metric).is_fraction:
        problem = unlikely_points(planned.stage.max_drop_points)
        if problem:
            where = pipeline.place("stages", planned.index)
            raise PipelineInvalid(f"{where} ({planned.name}): max_drop_points: {problem}")
    for i, gate in enumerate(planned.stage.gates):
        if problem := gate.unsuitable_metric(metric):
            where = pipeline.place("stages", planned.index, "gates", i)
            raise PipelineInvalid(f"{where} ({gate.gate}): {problem}")


def explained_task(task: Task | None, reason: str) -> AbstractContextManager[None]:
    """Append to errors what the task was inferred from; nothing where the reason is empty."""
    return located("", end=f" (task: {task.name}, {reason})" if task and reason else "")


def fit_to_task(
    pipeline: PipelineConfig, planned: tuple[PlannedStage, ...], task: Task | None
) -> tuple[PlannedStage, ...]:
    """Return the stages without default gates that do not suit the task; refuse the file's own."""
    if task is None:
        return planned
    fitted = tuple(replace(p, stage=p.stage.for_task(task)) for p in planned)
    for p in fitted:
        for i, gate in enumerate(p.stage.gates):
            if problem := gate.unsuitable_task(task):
                where = pipeline.place("stages", p.index, "gates", i)
                raise PipelineInvalid(f"{where} ({gate.gate}): {problem}")
    return fitted


def check_loss(pipeline: PipelineConfig, planned: Iterable[PlannedStage], loss: Loss) -> None:
    """Refuse stages whose settings do not fit the loss."""
    for p in planned:
        with located(f"{pipeline.place('stages', p.index)} ({p.name}): ", PipelineInvalid):
            p.stage.check_loss(loss)


def task_of(pipeline: PipelineConfig) -> tuple[Task | None, str]:
    """Return the task that the file names, or implies, and why; empty where it is named."""
    if pipeline.task is not None:
        return TASKS[pipeline.task], ""
    loss = pipeline.loss if pipeline.loss in loss_kinds() else None
    if loss is not None and loss_kinds()[loss].of_numbers:
        return TASKS["regression"], f"as loss is {loss}"
    metric = pipeline.metric.name if pipeline.metric and loss is None else ""
    if metric_class(metric).of_numbers:
        return TASKS["regression"], f"as metric is {metric}"
    if not isinstance(pipeline.model, HuggingFaceModel):
        return None, ""
    try:
        config = read_json(pipeline.folder / pipeline.model.huggingface / "config.json")
        class_name = str((config.get("architectures") or [""])[0])
        problem = config.get("problem_type")
    except (ArtifactInvalid, LookupError, TypeError):
        return None, ""  # refused where the folder is read
    name = OF_HUGGING_FACE.get(pipeline.model.task or "")
    reason = f"as model.task is {pipeline.model.task}"
    if pipeline.model.task is None:
        ends = (task for end, task in OF_CLASSES.items() if class_name.endswith(end))
        name, reason = next(ends, None), f"as the model is a {class_name}"
    if name == "classification" and problem in OF_PROBLEMS:
        name, reason = OF_PROBLEMS[problem], f"as the model's problem_type is {problem}"
    task = TASKS.get(name or "")
    # A loss that the file names says more than a class, which may be used for something else.
    if task is None or (loss is not None and loss not in task.losses):
        return None, ""
    return task, reason
