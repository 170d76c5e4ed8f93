"""The model that a pipeline imports: a factory, a Hugging Face folder, a timm name, or a file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import Discriminator, Field, JsonValue, Tag, field_validator, model_validator

from compress.artifacts.hf_folder import Task
from compress.common import signature
from compress.common.config import Settings
from compress.common.factories import Reference
from compress.common.requirements import Requirement, pip_install
from compress.core.validation_errors import closest
from compress.export.imported.exported_files import KINDS, Kind

SOURCE = "source"  # name under which stages and gates refer to the imported model

TIMM = Requirement(what="timm", install="pip install --no-deps 'timm>=1.0.20,<2'")
"""Without its dependencies, as pip would bring a torchvision of PyTorch's CUDA build."""


def refuse_repeated(what: str, names: Iterable[str]) -> None:
    """Raise ValueError if one of the names, which are those of `what`, is given twice."""
    if repeated := [name for name, count in Counter(names).items() if count > 1]:
        raise ValueError(f"{what} {repeated[0]!r} is given twice")


class ModelInterface(Settings):
    """Inputs, outputs and axis bounds of a model, whatever it is imported from."""

    inputs: Annotated[tuple[signature.TensorSpec, ...], Field(min_length=1)] | None = None
    """Input tensors. Names that are parameters of forward are passed to those; other names are
    free, and pass by position. Left out, they are taken from the samples of the data."""
    axes: dict[str, signature.AxisBounds] = {}
    """Named axis → the sizes that it may have, e.g. `{sequence: {min: 2, max: 512}}`; any by
    default. Exports are traced and compared within these, and served requests refused outside."""
    outputs: tuple[signature.OutputSpec, ...] | None = None
    """Names of the output tensors. Those that there are choose among them, in this order; names of
    which none is known name them all anew. By default all are given, under their keys, or as
    `output`, `output_0` and so on."""

    requirements: ClassVar[tuple[Requirement, ...]] = ()

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if self.inputs is not None:
            if not self.inputs[0].shape:
                raise ValueError(
                    f"inputs: the first axis of the first one is the batch, and "
                    f"{self.inputs[0].name!r} has none; give its shape, or list another one first"
                )
            signature.refuse_other_axes(self.inputs, self.axes)
        signature.refuse_double_names(self.inputs or (), self.outputs or ())
        return self

    @property
    def kind(self) -> str:
        """The kind of artifact that the model becomes."""
        return "eager"


class FactoryModel(ModelInterface):
    """A model of your own code."""

    factory: Reference
    """`module:callable` that returns the torch.nn.Module; looked up in the code folder first."""
    arguments: dict[str, JsonValue] = {}
    """Keyword arguments of the factory."""
    checkpoint: str | None = None
    """Weights, relative to this file: .safetensors or .bin (or the .index.json of several), .pt,
    .pth, Lightning's .ckpt, or a directory of torch.distributed.checkpoint, Hugging Face's Trainer,
    Accelerate or DeepSpeed; without it the factory's own."""


class HuggingFaceModel(ModelInterface):
    """A model that transformers knows, from a local folder; nothing is downloaded."""

    huggingface: str
    """Folder, relative to this file, with `config.json` and `model.safetensors`."""
    task: Task | None = None
    """What the model is for; the class that the folder's config names, by default."""
    labels: tuple[str, ...] = ()
    """Classes of a head that a stage `train` gives the model; by default those of its config."""
    stream: bool = False
    """Whether weights stay on disk, of which each stage and each call holds one block at a time:
    for a decoder that does not fit into memory. Its stages are `quantize_weights`, and after it
    `export_compressed_tensors`, or `export_genai` where the weights of a few bits fit."""

    requirements = (Requirement(what="transformers", install=pip_install("transformers")),)

    @field_validator("labels")
    @classmethod
    def _differ(cls, labels: tuple[str, ...]) -> tuple[str, ...]:
        refuse_repeated("label", labels)
        return labels


class TimmModel(ModelInterface):
    """An architecture of timm; nothing is downloaded."""

    timm: str
    """Name of the architecture, `resnet50` for example."""
    arguments: dict[str, JsonValue] = {}
    """Further arguments of timm.create_model: `num_classes`, `in_chans` …"""
    checkpoint: str | None = None
    """Weights, relative to this file, of any form a factory's checkpoint has; else random."""

    requirements = (TIMM,)

    @field_validator("timm")
    @classmethod
    def _is_local(cls, name: str) -> str:
        if ":" in name:
            raise ValueError("names a place to download from; give a plain name and a checkpoint")
        return name

    @field_validator("arguments")
    @classmethod
    def _load_nothing(cls, arguments: dict[str, JsonValue]) -> dict[str, JsonValue]:
        for key in ("pretrained", "checkpoint_path", "model_name"):
            if arguments.get(key):
                raise ValueError(f"{key} is not taken here; give the weights as `checkpoint:`")
        return arguments


class ModelFile(ModelInterface):
    """A model that was exported elsewhere; stages that read its format can follow."""

    file: Annotated[str, Field(pattern=r"\.(onnx|pt2|ts|torchscript|jit|pt|pth)$")]
    """File, relative to this one: `.onnx`, `.pt2` (torch.export.save), or TorchScript as `.ts`,
    `.torchscript`, `.jit`, `.pt` or `.pth`. TorchScript needs `inputs`, or data; the others tell
    theirs. `outputs` chooses among a file's outputs."""

    @property
    def kind(self) -> Kind:
        """The kind of artifact that the file becomes."""
        return KINDS[Path(self.file).suffix]


MODEL_CLASSES: dict[str, type[ModelInterface]] = {
    "factory": FactoryModel,
    "huggingface": HuggingFaceModel,
    "timm": TimmModel,
    "file": ModelFile,
}


def class_by_key(classes: Mapping[str, type[Settings]], default: str) -> Callable[[Any], str]:
    """Return a function from a section to its class's name: by the key that it has, or nearly."""

    def name_of(value: Any) -> str:
        if isinstance(value, Settings):
            return type(value).__name__
        given = [str(key) for key in value] if isinstance(value, dict) else []
        near = (closest(key, classes) for key in given)
        likely = [*(key for key in classes if key in given), *filter(None, near), default]
        return classes[likely[0]].__name__

    return name_of


ModelSpec = Annotated[
    Annotated[FactoryModel, Tag("FactoryModel")]
    | Annotated[HuggingFaceModel, Tag("HuggingFaceModel")]
    | Annotated[TimmModel, Tag("TimmModel")]
    | Annotated[ModelFile, Tag("ModelFile")],
    Discriminator(class_by_key(MODEL_CLASSES, "factory")),
]
"""The `model:` section; the class follows from which of its keys `factory`, … `file` is there."""
