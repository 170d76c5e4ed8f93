"""A network, and its int8 form, that engines are built from."""

import pytest

from compress.artifacts.eager_model import EagerModel
from compress.artifacts.graph_model import GraphModel
from compress.core.context import Context
from compress.quantization.stages.static import QuantizeStatic
from tests.export.builders import images, network, samples


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> EagerModel:
    return network(tmp_path_factory.mktemp("tensorrt") / "source", "networks:residual")


@pytest.fixture(scope="module")
def int8(model: EagerModel) -> GraphModel:
    context = Context(root=model.path.with_name("int8"), data=samples(images()))
    return QuantizeStatic(target="tensorrt", calibration_samples=64)(model, context)
