import json
import logging
import shutil
from pathlib import Path

import onnx
import onnxruntime
import pytest
import torch

from compress.artifacts.eager_model import EagerModel
from compress.common.errors import StageFailed
from compress.common.signature import Signature
from compress.core.context import Context
from compress.core.gates import MaxSize, Parity
from compress.export.onnx import proto_io
from compress.export.onnx.graph import check_class_count
from compress.export.onnx.lowering import translate
from compress.export.onnx.proto_io import read
from compress.export.onnx.stage import ExportOnnx, OnnxModel
from compress.quantization.stages.dynamic import QuantizeDynamic
from compress.serve.packaging.model_interface import record_probe
from compress.serve.torchserve.stage import PackageTorchServe, archive_members
from tests.export.builders import HERE, IMAGE, ROWS, network


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> EagerModel:
    return network(
        tmp_path_factory.mktemp("options") / "source", "branching_nets:convolutions", folder=HERE
    )


def exported(model: EagerModel, root: Path, **settings: object) -> OnnxModel:
    stage = {"gates": [{"gate": "parity", "atol": 1e-5}], **settings}
    return ExportOnnx.model_validate(stage)(model, Context(root=root))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # the user's own
def test_the_older_exporter_is_used_aloud_where_the_usual_one_fails(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    model = network(tmp_path / "source", "branching_nets:branching", ROWS, HERE)
    with caplog.at_level(logging.WARNING):
        artifact = exported(model, tmp_path / "onnx")
    assert artifact.manifest.facts["exporter"] == "legacy"
    assert "data-dependent expression" in caplog.text
    assert "older, deprecated exporter instead (dynamo=False)" in caplog.text
    assert capfd.readouterr() == ("", "")  # torch prints graphs where it fails
    with artifact.open() as got, model.open() as expected:
        for shift in (-5, 5):  # both branches
            x = torch.randn(3, 4) + shift * model.load().linear.weight.mean(0).sign()
            assert torch.allclose(got(x)[0], expected(x)[0], atol=1e-5)


def test_a_branch_that_tracing_would_guess_is_refused(tmp_path: Path) -> None:
    model = network(tmp_path / "source", "branching_nets:guessing", ROWS, HERE)
    with pytest.raises(StageFailed, match=r"torch\.export cannot trace .*data-dependent") as caught:
        exported(model, tmp_path / "onnx")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "onnx").exists()


def test_a_model_says_what_it_is(model: EagerModel, tmp_path: Path) -> None:
    artifact = exported(model, tmp_path / "onnx", class_names=["cat", "dog", "owl"])
    assert artifact.manifest.facts["exporter"] == "dynamo"
    session = onnxruntime.InferenceSession(artifact.payload_path)
    properties = {k: json.loads(v) for k, v in session.get_modelmeta().custom_metadata_map.items()}
    assert Signature.model_validate(properties["signature"]) == IMAGE
    assert properties["class_names"] == ["cat", "dog", "owl"]
    assert properties["provenance"]["source"] == model.digest
    assert properties["provenance"]["toolkit"].startswith("compress-pipeline ")
    with pytest.raises(StageFailed, match="2 names, and the first output has 3 classes"):
        check_class_count(read(artifact.payload_path), ["cat", "dog"])


def test_the_operator_set_is_the_one_asked_for(model: EagerModel, tmp_path: Path) -> None:
    artifact = exported(model, tmp_path / "onnx", opset=24)
    assert onnx.load(artifact.payload_path).opset_import[0].version == 24


@pytest.mark.parametrize(
    ("level", "domains"),
    [pytest.param("basic", [""], marks=pytest.mark.soak), ("extended", ["", "com.microsoft"])],
)
def test_rewritten_graphs_answer_alike_and_are_written_alike(
    model: EagerModel, tmp_path: Path, level: str, domains: list[str]
) -> None:
    first = exported(model, tmp_path / "first", optimize=level)
    graph = onnx.load(first.payload_path)
    assert [opset.domain for opset in graph.opset_import] == domains
    assert "BatchNormalization" not in {node.op_type for node in graph.graph.node}
    assert {node.domain for node in graph.graph.node} == set(domains)
    assert first.macs() == model.macs()
    assert exported(model, tmp_path / "second", optimize=level).digest == first.digest


def test_ranges_found_at_run_time_have_the_types_of_onnx(tmp_path: Path) -> None:
    model = network(tmp_path / "source", "networks:mlp")
    quantized = QuantizeDynamic()(model, Context(root=tmp_path / "quantized"))
    graph, _ = translate(quantized, None, "test")
    proto_io.write(graph, tmp_path / "model.onnx")  # refuses types that do not fit
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    x = IMAGE.example(2)[0]
    (found,) = session.run(None, {"image": x.numpy()})
    with quantized.open() as predict:
        assert torch.allclose(torch.from_numpy(found), predict(x)[0], atol=1e-5)


@pytest.mark.slow
def test_weights_that_protobuf_cannot_hold_lie_beside_the_file(
    model: EagerModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = exported(model, tmp_path / "whole")
    monkeypatch.setattr(proto_io, "LARGEST", 4096)
    artifact = exported(model, tmp_path / "onnx", optimize="basic")
    names = sorted(f.name for f in artifact.path.iterdir())
    assert names == ["manifest.json", "model.onnx", "model.onnx.data"]
    assert artifact.payload_path.stat().st_size < 6000
    assert artifact.payload_bytes > 4 * model.parameters() * 0.9
    assert MaxSize(ratio=0.5).measure(model, artifact, Context(root=tmp_path)) > 0.5
    assert (artifact.parameters(), artifact.macs()) == (whole.parameters(), whole.macs())
    artifact.verify()
    shutil.move(artifact.path, tmp_path / "elsewhere")
    moved = OnnxModel.from_directory(tmp_path / "elsewhere")
    assert Parity(atol=0).measure(whole, moved, Context(root=tmp_path)) < 1e-5
    probe = record_probe(moved, Context(root=tmp_path), max_rows=4)
    packed = archive_members(moved, moved, PackageTorchServe(), probe, None)
    assert packed["model.onnx.data"] == moved.path / "model.onnx.data"
