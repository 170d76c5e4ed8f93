"""Write Triton's ``config.pbtxt``: tensors, batching and instances in protobuf text format."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from compress.common.errors import ArtifactInvalid, StageFailed
from export.exporter import EXPORTERS

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping
    from pathlib import Path

    from export.common.runtime import TritonBackend
    from serve.packaging.model_interface import Interface, Tensor

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
    "string_value": f'"{COUNT}"',
    "data_type": r"TYPE_\w+",
    "kind": "KIND_CPU",
    **dict.fromkeys(("dims", "shape"), r"\[[-\d, ]*\]"),
    **dict.fromkeys(("max_batch_size", "count", "max_queue_size"), COUNT),
    "max_queue_delay_microseconds": COUNT,
}
"""Entry of a configuration → the values that are written here, but for those of a backend."""


def backends() -> dict[str, TritonBackend]:
    """Return Triton's backends by the kind of artifact that they run."""
    runtimes = {kind: exporter.runtime for kind, exporter in EXPORTERS.items()}
    return {kind: runtime.triton for kind, runtime in runtimes.items() if runtime.triton}


def _values_of_backends() -> dict[str, str]:
    """Return the entries that name a backend → the values that are written here."""
    known = backends().values()
    names = {
        "backend": [one.backend for one in known],
        "platform": [one.platform for one in known if one.platform],
        "key": [key for one in known for key in one.thread_parameters],
    }
    return {entry: f'"(?:{"|".join(map(re.escape, of))})"' for entry, of in names.items()}


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
    backend = backends()[kind]
    per_call, other = backend.thread_parameters
    config: dict[str, Any] = {
        "name": name,
        "backend": backend.backend,
        **({"platform": backend.platform} if backend.platform else {}),
        "max_batch_size": max_batch_size if batched else 0,
        "input": _tensors(interface.inputs, backend, "INPUT", batched),
        "output": _tensors(interface.outputs, backend, "OUTPUT", batched),
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
    config, values = f"{model}/{CONFIG}", VALUES | _values_of_backends()
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
        if not is_block and not re.fullmatch(values.get(entry, "(?!)"), value):
            raise ArtifactInvalid(
                f"{folder / config}:{number}: {line.strip()[:80]!r}: unknown entry, which may name "
                "code that Triton loads"
            )


def without_batching(interface: Interface) -> Interface:
    """Return the interface with all dimensions written, which Triton passes on as they are."""
    return replace(interface, rows_stay_first=False)


def _tensors(
    tensors: tuple[Tensor, ...], backend: TritonBackend, role: str, batched: bool
) -> list[dict[str, Any]]:
    entries = []
    for i, tensor in enumerate(tensors):
        dtype = tensor.dtype
        name = backend.tensor_name.format(name=tensor.name, role=role, index=i)
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
