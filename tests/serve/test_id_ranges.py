"""Ids outside a model's embedding table are no request: ONNX counts negative ones from the end."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from compress.artifacts.eager_model import EagerModel
from compress.common.signature import TABLE_ROWS, Signature, TensorSpec
from compress.core.context import Context
from compress.export.aotinductor.stage import ExportAot
from compress.export.onnx.stage import ExportOnnx, OnnxModel
from compress.export.openvino.stage import ExportOpenVINO
from compress.serve.packaging.model_interface import record_probe
from compress.serve.repository import PackageKServe, PackageTriton
from compress.serve.torchserve.mar_file import CONFIG
from compress.serve.torchserve.stage import PackageTorchServe, archive_members
from compress.serve.worker.tensors import check
from tests.serve.served_here import serving
from tests.serve.text_nets import TOKENS, Classifier

TEXT = Signature(
    inputs=(
        TensorSpec(name="ids", shape=("batch", "length"), dtype="int64"),
        TensorSpec(name="mask", shape=("batch", "length"), dtype="int64"),
    )
)


class Indexed(torch.nn.Module):
    """Looks rows up by `table[ids]`, which counts from the end in PyTorch too."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(10, 4))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table[ids]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> OnnxModel:
    source = EagerModel.from_module(Classifier(), signature=TEXT)
    return ExportOnnx().run_checked(source, Context(root=tmp_path_factory.mktemp("onnx") / "model"))


def test_the_built_in_server_answers_ids_of_the_table_alone(exported: OnnxModel) -> None:
    assert exported.manifest.facts[TABLE_ROWS] == {"ids": TOKENS}
    with serving(exported.path) as server:

        def ask(token: int) -> tuple[int, bytes]:
            inputs = [
                {"name": name, "shape": [1, 2], "datatype": "INT64", "data": [[1, value]]}
                for name, value in (("ids", token), ("mask", 1))
            ]
            body = json.dumps({"inputs": inputs}).encode()
            status, _, answer = server.ask(body, {"Content-Type": "application/json"})
            return status, answer

        assert ask(TOKENS - 1)[0] == ask(0)[0] == 200
        for token in (-1, -50, TOKENS):
            status, answer = ask(token)
            assert status == 422
            assert f"ids holds {token}, expected ids from 0 to 99".encode() in answer


def test_an_archives_handler_checks_the_same_range(exported: OnnxModel, tmp_path: Path) -> None:
    probe = record_probe(exported, Context(root=tmp_path), max_rows=4)
    members = archive_members(exported, exported, PackageTorchServe(), probe, None)
    config = members[CONFIG]
    assert isinstance(config, bytes)
    specs = yaml.safe_load(config)["handler"]["inputs"]
    ids = np.array([[3, -1]])
    with pytest.raises(ValueError, match="ids holds -1, expected ids from 0 to 99"):
        check([ids, np.ones_like(ids)], specs, max_rows=4)
    check([abs(ids), np.ones_like(ids)], specs, max_rows=4)


def test_openvino_files_have_the_range_of_their_source(exported: OnnxModel, tmp_path: Path) -> None:
    from_onnx = ExportOpenVINO().run_checked(exported, Context(root=tmp_path / "openvino"))
    assert from_onnx.manifest.facts[TABLE_ROWS] == {"ids": TOKENS}


# It compiles for half a minute, and the first test here has the check, which is before any model.
@pytest.mark.soak
def test_an_id_outside_the_table_does_not_end_a_server_of_compiled_code(tmp_path: Path) -> None:
    source = EagerModel.from_module(Classifier(), signature=TEXT)
    compiled = ExportAot().run_checked(source, Context(root=tmp_path / "aot"))
    with serving(compiled.path) as server:
        statuses = []
        for token in (-1, TOKENS, 2**40, TOKENS - 1):
            data = {"inputs": {"ids": [[1, token]], "mask": [[1, 1]]}}
            headers = {"Content-Type": "application/json"}
            statuses.append(server.ask(json.dumps(data).encode(), headers)[0])
    assert statuses == [422, 422, 422, 200]


def test_repositories_say_which_ids_clients_must_send(exported: OnnxModel, tmp_path: Path) -> None:
    words = f"ids must hold ids from 0 to {TOKENS - 1}: Triton does not check them"
    triton = PackageTriton(gates=()).run(exported, Context(root=tmp_path / "triton"))
    assert f"# {words}" in (triton.path / "model/config.pbtxt").read_text()
    stage = PackageKServe(storage_uri="s3://models/rows", gates=())
    kserve = stage.run(triton, Context(root=tmp_path / "kserve"))
    for packaged in (triton, kserve):
        assert words in json.dumps(packaged.manifest.facts["warnings"])


def test_indices_that_may_be_negative_have_no_range(tmp_path: Path) -> None:
    signature = Signature(inputs=(TensorSpec(name="ids", shape=("batch",), dtype="int64"),))
    source = EagerModel.from_module(Indexed(), signature=signature)
    exported = ExportOnnx().run_checked(source, Context(root=tmp_path / "onnx"))
    assert TABLE_ROWS not in exported.manifest.facts
