"""NaN and infinities in requests: taken where samples of the data hold them, refused elsewhere."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from compress.common.signature import Signature, TensorSpec
from compress.core.context import Context
from compress.data.infer_signature import inputs_of, with_values_seen
from compress.data.splits import Splits
from compress.serve.http.messages import HttpError, RequestDecoder
from compress.serve.repository import PackageTriton
from compress.serve.worker.wire import to_npz
from tests.serve.served_here import sealed

X = TensorSpec(name="x", shape=("batch", 4))
NAN, INFINITE = [1.0, float("nan"), 0.0, 0.0], [1.0, float("-inf"), 0.0, 0.0]


def data(row: list[float]) -> Splits:
    rows = torch.zeros(40, 4)
    rows[::3] = torch.tensor(row)
    labels = torch.zeros(40, dtype=torch.int64)
    return Splits(datasets={"val": TensorDataset(rows, labels)}, input_names=("x",))


@pytest.mark.parametrize(
    ("row", "held"), [(NAN, ("nan",)), (INFINITE, ("infinities",)), ([0.0] * 4, None)]
)
def test_samples_show_which_inputs_hold_them(row: list[float], held: Any) -> None:
    assert with_values_seen((X,), data(row))[0].not_finite == held
    assert inputs_of(data(row), lambda: ["x"])[0].not_finite == held
    declared = X.model_copy(update={"not_finite": ()})
    assert with_values_seen((declared,), data(row))[0] == declared
    dumped = X.model_copy(update={"not_finite": held}).model_dump()
    assert ("not_finite" in dumped) == bool(held), "older manifests keep their digests"


def bodies(row: list[float]) -> dict[str, tuple[dict[str, str], bytes]]:
    array = np.array([row], "<f4")
    binary = {"name": "x", "shape": [1, 4], "datatype": "FP32"}
    head = json.dumps({"inputs": [{**binary, "parameters": {"binary_data_size": 16}}]}).encode()
    length = {"inference-header-content-length": str(len(head))}
    text = json.dumps({"inputs": [{**binary, "data": row}]}).encode()
    return {
        "json": ({"content-type": "application/json"}, text),
        "binary": (length, head + array.tobytes()),
        "npz": ({"content-type": "application/x-npz"}, to_npz({"x": array})),
        "raw": ({"content-type": "application/octet-stream"}, array.tobytes()),
    }


@pytest.mark.parametrize("form", ["json", "binary", "npz", "raw"])
def test_the_built_in_server_takes_what_samples_hold_in_each_form(form: str) -> None:
    spec = X.model_copy(update={"not_finite": ("infinities",)})
    decoders = [
        RequestDecoder(Signature(inputs=(each,)).input_descriptions(), ["y"], (), 8)
        for each in (spec, X)
    ]
    (array,), _ = decoders[0].decode(*bodies(INFINITE)[form])
    assert array.tolist() == [INFINITE]
    for decoder, row in ((decoders[0], NAN), (decoders[1], INFINITE)):
        with pytest.raises(HttpError, match="expected finite numbers") as refused:
            decoder.decode(*bodies(row)[form])
        assert refused.value.response.status == 400


def test_the_configuration_of_triton_names_such_inputs(tmp_path: Path) -> None:
    model = sealed(tmp_path / "onnx")
    taken = model.signature.inputs[0].model_copy(update={"not_finite": ("nan",)})
    signature = model.signature.model_copy(update={"inputs": (taken,)})
    model.manifest = model.manifest.model_copy(update={"signature": signature})
    model.signature = signature
    model.verify = lambda: None
    made = PackageTriton(gates=()).run(model, Context(root=tmp_path / "triton"))
    config = next(made.path.rglob("config.pbtxt")).read_text()
    assert config.startswith("# x may hold nan, as samples of the data do\n")
    made.verify()
