"""Proves that a module computes what ONNX Runtime computes of the file that it was read from."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx
import torch

from compress.common.errors import ArtifactInvalid, raised_as
from compress.common.tensor_difference import relative_error
from compress.graph.from_onnx.module import OnnxModule
from compress.graph.from_onnx.shape_tensor import to_tensor

LARGEST_ERROR = 1e-3
"""Of an output's norm: float32 sums in another order differ by 1e-7 to 1e-5 of it in networks of
usual depth, a wrong operator by tenths. Half precision is computed with 11 bits, so by 1e-2."""
SMALLEST = 1e-4
"""Mean size of elements from which on errors are relative: ONNX Runtime approximates functions such
as Sigmoid within some 1e-7, which is much of a probability map that has found nothing."""


def prove(module: OnnxModule, file: Path, examples: Sequence[Sequence[torch.Tensor]]) -> float:
    """Compare a module with ONNX Runtime on inputs, and return the largest error of an output.

    Raises ArtifactInvalid, with the first node whose output differs.
    """
    largest, outputs, session = 0.0, module.output_names, None
    for inputs in examples:
        with raised_as(ArtifactInvalid, f"{file}: ONNX Runtime"):
            session = session or _session(file)
            expected = session.run(outputs, _feed(module, inputs))
        with torch.no_grad(), raised_as(ArtifactInvalid, f"{file}: in PyTorch"):
            found = module(*inputs)
        for name, ours, theirs in zip(outputs, found.values(), expected, strict=True):
            reference = torch.from_numpy(theirs)
            difference = _error(reference, ours)
            allowed = LARGEST_ERROR * (10 if reference.dtype == torch.float16 else 1)
            if not difference <= allowed:
                where = _first_difference(module, file, inputs)
                # Rounding adds up where a model is sensitive to it, such as a LayerNorm of values
                # that are nearly equal: then every node agrees with what it reads.
                if where is not None or difference > 10 * allowed:
                    raise ArtifactInvalid(
                        f"{file}: output {name!r} of the model in PyTorch differs from ONNX "
                        f"Runtime's by {difference:.2g} of its norm, expected at most "
                        f"{allowed:g}{where or ''}"
                    )
            largest = max(largest, difference)
    return largest


def _session(model: Path | bytes) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    # Packed for its kernels, weights would be in memory once more.
    options.add_session_config_entry("session.disable_prepacking", "1")
    given = model if isinstance(model, bytes) else str(model)
    return onnxruntime.InferenceSession(given, options, providers=["CPUExecutionProvider"])


def _feed(module: OnnxModule, inputs: Sequence[torch.Tensor]) -> dict[str, Any]:
    return {name: x.numpy() for name, x in zip(module.input_names, inputs, strict=True)}


def _error(expected: torch.Tensor, found: torch.Tensor) -> float:
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return float("inf")
    if not expected.numel():
        return 0.0
    least_norm = SMALLEST * expected.numel() ** 0.5
    return relative_error(expected.double(), found.double(), least_norm)


def _first_difference(module: OnnxModule, file: Path, inputs: Sequence[torch.Tensor]) -> str | None:
    """Describe the first node that differs where those before it are as ONNX Runtime computes.

    None where every node agrees; nothing is said where they cannot all be outputs.
    """
    try:
        proto = onnx.load(file)
        known = {value.name for value in proto.graph.output}
        theirs = {name for node in proto.graph.node for name in node.output}
        named = [name for step in module.steps for name in step.outputs if name in theirs]
        proto.graph.output.extend(onnx.ValueInfoProto(name=n) for n in named if n not in known)
        outputs = _session(proto.SerializeToString()).run(named, _feed(module, inputs))
    except Exception:  # noqa: BLE001 - of a model whose every value is an output
        return ""
    expected = dict(zip(named, outputs, strict=True))
    values: dict[str, Any] = dict(zip(module.input_names, inputs, strict=True))
    for step in module.steps:
        with torch.no_grad():
            found = module.compute(step, values)
        values |= found
        for name in found.keys() & expected.keys():
            reference = torch.from_numpy(expected[name])
            if not _error(reference, to_tensor(found[name])) <= LARGEST_ERROR:
                return f"; first at {step.node.operator} ({step.node.name})"
            values[name] = reference
    return None
