"""Loads the data and imports the model that a pipeline file names."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from compress.artifacts.recipe import Recipe
from compress.checkpoint.loading import checkpoint_digest
from compress.common.errors import CompressError, PipelineInvalid
from compress.common.factories import local_sources, sources_digest
from compress.common.signature import Signature
from compress.core.context import Context
from compress.pipelines.config.model_spec import (
    MODEL_CLASSES,
    SOURCE,
    FactoryModel,
    HuggingFaceModel,
    ModelFile,
    TimmModel,
)
from compress.pipelines.planning.loss_and_metric import fitting_loss, infer_loss_and_metric
from compress.pipelines.planning.planner import build_plan, task_of
from compress.pipelines.system.machine_info import version_of
from compress.pipelines.system.temp_files import temporary_files

if TYPE_CHECKING:
    from collections.abc import Sequence

    from compress.artifacts.artifact import Artifact
    from compress.common.signature import AxisBounds, TensorSpec
    from compress.core.progress import Progress
    from compress.data.splits import Splits
    from compress.pipelines.config.pipeline import PipelineConfig
    from compress.pipelines.planning.plan import Plan


def resolve_inputs(pipeline: PipelineConfig) -> tuple[PipelineConfig, Splits | None, str]:
    """Load the data, and infer of it `model.inputs`, or what is not declared of them.

    Returns:
        The pipeline with `model.inputs`, its data if any, and a line that names what was inferred.
    """
    from compress.data.infer_signature import (
        described,
        inputs_of,
        with_named_length,
        with_values_seen,
    )
    from compress.serve.torchserve.stage import PackageTorchServe

    data = load_data(pipeline)
    spec, inputs, origin = pipeline.model, pipeline.model.inputs, "the samples of the data"
    try:
        if inputs is None and isinstance(spec, ModelFile):
            from compress.pipelines.models.exported_files import signature_of

            file = pipeline.folder / spec.file
            if signature := signature_of(spec.kind, file):
                inputs, origin = signature.inputs, file.name
        if inputs is None and data is None and isinstance(spec, HuggingFaceModel | TimmModel):
            (inputs, axes), origin = _declared_inputs(pipeline, spec), "the model's configuration"
            spec = spec.model_copy(update={"axes": spec.axes or axes})
        if inputs is not None:
            inputs = with_values_seen(inputs, data) if data else inputs
        else:
            if data is None:
                raise PipelineInvalid(
                    "inputs are not declared, and there is no `data:` whose samples show them"
                )
            inputs = inputs_of(data, lambda: _parameters(pipeline))
            task, _ = task_of(pipeline)
            if task is not None and task.next_token:
                # Samples of one length are cut from a text; the model reads any.
                inputs = with_named_length(inputs)
                if isinstance(spec, HuggingFaceModel) and not spec.axes:
                    spec = spec.model_copy(update={"axes": _declared_inputs(pipeline, spec)[1]})
    except CompressError as error:
        raise type(error)(f"{pipeline.place('model')}: {error}") from error
    if data is not None:
        names, dtypes = zip(*((spec.name, spec.dtype) for spec in inputs), strict=True)
        source = data.source and replace(data.source, input_names=names, input_dtypes=dtypes)
        data = replace(data, input_names=names, input_dtypes=dtypes, source=source)
    inferred = f"model.inputs, from {origin}: {described(inputs)}"
    if pipeline.model.inputs is not None:
        inferred = ""
    model = spec.model_copy(update={"inputs": inputs})
    pipeline = pipeline.model_copy(update={"model": model})
    # Requests, images or texts, must become the model's inputs.
    for index, stage in enumerate(pipeline.stages):
        lacks = any(need.missing() for need in stage.all_requirements() if not need.program)
        if lacks or not isinstance(stage, PackageTorchServe):
            continue  # the planner refuses a stage that lacks a library
        try:
            package = stage.resolve_paths(pipeline.folder, pipeline.code_folder)
            package.check_inputs(Signature(inputs=inputs))
        except CompressError as error:
            where = pipeline.place("stages", index)
            raise PipelineInvalid(f"{where} ({stage.title}): {error}") from error
    return pipeline, data, inferred


def _parameters(pipeline: PipelineConfig) -> Sequence[str]:
    """Return the names of the model's positional parameters."""
    from compress.common.forward import positional_parameters

    spec = pipeline.model
    if isinstance(spec, ModelFile):
        from compress.export.torchscript.file_io import load

        arguments = load(pipeline.folder / spec.file).forward.schema.arguments
        return [argument.name for argument in arguments[1:]]  # without self
    if isinstance(spec, HuggingFaceModel):
        from compress.artifacts.hf_folder import read_architecture, read_folder

        folder = pipeline.folder / spec.huggingface
        if spec.stream:
            return positional_parameters(read_architecture(folder, spec.task))
        _, module = read_folder(folder, spec.task, untrained_head=True)
        return positional_parameters(module)
    return positional_parameters(_recipe(spec).build(pipeline.code_folder))


def _declared_inputs(
    pipeline: PipelineConfig, spec: HuggingFaceModel | TimmModel
) -> tuple[tuple[TensorSpec, ...], dict[str, AxisBounds]]:
    """Return the inputs that a library's model declares, and bounds of their axes."""
    import torch

    from compress.artifacts.importing import inputs_of_timm, inputs_of_transformer

    if isinstance(spec, HuggingFaceModel):
        from compress.artifacts.hf_folder import read_architecture

        folder = pipeline.folder / spec.huggingface
        return inputs_of_transformer(read_architecture(folder, spec.task), folder)
    with torch.device("meta"):
        return inputs_of_timm(_recipe(spec).build())


def load_data(pipeline: PipelineConfig) -> Splits | None:
    """Call the data factory, or return None where there is no data section."""
    if pipeline.data is None:
        return None
    from compress.data.splits import DataReference

    spec = pipeline.data
    reference = DataReference(
        spec.factory,
        dict(spec.arguments),
        pipeline.code_folder,
        spec.batch_size,
        spec.loader.resolve_paths(pipeline.folder),
        tuple(tensor.name for tensor in pipeline.model.inputs or ()),
        tuple(tensor.dtype for tensor in pipeline.model.inputs or ()),
    )
    try:
        return reference.load()
    except PipelineInvalid as error:
        message = str(error).removeprefix(f"data.factory {spec.factory!r}: ")
        raise PipelineInvalid(f"{pipeline.place('data', 'factory')}: {message}") from error


def measuring_context(
    pipeline: PipelineConfig, root: Path, progress: Progress
) -> tuple[Plan, PipelineConfig, Context]:
    """Return a context to measure outside of a run; plan and pipeline completed by the data."""
    plan = build_plan(pipeline)
    pipeline, data, _ = resolve_inputs(pipeline)
    plan, pipeline = infer_loss_and_metric(plan, pipeline, data)
    context = Context(
        root=root,
        data=data,
        loss=plan.loss,
        metric=plan.metric,
        device=pipeline.device,
        threads=pipeline.threads,
        seed=pipeline.seed,
        progress=progress,
    )
    return plan, pipeline, context


def check_model(pipeline: PipelineConfig) -> tuple[Signature, str, Splits | None]:
    """Build the model and read its weights and the data, without storing anything.

    Returns:
        The model's interface, lines that name what of it and of the loss was inferred, the data.
    """
    from compress.data.fingerprint import SAMPLED_FOR_FINGERPRINT

    plan = build_plan(pipeline)
    pipeline, data, inferred = resolve_inputs(pipeline)
    plan, pipeline = infer_loss_and_metric(plan, pipeline, data)
    with temporary_files(), tempfile.TemporaryDirectory() as folder:
        source = import_source(pipeline, Path(folder) / SOURCE, data)
        context = Context(
            root=Path(folder), data=data, device=pipeline.device, threads=pipeline.threads
        )
        contents = data.contents(SAMPLED_FOR_FINGERPRINT) if data else None
        loss = fitting_loss(plan, pipeline, source, context, contents)
        lines = [inferred, plan.task_line, loss]
        return source.signature, "\n".join(filter(None, lines)), data


def import_source(pipeline: PipelineConfig, path: Path, data: Splits | None = None) -> Artifact:
    """Import the model as an artifact; it is checked on samples of the data where there are any."""
    from compress.artifacts.importing import import_checkpoint
    from compress.data.infer_signature import sample_inputs

    spec = pipeline.model
    outputs = {} if spec.outputs is None else {"outputs": spec.outputs}
    try:
        signature = Signature.model_validate({"inputs": spec.inputs, "axes": spec.axes, **outputs})
    except ValidationError as error:
        message = error.errors()[0]["msg"].removeprefix("Value error, ")
        key = "axes" if message.startswith("axes: ") else "inputs"
        message = message.removeprefix("axes: ")
        raise PipelineInvalid(f"{pipeline.place('model', key)}: {message}") from None
    inputs = sample_inputs(data, signature)
    try:
        if isinstance(spec, ModelFile):
            from compress.pipelines.models.exported_files import import_file

            return import_file(spec.kind, pipeline.folder / spec.file, signature, path, inputs)
        if isinstance(spec, HuggingFaceModel):
            return _import_hugging_face(pipeline, spec, signature, path)
        return import_checkpoint(
            path,
            _recipe(spec),
            signature,
            checkpoint=pipeline.folder / spec.checkpoint if spec.checkpoint else None,
            folder=pipeline.code_folder,
            seed=pipeline.seed,
            inputs=inputs,
        )
    except CompressError as error:
        # Errors begin with the setting that is wrong; else it is the one that names the model.
        keys = [k for k in ("checkpoint", "model.inputs", "model.outputs") if k in str(error)[:20]]
        keys += [key for key in MODEL_CLASSES if key in type(spec).model_fields]
        key = keys[0].removeprefix("model.")
        message = str(error).removeprefix(f"model.{key}: ")
        raise type(error)(f"{pipeline.place('model', key)}: {message}") from error


def _recipe(spec: FactoryModel | TimmModel) -> Recipe:
    if isinstance(spec, FactoryModel):
        return Recipe(factory=spec.factory, arguments=spec.arguments)
    from compress.artifacts.libraries.timm_model import FACTORY

    return Recipe(factory=FACTORY, arguments={**spec.arguments, "model_name": spec.timm})


def _import_hugging_face(
    pipeline: PipelineConfig, spec: HuggingFaceModel, signature: Signature, path: Path
) -> Artifact:
    import torch

    from compress.artifacts.hf_folder import OUTPUTS, files_to_carry, read_folder
    from compress.artifacts.importing import import_module
    from compress.common.signature import OutputSpec

    if spec.stream:
        from compress.artifacts.importing import import_streamed

        return import_streamed(path, pipeline.folder / spec.huggingface, spec.task, signature)
    trains = pipeline.stages[0].stage == "train"
    folder = pipeline.folder / spec.huggingface
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(pipeline.seed)  # of an untrained head
        recipe, module = read_folder(folder, spec.task, untrained_head=trains)
    if spec.outputs is None and spec.task in OUTPUTS:
        outputs = tuple(OutputSpec(name=name) for name in OUTPUTS[spec.task])
        signature = Signature(inputs=signature.inputs, outputs=outputs, axes=signature.axes)
    carried = files_to_carry(folder, module)
    return import_module(path, recipe, module, signature, carried=carried)


def source_parts(pipeline: PipelineConfig) -> dict[str, object]:
    """Return what decides the imported model: its settings, and hashes of its code and weights."""
    spec = pipeline.model
    parts: dict[str, object] = {"stage": SOURCE, "settings": spec.model_dump(mode="json")}
    if isinstance(spec, HuggingFaceModel):
        from compress.artifacts.hf_folder import folder_digest

        return {
            **parts,
            "library": version_of("transformers"),
            "checkpoint": folder_digest(pipeline.folder / spec.huggingface),
            "trains": pipeline.stages[0].stage == "train",
        }
    if isinstance(spec, ModelFile):
        from compress.pipelines.models.exported_files import digest_of

        return {**parts, "checkpoint": digest_of(pipeline.folder / spec.file)}
    factory = _recipe(spec).factory
    sources = local_sources(factory, pipeline.code_folder)
    library = "timm" if isinstance(spec, TimmModel) else factory.partition(":")[0]
    checkpoint = pipeline.folder / spec.checkpoint if spec.checkpoint else None
    return {
        **parts,
        "code": sources_digest(sources),
        "library": None if sources else version_of(library),
        "checkpoint": checkpoint_digest(checkpoint) if checkpoint else None,
    }
