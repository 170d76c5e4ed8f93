"""Triton's ``config.pbtxt``: a model's tensors, batching and instances, in protobuf's text form."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from compress.common.errors import StageFailed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from serve.packaging.model_interface import Interface, Tensor

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


@dataclass(frozen=True)
class DynamicBatching:
    """How Triton joins requests."""

    max_delay_ms: float
    """How long a request may wait for others, milliseconds."""
    queue_size: int
    """Requests that may wait."""


def model_config(
    name: str,
    kind: str,
    interface: Interface,
    *,
    max_batch_size: int,
    batching: DynamicBatching | None,
    instances: int,
    threads: int,
) -> str:
    """Write ``config.pbtxt``.

    If axis 0 of every tensor is the batch, ``max_batch_size`` is set and the dimensions omit that
    axis; otherwise all dimensions are written and requests are not joined.

    Args:
        name: the model's name.
        kind: the packaged artifact's kind.
        interface: the model's tensors.
        max_batch_size: the largest number of rows in a call.
        batching: how requests are joined; None if they must not be.
        instances: copies of the model.
        threads: CPU threads of each copy.

    Raises:
        StageFailed: a tensor is one that Triton cannot carry.
    """
    batched = interface.rows_stay_first
    intra, inter = THREAD_PARAMETERS[kind]
    config: dict[str, Any] = {
        "name": name,
        "platform": PLATFORMS[kind],
        "max_batch_size": max_batch_size if batched else 0,
        "input": _tensors(interface.inputs, kind, batched),
        "output": _tensors(interface.outputs, kind, batched),
        "instance_group": [{"kind": Word("KIND_CPU"), "count": instances}],
        "parameters": [_parameter(intra, threads), _parameter(inter, 1)],
    }
    if batched and batching:
        config["dynamic_batching"] = {
            "max_queue_delay_microseconds": round(batching.max_delay_ms * 1000),
            "default_queue_policy": {"max_queue_size": batching.queue_size},
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
