"""How each kind of packaged model becomes a function of arrays."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from serve.worker.wire import Array

    Run = Callable[[Sequence[Array]], list[Array]]

THREADS_VARIABLE = "HANDLER_THREADS"
"""Environment variable that overrides the packaged number of threads."""


def load_onnx(payload: Path, inputs: list[str], outputs: list[str], threads: int) -> Run:
    """Return an ONNX Runtime session as a function of arrays."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    # Spinning threads take the cores from the other workers.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = onnxruntime.InferenceSession(str(payload), options, ["CPUExecutionProvider"])
    return lambda arrays: list(session.run(outputs, dict(zip(inputs, arrays, strict=True))))


def load_torchscript(payload: Path, inputs: list[str], outputs: list[str], threads: int) -> Run:
    """Return a TorchScript module as a function of arrays."""
    import torch

    load: Any = torch.jit.load  # it has no annotations
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r".*torch\.jit.* is deprecated")
        module = load(str(payload), map_location="cpu").eval()
    torch.set_num_threads(threads)

    def run(arrays: Sequence[Array]) -> list[Array]:
        with torch.inference_mode():
            return [out.numpy() for out in _flatten(module(*map(torch.from_numpy, arrays)))]

    return run


LOADERS = {"onnx": load_onnx, "torchscript": load_torchscript}


def replay(run: Run, given: list[Array], expected: list[Array], atol: float) -> None:
    """Raise RuntimeError unless the recorded inputs give the recorded outputs."""
    for _ in range(3):  # TorchScript profiles its first runs: READY means warm
        got = run(given)
    kinds = [[(array.shape, array.dtype) for array in arrays] for arrays in (got, expected)]
    pairs = zip(got, expected, strict=False)
    if kinds[0] != kinds[1] or not all(np.allclose(a, b, 0, atol) for a, b in pairs):
        raise RuntimeError(f"the model does not answer the probe as packaged (within {atol:g})")


def _flatten(answer: Any) -> list[Any]:
    answer = list(answer.values()) if isinstance(answer, dict) else answer
    if isinstance(answer, list | tuple):
        return [tensor for part in answer if part is not None for tensor in _flatten(part)]
    return [answer]
