"""Repositories in a real Triton: what it makes of the configuration, and what it answers."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from google.protobuf import json_format, text_format
from torch.utils.data import TensorDataset
from tritonclient.grpc import model_config_pb2
from tritonclient.utils import InferenceServerException

from compress.artifacts.artifact import Artifact
from compress.artifacts.importing import import_checkpoint
from compress.artifacts.recipe import Recipe
from compress.common.signature import OutputSpec, Signature, TensorSpec
from compress.core.context import Context
from compress.core.stage import Stage
from compress.data.splits import Splits
from compress.export.onnx.cascade import Cascade
from compress.export.onnx.stage import ExportOnnx
from compress.export.openvino.stage import ExportOpenVINO
from compress.export.torchscript.stage import ExportTorchScript
from compress.serve.repository import (
    REPOSITORY,
    PackageKServe,
    PackageTriton,
    TritonRepository,
)
from tests.conftest import DIGITS
from tests.serve import test_package_triton, triton_server
from tests.serve.test_package_triton import POOLED, STACKED

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(triton_server.HAS_NONE), reason=triton_server.HAS_NONE),
]

NETS = f"""{test_package_triton.NETS}
class Averaged(Pooled):
    # And one number for each row.

    def forward(self, x, mask):
        sums, best = super().forward(x, mask)
        return sums, best, sums.mean(-1)

class Shifted(nn.Module):
    def __init__(self, shift):
        super().__init__()
        self.shift = nn.Parameter(torch.tensor([0.0, shift]))

    def forward(self, x):
        return x + self.shift
"""
TWO_SCORES = Signature(
    inputs=(TensorSpec(name="x", shape=("batch", 2)),), outputs=(OutputSpec(name="scores"),)
)
AVERAGED = POOLED.model_copy(update={"outputs": (*POOLED.outputs, OutputSpec(name="mean"))})
IMAGES = Signature(
    inputs=(TensorSpec(name="image", shape=("batch", 1, 8, 8)),),
    outputs=(OutputSpec(name="logits"),),
)
SIZES = {"blocks": 1, "width": 8, "classes": 10}
CLASSES = tuple(f"digit {i}" for i in range(10))


class Served(NamedTuple):
    """A running Triton, and what each of its models was packaged from."""

    server: triton_server.Triton
    packaged: dict[str, TritonRepository]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, digits: Splits) -> Iterator[Served]:
    """Serve a model for each way in which a configuration differs, all by one Triton."""
    root = tmp_path_factory.mktemp("triton")
    (root / "triton_served_nets.py").write_text(NETS)
    x, mask = AVERAGED.example(batch=24)
    rows = [{"x": one, "mask": kept} for one, kept in zip(x, mask, strict=True)]
    texts = Splits({"val": rows}, input_names=("x", "mask"))  # type: ignore[dict-item]

    def made(
        folder: Path, net: str, signature: Signature, exporter: Stage[Any, Any], **sizes: float
    ) -> Artifact:
        path = root / f"{net.replace(':', '-')}-{exporter.stage}-{[*sizes.values()]}"
        recipe = Recipe(factory=net, arguments=sizes)
        model = import_checkpoint(path / "eager", recipe, signature, checkpoint=None, folder=folder)
        return exporter.run(model, Context(root=path / "exported"))

    rows_x2 = torch.randn(400, 2, generator=torch.Generator().manual_seed(0))
    scored = Splits({"val": TensorDataset(rows_x2, rows_x2.argmax(1))})
    shifted = (root, "triton_served_nets:Shifted", TWO_SCORES, ExportOnnx())
    small, large = made(*shifted, shift=0.0), made(*shifted, shift=0.05)
    context = Context(root=root / "cascade", data=scored, artifacts={"large": large})
    cascade = Cascade(fallback="large", percent=2).run(small, context)
    assert 0 < cascade.manifest.facts["cascade"]["fallback_share"] < 1  # both kinds of rows
    pooled = (root, "triton_served_nets:Averaged", AVERAGED)
    stacked = (root, "triton_served_nets:Stacked", STACKED)
    made_by: list[tuple[Artifact, dict[str, Any], Splits | None]] = [
        (
            made(DIGITS, "models:ResNet", IMAGES, ExportOnnx(class_names=CLASSES), **SIZES),
            {"model_name": "digits", "max_batch_size": 16, "max_batch_delay_ms": 100},
            digits,
        ),
        (made(*pooled, ExportOnnx()), {"model_name": "pooled", "dynamic_batching": False}, texts),
        (
            made(*pooled, ExportOpenVINO()),
            {"model_name": "intel", "max_batch_delay_ms": 100, "threads": 2},
            texts,
        ),
        (made(*stacked, ExportTorchScript()), {"model_name": "stacked", "instances": 2}, None),
        (cascade, {"model_name": "cascade", "max_batch_size": 16}, scored),
    ]
    repository, packaged = root / "repository", {}
    for model, settings, data in made_by:
        name = settings["model_name"]
        context = Context(root=root / "packaged" / name, data=data)
        packaged[name] = PackageTriton(**settings)(model, context)
        # What KServe is given, and its runtime `kserve-tritonserver` starts Triton for.
        kserve = PackageKServe(storage_uri="s3://models/all")
        service = kserve.run(packaged[name], context.with_root(root / "services" / name))
        shutil.copytree(service.path / REPOSITORY / name, repository / name)
    # As the warning of a package whose requests are not to be joined says.
    with triton_server.triton(repository, root, "--disable-auto-complete-config") as server:
        yield Served(server, packaged)


Ask = Callable[..., dict[str, np.ndarray]]


@pytest.fixture(params=["http", "json", "grpc"])
def ask(request: pytest.FixtureRequest, served: Served) -> Iterator[Ask]:
    """Return what sends a request by NVIDIA's own client, and gives the outputs by their names."""
    triton = triton_grpc if request.param == "grpc" else triton_http
    binary = {} if request.param == "grpc" else {"binary_data": request.param == "http"}
    address = served.server.grpc if request.param == "grpc" else served.server.http
    with triton.InferenceServerClient(address) as client:

        def send(name: str, *tensors: torch.Tensor, classes: int = 0) -> dict[str, np.ndarray]:
            inputs = inputs_of(served, name, tensors, triton, **binary)
            named = [entry.name for entry in configuration(served, name).output]
            wanted = [
                triton.InferRequestedOutput(each, class_count=classes, **binary) for each in named
            ]
            answer = client.infer(name, inputs, outputs=wanted)
            return {each: answer.as_numpy(each) for each in named}

        yield send


def configuration(served: Served, name: str) -> Any:
    text = (served.packaged[name].path / name / "config.pbtxt").read_text()
    return text_format.Parse(text, model_config_pb2.ModelConfig())


def inputs_of(
    served: Served,
    name: str,
    tensors: Sequence[torch.Tensor],
    client: ModuleType = triton_grpc,
    **binary: bool,
) -> list[Any]:
    """Return tensors as a client of Triton's sends them, named as the configuration has them."""
    inputs = []
    for entry, tensor in zip(configuration(served, name).input, tensors, strict=True):
        data_type = model_config_pb2.DataType.Name(entry.data_type).removeprefix("TYPE_")
        sent = client.InferInput(entry.name, tensor.shape, data_type)
        sent.set_data_from_numpy(tensor.numpy(), **binary)
        inputs.append(sent)
    return inputs


def expected(
    served: Served, name: str, requests: Sequence[tuple[torch.Tensor, ...]]
) -> list[list[np.ndarray]]:
    """Return what the runtime of this process answers, which the gates have judged."""
    with served.packaged[name].open() as predict:
        return [[y.numpy() for y in predict(*inputs)] for inputs in requests]


def val_of(
    served: Served, digits: Splits, name: str, rows: int = 1
) -> list[tuple[torch.Tensor, ...]]:
    """Return the inputs of requests with so many rows each: all of `val`, for the digits."""
    if name == "digits":
        tensors = [torch.stack([image for image, _ in digits.datasets["val"]])]  # type: ignore[attr-defined]
    else:
        tensors = served.packaged[name].signature.example(batch=32 if name == "cascade" else 6)
    return list(zip(*(tensor.split(rows) for tensor in tensors), strict=True))


def test_triton_reads_each_configuration_as_it_was_written(served: Served) -> None:
    with triton_http.InferenceServerClient(served.server.http) as client:
        index = {each["name"]: each for each in client.get_model_repository_index()}
        assert {(each["state"], each["version"]) for each in index.values()} == {("READY", "1")}
        assert index.keys() == served.packaged.keys()
        for name in served.packaged:
            read = json_format.ParseDict(
                client.get_model_config(name), model_config_pb2.ModelConfig()
            )
            written = configuration(served, name)
            for field, value in written.ListFields():
                if field.name == "dynamic_batching":
                    # Triton states what is left out: its preferred size is the largest.
                    value.preferred_batch_size.append(written.max_batch_size)
                if field.name == "instance_group":
                    value[0].name = f"{name}_0"
                assert getattr(read, field.name) == value, f"{name}: {field.name}"
            assert read.HasField("dynamic_batching") is written.HasField("dynamic_batching")
    assert configuration(served, "digits").HasField("dynamic_batching")
    assert not configuration(served, "pooled").HasField("dynamic_batching")


@pytest.mark.parametrize("name", ["digits", "pooled", "intel", "stacked", "cascade"])
def test_answers_are_those_that_the_gates_judged(
    name: str, served: Served, digits: Splits, ask: Ask
) -> None:
    # As many rows as the digits' configuration allows: such a request waits for no others.
    requests = val_of(served, digits, name, rows=16)
    for inputs, right in zip(requests, expected(served, name, requests), strict=True):
        answers = ask(name, *inputs)
        for got, y in zip(answers.values(), right, strict=True):
            # One number for each row is sent as a dimension of one, which the protocol requires.
            assert np.array_equal(got.reshape(y.shape), y)


def test_requests_are_joined_where_rows_have_shown_that_this_changes_nothing(
    served: Served, digits: Splits
) -> None:
    for name, joined in (("digits", True), ("intel", True), ("pooled", False), ("stacked", False)):
        rows = val_of(served, digits, name)[:6]
        served.server.calls(name)
        with (
            triton_grpc.InferenceServerClient(served.server.grpc) as client,
            ThreadPoolExecutor(len(rows)) as pool,
        ):
            inputs = [inputs_of(served, name, row) for row in rows]
            answers = list(pool.map(partial(client.infer, name), inputs))
        assert (max(served.server.calls(name)) > 1) is joined, name
        named = [entry.name for entry in configuration(served, name).output]
        for answer, right in zip(answers, expected(served, name, rows), strict=True):
            for each, y in zip(named, right, strict=True):
                # Rows that are computed together are rounded in another order.
                got = answer.as_numpy(each).reshape(y.shape)
                assert np.allclose(got, y, rtol=0, atol=1e-5)


def test_the_classification_extension_names_classes(
    served: Served, digits: Splits, ask: Ask
) -> None:
    request = val_of(served, digits, "digits")[0]
    ((scores,),) = expected(served, "digits", [request])
    (best,) = ask("digits", *request, classes=1)["logits"].reshape(-1)
    # In JSON it is text, else bytes.
    score, index, name = str(best.decode() if isinstance(best, bytes) else best).split(":")
    assert (int(index), name) == (scores.argmax(), CLASSES[scores.argmax()])
    assert float(score) == pytest.approx(scores.max(), abs=1e-5)


def test_more_rows_than_the_configuration_allows_are_refused(ask: Ask) -> None:
    ask("digits", torch.zeros(16, 1, 8, 8))
    with pytest.raises(InferenceServerException, match=r"batch-size must be <= 16"):
        ask("digits", torch.zeros(17, 1, 8, 8))
