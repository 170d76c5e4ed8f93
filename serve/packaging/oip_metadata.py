"""The Open Inference Protocol's metadata of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from serve.worker.oip import DATATYPES

if TYPE_CHECKING:
    from serve.packaging.model_interface import Interface, Tensor

EXTENSIONS = ("binary_tensor_data",)


def model_metadata(name: str, kind: str, interface: Interface) -> dict[str, Any]:
    """Return the response to ``GET /v2/models/{name}``."""

    def describe(tensor: Tensor) -> dict[str, Any]:
        datatype = DATATYPES[tensor.dtype]
        return {"name": tensor.name, "datatype": datatype, "shape": [*tensor.shape]}

    return {
        "name": name,
        "versions": ["1"],
        "platform": kind,
        "inputs": [describe(tensor) for tensor in interface.inputs],
        "outputs": [describe(tensor) for tensor in interface.outputs],
    }
