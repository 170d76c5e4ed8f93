"""Every exported kind is packed, and answers through the archive's own handler, without Java."""

import platform
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import yaml
from tokenizers import Tokenizer, models
from torch.export.pt2_archive import PT2ArchiveReader

from compress.artifacts.artifact import Artifact
from compress.artifacts.eager_model import EagerModel
from compress.artifacts.graph_model import GraphModel
from compress.artifacts.importing import import_checkpoint
from compress.artifacts.recipe import Recipe
from compress.common.errors import StageFailed
from compress.common.signature import OutputSpec, Signature, TensorSpec
from compress.core.context import Context
from compress.data.splits import Splits
from compress.export.aotinductor.stage import AotModel, ExportAot
from compress.export.onnx.stage import ExportOnnx, OnnxModel
from compress.export.openvino.stage import ExportOpenVINO
from compress.export.torchscript.stage import ExportTorchScript
from compress.quantization.stages.static import QuantizeStatic
from compress.serve.http.loaded_model import open_model
from compress.serve.packaging.provenance import Provenance, digest_of
from compress.serve.packaging.request_forms import TextInput, are_probabilities
from compress.serve.torchserve.mar_file import read_mar
from compress.serve.torchserve.stage import PackageTorchServe
from compress.serve.worker.loaders import load_graph, missing_here
from compress.serve.worker.wire import create_readers, decode
from tests.export.builders import EXACT_BITS
from tests.serve.handler_process import HandlerProcess

pytestmark = pytest.mark.torchserve

PERCEPTRON = "from torch import nn\n\ndef mlp():\n    return nn.Sequential(nn.Linear(4, 3))\n"
X = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> EagerModel:
    folder = tmp_path_factory.mktemp("kinds")
    (folder / "perceptron.py").write_text(PERCEPTRON)
    signature = Signature(
        inputs=(TensorSpec(name="x", shape=("batch", 4)),), outputs=(OutputSpec(name="y"),)
    )
    recipe = Recipe(factory="perceptron:mlp")
    return import_checkpoint(folder / "source", recipe, signature, checkpoint=None, folder=folder)


@pytest.fixture(scope="module")
def int8(source: EagerModel, tmp_path_factory: pytest.TempPathFactory) -> GraphModel:
    samples = [(row, 0) for row in torch.from_numpy(X)] * 13
    data = Splits({"train": samples, "val": samples}, batch_size=4)
    context = Context(root=tmp_path_factory.mktemp("int8") / "int8", data=data)
    return QuantizeStatic(calibration_samples=64, weight_bits=EXACT_BITS).run_checked(
        source, context
    )


def answers_as_packed(model: Artifact, root: Path, **settings: Any) -> Provenance:
    """Pack a model, ask the handler in a process alone, and compare with the model itself."""
    stage = PackageTorchServe(**settings)
    archive = stage.run(model, Context(root=root))  # type: ignore[arg-type]  # any kind
    members = read_mar(archive.payload_path)
    origin = Provenance.read(members["provenance.json"], "it")
    with HandlerProcess(members, model.signature) as harness, model.open() as predict:
        (expected,) = predict(torch.from_numpy(X))
        np.testing.assert_allclose(harness.predict([X])[0], expected.numpy(), 0, 1e-6)
        with pytest.raises(StageFailed, match="400: x is float64, expected float32"):
            harness.predict([X.astype(np.float64)])
    return origin


@pytest.mark.slow
def test_an_eager_model_is_served_as_its_graph_without_its_code(
    source: EagerModel, tmp_path: Path
) -> None:
    origin = answers_as_packed(source, tmp_path / "mar")
    assert origin.artifact.kind == "graph"
    assert origin.artifact.origin == source.digest != origin.artifact.digest
    members = read_mar(tmp_path / "mar" / "model.mar")
    assert not any(b"nn.Sequential" in content for content in members.values())


@pytest.mark.slow
def test_a_quantized_graph_is_served(int8: GraphModel, tmp_path: Path) -> None:
    assert answers_as_packed(int8, tmp_path / "mar").artifact.kind == "graph"


@pytest.mark.slow
def test_onnx_weights_beside_the_file_travel(source: EagerModel, tmp_path: Path) -> None:
    whole = ExportOnnx(class_names=("a", "b", "c")).run_checked(
        source, Context(root=tmp_path / "onnx")
    )
    with OnnxModel.atomic_write(tmp_path / "large", whole.signature) as partial:
        onnx.save_model(
            onnx.load_model(whole.payload_path),
            partial / "model.onnx",
            save_as_external_data=True,
            location="model.onnx.data",
            size_threshold=0,
        )
    model = OnnxModel.from_directory(tmp_path / "large")
    assert "model.onnx.data" in answers_as_packed(model, tmp_path / "mar").members


def test_an_openvino_model_and_its_weights_are_served(source: EagerModel, tmp_path: Path) -> None:
    model = ExportOpenVINO().run_checked(source, Context(root=tmp_path / "openvino"))
    assert {"model.xml", "model.bin"} <= answers_as_packed(model, tmp_path / "mar").members.keys()


def test_openvino_answers_threads_side_by_side(source: EagerModel, tmp_path: Path) -> None:
    model = ExportOpenVINO().run_checked(source, Context(root=tmp_path / "openvino"))
    with open_model(model, "m", threads=1) as served, ThreadPoolExecutor(4) as pool:
        expected = served.call(X)[0]
        for (found,) in pool.map(served.call, [X] * 64):
            np.testing.assert_array_equal(found, expected)
        with pytest.raises(ValueError, match=r"input x has shape \[5, 3\], expected \[\?,4\]"):
            served.call(X[:, :3])


@pytest.mark.slow
def test_quantized_torchscript_is_served(int8: GraphModel, tmp_path: Path) -> None:
    model = ExportTorchScript().run_checked(int8, Context(root=tmp_path / "ts"))
    assert answers_as_packed(model, tmp_path / "mar").artifact.kind == "torchscript"


@pytest.mark.soak  # test_package_triton.py serves one
@pytest.mark.slow
def test_an_aotinductor_package_is_served_and_refused_on_another_processor(
    source: EagerModel, tmp_path: Path
) -> None:
    model = ExportAot().run_checked(source, Context(root=tmp_path / "aot"))
    assert answers_as_packed(model, tmp_path / "mar").artifact.kind == "aot"
    members = read_mar(tmp_path / "mar" / "model.mar")
    config = members["model-config.yaml"]
    members["model-config.yaml"] = config.replace(b"instructions:", b"instructions:\n    - avx9")
    record = Provenance.read(members["provenance.json"], "it")
    digests = record.members | {"model-config.yaml": digest_of(members["model-config.yaml"])}
    members["provenance.json"] = record.model_copy(update={"members": digests}).sealed()
    with (
        pytest.raises(StageFailed, match="compiled for a processor with avx9, which this one has"),
        HandlerProcess(members, model.signature),
    ):
        pass


def test_compiled_code_is_refused_where_it_was_not_built_for() -> None:
    here = {"device": "cpu", "system": platform.system(), "machine": platform.machine()}
    here["torch"] = torch.__version__.partition("+")[0]
    assert missing_here({**here, "instructions": []}) == ""
    missing = missing_here({**here, "instructions": ["avx9"]})
    assert missing == "a processor with avx9, which this one has not"
    assert missing_here({**here, "torch": "1.0"}).startswith("torch 1.0, and here it is ")


def test_code_compiled_for_a_gpu_is_not_packed(source: EagerModel, tmp_path: Path) -> None:
    facts = {"built_for": {"device": "cuda"}, "parameters": 1, "macs": 1}
    with AotModel.atomic_write(tmp_path / "cuda", source.signature, facts=facts) as partial:
        (partial / "model.pt2").write_bytes(b"it would be run")
    with pytest.raises(StageFailed, match="compiled for cuda, and archives are served on the CPU"):
        PackageTorchServe().run(
            AotModel.from_directory(tmp_path / "cuda"), Context(root=tmp_path / "mar")
        )
    assert not (tmp_path / "mar").exists()


def test_a_graph_that_could_run_code_is_not_read(source: EagerModel, tmp_path: Path) -> None:
    graph = GraphModel.from_eager(source, tmp_path / "graph")
    reader = PT2ArchiveReader(str(graph.payload_path))
    with (tmp_path / "model.pt2").open("wb") as stream:
        writer = torch._C.PyTorchFileWriter(stream)
        writer.set_min_version(6)
        for name in reader.get_file_names():
            if name != "byteorder" and not name.startswith(".data/"):
                record = reader.read_bytes(name)
                if name.endswith("sample_inputs/model.pt"):
                    record = b"a pickle"
                writer.write_record(name, record, len(record))
        writer.write_end_of_file()
    with pytest.raises(RuntimeError, match="holds pickled sample inputs; it was not read"):
        load_graph(tmp_path / "model.pt2", {}, 1)


@pytest.mark.slow
def test_class_names_of_an_onnx_file_become_labels(source: EagerModel, tmp_path: Path) -> None:
    model = ExportOnnx(class_names=("a", "b", "c")).run_checked(
        source, Context(root=tmp_path / "onnx")
    )
    archive = PackageTorchServe(top_labels=9).run(model, Context(root=tmp_path / "mar"))
    config = yaml.safe_load(read_mar(archive.payload_path)["model-config.yaml"])
    classes = {"names": ["a", "b", "c"], "top": 3, "softmax": True}
    assert config["handler"]["classes"] == classes
    with pytest.raises(StageFailed, match=r"2 names, and y has shape \[4, 3\]"):
        PackageTorchServe(class_names=("a", "b")).run(model, Context(root=tmp_path / "no"))


@pytest.mark.slow
def test_a_tokenizer_travels_with_a_model_that_takes_texts(tmp_path: Path) -> None:
    (tmp_path / "reviews.py").write_text(
        "from torch import nn\n\nclass Reviews(nn.Module):\n    def __init__(self):\n"
        "        super().__init__()\n        self.table = nn.Embedding(4, 3)\n\n"
        "    def forward(self, input_ids):\n        return self.table(input_ids).mean(1)\n"
    )
    ids = TensorSpec(name="input_ids", shape=("batch", "length"), dtype="int64")
    signature = Signature(inputs=(ids,), outputs=(OutputSpec(name="y"),))
    source = import_checkpoint(
        tmp_path / "source",
        Recipe(factory="reviews:Reviews"),
        signature,
        checkpoint=None,
        folder=tmp_path,
    )
    model = ExportOnnx().run_checked(source, Context(root=tmp_path / "onnx"))
    words = Tokenizer(models.WordLevel({"[PAD]": 0, "good": 1, "bad": 2}, unk_token="[PAD]"))
    words.save(str(tmp_path / "words.json"))
    stage = PackageTorchServe(text=TextInput(tokenizer="words.json")).resolve_paths(
        tmp_path, tmp_path
    )
    archive = stage.run(model, Context(root=tmp_path / "mar"))
    assert str(tmp_path) not in (archive.path / "manifest.json").read_text()
    members = read_mar(archive.payload_path)
    settings = yaml.safe_load(members["model-config.yaml"])["handler"]
    (tmp_path / "tokenizer.json").write_bytes(members["tokenizer.json"])
    readers = create_readers(settings, settings["inputs"], tmp_path)
    (array,), _ = decode(b"bad", "text/plain", {}, settings["inputs"], readers)
    assert array.dtype == np.int64 and array.tolist() == [[2]]
    with HandlerProcess(members, signature) as harness, model.open() as predict:
        (expected,) = predict(torch.from_numpy(array))
        assert np.array_equal(harness.predict([array])[0], expected.numpy())


def test_probabilities_and_scores_are_told_apart() -> None:
    y = np.array([[0.25, 0.75], [1, 0]], np.float32)
    assert are_probabilities(y)
    assert not are_probabilities(y * 2)
    assert not are_probabilities(y - [1, -1])
