"""The far end of a device: ONNX Runtime sessions behind frames of arrays; needs numpy beside it.

A frame is the length of a JSON header (4 bytes, little-endian), the header, and the bytes of the
arrays whose dtypes and shapes the header lists. On a pipe its own length (8 bytes) precedes it.
"""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    Array = np.ndarray[Any, Any]


def pack(header: dict[str, Any], arrays: Sequence[Array] = ()) -> bytes:
    """Return a frame."""
    arrays = [np.ascontiguousarray(a).reshape(a.shape) for a in arrays]
    specs = [[str(a.dtype), list(a.shape)] for a in arrays]
    head = json.dumps({**header, "arrays": specs}).encode()
    return b"".join([len(head).to_bytes(4, "little"), head, *(a.tobytes() for a in arrays)])


def unpack(frame: bytes) -> tuple[dict[str, Any], list[Array]]:
    """Return a frame's header and its arrays, which can be written to."""
    end = 4 + int.from_bytes(frame[:4], "little")
    header, arrays = json.loads(frame[4:end]), []
    for name, shape in header.pop("arrays"):
        size = np.dtype(name).itemsize * int(np.prod(shape, dtype=np.int64))
        part = bytearray(frame[end : end + size])
        arrays.append(np.frombuffer(part, name).reshape(shape))
        end += size
    return header, arrays


def read_frame(stream: BinaryIO) -> bytes | None:
    """Return the next frame of a pipe; None where it was closed before the frame's end."""
    size = int.from_bytes(stream.read(8), "little")
    frame = stream.read(size)
    return frame if size and len(frame) == size else None


def write_frame(stream: BinaryIO, frame: bytes) -> None:
    """Write a frame to a pipe."""
    stream.write(len(frame).to_bytes(8, "little"))
    stream.write(frame)
    stream.flush()


def serve() -> None:
    """Answer frames of standard input on standard output until it is closed."""
    sessions: dict[str, Any] = {}
    # What a library prints is no frame.
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    while (frame := read_frame(sys.stdin.buffer)) is not None:
        try:
            reply = _answer(*unpack(frame), sessions)
        except Exception as error:  # noqa: BLE001 - onnxruntime's own types derive from it alone
            reply = pack({"error": f"{type(error).__name__}: {error}"})
        write_frame(replies, reply)


def _answer(header: dict[str, Any], arrays: list[Array], sessions: dict[str, Any]) -> bytes:
    import onnxruntime

    key = header["session"]
    if header["do"] == "run":
        names = [each.name for each in sessions[key].get_inputs()]
        return pack({}, sessions[key].run(None, dict(zip(names, arrays, strict=True))))
    sessions.pop(key, None)
    if header["do"] == "open":
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = header["threads"]
        options.inter_op_num_threads = 1
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.log_severity_level = 3
        if not header["optimized"]:
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        providers = ["CPUExecutionProvider"]
        sessions[key] = onnxruntime.InferenceSession(header["files"][0], options, providers)
    return pack({})
