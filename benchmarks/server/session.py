"""The same session of ONNX Runtime for all servers; it imports nothing else."""

import os

import onnxruntime

EXACT_VARIABLE = "SESSION_EXACT"
"""1 where the processor needs it to sum int8 products exactly, as `compress serve` sets it."""


def open_session(model: str) -> onnxruntime.InferenceSession:
    """Open a model whose calls take one thread each."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    exact = os.environ.get(EXACT_VARIABLE, "0")
    options.add_session_config_entry("session.x64quantprecision", exact)
    return onnxruntime.InferenceSession(model, options, ["CPUExecutionProvider"])
