"""Decoders that pruning made narrower, in the folders and files that a config describes."""

import json

import pytest
import torch

from compress import EagerModel, PruneChannels, PruneLayers, QuantizeWeights, RotateWeights
from compress.artifacts.artifact import Artifact
from compress.common.errors import StageFailed
from compress.common.tensor_difference import relative_error
from compress.export import ExportCompressedTensors, ExportGenai, ExportGguf
from compress.export.compressed_tensors.stage import COMPRESSED_TENSORS
from compress.export.compressed_tensors.tensors import streamed_folder
from compress.export.gguf.stage import GGUF
from tests.export.tiny_decoder import context_for, decoder

pytest.importorskip("transformers")

NARROW = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 128}
IDS = torch.arange(24)[None]
PRUNE = PruneChannels(ratio=0.5, round_to=64, calibration_samples=0)
QUANTIZE = QuantizeWeights(method="rtn", symmetric=True, activation_bits=32)

needs_gguf = pytest.mark.skipif(
    GGUF.missing(), reason="to run these tests: pip install -e '.[gguf]'"
)


@pytest.fixture(scope="module")
def wide(tmp_path_factory) -> EagerModel:
    """Return a tiny Qwen2, whose config has no size of a head."""
    return decoder(tmp_path_factory.mktemp("wide"), "Qwen2", intermediate_size=192)


@pytest.fixture(scope="module")
def pruned(tmp_path_factory) -> EagerModel:
    """Return one layer of it with half the heads and two thirds of the inner width."""
    root = tmp_path_factory.mktemp("narrow")
    wide = decoder(root, "Qwen2", intermediate_size=192, num_hidden_layers=1)
    small = PRUNE(wide, context_for(wide, root / "pruned"))
    # A stage between pruning and quantization keeps the widths.
    return RotateWeights()(small, context_for(small, root / "rotated"))


@pytest.fixture(scope="module")
def narrow(pruned, tmp_path_factory) -> Artifact:
    return QUANTIZE(pruned, context_for(pruned, tmp_path_factory.mktemp("four") / "quantized"))


@needs_gguf
def test_fewer_layers_and_widths_stand_in_one_config(tmp_path) -> None:
    # A list in the config of Qwen3 has an entry for each layer.
    deep = decoder(tmp_path, "Qwen3", head_dim=16, intermediate_size=128)
    short = PruneLayers(remove=1)(deep, context_for(deep, tmp_path / "short"))
    stage = PruneChannels(ratio=0.5, calibration_samples=0)
    small = stage(short, context_for(short, tmp_path / "small"))
    file = ExportGguf()(small, context_for(small, tmp_path / "file"))
    config = json.loads((file.path / "config.json").read_text())
    expected = {**NARROW, "intermediate_size": 64, "num_hidden_layers": 1}
    assert {name: config[name] for name in expected} == expected
    assert len(config["layer_types"]) == 1
    assert relative_error(small.open()(IDS)[0], file.open()(IDS)[0]) < 1e-6


@pytest.fixture(scope="module")
def uneven(wide, tmp_path_factory) -> tuple[EagerModel, Artifact]:
    """Return a model whose first layer alone is narrower, and the same in 4 bits."""
    root = tmp_path_factory.mktemp("uneven")
    half = {"ratio": 0.5, "round_to": 64, "calibration_samples": 0}
    stage = PruneChannels(include=("model.layers.0.*",), **half)
    small = stage(wide, context_for(wide, root / "pruned"))
    return small, QuantizeWeights(method="rtn")(small, context_for(small, root / "quantized"))


def test_compressed_tensors_say_the_widths(pruned, narrow, tmp_path, caplog) -> None:
    folder = ExportCompressedTensors().run(narrow, context_for(pruned, tmp_path / "folder"))
    config = json.loads((folder.path / "config.json").read_text())
    expected = {**NARROW, "head_dim": 16, "hidden_size": 64}
    assert {name: config[name] for name in expected} == expected
    assert "vLLM's Qwen2 takes the width by the number of heads" in caplog.text
    opened = streamed_folder(folder.path, narrow.signature)
    with torch.inference_mode():
        assert relative_error(narrow.open()(IDS)[0], opened(IDS)[0]) < 1e-5
    if not COMPRESSED_TENSORS.missing():
        assert folder.manifest.facts["scores_error"] < 1e-5
        assert relative_error(narrow.open()(IDS)[0], folder.open()(IDS)[0]) < 1e-5


@needs_gguf
def test_gguf_says_the_widths(tmp_path) -> None:
    from gguf import GGUFReader

    wide = decoder(tmp_path, "Mistral", intermediate_size=192, num_hidden_layers=1)
    pruned = PRUNE(wide, context_for(wide, tmp_path / "pruned"))
    file = ExportGguf()(pruned, context_for(pruned, tmp_path / "file"))
    fields = GGUFReader(file.payload_path).fields
    names = ("attention.head_count", "attention.head_count_kv", "feed_forward_length")
    assert [fields[f"llama.{name}"].contents() for name in names] == [*NARROW.values()]
    assert fields["llama.attention.key_length"].contents() == 16
    assert file.manifest.facts["scores_error"] < 1e-6
    assert relative_error(pruned.open()(IDS)[0], file.open()(IDS)[0]) < 1e-6
    config = json.loads((file.path / "config.json").read_text())
    assert NARROW.items() <= config.items()


@pytest.mark.slow
def test_genai_says_the_widths(pruned, narrow, tmp_path) -> None:
    folder = ExportGenai()(narrow, context_for(pruned, tmp_path / "folder"))
    settings = json.loads((folder.path / "genai_config.json").read_text())["model"]["decoder"]
    names = ("num_attention_heads", "num_key_value_heads", "head_size")
    assert [settings[name] for name in names] == [2, 1, 16]
    assert NARROW.items() <= json.loads((folder.path / "config.json").read_text()).items()
    assert folder.manifest.facts["scores_error"] < 1e-5


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        (ExportGenai(), "found heads of queries and keys 2 and 1 of 16, 4 and 2 of 16; prune with"),
        (ExportCompressedTensors(), r"export_compressed_tensors: .*\.0\..* and .*\.1\..* is \["),
        pytest.param(ExportGguf(), r"export_gguf: .*\.0\..* and .*\.1\..* is \[", marks=needs_gguf),
    ],
)
def test_layers_of_different_widths_are_refused(uneven, stage, message, tmp_path) -> None:
    small, packed = uneven
    with pytest.raises(StageFailed, match=f"{message}.*scope: uniform"):
        stage.run(packed, context_for(small, tmp_path / "out"))
    assert not any(tmp_path.iterdir())
