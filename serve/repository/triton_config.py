"""Triton's ``config.pbtxt``: a model's tensors, batching and instances, in protobuf's text form."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from compress.common.errors import StageFailed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from serve.packaging.model_interface import Interface, Tensor
    from serve.repository.triton import PackageTriton

PLATFORMS = {"onnx": "onnxruntime_onnx", "torchscript": "pytorch_libtorch"}
FILES = {"onnx": "model.onnx", "torchscript": "model.pt"}
"""The names under which the two backends look for a version's file."""
THREAD_PARAMETERS = {
    "onnx": ("intra_op_thread_count", "inter_op_thread_count"),
    "torchscript": ("INTRA_OP_THREAD_COUNT", "INTER_OP_THREAD_COUNT"),
}
DATA_TYPES = {
    "bool": "TYPE_BOOL",
    "uint8": "TYPE_UINT8",
    **{f"int{bits}": f"TYPE_INT{bits}" for bits in (8, 16, 32, 64)},
    **{f"float{bits}": f"TYPE_FP{bits}" for bits in (16, 32, 64)},
}


class Word(str):
    """A name of an enumeration, which protobuf's text has without quotes."""


def config_of(
    settings: PackageTriton, kind: str, interface: Interface, *, joins_requests: bool
) -> str:
    """Return ``config.pbtxt``.

    Where axis 0 of every tensor counts the rows, Triton is told so by ``max_batch_size`` and the
    dimensions leave it out; else they are all written, and nothing is joined.

    Args:
        settings: the stage's settings.
        kind: the packaged artifact's.
        interface: the model's tensors.
        joins_requests: whether requests that are answered together get their own answers.

    Raises:
        StageFailed: a tensor is one that Triton cannot carry.
    """
    batched = interface.rows_stay_first
    intra, inter = THREAD_PARAMETERS[kind]
    config: dict[str, Any] = {
        "name": settings.model_name,
        "platform": PLATFORMS[kind],
        "max_batch_size": settings.max_batch_size if batched else 0,
        "input": _tensors(interface.inputs, kind, batched),
        "output": _tensors(interface.outputs, kind, batched),
        "instance_group": [{"kind": Word("KIND_CPU"), "count": settings.instances}],
        "parameters": [_parameter(intra, settings.threads), _parameter(inter, 1)],
    }
    if batched and joins_requests and settings.dynamic_batching:
        config["dynamic_batching"] = {
            "max_queue_delay_microseconds": round(settings.max_batch_delay_ms * 1000),
            "default_queue_policy": {"max_queue_size": settings.queue_size},
        }
    return "\n".join(_lines(config)) + "\n"


def name_of(kind: str, name: str, place: int) -> str:
    """Return a tensor's name: TorchScript has none, and its backend wants ``name__place``."""
    return f"{name}__{place}" if kind == "torchscript" else name


def _tensors(tensors: tuple[Tensor, ...], kind: str, batched: bool) -> list[dict[str, Any]]:
    return [_tensor(t, name_of(kind, t.name, i), batched) for i, t in enumerate(tensors)]


def _tensor(tensor: Tensor, name: str, batched: bool) -> dict[str, Any]:
    if tensor.dtype not in DATA_TYPES:
        raise StageFailed(f"{tensor.name} is {tensor.dtype}, which Triton's requests do not carry")
    dims = [*(tensor.shape[1:] if batched else tensor.shape)]
    written: dict[str, Any] = {"name": name, "data_type": Word(DATA_TYPES[tensor.dtype])}
    if dims:
        return written | {"dims": dims}
    # Triton wants a dimension: it sends one element, and reshapes to none.
    return written | {"dims": [1], "reshape": {"shape": []}}


def _parameter(key: str, value: int) -> dict[str, Any]:
    return {"key": key, "value": {"string_value": str(value)}}


def _lines(message: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    """Yield protobuf's text: ``key: value``, a block for a message, a list for plain values."""
    for key, value in message.items():
        if isinstance(value, list) and all(isinstance(v, int) for v in value):
            yield f"{indent}{key}: [{', '.join(map(str, value))}]"
            continue
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, dict):
                yield f"{indent}{key} {{"
                yield from _lines(one, f"{indent}  ")
                yield f"{indent}}}"
            else:
                shown = one if isinstance(one, Word) else json.dumps(one)
                yield f"{indent}{key}: {shown}"
