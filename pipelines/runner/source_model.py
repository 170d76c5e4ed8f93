"""Imports the model that a pipeline file names."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from compress.artifacts import hf_folder
from compress.artifacts.recipe import Recipe
from compress.common.config import first_problem
from compress.common.errors import CompressError, PipelineInvalid
from compress.common.factories import resolve
from compress.common.signature import OutputSpec, Signature
from compress.export.imported.exported_files import import_file
from compress.pipelines.config.data_spec import FileData
from compress.pipelines.config.model_spec import (
    MODEL_CLASSES,
    FactoryModel,
    HuggingFaceModel,
    ModelFile,
    TimmModel,
)
from compress.pipelines.system.signals import only_signals_interrupt

if TYPE_CHECKING:
    from compress.artifacts.artifact import Artifact
    from compress.data.splits import Splits
    from compress.pipelines.config.pipeline import PipelineConfig


def import_model_code(pipeline: PipelineConfig) -> None:
    """Import what defines the model, ahead of its use, where an error is going to be raised."""
    spec = pipeline.model
    with suppress(CompressError), only_signals_interrupt():
        if isinstance(spec, HuggingFaceModel):
            hf_folder.import_classes(pipeline.folder / spec.huggingface)
        elif isinstance(spec, FactoryModel | TimmModel):
            resolve(recipe_of(spec).factory, pipeline.code_folder)


def import_source(pipeline: PipelineConfig, path: Path, data: Splits | None = None) -> Artifact:
    """Import the model as an artifact; it is checked on samples of the data where there are any.

    Beside it lie the files that say how the data's images or texts were prepared.
    """
    from compress.artifacts.importing import import_checkpoint
    from compress.data.infer_signature import sample_inputs

    spec = pipeline.model
    outputs = {} if spec.outputs is None else {"outputs": spec.outputs}
    try:
        signature = Signature.model_validate({"inputs": spec.inputs, "axes": spec.axes, **outputs})
    except ValidationError as error:
        message = first_problem(error)
        key = "axes" if message.startswith("axes: ") else "inputs"
        message = message.removeprefix("axes: ")
        raise PipelineInvalid(f"{pipeline.place('model', key)}: {message}") from None
    inputs, carried = sample_inputs(data, signature), carried_files(pipeline, data)
    try:
        if isinstance(spec, ModelFile):
            file = pipeline.folder / spec.file
            kind = spec.kind
            to_module = kind == "onnx" and pipeline.source_kind == "eager"
            return import_file(kind, file, signature, path, inputs, carried, to_module=to_module)
        if isinstance(spec, HuggingFaceModel):
            return _import_hugging_face(pipeline, spec, signature, path, carried)
        return import_checkpoint(
            path,
            recipe_of(spec),
            signature,
            checkpoint=pipeline.folder / spec.checkpoint if spec.checkpoint else None,
            folder=pipeline.code_folder,
            seed=pipeline.seed,
            inputs=inputs,
            carried=carried,
        )
    except CompressError as error:
        # Errors begin with the setting that is wrong; else it is the one that names the model.
        keys = [k for k in ("checkpoint", "model.inputs", "model.outputs") if k in str(error)[:20]]
        keys += [key for key in MODEL_CLASSES if key in type(spec).model_fields]
        key = keys[0].removeprefix("model.")
        message = str(error).removeprefix(f"model.{key}: ")
        raise type(error)(f"{pipeline.place('model', key)}: {message}") from error


def carried_files(pipeline: PipelineConfig, data: Splits | None) -> dict[str, bytes]:
    """Return what artifacts carry of how data of files were prepared, and the classes' names."""
    if not isinstance(pipeline.data, FileData) or data is None or data.source is None:
        return {}
    from compress.pipelines.data.preparation import files_for_classes

    first: Any = next(iter(data.datasets.values()))
    return files_for_classes(first.class_names, data.source.arguments["files"].carried)


def recipe_of(spec: FactoryModel | TimmModel) -> Recipe:
    """Return how a model of code is built."""
    if isinstance(spec, FactoryModel):
        return Recipe(factory=spec.factory, arguments=spec.arguments)
    from compress.artifacts.libraries.timm_model import FACTORY

    return Recipe(factory=FACTORY, arguments={**spec.arguments, "model_name": spec.timm})


def _import_hugging_face(
    pipeline: PipelineConfig,
    spec: HuggingFaceModel,
    signature: Signature,
    path: Path,
    carried: Mapping[str, bytes],
) -> Artifact:
    import torch

    from compress.artifacts.importing import import_module, import_streamed

    folder = pipeline.folder / spec.huggingface
    if spec.stream:
        return import_streamed(path, folder, spec.task, signature)
    trains = pipeline.stages[0].stage == "train"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(pipeline.seed)  # of an untrained head
        recipe, module = hf_folder.read_folder(
            folder, spec.task, spec.labels, untrained_head=trains
        )
    if spec.outputs is None and spec.task in hf_folder.OUTPUTS:
        outputs = tuple(OutputSpec(name=name) for name in hf_folder.OUTPUTS[spec.task])
        signature = Signature(inputs=signature.inputs, outputs=outputs, axes=signature.axes)
    carried = carried or hf_folder.files_to_carry(folder, module)
    return import_module(path, recipe, module, signature, carried=carried)
