"""Write Triton's ``config.pbtxt``: tensors, batching and instances in protobuf text format."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from compress.common.errors import ArtifactInvalid, StageFailed

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping
    from pathlib import Path

    from compress.serve.packaging.model_interface import Interface, Tensor

PLATFORMS = {
    "onnx": "onnxruntime_onnx",
    "torchscript": "pytorch_libtorch",
    "aot": "torch_aoti",  # Triton 26.03 and later
}
"""Formats of the backends that have several; OpenVINO's has none."""
BACKENDS = {
    "onnx": "onnxruntime",
    "torchscript": "pytorch",
    "aot": "pytorch",
    "openvino": "openvino",
}
FILES = {
    "onnx": "model.onnx",
    "torchscript": "model.pt",
    "aot": "model.pt2",
    "openvino": "model.xml",
}
"""Default file names of the formats."""
THREAD_PARAMETERS = {
    "onnx": ("intra_op_thread_count", "inter_op_thread_count"),
    **dict.fromkeys(("torchscript", "aot"), ("INTRA_OP_THREAD_COUNT", "INTER_OP_THREAD_COUNT")),
    "openvino": ("INFERENCE_NUM_THREADS", "NUM_STREAMS"),
}
DATA_TYPES = {
    "bool": "TYPE_BOOL",
    "uint8": "TYPE_UINT8",
    **{f"int{bits}": f"TYPE_INT{bits}" for bits in (8, 16, 32, 64)},
    **{f"float{bits}": f"TYPE_FP{bits}" for bits in (16, 32, 64)},
}


CONFIG, VERSION = "config.pbtxt", "1"
BLOCKS = {
    *("input", "output", "reshape", "instance_group", "parameters", "value"),
    *("dynamic_batching", "default_queue_policy"),
}
COUNT, TEXT = r"\d+", r'"(?:[^"\\]|\\.)*"'
VALUES = {
    "name": TEXT,
    "backend": f'"(?:{"|".join(BACKENDS.values())})"',
    "platform": f'"(?:{"|".join(PLATFORMS.values())})"',
    "key": f'"(?:{"|".join(key for keys in THREAD_PARAMETERS.values() for key in keys)})"',
    "string_value": f'"{COUNT}"',
    "data_type": r"TYPE_\w+",
    "kind": "KIND_CPU",
    **dict.fromkeys(("dims", "shape"), r"\[[-\d, ]*\]"),
    **dict.fromkeys(("max_batch_size", "count", "max_queue_size"), COUNT),
    "max_queue_delay_microseconds": COUNT,
}
"""Entry of a configuration → the values that are written here."""


class EnumName(str):
    """An enumeration's value, which protobuf text format writes without quotes."""


@dataclass(frozen=True)
class DynamicBatching:
    """Settings of Triton's dynamic batcher."""

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
    axis; otherwise all dimensions are written and requests are not joined. Without ``batching``
    they are not either. ``threads`` are those of each of the ``instances``.

    Raises:
        StageFailed: Triton does not support a tensor's data type.
    """
    batched = interface.rows_stay_first
    per_call, other = THREAD_PARAMETERS[kind]
    config: dict[str, Any] = {
        "name": name,
        "backend": BACKENDS[kind],
        **({"platform": PLATFORMS[kind]} if kind in PLATFORMS else {}),
        "max_batch_size": max_batch_size if batched else 0,
        "input": _tensors(interface.inputs, kind, "INPUT", batched),
        "output": _tensors(interface.outputs, kind, "OUTPUT", batched),
        "instance_group": [{"kind": EnumName("KIND_CPU"), "count": instances}],
        "parameters": [
            {"key": key, "value": {"string_value": str(count)}}
            for key, count in ((per_call, threads), (other, 1))
        ],
    }
    if batched and batching:
        config["dynamic_batching"] = {
            "max_queue_delay_microseconds": round(batching.max_delay_ms * 1000),
            "default_queue_policy": {"max_queue_size": batching.queue_size},
        }
    return "\n".join(_lines(config)) + "\n"


def refuse_foreign_entries(folder: Path, files: Collection[str], model: str) -> None:
    """Raise ArtifactInvalid for a repository with more than one model, or entries of others.

    Triton loads each model that it finds, and its Python backend the code beside it.

    Args:
        folder: the repository.
        files: names of its files.
        model: name of its model.
    """
    config = f"{model}/{CONFIG}"
    for name in files:
        if name != config and not name.startswith(f"{model}/{VERSION}/"):
            raise ArtifactInvalid(f"{folder}: {name}: is not of model {model}, and Triton reads it")
    if config not in files:
        raise ArtifactInvalid(f"{folder}: {config} is missing")
    for number, line in enumerate((folder / config).read_text("utf-8").split("\n"), start=1):
        if line.startswith("# "):
            continue
        entry, _, value = line.strip().partition(": ")
        is_block = entry in ("", "}") or (not value and entry.removesuffix(" {") in BLOCKS)
        if not is_block and not re.fullmatch(VALUES.get(entry, "(?!)"), value):
            raise ArtifactInvalid(
                f"{folder / config}:{number}: {line.strip()[:80]!r}: unknown entry, which may name "
                "code that Triton loads"
            )


def without_batching(interface: Interface) -> Interface:
    """Return the interface with all dimensions written, which Triton passes on as they are."""
    return replace(interface, rows_stay_first=False)


def name_of(kind: str, name: str, role: str, index: int) -> str:
    """Return a tensor's name in Triton; ``role`` is ``INPUT`` or ``OUTPUT``.

    TorchScript has no names, and its backend expects ``name__index``; an AOTInductor package's
    tensors are ``INPUT__index`` and ``OUTPUT__index``.
    """
    if kind == "aot":
        return f"{role}__{index}"
    return f"{name}__{index}" if kind == "torchscript" else name


def _tensors(
    tensors: tuple[Tensor, ...], kind: str, role: str, batched: bool
) -> list[dict[str, Any]]:
    entries = []
    for i, tensor in enumerate(tensors):
        dtype, name = tensor.dtype, name_of(kind, tensor.name, role, i)
        if dtype not in DATA_TYPES:
            raise StageFailed(f"{tensor.name} is {dtype}, which Triton's requests do not carry")
        dims = [*(tensor.shape[1:] if batched else tensor.shape)]
        entry: dict[str, Any] = {"name": name, "data_type": EnumName(DATA_TYPES[dtype])}
        # Triton requires a dimension: for a scalar it passes one element, reshaped to none.
        entry |= {"dims": dims} if dims else {"dims": [1], "reshape": {"shape": []}}
        entries.append(entry)
    return entries


def _lines(message: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    """Yield protobuf text: ``key: value``, a block for a message, a list for integers."""
    for key, value in message.items():
        if isinstance(value, list) and all(isinstance(v, int) for v in value):
            yield f"{indent}{key}: [{', '.join(map(str, value))}]"
            continue
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, dict):
                yield f"{indent}{key} {{"
                yield from _lines(item, f"{indent}  ")
                yield f"{indent}}}"
            else:
                text = item if isinstance(item, EnumName) else json.dumps(item)
                yield f"{indent}{key}: {text}"
