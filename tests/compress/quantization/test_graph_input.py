"""Quantization of `torch.export` programs, which have no code and name no modules."""

from pathlib import Path
from typing import Any

import pytest
import torch

from compress.artifacts.eager_model import EagerModel
from compress.artifacts.graph_model import GraphModel
from compress.common.errors import PipelineInvalid, StageFailed
from compress.common.signature import Signature, TensorSpec
from compress.core.context import Context
from compress.functional.stages import quantize_static
from compress.quantization.stages.dynamic import QuantizeDynamic
from compress.quantization.stages.half_precision import ConvertPrecision
from compress.quantization.stages.mixed_precision import QuantizeMixed
from compress.quantization.stages.qat import QuantizeAwareTraining
from compress.quantization.stages.static import QuantizeStatic
from compress.quantization.stages.weight_only import QuantizeWeights
from tests.compress.quantization.builders import answer, build_model, images, labelled_images

VECTOR = Signature(inputs=(TensorSpec(name="x", shape=("batch", 4)),))
FACTS = ("quantized_operators", "float_modules", "left_float", "mixed", "float32_operators")


@pytest.fixture(scope="module")
def eager(tmp_path_factory: pytest.TempPathFactory) -> EagerModel:
    folder = tmp_path_factory.mktemp("eager")
    return build_model(folder / "source", "networks:flattened")


@pytest.fixture(scope="module")
def graph(eager: EagerModel, tmp_path_factory: pytest.TempPathFactory) -> GraphModel:
    return GraphModel.from_eager(eager, tmp_path_factory.mktemp("graph") / "source")


@pytest.mark.parametrize(
    "stage",
    [
        QuantizeStatic(calibration_samples=32, exclude=("3",)),
        QuantizeWeights(group_size=16, method="gptq", calibration_samples=32),
        QuantizeMixed(max_drop_points=0, calibration_samples=32, fallback=("float",)),
        ConvertPrecision(dtype="float16", calibration_samples=32),
        pytest.param(
            QuantizeAwareTraining(calibration_samples=32, epochs=1, teaching={"loss": "mse"}),
            marks=pytest.mark.soak,
        ),
    ],
    ids=lambda stage: stage.stage,
)
def test_a_graph_is_quantized_as_the_model_that_it_was_traced_from(
    eager: EagerModel, graph: GraphModel, tmp_path: Path, stage: Any
) -> None:
    data = labelled_images()
    expected, found = (
        stage(model, Context(root=tmp_path / model.kind, data=data)) for model in (eager, graph)
    )
    torch.testing.assert_close(answer(found, images()), answer(expected, images()))
    for name in FACTS:
        assert found.manifest.facts.get(name) == expected.manifest.facts.get(name)


def test_patterns_of_exclude_are_names_of_modules_with_parameters(
    graph: GraphModel, tmp_path: Path
) -> None:
    context = Context(root=tmp_path / "out", data=labelled_images())
    with pytest.raises(PipelineInvalid, match=r"no module is named '4'; did you mean"):
        QuantizeStatic(exclude=("4",))(graph, context)


def test_what_is_quantized_already_is_refused(graph: GraphModel, tmp_path: Path) -> None:
    context = Context(root=tmp_path / "out", data=labelled_images())
    halves = ConvertPrecision(dtype="bfloat16")(graph, Context(root=tmp_path / "bfloat16"))
    with pytest.raises(StageFailed, match=r"^quantize_static: the graph is quantized already"):
        QuantizeStatic()(halves, context)
    integers = QuantizeDynamic()(graph, Context(root=tmp_path / "int8"))
    with pytest.raises(StageFailed, match="quantized already, expected a float model"):
        quantize_static(integers.program(), data=images())


def test_a_graph_whose_outputs_are_a_mapping_is_quantized(tmp_path: Path) -> None:
    model = build_model(tmp_path / "eager", "networks:OwnModule", VECTOR)
    program = torch.export.export(
        model.load(), model.signature.example(), dynamic_shapes=({0: torch.export.Dim("batch")},)
    )
    graph = GraphModel.create(tmp_path / "graph", program, model.signature)
    small = QuantizeDynamic(exclude=("head",))(graph, Context(root=tmp_path / "out"))
    assert small.manifest.facts["float_modules"] == ["head"]
    x = torch.randn(5, 4)
    torch.testing.assert_close(answer(small, x), answer(model, x), rtol=0, atol=0.05)
