"""Makes artifacts of models in memory: modules and exported programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from compress.artifacts.artifact import Artifact
from compress.artifacts.eager_model import EagerModel
from compress.artifacts.graph_model import GraphModel
from compress.artifacts.in_process import register
from compress.common.errors import PipelineInvalid
from compress.common.forward import positional_parameters
from compress.common.signature import Signature
from compress.data.infer_signature import inputs_of, sample_inputs
from compress.functional.in_memory import make_splits

if TYPE_CHECKING:
    from compress.data.splits import Splits

Inputs = torch.Tensor | Sequence[torch.Tensor] | Mapping[str, torch.Tensor]
"""Example inputs: one tensor, several in order, or by the names of forward's parameters."""


def with_splits(
    model: Any,
    data: Any,
    example_inputs: Inputs | None = None,
    reads: Any = Artifact,
    **splits: Any,
) -> tuple[Artifact, Splits | None]:
    """Return a model as :func:`as_artifact` does, and its data as splits; None without any."""
    names = forward_names(model)
    made = make_splits(data, parameters=names, **splits)
    return as_artifact(model, made, example_inputs, reads), made


def as_artifact(
    model: Any, data: Splits | None, example_inputs: Inputs | None = None, reads: Any = Artifact
) -> Artifact:
    """Return a model as an artifact of a type that a stage reads; artifacts are returned as is.

    Raises:
        PipelineInvalid: it is no model, or of a kind that the stage does not read, or there are
            neither data nor inputs to infer its signature from.
        ArtifactInvalid: the module cannot be copied, or answers otherwise when built again.
    """
    if isinstance(model, GraphModel) and not isinstance(model, reads):
        return as_artifact_of_graph(model.program(), model.signature)
    if isinstance(model, Artifact):
        readable: bool = isinstance(model, reads)
        if not readable:
            raise PipelineInvalid(
                f"found an artifact of kind {model.kind}, which this stage does not read; give it "
                "the model from before it was exported"
            )
        return model
    if isinstance(model, torch.export.ExportedProgram):
        return as_artifact_of_graph(model, _signature(data, [], example_inputs))
    if not isinstance(model, torch.nn.Module):
        raise PipelineInvalid(
            f"model is a {type(model).__name__}, expected a torch.nn.Module, a torch.export "
            "program or an artifact"
        )
    inputs = (example_inputs,) if isinstance(example_inputs, torch.Tensor) else example_inputs
    if inputs is not None:
        return EagerModel.from_module(model, example_inputs=inputs)
    floats = [x for x in model.parameters() if x.is_floating_point()]
    dtype = str(floats[0].dtype).removeprefix("torch.") if floats else "float32"
    signature = _signature(data, positional_parameters(model), None, dtype)
    samples = sample_inputs(data, signature)
    return EagerModel.from_module(model, signature=signature, example_inputs=samples)


def forward_names(model: Any) -> list[str]:
    """Return the names of the tensors that a model takes; none where it does not say."""
    if isinstance(model, Artifact):
        return [spec.name for spec in model.signature.inputs]
    return positional_parameters(model) if isinstance(model, torch.nn.Module) else []


def as_artifact_of_graph(program: torch.export.ExportedProgram, signature: Signature) -> EagerModel:
    """Return an exported program as a model that stages trace again; it loads in this process."""

    def build() -> torch.nn.Module:
        module: Any = program.module(check_guards=False)
        # A graph has one mode, the one that it was traced in, and torch raises for both calls.
        module.train = module.eval = partial(_same, module)
        return module  # type: ignore[no-any-return]

    reference = register(build, "exported_program")
    return EagerModel.from_module(build(), signature=signature, factory=reference)


def _same(module: torch.nn.Module, mode: bool = True) -> torch.nn.Module:
    return module


def _signature(
    data: Splits | None,
    parameters: list[str],
    inputs: Inputs | None,
    float_dtype: str = "float32",
) -> Signature:
    if inputs is not None:
        inputs = (inputs,) if isinstance(inputs, torch.Tensor) else inputs
        return Signature.from_examples(inputs)
    if data is None:
        raise PipelineInvalid(
            "nothing shows what the model takes; pass example_inputs=(x,) or data"
        )
    return Signature(inputs=inputs_of(data, lambda: parameters, float_dtype))
