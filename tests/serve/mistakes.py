"""What clients get wrong, and how both servers answer it; for the model of served_here.py."""

import io
import json

import numpy as np

from compress.serve.worker.wire import NPY, NPZ, RAW, to_npz
from tests.serve.attacks import npz_of_members
from tests.serve.served_here import as_json

GOOD = [0.0, 3.0, 1.5, -2.0]
NOT_THERE = [0.0, 9999.0, 1.5, -2.0]
"""A place beyond the model's table: only the model itself can tell."""


def changed(**changes: object) -> bytes:
    request = json.loads(as_json(GOOD))
    request["inputs"][0] |= changes
    return json.dumps(request).encode()


def binary(size: int, tensor_bytes: int, shape: tuple[int, ...] = (1, 4)) -> tuple[bytes, dict]:
    tensor = {"name": "x", "shape": shape, "datatype": "FP32"}
    tensor["parameters"] = {"binary_data_size": size}
    text = json.dumps({"inputs": [tensor]}).encode()
    headers = {"Content-Type": RAW, "Inference-Header-Content-Length": str(len(text))}
    return text + bytes(tensor_bytes), headers


def npy(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


ROW = np.array([GOOD], np.float32)
NANS = np.full((1, 4), np.nan, np.float32).tobytes()
INFINITIES = np.full((1, 4), np.inf, np.float32).tobytes()
DEEP = b"[" * 10_000 + b"]" * 10_000
MISTAKES = {
    "malformed JSON": (b'{"inputs": [', {}, 400, ["not JSON"]),
    "not UTF-8": (b'{"inputs": "\xff"}', {}, 400, ["not JSON"]),
    "JSON nested 10,000 deep": (DEEP, {}, 400, ["nested too deeply"]),
    "10,000 deep as a tensor": (b'{"inputs": {"x": %s}}' % DEEP, {}, 400, ["nested too deeply"]),
    "no inputs": (b"{}", {}, 400, ["inputs"]),
    "another name": (changed(name="y"), {}, 400, ["'y'", "'x'"]),
    "another datatype": (changed(datatype="INT64"), {}, 400, ["x", "INT64", "FP32"]),
    "words": (changed(data=["a", "b", "c", "d"]), {}, 400, ["x", "float32"]),
    "ragged data": (changed(data=[[1, 2], [3]]), {}, 400, ["x"]),
    "another rank": (changed(shape=[4]), {}, 400, ["x", "[4]", "4]"]),
    "another size": (changed(shape=[1, 3], data=[1, 2, 3]), {}, 400, ["x", "[1, 3]", "'batch', 4"]),
    "data that does not fill the shape": (changed(shape=[2, 4]), {}, 400, ["4 elements", "[2, 4]"]),
    "a negative size": (changed(shape=[-1, 4]), {}, 400, ["x", "[-1, 4]"]),
    "no rows": (changed(shape=[0, 4], data=[]), {}, 400, ["x", "[0, 4]"]),
    "NaN in JSON": (changed(data=[float("nan")] * 4), {}, 400, ["NaN"]),
    "Infinity in JSON": (changed(data=[float("inf")] * 4), {}, 400, ["x holds infinity"]),
    "NaN in bytes": (NANS, {"Content-Type": RAW}, 400, ["x", "NaN", "finite"]),
    "infinity in bytes": (INFINITIES, {"Content-Type": RAW}, 400, ["x", "infinity"]),
    "an empty body": (b"", {}, 400, ["empty", "x"]),
    "another content type": (b"x", {"Content-Type": "text/csv"}, 415, ["text/csv", "json"]),
    "a compressed body": (b"x", {"Content-Encoding": "gzip"}, 415, ["gzip"]),
    "bytes that make no row": (b"abc", {"Content-Type": RAW}, 400, ["3 bytes", "float32", "4]"]),
    "a negative X-Shape": (
        *[
            bytes(320),
            {"Content-Type": RAW, "X-Shape": "-5,4"},
            400,
            ["X-Shape", "'-5,4'", "sizes"],
        ],
    ),
    "another X-Shape": (
        *[bytes(16), {"Content-Type": RAW, "X-Shape": "1, +4"}, 400, ["X-Shape", "sizes", "1,8"]],
    ),
    "too many arrays": (npz_of_members(5000), {"Content-Type": NPZ}, 400, ["more than the 1"]),
    "a text among numbers": (changed(data=["x" * 100_000, 1, 2, 3]), {}, 400, ["x", "float32"]),
    "not an npy": (b"abc", {"Content-Type": NPY}, 400, ["cannot be read"]),
    "not an npz": (b"abc", {"Content-Type": NPZ}, 400, ["zip"]),
    "a pickle in an npy": (npy(np.array([{}])), {"Content-Type": NPY}, 400, ["Object arrays"]),
    "float64 in an npz": (to_npz({"x": ROW.astype("f8")}), {"Content-Type": NPZ}, 400, ["float64"]),
    "too many rows": (as_json(*[GOOD] * 17), {}, 413, ["17 rows", "at most 16"]),
    "a header longer than the body": (
        *[b"{}", {"Inference-Header-Content-Length": "99"}, 400, ["99", "2 bytes"]],
    ),
    "a header of thousands of digits": (
        *[b"{}", {"Inference-Header-Content-Length": "9" * 5000}, 400, ["cannot be read"]],
    ),
    "a header that is no number": (
        *[b"{}", {"Inference-Header-Content-Length": "-1"}, 400, ["'-1'", "number"]],
    ),
    "too few bytes": (*binary(16, 8), 400, ["x", "is 16", "8 bytes are left"]),
    "too many bytes": (*binary(16, 20), 400, ["4 bytes follow"]),
    "bytes that do not fill the shape": (*binary(12, 12), 400, ["12", "expected 16"]),
    "an impossible shape": (*binary(16, 16, (2**40, 4)), 400, ["x", "shape"]),
    "an unknown output": (
        *[json.dumps({**json.loads(as_json(GOOD)), "outputs": [{"name": "y"}]}).encode()],
        *[{}, 400, ["'y'", "'double'"]],
    ),
    "outputs that are no objects": (
        *[json.dumps({**json.loads(as_json(GOOD)), "outputs": ["y"]}).encode()],
        *[{}, 400, ["outputs", "y", "name"]],
    ),
    "a value that the model refuses": (as_json(NOT_THERE), {}, 422, ["out of data bounds"]),
    "values that become NaN": (as_json([0, 3, 0, 3e38]), {}, 422, ["answers NaN in zero"]),
    "an image": (b"x", {"Content-Type": "image/png"}, 415, ["image/png"]),
    "three outputs as bytes": (
        ROW.tobytes(),
        {"Content-Type": RAW, "Accept": RAW},
        406,
        ["3 outputs"],
    ),
    "a tensor without a shape": (b'{"inputs": [{"name": "x"}]}', {}, 400, ["expected a 'shape'"]),
    "the same tensor twice": (
        *[json.dumps({"inputs": json.loads(as_json(GOOD))["inputs"] * 2}).encode()],
        *[{}, 400, ["x", "twice"]],
    ),
    "an answer that JSON has no word for": (
        *[as_json([0, 3, 3e38, 0]), {}, 406, ["double", "infinity"]],
    ),
}
