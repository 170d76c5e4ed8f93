"""A model repository for Triton: what Triton's own schema reads in it, and what it answers."""

import importlib.util
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from google.protobuf import text_format

from compress.artifacts.artifact import Artifact
from compress.artifacts.importing import import_checkpoint
from compress.artifacts.recipe import Recipe
from compress.common.atomic_files import sha256_of
from compress.common.errors import ArtifactInvalid, StageFailed
from compress.common.signature import OutputSpec, Signature, TensorSpec
from compress.core.context import Context
from compress.data.splits import Splits
from compress.export.aotinductor.stage import AotModel, ExportAot
from compress.export.onnx.stage import ExportOnnx, OnnxModel
from compress.export.openvino.stage import RUNTIME, ExportOpenVINO
from compress.export.torchscript.stage import ExportTorchScript
from compress.profiling.batch_dependence import numpy_call
from compress.serve.packaging.model_interface import Interface, Tensor, infer_interface
from compress.serve.repository import (
    AUTO_COMPLETES,
    TRITON_NOT_RUN,
    PackageKServe,
    PackageTriton,
    TritonRepository,
    model_config,
)
from compress.serve.verify import verify

NETS = """
import torch
from torch import nn

class Pooled(nn.Module):
    # Rows and steps vary; one answer for each row, one for each step.

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 5)

    def forward(self, x, mask):
        y = self.layer(x)
        return (y * mask.unsqueeze(-1)).sum(1), y.argmax(-1)

class Stacked(nn.Module):
    # The state as torch's recurrent layers give it: layers first, rows second.

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 5)

    def forward(self, x):
        y = self.layer(x)
        return y, y[:, -1].expand(4, -1, -1)

class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x):
        return {"logits": self.layer(x)}
"""
POOLED = Signature(
    inputs=(
        TensorSpec(name="x", shape=("batch", "steps", 3)),
        TensorSpec(name="mask", shape=("batch", "steps"), dtype="int64"),
    ),
    outputs=(OutputSpec(name="sums"), OutputSpec(name="best")),
)
STACKED = Signature(
    inputs=(TensorSpec(name="x", shape=("batch", 6, 3)),),
    outputs=(OutputSpec(name="y"), OutputSpec(name="state")),
)
NAMED = Signature(
    inputs=(TensorSpec(name="x", shape=("batch", 4)),), outputs=(OutputSpec(name="logits"),)
)


@pytest.fixture(scope="module")
def published() -> ModuleType:
    """Return Triton's own schema, which its client's package carries.

    The module is read by its path: the package around it imports gRPC.
    """
    package = importlib.util.find_spec("tritonclient")
    assert package is not None
    file = Path(next(iter(package.submodule_search_locations or ()))) / "grpc/model_config_pb2.py"
    spec = importlib.util.spec_from_file_location("model_config_pb2", file)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("triton")
    (folder / "triton_nets.py").write_text(NETS)
    return folder


def made(
    folder: Path, name: str, signature: Signature, exporter: Any, **arguments: Any
) -> Artifact:
    recipe = Recipe(factory=f"triton_nets:{name}", arguments=arguments)
    root = folder / name / exporter.stage
    source = import_checkpoint(root / "source", recipe, signature, checkpoint=None, folder=folder)
    return exporter.run_checked(source, Context(root=root / "exported"))


@pytest.fixture(scope="module")
def pooled(folder: Path) -> OnnxModel:
    return made(folder, "Pooled", POOLED, ExportOnnx())


@pytest.fixture(scope="module")
def rows() -> Splits:
    """Return samples for `pooled`, with masks of several lengths."""
    x, mask = POOLED.example(batch=40)
    samples = [{"x": one, "mask": kept} for one, kept in zip(x, mask, strict=True)]
    return Splits({"val": samples}, input_names=("x", "mask"))  # type: ignore[dict-item]


def written(interface: Interface, joins: bool = True) -> str:
    return model_config(PackageTriton(), "onnx", interface, joins=joins)


def read(repository: TritonRepository, published: ModuleType) -> Any:
    text = (repository.path / repository.model_name / "config.pbtxt").read_text()
    return text_format.Parse(text, published.ModelConfig())


@pytest.mark.slow
@pytest.mark.parametrize("joins", [True, False])
def test_requests_are_joined_only_where_that_changes_no_answer(
    joins: bool, pooled: OnnxModel, published: ModuleType
) -> None:
    with pooled.open() as predict:
        interface = infer_interface(numpy_call(predict, pooled.signature), pooled.signature)
    text = written(interface, joins)
    config = text_format.Parse(text, published.ModelConfig())
    assert config.max_batch_size == 128
    assert config.HasField("dynamic_batching") is joins


def test_the_configuration_is_what_tritons_schema_reads(
    pooled: OnnxModel, rows: Splits, published: ModuleType, tmp_path: Path
) -> None:
    stage = PackageTriton(
        model_name="text", max_batch_size=64, max_batch_delay_ms=1.5, instances=2, threads=3
    )
    repository = stage(pooled, Context(root=tmp_path / "triton", data=rows))
    assert repository.manifest.facts["warnings"] == [TRITON_NOT_RUN]
    config = read(repository, published)
    assert (config.name, config.platform, config.max_batch_size) == ("text", "onnxruntime_onnx", 64)
    types = published.DataType
    tensors = [*config.input, *config.output]
    assert [(t.name, list(t.dims), t.data_type) for t in tensors] == [
        ("x", [-1, 3], types.TYPE_FP32),
        ("mask", [-1], types.TYPE_INT64),
        ("sums", [5], types.TYPE_FP32),
        ("best", [-1], types.TYPE_INT64),
    ]
    (group,) = config.instance_group
    assert (group.kind, group.count) == (published.ModelInstanceGroup.KIND_CPU, 2)
    assert config.dynamic_batching.max_queue_delay_microseconds == 1500
    assert config.dynamic_batching.default_queue_policy.max_queue_size == 128
    assert config.parameters["intra_op_thread_count"].string_value == "3"


def test_the_layout_is_a_model_repository_and_the_packaged_file_answers(
    pooled: OnnxModel, tmp_path: Path
) -> None:
    repository = PackageTriton(model_name="text")(pooled, Context(root=tmp_path / "triton"))
    files = sorted(f.relative_to(repository.path).as_posix() for f in repository.path.rglob("*.*"))
    assert files == ["manifest.json", "text/1/model.onnx", "text/config.pbtxt"]
    assert repository.payload_path.read_bytes() == pooled.payload_path.read_bytes()
    assert repository.payload_bytes > pooled.payload_bytes
    not_run, why, auto = repository.manifest.facts["warnings"]
    assert auto == AUTO_COMPLETES
    assert (
        not_run == TRITON_NOT_RUN
        and "requests are not joined: only seeded inputs were asked" in why
    )
    assert "dynamic_batching" not in (repository.path / "text" / "config.pbtxt").read_text()
    twin = PackageTriton(model_name="text")(pooled, Context(root=tmp_path / "twin"))
    assert twin.digest == repository.digest
    inputs = POOLED.example(batch=5)
    with pooled.open() as expected, repository.open() as got:
        for a, b in zip(expected(*inputs), got(*inputs), strict=True):
            assert torch.equal(a, b)


def test_a_repository_is_verified_and_refused_where_it_was_altered(
    pooled: OnnxModel, tmp_path: Path
) -> None:
    sealed = PackageTriton()(pooled, Context(root=tmp_path / "triton"))
    # Their order is a part of the digest.
    first = ["model_name", "model_file", "batched", "parameters"]
    assert list(sealed.manifest.facts)[:4] == first
    proof = verify(sealed.path)
    assert proof.kind == "triton" and proof.sha256 == sha256_of(pooled.payload_path)
    copy = shutil.copytree(sealed.path, tmp_path / "copy")
    config = copy / "model" / "config.pbtxt"
    config.chmod(0o644)
    config.write_text(config.read_text().replace("count: 1", "count: 9"))
    with pytest.raises(ArtifactInvalid, match=r"model/config\.pbtxt is not the file"):
        Artifact.from_directory(copy).verify()


def test_rows_on_another_axis_are_not_batched(
    folder: Path, published: ModuleType, tmp_path: Path
) -> None:
    model = made(folder, "Stacked", STACKED, ExportTorchScript())
    repository = PackageTriton()(model, Context(root=tmp_path / "triton"))
    config = read(repository, published)
    assert (config.platform, config.max_batch_size) == ("pytorch_libtorch", 0)
    assert not config.HasField("dynamic_batching")
    # The backend finds a TorchScript tensor by the number at the end of its name.
    assert [(t.name, list(t.dims)) for t in [*config.input, *config.output]] == [
        ("x__0", [-1, 6, 3]),
        ("y__0", [-1, 6, 5]),
        ("state__1", [4, -1, 5]),
    ]
    assert repository.payload_path.name == "model.pt"
    assert config.parameters["INTRA_OP_THREAD_COUNT"].string_value == "1"


def test_an_aotinductor_package_has_positional_names_and_no_batching(published: ModuleType) -> None:
    tensors = (Tensor("x", "float32", (-1, 3)),)
    interface = Interface(tensors, tensors, rows_stay_first=False)
    stage = PackageTriton(model_name="m", threads=2)
    text = model_config(stage, "aot", interface, joins=True)
    config = text_format.Parse(text, published.ModelConfig())
    assert (config.backend, config.platform, config.max_batch_size) == ("pytorch", "torch_aoti", 0)
    assert not config.HasField("dynamic_batching")
    assert [(t.name, list(t.dims)) for t in [*config.input, *config.output]] == [
        ("INPUT__0", [-1, 3]),
        ("OUTPUT__0", [-1, 3]),
    ]
    assert config.parameters["INTRA_OP_THREAD_COUNT"].string_value == "2"


# CI compiles such packages in tests/export/aotinductor, and packages other kinds.
@pytest.mark.soak
@pytest.mark.slow
def test_a_packaged_aotinductor_package_answers_on_the_machine_it_was_compiled_for(
    folder: Path, published: ModuleType, tmp_path: Path
) -> None:
    model = made(folder, "Pooled", POOLED, ExportAot())
    repository = PackageTriton()(model, Context(root=tmp_path / "triton"))
    service = PackageKServe(storage_uri="s3://a/b")(repository, Context(root=tmp_path / "kserve"))
    assert repository.payload_path.name == "model.pt2"
    assert "does not batch" in repository.manifest.facts["warnings"][1]  # type: ignore[index]
    names = [tensor.name for tensor in read(repository, published).output]
    assert names == ["OUTPUT__0", "OUTPUT__1"]
    inputs = POOLED.example(batch=5)
    with model.open() as expected, repository.open() as got, service.open() as deployed:
        for a, b, c in zip(expected(*inputs), got(*inputs), deployed(*inputs), strict=True):
            assert torch.equal(a, b) and torch.equal(a, c)


def test_an_openvino_model_is_packaged_with_its_weights(
    folder: Path, rows: Splits, published: ModuleType, tmp_path: Path
) -> None:
    model = made(folder, "Pooled", POOLED, ExportOpenVINO())
    context = Context(root=tmp_path / "triton", data=rows)
    repository = PackageTriton(threads=2, dynamic_batching=False)(model, context)
    config = read(repository, published)
    assert (config.backend, config.platform, config.max_batch_size) == ("openvino", "", 128)
    assert config.parameters["INFERENCE_NUM_THREADS"].string_value == "2"
    assert [tensor.name for tensor in config.input] == ["x", "mask"]
    assert {"model/1/model.xml", "model/1/model.bin"} <= repository.manifest.files.keys()
    warnings = [TRITON_NOT_RUN, RUNTIME.triton.warning, AUTO_COMPLETES]
    assert repository.manifest.facts["warnings"] == warnings
    service = PackageKServe(storage_uri="s3://a/b")(repository, context.with_root(tmp_path / "ks"))
    assert "name: triton" in service.payload_path.read_text()
    inputs = POOLED.example(batch=5)
    with model.open() as expected, service.open() as deployed:
        for a, b in zip(expected(*inputs), deployed(*inputs), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("file", "message"), [("model.bin", "no backend"), ("model.pt2", "built_for")]
)
def test_a_file_that_cannot_be_opened_as_it_is_recorded_is_refused(
    tmp_path: Path, file: str, message: str
) -> None:
    facts: dict[str, Any] = {"model_name": "m", "model_file": f"m/1/{file}"}
    with TritonRepository.atomic_write(tmp_path / "made", POOLED, facts=facts) as partial:
        (partial / "m/1").mkdir(parents=True)
        (partial / "m/1" / file).touch()
        (partial / "m/config.pbtxt").touch()
    repository = TritonRepository.from_directory(tmp_path / "made")
    with pytest.raises(ArtifactInvalid, match=message), repository.open():
        pass


def test_code_for_a_gpu_is_refused(tmp_path: Path) -> None:
    facts = {"built_for": {"device": "cuda"}}
    with AotModel.atomic_write(tmp_path / "aot", STACKED, facts=facts) as partial:
        (partial / "model.pt2").write_bytes(b"code")
    with pytest.raises(StageFailed, match="compiled for cuda"):
        PackageTriton().run(
            AotModel.from_directory(tmp_path / "aot"), Context(root=tmp_path / "triton")
        )


def test_a_dictionary_is_refused(folder: Path, tmp_path: Path) -> None:
    model = made(folder, "Named", NAMED, ExportTorchScript(method="script"))
    with pytest.raises(StageFailed, match="answers with a dict"):
        PackageTriton().run(model, Context(root=tmp_path / "triton"))
    assert not (tmp_path / "triton").exists()


def test_a_tensor_of_one_number_for_each_row_is_reshaped(published: ModuleType) -> None:
    tensors = (Tensor("score", "float16", (-1,)),)
    interface = Interface(tensors, (Tensor("flag", "bool", (-1,)),), True)
    text = written(interface)
    config = text_format.Parse(text, published.ModelConfig())
    (score,), (flag,) = config.input, config.output
    assert (list(score.dims), list(score.reshape.shape), score.HasField("reshape")) == (
        [1],
        [],
        True,
    )
    assert flag.data_type == published.DataType.TYPE_BOOL
