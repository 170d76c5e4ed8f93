"""What the built-in server tells of itself and its model by the Open Inference Protocol."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from serve.worker.oip import DATATYPES

if TYPE_CHECKING:
    from serve.packaging.model_interface import Interface, Tensor

EXTENSIONS = ("binary_tensor_data",)


def model_metadata(name: str, kind: str, interface: Interface) -> dict[str, Any]:
    """Return what ``GET /v2/models/{name}`` answers."""
    return {
        "name": name,
        "versions": ["1"],
        "platform": kind,
        "inputs": [_described(tensor) for tensor in interface.inputs],
        "outputs": [_described(tensor) for tensor in interface.outputs],
    }


def _described(tensor: Tensor) -> dict[str, Any]:
    datatype = DATATYPES[tensor.dtype]
    return {"name": tensor.name, "datatype": datatype, "shape": [*tensor.shape]}
