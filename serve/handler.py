"""Answers requests inside TorchServe; this one file travels in every ``.mar`` and imports no other.

TorchServe wants exactly one class here, and an exception that leaves ``handle`` fails every request
of its batch with 503: a refusal is ``ValueError(status, message)``; ``handle`` answers it alone.

Requests (Content-Type decides, nothing is guessed from the bytes):

    application/x-npz         every input by name, as numpy.savez writes them; lossless
    application/x-npy         the input of a single-input model
    application/octet-stream  its bytes, little-endian, C order; X-Shape where axes vary
    application/json          [...] for a single input, or {"inputs": {"name": [...], ...}}

Answers (Accept decides): ``application/x-npz``, lossless; ``application/octet-stream`` for a single
output, with X-Shape and X-Dtype; else JSON, ``{"outputs": {"name": [...], ...}}``. X-Batch-Axis: 0
says that every output has its rows there, so that more of them may be sent in several requests.
"""

from __future__ import annotations

import io
import json
import logging
import os
import warnings
import zipfile
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy.typing as npt
    from ts.context import Context

    Array = npt.NDArray[Any]
    Run = Callable[[Sequence[Array]], list[Array]]
    Named = Mapping[str, Any]
    Specs = Sequence[Named]
    Requests = dict[int, list[Array]]

JSON, NPY, NPZ = "application/json", "application/x-npy", "application/x-npz"
RAW = "application/octet-stream"
THREADS_VARIABLE = "HANDLER_THREADS"
"""Environment variable that overrides the packaged number of threads."""


class PackagedModel:
    """The packaged model and what it accepts."""

    def initialize(self, context: Context) -> None:
        """Load the model and replay the probe; a model that answers otherwise is never READY."""
        folder = Path(context.system_properties["model_dir"])
        settings = context.model_yaml_config["handler"]
        self.inputs: Specs = settings["inputs"]
        self.outputs: list[str] = settings["outputs"]
        self.max_rows = int(settings["max_rows"])
        names = [spec["name"] for spec in self.inputs]
        payload = folder / context.manifest["model"]["serializedFile"]
        threads = int(os.environ.get(THREADS_VARIABLE) or settings["threads"])
        self.run = LOADERS[settings["kind"]](payload, names, self.outputs, threads)
        probe = from_npz((folder / "probe.npz").read_bytes())
        given = [probe[name] for name in names]
        expected = [probe[name] for name in self.outputs]
        # float: PyYAML reads 1e-05 as a string.
        replay(self.run, given, expected, float(settings["probe_atol"]))
        self.joins_rows = bool(settings["joins_rows"])

    def handle(self, data: list[dict[str, Any]], context: Context) -> list[str | bytes]:
        """Answer a batch of requests, each with its own status; what can be joined runs at once."""
        sent = [context.get_all_request_header(i) for i in range(len(data))]
        headers = [{key.lower(): value for key, value in each.items()} for each in sent]
        answers: dict[int, str | bytes] = {}
        groups: dict[Any, Requests] = {}
        for i, row in enumerate(data):
            try:
                arrays = read_request(row, headers[i], self.inputs, self.max_rows)
            except Exception as error:  # noqa: BLE001 - RecursionError too; its neighbours live on
                answers[i] = refuse(context, i, error)
            else:
                alike = tuple(array.shape[1:] for array in arrays) if self.joins_rows else i
                groups.setdefault(alike, {})[i] = arrays
        for group in groups.values():
            for i, outputs in self.answer(group).items():
                answers[i] = self.write_answer(context, i, headers[i], outputs)
        return [answers[i] for i in range(len(data))]

    def answer(self, group: Requests) -> dict[int, list[Array] | Exception]:
        """Return each request's outputs, or what went wrong with it."""
        try:
            if len(group) == 1:
                return {i: self.run(arrays) for i, arrays in group.items()}
            joined = self.run([np.concatenate(c) for c in zip(*group.values(), strict=True)])
            ends = np.cumsum([len(arrays[0]) for arrays in group.values()])[:-1]
            parts = zip(*(np.split(output, ends) for output in joined), strict=True)
            return dict(zip(group, map(list, parts), strict=True))
        except Exception as error:
            logging.exception("inference failed")
            if len(group) == 1:
                return dict.fromkeys(group, error)
        # One request's values (an index out of range …) must not fail those it was joined with.
        return {i: self.answer({i: arrays})[i] for i, arrays in group.items()}

    def write_answer(
        self, context: Context, i: int, headers: Named, outputs: list[Array] | Exception
    ) -> str | bytes:
        """Return one response body and set its status and headers."""
        try:
            if isinstance(outputs, Exception):
                raise ValueError(500, f"inference failed: {type(outputs).__name__}")
            named = dict(zip(self.outputs, outputs, strict=True))
            body, own_headers = encode(named, str(headers.get("accept", "")).lower())
        except Exception as error:  # noqa: BLE001
            return refuse(context, i, error, status=500)
        if self.joins_rows:
            own_headers["X-Batch-Axis"] = "0"
        for key, value in own_headers.items():
            context.set_response_header(i, key, value)
        return body


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


def read_request(row: Named, headers: Named, specs: Specs, max_rows: int) -> list[Array]:
    """Return a request's inputs in the signature's order, checked."""
    field = "body" if "body" in row else "data"
    if field not in row:
        raise ValueError(400, f"the request has no body; send one as {JSON} or {NPZ}")
    # TorchServe keeps each form field's own Content-Type under the field's name.
    content_type = (headers.get(field) or headers).get("content-type") or RAW
    arrays = decode(row[field], content_type.partition(";")[0].strip().lower(), headers, specs)
    check(arrays, specs, max_rows)
    return arrays


def decode(body: Any, content_type: str, headers: Named, specs: Specs) -> list[Array]:
    """Return a body's arrays in the signature's order."""
    accepted = (JSON, NPZ) if len(specs) > 1 else (JSON, NPZ, NPY, RAW)
    if content_type not in accepted:
        raise ValueError(415, f"{content_type[:80]}: this model takes {', '.join(accepted)}")
    if content_type == JSON:
        # TorchServe has parsed it already where decode_input_request is on, its default.
        return from_json(json.loads(body) if isinstance(body, bytes | bytearray) else body, specs)
    if content_type == NPZ:
        return _in_order(from_npz(bytes(body)), specs)
    if content_type == NPY:
        return [np.lib.format.read_array(io.BytesIO(bytes(body)), allow_pickle=False)]
    return [from_raw(bytes(body), headers, specs[0])]


def from_raw(body: bytes, headers: Named, spec: Named) -> Array:
    """Return the array in bare bytes; its shape from X-Shape, else from the signature."""
    shape = [-1 if isinstance(d, str) else d for d in spec["shape"]]
    if "x-shape" in headers:
        shape = [int(d) for d in headers["x-shape"].split(",")]
    little_endian = np.dtype(spec["dtype"]).newbyteorder("<")
    return np.frombuffer(body, little_endian).reshape(shape).astype(spec["dtype"])


def from_json(value: Any, specs: Specs) -> list[Array]:
    """Return the arrays in a parsed JSON body: whole numbers for integers, 0 and 1 for booleans."""
    inputs = value.get("inputs") if isinstance(value, dict) else value
    if isinstance(inputs, list) and len(specs) == 1:
        inputs = {specs[0]["name"]: inputs}
    if not isinstance(inputs, dict):
        raise ValueError(400, 'the body is not {"inputs": {"name": [...], ...}}')
    arrays = []
    for array, spec in zip(_in_order(inputs, specs), specs, strict=True):
        found = np.asarray(array)
        whole = found.dtype.kind in "biuf"
        arrays.append(found.astype(spec["dtype"]) if whole else found)
        if not whole or (arrays[-1].dtype.kind != "f" and (arrays[-1] != found).any()):
            raise ValueError(400, f"{spec['name']} holds values that are not {spec['dtype']}")
    return arrays


def check(arrays: list[Array], specs: Specs, max_rows: int) -> None:
    """Raise ValueError for inputs that the signature does not allow."""
    sizes: dict[str, int] = {}
    for array, spec in zip(arrays, specs, strict=True):
        name, shape = spec["name"], spec["shape"]
        if array.dtype != spec["dtype"]:
            raise ValueError(400, f"{name} is {array.dtype}, expected {spec['dtype']}")
        fits = array.size and len(array.shape) == len(shape)
        for wanted, size in zip(shape, array.shape, strict=False):
            fits &= size == (sizes.setdefault(wanted, size) if isinstance(wanted, str) else wanted)
        if not fits:
            raise ValueError(400, f"{name} has shape {list(array.shape)}, expected {shape}")
        if array.dtype.kind == "f" and np.isnan(array).any():
            raise ValueError(400, f"{name} holds NaN")
    rows = sizes.get(next(iter(specs[0]["shape"]), ""), 0)
    if rows > max_rows:
        raise ValueError(413, f"{rows} rows, at most {max_rows} in one request")


def encode(named: dict[str, Array], accept: str) -> tuple[str | bytes, dict[str, str]]:
    """Return a body and its headers in the form that the client accepts."""
    if any(array.dtype.kind == "f" and np.isnan(array).any() for array in named.values()):
        raise ValueError(500, "the model answered NaN")
    if NPZ in accept:
        return to_npz(named), {"content-type": NPZ}
    if RAW in accept:
        (output, *others) = named.values()
        if others:
            raise ValueError(400, f"the model has {len(named)} outputs: accept {NPZ} or {JSON}")
        headers = {"X-Shape": ",".join(map(str, output.shape)), "X-Dtype": str(output.dtype)}
        little_endian = output.astype(output.dtype.newbyteorder("<"))
        return little_endian.tobytes(), {"content-type": RAW, **headers}
    outputs = {name: array.tolist() for name, array in named.items()}
    return json.dumps({"outputs": outputs}, allow_nan=False), {"content-type": JSON}


def to_npz(arrays: Named) -> bytes:
    """Return arrays as ``numpy.savez`` writes them, under any name, the same bytes every time."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
        for name, array in arrays.items():
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asarray(array), allow_pickle=False)
    return stream.getvalue()


def from_npz(data: bytes) -> dict[str, Array]:
    """Return arrays by name; nothing is unpickled."""
    arrays = {}
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for member in archive.infolist():
            if member.compress_type != zipfile.ZIP_STORED:  # few bytes could unfold to any size
                raise ValueError(400, "the npz is compressed: write it with numpy.savez")
            with archive.open(member) as stream:
                array = np.lib.format.read_array(stream, allow_pickle=False)
            arrays[member.filename.removesuffix(".npy")] = array
    return arrays


def refuse(context: Context, i: int, error: Exception, status: int = 400) -> str:
    """Set the status of a refused request and return its body."""
    message = f"{type(error).__name__}: {str(error)[:160]}"
    if type(error) is ValueError and len(error.args) == 2:
        status, message = error.args
    context.set_response_status(status, HTTPStatus(status).phrase, i)
    context.set_response_content_type(i, JSON)
    return json.dumps({"code": status, "message": message})


def _in_order(named: Named, specs: Specs) -> list[Any]:
    names = [spec["name"] for spec in specs]
    if sorted(named) != sorted(names):
        raise ValueError(400, f"the inputs are {sorted(named)}, expected {names}")
    return [named[name] for name in names]


def _flatten(answer: Any) -> list[Any]:
    answer = list(answer.values()) if isinstance(answer, dict) else answer
    if isinstance(answer, list | tuple):
        return [tensor for part in answer if part is not None for tensor in _flatten(part)]
    return [answer]
