"""A tiny Llama, and the same in 4 bits."""

import pytest

from compress import EagerModel, QuantizeWeights
from compress.artifacts.artifact import Artifact
from tests.export.tiny_decoder import context_for, decoder

LAYERS = 1


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> EagerModel:
    return decoder(tmp_path_factory.mktemp("llama"), num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def in_four_bits(llama: EagerModel, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    root = tmp_path_factory.mktemp("quantized") / "quantized"
    stage = QuantizeWeights(bits=4, method="gptq", group_size=32, embedding_bits=4)
    return stage(llama, context_for(llama, root))
