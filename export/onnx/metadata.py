"""Properties and value names of an ONNX model: signature, class names, origin."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from compress import __version__
from compress.artifacts.carried_files import IMAGES, TOKENIZER
from compress.common.errors import StageFailed
from compress.common.sealed_json import canonical_json
from compress.export.onnx.graph import rename_values_, values_in_order

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import onnx_ir as ir

    from compress.artifacts.artifact import Artifact

INPUT = "compress_input_{}"
OUTPUT = "compress_output_{}"
"""Names that the exporter is given, to be renamed afterwards: torch (2.13) lets a value inside keep
a name that an output is given, and the graph is then invalid."""


def add_metadata_(model: ir.Model, source: Artifact, class_names: Sequence[str]) -> tuple[str, ...]:
    """Write properties into a model, in place: each a JSON text, the same for the same source.

    Without ``class_names`` those of the source's Hugging Face config are written, if they are as
    many as the first output's classes. Returns the names written.
    """
    properties: dict[str, Any] = {
        "provenance": {"source": source.digest, "toolkit": f"compress-pipeline {__version__}"},
        "signature": source.signature.model_dump(mode="json"),
    }
    if class_names:
        check_class_count(model, class_names)
    elif class_count(model) == len(carried := source.class_names):
        class_names = carried
    if class_names:
        properties["class_names"] = list(class_names)
        properties["id2label"] = {str(i): name for i, name in enumerate(class_names)}
    preprocessing = {}
    files = source.manifest.files
    if IMAGES in files and (image := source.carried_json(IMAGES)):
        preprocessing["image"] = image
    if TOKENIZER in files and (tokenizer := source.carried_json(TOKENIZER)):
        preprocessing["text"] = {
            "tokenizer_sha256": files[TOKENIZER].sha256,
            "truncation": tokenizer.get("truncation"),
            "padding": tokenizer.get("padding"),
        }
    if preprocessing:
        properties["preprocessing"] = preprocessing
    model.metadata_props.update(
        (key, canonical_json(properties[key])) for key in sorted(properties)
    )
    return tuple(class_names)


def class_names_in(properties: Mapping[str, str]) -> list[str]:
    """Return the names of classes in a model's properties; empty where it holds none as JSON."""
    try:
        names: Any = json.loads(properties.get("class_names", "[]"))
    except (ValueError, RecursionError):
        return []
    return names if isinstance(names, list) and all(isinstance(n, str) for n in names) else []


def check_class_count(model: ir.Model, class_names: Sequence[str]) -> None:
    """Raise StageFailed where the first output has another number of classes, if it is known."""
    classes = class_count(model)
    if classes and classes != len(class_names):
        raise StageFailed(
            f"class_names: {len(class_names)} names, and the first output has {classes} classes"
        )


def class_count(model: ir.Model) -> int:
    """Return the size of the first output's last axis; 0 where it is not fixed."""
    shape = model.graph.outputs[0].shape
    return size if shape and isinstance(size := shape[-1], int) else 0


def name_values_(model: ir.Model, names: Mapping[str, str]) -> None:
    """Rename values, in place; an inner value that already has a new name gets another one."""
    values = [*dict.fromkeys(values_in_order(model))]
    taken = {value.name for value in values}
    renamed = dict(names)
    for name in sorted({n for n in names.values() if n in taken} - names.keys()):
        number = next(i for i in range(len(taken) + 1) if f"{name}_inside_{i}" not in taken)
        renamed[name] = f"{name}_inside_{number}"
    rename_values_(model, values, renamed)
