"""Any bytes of a request are answered, or refused with a status of 4xx and one clear line."""

import io
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compress.common.printable import CONTROL_CHARACTERS
from compress.common.signature import Signature, TensorSpec
from compress.serve.worker.tensors import check, describe_error
from compress.serve.worker.wire import (
    HEADER_LENGTH,
    JSON,
    NPY,
    NPZ,
    RAW,
    TEXT,
    decode,
    encode,
    requested_outputs,
    to_npz,
)
from tests.fuzz.mutations import changed_bytes, changed_value

ONE = Signature(inputs=(TensorSpec(name="x", shape=("batch", 4)),)).input_descriptions()
TWO = Signature(
    inputs=(
        TensorSpec(name="ids", shape=("batch", "words"), dtype="int64"),
        TensorSpec(name="mask", shape=("batch", "words"), dtype="bool"),
    ),
    axes={"words": {"min": 2, "max": 8}},
).input_descriptions()
OUTPUTS = ["logits", "flags"]
TYPES = (JSON, NPZ, NPY, RAW, TEXT, "", "text/html", "application/x-www-form-urlencoded")
X = np.arange(8, dtype=np.float32).reshape(2, 4)
IDS = np.ones((2, 3), np.int64)
PLAIN = {"inputs": {"x": X.tolist()}}
PROTOCOL = {
    "id": "7",
    "parameters": {"binary_data_output": True},
    "inputs": [
        {"name": "ids", "shape": [2, 3], "datatype": "INT64", "data": IDS.tolist()},
        {"name": "mask", "shape": [2, 3], "datatype": "BOOL", "data": [True] * 6},
    ],
    "outputs": [{"name": "flags", "parameters": {"binary_data": False}}, {"name": "logits"}],
}
BINARY = {
    "inputs": [
        {
            "name": "x",
            "shape": [2, 4],
            "datatype": "FP32",
            "parameters": {"binary_data_size": X.nbytes},
        }
    ]
}
WORDS = ("inputs", "outputs", "name", "shape", "datatype", "data", "parameters", "x", "ids", "FP32")
NUMBERS = (
    "-5,64",
    "0",
    "2,4",
    "1" * 5000,
    "-1,-1",
    "2,",
    "٣,4",
    "1e3",
    "0x2,4",
    "9223372036854775808,4",
)


def as_npy(array: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def hold(body: Any, content_type: str, headers: Mapping[str, str], specs: Any) -> None:
    """Read a request as the servers do, answer it, and see how it is refused where it is."""
    try:
        arrays, asked = decode(body, content_type, headers, specs, {})
        check(arrays, specs, 128)
        wanted = requested_outputs(asked, OUTPUTS) if asked else {}
    except Exception as error:  # noqa: BLE001 - the servers catch all alike
        status, message = describe_error(error)
        assert 400 <= status < 500, error
        assert type(error) is ValueError or "cannot be read" in message, error
        assert len(message) < 1000 and not CONTROL_CHARACTERS.search(json.dumps(message)), message
        return
    rows = len(arrays[0])
    named = {"logits": np.full((rows, 3), np.inf, np.float32), "flags": np.ones(rows, bool)}
    for accept in ("", NPZ, JSON):
        try:
            written, _ = encode(named, accept, wanted, "model", None)
            assert isinstance(written, bytes)
        except ValueError as error:
            assert describe_error(error)[0] == 406  # infinity in JSON


@st.composite
def requests(draw: st.DrawFn) -> tuple[Any, str, dict[str, str], Any]:
    """Return a body, its type, headers and the model's inputs; most are almost right."""
    kind = draw(st.sampled_from(("plain", "protocol", "binary", "npz", "npy", "raw", "anything")))
    headers: dict[str, str] = {}
    specs: Any = TWO if kind == "protocol" else ONE
    content_type = JSON
    if kind in ("plain", "protocol", "binary"):
        content = {"plain": PLAIN, "protocol": PROTOCOL, "binary": BINARY}[kind]
        value = draw(st.one_of(st.just(content), changed_value(content, WORDS)))
        body: Any = json.dumps(value).encode()
        if kind == "binary":
            headers[HEADER_LENGTH] = str(len(body))
            body += X.tobytes()
            content_type = draw(st.sampled_from(TYPES))
    elif kind == "npz":
        content_type, body = NPZ, to_npz({"x": X})
    elif kind == "npy":
        content_type, body = NPY, as_npy(X)
    elif kind == "raw":
        content_type, body = RAW, X.tobytes()
        headers["x-shape"] = draw(st.sampled_from(NUMBERS))
    else:
        body = draw(st.binary(max_size=64))
        content_type = draw(st.sampled_from(TYPES))
        specs = draw(st.sampled_from((ONE, TWO)))
    if draw(st.booleans()):
        body = draw(changed_bytes(body))
    for name in draw(st.lists(st.sampled_from(("x-dtype", "content-encoding", HEADER_LENGTH)))):
        headers[name] = draw(
            st.one_of(st.sampled_from(("float32", "identity", *NUMBERS)), st.text())
        )
    return body, content_type, headers, specs


@pytest.mark.timeout(600)
@given(request=requests())
def test_any_request_is_answered_or_refused_with_4xx(request: Any) -> None:
    hold(*request)


@pytest.mark.timeout(600)
@given(value=changed_value(PROTOCOL, WORDS))
def test_any_parsed_json_is_answered_or_refused_with_4xx(value: Any) -> None:
    hold(value, JSON, {}, TWO)  # as TorchServe gives it, which has parsed it


def test_the_requests_that_are_changed_are_right() -> None:
    for body, content_type, headers, specs in (
        (json.dumps(PLAIN).encode(), JSON, {}, ONE),
        (json.dumps(PROTOCOL).encode(), JSON, {}, TWO),
        (to_npz({"x": X}), NPZ, {}, ONE),
        (as_npy(X), NPY, {}, ONE),
        (X.tobytes(), RAW, {"x-shape": "2,4"}, ONE),
    ):
        arrays, _ = decode(body, content_type, headers, specs, {})
        check(arrays, specs, 128)
