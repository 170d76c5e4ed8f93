"""The user's model and data, as the pipeline file names them."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from compress.core.checkpoint import checkpoint_digest, import_checkpoint
from compress.core.data import DataReference, Splits
from compress.core.errors import CompressError, PipelineInvalid
from compress.core.factory import local_sources, sources_digest
from compress.core.recipe import Recipe
from compress.core.signature import Signature
from pipelines.machine import version_of
from pipelines.plan import SOURCE

if TYPE_CHECKING:
    from compress.core.eager import EagerModel
    from pipelines.pipeline import Pipeline


def load_data(pipeline: Pipeline) -> Splits | None:
    """Call the data factory, or return None where there is no data section.

    Raises:
        PipelineInvalid: it cannot be imported, fails, or returns something else than datasets.
    """
    if pipeline.data is None:
        return None
    spec = pipeline.data
    names = tuple(tensor.name for tensor in pipeline.model.inputs)
    reference = DataReference(
        spec.factory,
        dict(spec.arguments),
        pipeline.code_folder,
        spec.batch_size,
        spec.loader.beside(pipeline.folder),
        names,
    )
    try:
        return reference.load()
    except PipelineInvalid as error:
        message = str(error).removeprefix(f"data.factory {spec.factory!r}: ")
        raise PipelineInvalid(f"{pipeline.place('data', 'factory')}: {message}") from error


def check_model(pipeline: Pipeline) -> None:
    """Build the model and read its checkpoint, keeping nothing.

    Raises:
        CompressError: the factory, the checkpoint or the declared inputs are wrong.
    """
    with tempfile.TemporaryDirectory() as folder:
        import_source(pipeline, Path(folder) / SOURCE)


def import_source(pipeline: Pipeline, path: Path) -> EagerModel:
    """Seal the model as it came in.

    Raises:
        CompressError: the factory, the checkpoint or the declared inputs are wrong.
    """
    spec = pipeline.model
    outputs = {} if spec.outputs is None else {"outputs": spec.outputs}
    try:
        signature = Signature(inputs=spec.inputs, **outputs)
    except ValidationError as error:
        message = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise PipelineInvalid(f"{pipeline.place('model', 'inputs')}: {message}") from None
    try:
        return import_checkpoint(
            path,
            Recipe(factory=spec.factory, arguments=spec.arguments),
            signature,
            checkpoint=pipeline.checkpoint,
            folder=pipeline.code_folder,
            seed=pipeline.seed,
        )
    except CompressError as error:
        found = (k for k in ("checkpoint", "model.inputs", "model.outputs") if k in str(error)[:20])
        key = next(found, "factory").removeprefix("model.")
        message = str(error).removeprefix(f"model.{key}: ")
        raise type(error)(f"{pipeline.place('model', key)}: {message}") from error


def source_parts(pipeline: Pipeline) -> dict[str, object]:
    """Return what decides the imported model: its settings, its source code and its weights."""
    checkpoint = pipeline.checkpoint
    sources = local_sources(pipeline.model.factory, pipeline.code_folder)
    return {
        "stage": SOURCE,
        "settings": pipeline.model.model_dump(mode="json"),
        "code": sources_digest(sources),
        "library": None if sources else version_of(pipeline.model.factory.partition(":")[0]),
        "checkpoint": checkpoint_digest(checkpoint) if checkpoint else None,
    }
