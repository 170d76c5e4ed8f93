"""Makes artifacts of models in memory, and splits of the data that a notebook has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    StackDataset,
    Subset,
    TensorDataset,
    default_collate,
)

from compress.artifacts.artifact import Artifact
from compress.artifacts.eager_model import EagerModel
from compress.artifacts.graph_model import GraphModel
from compress.artifacts.in_process import register
from compress.common.errors import PipelineInvalid, first_line
from compress.common.forward import positional_parameters
from compress.common.process import seeded
from compress.common.signature import Signature
from compress.data.batch import LABELS, stack_columns
from compress.data.infer_signature import inputs_of, sample_inputs
from compress.data.loader_config import Loading
from compress.data.splits import Splits
from compress.data.targets import describe

Inputs = torch.Tensor | Sequence[torch.Tensor] | Mapping[str, torch.Tensor]
"""Example inputs: one tensor, several in order, or by the names of forward's parameters."""
SPLITS = ("train", "val", "validation", "test", "calibration", "unlabelled")
"""Keys by which a mapping is one of splits; `validation` is taken as `val`."""


def make_splits(
    data: Any = None, *, parameters: Sequence[str] = (), **splits: Any
) -> Splits | None:
    """Return splits of data in memory; None without data.

    `data` are splits, a mapping of them, or one dataset, which becomes `train`; datasets given by
    the name of their split go before them. Columns of a Hugging Face dataset that are neither
    labels nor `parameters` of the model's forward are left out. PipelineInvalid where something is
    no data, or the loaders collate in different ways.
    """
    if isinstance(data, Splits):
        if any(value is not None for value in splits.values()):
            raise PipelineInvalid("found Splits and other data; put all into the Splits")
        return data
    by_name: dict[str, Any] = {}
    if isinstance(data, Mapping) and data and set(data) <= set(SPLITS):
        by_name = {"val" if name == "validation" else name: each for name, each in data.items()}
    elif data is not None:
        by_name = {"train": data}
    by_name |= {name: each for name, each in splits.items() if each is not None}
    if not by_name:
        return None
    loaders = [each for each in by_name.values() if isinstance(each, DataLoader)]
    sizes = [loader.batch_size for loader in loaders if loader.batch_size]
    return Splits(
        {name: as_dataset(each, parameters) for name, each in by_name.items()},
        batch_size=max(sizes, default=Splits.batch_size),
        loading=Loading(collate_fn=_collate_reference(loaders, len(by_name))),
    )


def _collate_reference(loaders: Sequence[DataLoader[Any]], count: int) -> str | None:
    """Return a reference to the loaders' own way to collate; None if it is torch's."""
    own = [x.collate_fn for x in loaders if x.collate_fn is not default_collate]
    if not own:
        return None
    if len(own) < count or any(each != own[0] for each in own):
        raise PipelineInvalid("the splits are collated in different ways; give all one collate_fn")
    return register(own[0], getattr(own[0], "__name__", type(own[0]).__name__))


def as_dataset(data: Any, parameters: Sequence[str] = ()) -> Dataset[Any]:
    """Return data of one split as a dataset of samples; raise PipelineInvalid if it is none."""
    if isinstance(data, DataLoader):
        return _chosen_rows(data, as_dataset(data.dataset, parameters))
    if isinstance(data, torch.Tensor | np.ndarray):
        return TensorDataset(_tensor(data))
    if isinstance(data, tuple) and data and all(hasattr(each, "shape") for each in data):
        tensors: list[Any] = [_tensor(each) for each in data]
        if len({len(each) for each in tensors}) > 1:
            lengths = ", ".join(str(len(each)) for each in tensors)
            raise PipelineInvalid(f"the arrays have {lengths} rows, expected as many in each")
        if len(tensors) < 3:
            return TensorDataset(*tensors)
        return StackDataset(StackDataset(*tensors[:-1]), tensors[-1])  # ((x1, x2, …), y)
    if isinstance(data, Mapping) and data and all(hasattr(each, "shape") for each in data.values()):
        by_name: dict[str, Any] = {_column_name(c): _tensor(each) for c, each in data.items()}
        return stack_columns(by_name)
    columns = getattr(data, "column_names", None)
    if isinstance(columns, list) and not isinstance(data, Mapping):
        kept = [c for c in columns if not parameters or c in (*parameters, LABELS, "label")]
        return _Columns(data, kept)
    if isinstance(data, Sized) and hasattr(data, "__getitem__") and not isinstance(data, Mapping):
        return data  # type: ignore[return-value]  # Splits refuses what has no samples by index
    raise PipelineInvalid(
        f"the data are {describe(data)}, expected a DataLoader, a Dataset, a list of samples, "
        "tensors or arrays (inputs, targets), or a mapping of splits"
    )


def _chosen_rows(loader: DataLoader[Any], dataset: Dataset[Any]) -> Dataset[Any]:
    """Return the rows that a loader's sampler chooses once each, in the dataset's order."""
    sampler: Any = loader.batch_sampler or loader.sampler
    if type(sampler) is BatchSampler:
        sampler = sampler.sampler
    if type(sampler) is SequentialSampler or isinstance(loader.dataset, IterableDataset):
        return dataset
    with seeded(0, "cpu"):
        drawn = list(sampler)
    batches = (x if isinstance(x, list | tuple) else [x] for x in drawn)
    rows = [int(row) for batch in batches for row in batch]
    name = type(sampler).__name__
    if isinstance(sampler, DistributedSampler):
        raise PipelineInvalid(
            f"{name} divides the rows among processes, which training does itself; leave it out"
        )
    if len(set(rows)) < len(rows):
        raise PipelineInvalid(
            f"{name} draws rows more than once; give a dataset that holds each row as often as it "
            "counts, or class_weights to the training"
        )
    return dataset if len(rows) == len(dataset) else Subset(dataset, sorted(rows))  # type: ignore[arg-type]


def _tensor(array: Any) -> torch.Tensor:
    try:
        tensor = torch.as_tensor(array)
    except (TypeError, ValueError, RuntimeError) as error:  # of objects, or ragged lists
        raise PipelineInvalid(f"data: not an array of numbers: {first_line(error)}") from error
    # NumPy computes in float64 by default, and models in float32.
    return tensor.float() if tensor.dtype == torch.float64 else tensor


class _Columns(Dataset[Any]):
    """Rows as mappings of tensors."""

    def __init__(self, rows: Any, kept: list[str]) -> None:
        self.rows, self.kept = rows, kept

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        row = self.rows[index]
        return {_column_name(c): torch.as_tensor(row[c]) for c in self.kept}


def _column_name(column: str) -> str:
    return LABELS if column == "label" else column


def as_artifact(
    model: Any, data: Splits | None, example_inputs: Inputs | None = None, reads: Any = Artifact
) -> Artifact:
    """Return a model as an artifact of a type that a stage reads; artifacts are returned as is.

    PipelineInvalid where it is no model, or of a kind that the stage does not read, or neither data
    nor inputs show its signature; ArtifactInvalid where the module cannot be copied.
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
    data: Splits | None, parameters: list[str], inputs: Inputs | None, float_dtype: str = "float32"
) -> Signature:
    if inputs is not None:
        inputs = (inputs,) if isinstance(inputs, torch.Tensor) else inputs
        return Signature.from_examples(inputs)
    if data is None:
        raise PipelineInvalid(
            "nothing shows what the model takes; pass example_inputs=(x,) or data"
        )
    return Signature(inputs=inputs_of(data, lambda: parameters, float_dtype))
