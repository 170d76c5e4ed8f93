"""What an ONNX model says about itself, in its properties: signature, class names, origin."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from compress import __version__
from compress.core.artifact import canonical_json
from compress.core.errors import StageFailed

if TYPE_CHECKING:
    from collections.abc import Sequence

    import onnx

    from compress.core.artifact import Artifact


def describe_(model: onnx.ModelProto, source: Artifact, class_names: Sequence[str]) -> None:
    """Write properties into a model, in place: each a JSON text, the same for the same source.

    Raises:
        StageFailed: there are more or fewer class names than the first output has classes.
    """
    properties: dict[str, Any] = {
        "provenance": {"source": source.digest, "toolkit": f"compress-pipeline {__version__}"},
        "signature": source.signature.model_dump(mode="json"),
    }
    if class_names:
        refuse_misfit(model, class_names)
        properties["class_names"] = list(class_names)
    for key in sorted(properties):
        model.metadata_props.add(key=key, value=canonical_json(properties[key]))


def refuse_misfit(model: onnx.ModelProto, class_names: Sequence[str]) -> None:
    """Refuse class names that are not one for each class.

    Raises:
        StageFailed: the last axis of the first output is known, and another number.
    """
    axes = model.graph.output[0].type.tensor_type.shape.dim
    classes: int = axes[-1].dim_value if axes else 0
    if classes and classes != len(class_names):
        raise StageFailed(
            f"class_names: {len(class_names)} names, and the first output has {classes} classes"
        )
