"""Weights that are quantized block by block: equal to those of the whole model, and resumed."""

import os
import signal
from pathlib import Path

import pytest
import torch

from benchmarks.attack.forgeries import flip_a_byte
from compress import QuantizeWeights
from compress.artifacts.importing import import_streamed
from compress.artifacts.streaming.packed_model import PackedModel, packed_weights
from compress.common.errors import ArtifactInvalid, StageFailed
from compress.export import ExportCompressedTensors, ExportOnnx
from compress.export.common.packed_weights import decoder_weights
from compress.quantization.ptq.streamed_weights import BlockGraphs
from tests.export.tiny_decoder import TOKENS, VOCABULARY, context_for, decoder

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Return a Llama of two blocks whose table is tied, in memory and on disk."""
    folder = tmp_path_factory.mktemp("streamed")
    whole = decoder(folder, num_hidden_layers=2, tie_word_embeddings=True)
    return whole, import_streamed(folder / "streamed", folder / "hf", None, TOKENS)


GPTQ = {"method": "gptq", "symmetric": True, "activation_bits": 32}


@pytest.fixture(scope="module")
def in_four_bits(models, tmp_path_factory):
    """Return both of them quantized, in one go."""
    root = tmp_path_factory.mktemp("four_bits")
    stage = QuantizeWeights(**GPTQ)
    return [stage(model, context_for(model, root / model.path.name)) for model in models]


def ids(length: int = 20) -> torch.Tensor:
    return torch.arange(2 * length).view(2, length) % VOCABULARY


def test_a_folder_that_is_read_part_by_part_is_the_same_model(models) -> None:
    whole, streamed = models
    weights = "weights.safetensors"
    assert streamed.manifest.files[weights] == whole.manifest.files[weights]
    assert torch.equal(streamed.open()(ids())[0], whole.open()(ids())[0])
    assert (streamed.parameters(), streamed.macs()) == (whole.parameters(), whole.macs())
    assert streamed.is_streamed
    assert not whole.is_streamed


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        GPTQ,
        *(
            pytest.param(settings, marks=pytest.mark.soak)
            for settings in (
                {"method": "awq", "exclude": ("*.o_proj", "*.down_proj")},
                {"method": "hqq", "embeddings": False},
                {"bits": 8, "embedding_bits": 4},
            )
        ),
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_blocks_get_the_integers_of_the_whole_model(
    models, in_four_bits, tmp_path, settings
) -> None:
    whole, streamed = models
    graph, packed = in_four_bits
    if settings is not GPTQ:
        stage = QuantizeWeights(**settings)
        graph = stage(whole, context_for(whole, tmp_path / "whole"))
        packed = stage(streamed, context_for(streamed, tmp_path / "streamed"))
    assert isinstance(packed, PackedModel)
    scores = packed.open()(ids())[0]
    assert torch.equal(scores, graph.open()(ids())[0])
    expected = decoder_weights(graph, context_for(whole, tmp_path), "test")
    stored = packed.stored()
    found = packed_weights(packed.skeleton(), stored)
    assert {*found} == {*expected.packed}
    for key, weight in expected.packed.items():
        for name in ("packed", "scale", "zero_point"):
            assert torch.equal(getattr(found[key], name), getattr(weight, name)), (key, name)
    floats = expected.module.state_dict()
    kept = [name for name in floats if name in stored]
    assert kept
    assert all(torch.equal(stored[name].read(), floats[name]) for name in kept)
    for fact in ("quantized_operators", "left_float", "scaled"):
        assert packed.manifest.facts.get(fact) == graph.manifest.facts.get(fact)


@pytest.mark.slow
def test_a_killed_stage_goes_on_at_the_block(models, in_four_bits, tmp_path, caplog) -> None:
    _, streamed = models
    stage = QuantizeWeights(**GPTQ)
    child = os.fork()
    if not child:
        context = context_for(streamed, tmp_path / "resumed")

        def die(_: str, done: int, __: int) -> None:
            if done == 2:
                os.kill(os.getpid(), signal.SIGKILL)

        object.__setattr__(context, "progress", die)
        stage(streamed, context)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    pieces = sorted((tmp_path / "resumed.work" / "streamed").glob("piece-*.safetensors"))
    assert len(pieces) == 2
    caplog.set_level("INFO")
    resumed = stage(streamed, context_for(streamed, tmp_path / "resumed"))
    assert "goes on at model.layers.1, piece 3 of 4" in caplog.text
    assert "model.layers.0:" not in caplog.text
    assert resumed.digest == in_four_bits[1].digest
    assert not (tmp_path / "resumed.work").exists()


class StoppedError(Exception):
    pass


def stopped_after_two_pieces(stage: QuantizeWeights, streamed, folder) -> None:
    def stop(_: str, done: int, __: int) -> None:
        if done == 2:
            raise StoppedError

    context = context_for(streamed, folder)
    object.__setattr__(context, "progress", stop)
    with pytest.raises(StoppedError):
        stage(streamed, context)


@pytest.mark.soak
@pytest.mark.parametrize("name", ["piece-0001.safetensors", "piece-0001.json", "carried-0002"])
def test_a_changed_piece_is_quantized_again(models, tmp_path, caplog, name) -> None:
    _, streamed = models
    stage = QuantizeWeights(method="gptq")
    at_once = stage(streamed, context_for(streamed, tmp_path / "at_once"))
    stopped_after_two_pieces(stage, streamed, tmp_path / "made")
    file = tmp_path / "made.work" / "streamed" / name
    flip_a_byte(next(file.iterdir()) if file.is_dir() else file)
    made = stage(streamed, context_for(streamed, tmp_path / "made"))
    assert made.digest == at_once.digest
    assert "is not as it was written" in caplog.text


@pytest.mark.soak
@pytest.mark.slow
def test_other_settings_begin_anew(models, tmp_path, caplog) -> None:
    _, streamed = models
    stopped_after_two_pieces(QuantizeWeights(), streamed, tmp_path / "made")
    caplog.set_level("INFO")
    made = QuantizeWeights(bits=8)(streamed, context_for(streamed, tmp_path / "made"))
    assert "goes on" not in caplog.text
    layer = packed_weights(made.skeleton(), made.stored())["lm_head.weight", False]
    assert layer.bits == 8


@pytest.mark.slow
def test_a_block_of_other_code_is_traced_by_itself(models) -> None:
    _, streamed = models
    blocks = BlockGraphs(streamed)
    blocks.capture(1)
    assert blocks._reused_graph(1) is not None
    blocks._blocks[1].self_attn.scaling *= 2
    assert blocks._reused_graph(1) is None  # by its settings
    blocks._blocks[1].self_attn.scaling /= 2
    own = type(blocks._blocks[1].mlp)
    changed = type(own.__name__, (own,), {"forward": lambda self, x: 2 * own.forward(self, x)})
    blocks._blocks[1].mlp.__class__ = blocks._blocks[0].mlp.__class__ = changed
    assert blocks._reused_graph(1) is None  # by its outputs


@pytest.mark.slow
def test_the_exported_folder_is_that_of_the_whole_model(models, in_four_bits, tmp_path) -> None:
    _, streamed = models
    folders = []
    for model, packed in zip(models, in_four_bits, strict=True):
        out = context_for(model, tmp_path / f"{model.path.name}-folder")
        folders.append(ExportCompressedTensors().run(packed, out))
    expected, found = folders
    assert found.manifest.files == expected.manifest.files
    assert found.manifest.facts["scores_error"] == 0
    assert torch.equal(found.open()(ids())[0], packed.open()(ids())[0])
    with pytest.raises(StageFailed, match="has no graph, which would hold all of its weights"):
        ExportOnnx()(packed, context_for(streamed, tmp_path / "onnx"))


@pytest.mark.soak
def test_awq_that_multiplies_inputs_is_not_exported(tmp_path) -> None:
    from safetensors.torch import load_file, save_file

    # The only head of values has a large channel, and nothing before the layer that reads it takes
    # the division: it reads the channel once for each of its heads.
    decoder(tmp_path, num_key_value_heads=1)
    file = tmp_path / "hf" / "model.safetensors"
    state = load_file(file)
    for name in state:
        if name.endswith("v_proj.weight"):
            state[name][0] *= 100
    save_file(state, file, metadata={"format": "pt"})
    streamed = import_streamed(tmp_path / "streamed", tmp_path / "hf", None, TOKENS)
    packed = QuantizeWeights(method="awq")(streamed, context_for(streamed, tmp_path / "packed"))
    assert any(name.endswith("o_proj.input_factor") for name in packed.stored())
    with pytest.raises(StageFailed, match="awq multiplies the input of "):
        ExportCompressedTensors().run(packed, context_for(streamed, tmp_path / "folder"))


def test_a_folder_without_a_weight_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    decoder(tmp_path)
    file = tmp_path / "hf" / "model.safetensors"
    state = load_file(file)
    del state["model.norm.weight"]
    save_file(state, file, metadata={"format": "pt"})
    with pytest.raises(ArtifactInvalid, match=r"missing model\.norm\.weight"):
        import_streamed(tmp_path / "streamed", tmp_path / "hf", None, TOKENS)


def test_a_model_without_one_chain_of_blocks_is_refused(tmp_path: Path) -> None:
    decoder(tmp_path, num_hidden_layers=1)
    streamed = import_streamed(tmp_path / "streamed", tmp_path / "hf", None, TOKENS)
    with pytest.raises(StageFailed, match="one chain of blocks, found none"):
        QuantizeWeights()(streamed, context_for(streamed, tmp_path / "made"))
