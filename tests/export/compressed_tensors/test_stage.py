"""Integers of `quantize_weights` as compressed-tensors, read back by us and by transformers."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from compress import EagerModel, QuantizeWeights
from compress.artifacts.streaming.packed_model import PackedWeight
from compress.common.errors import StageFailed
from compress.common.tensor_difference import relative_error
from compress.export import CompressedTensorsModel, ExportCompressedTensors
from compress.export.common.packed_weights import DecoderWeights, decoder_weights
from compress.export.compressed_tensors.stage import COMPRESSED_TENSORS
from compress.export.compressed_tensors.tensors import (
    compare_integers,
    packed_state,
    quantization_config,
    streamed_folder,
    unpacked,
    vllm_limits,
)
from tests.export.tiny_decoder import context_for, decoder

IDS = torch.arange(24)[None]

needs_library = pytest.mark.skipif(
    COMPRESSED_TENSORS.missing(),
    reason="to run these tests: pip install -e '.[compressed-tensors]'",
)

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def quantized(tmp_path_factory):
    """Return a tiny Llama whose table is tied to its last layer, and its weights in 4 bits."""
    root = tmp_path_factory.mktemp("tensors")
    source = decoder(root, tie_word_embeddings=True, num_hidden_layers=1)
    stage = QuantizeWeights(exclude=("*.o_proj",), activation_bits=32)
    return source, stage(source, context_for(source, root / "quantized"))


@pytest.fixture(scope="module")
def source(quantized) -> EagerModel:
    return quantized[0]


@pytest.fixture(scope="module")
def folder(quantized, tmp_path_factory) -> CompressedTensorsModel:
    source, model = quantized
    root = tmp_path_factory.mktemp("folder") / "folder"
    return ExportCompressedTensors().run(model, context_for(source, root))


@pytest.mark.parametrize("bits", [4, 8])
def test_integers_come_back_for_any_number_of_outputs(bits) -> None:
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randint(0, 2**bits, shape, generator=generator).to(torch.uint8)

    integers = drawn(13, 64)
    packed = integers if bits == 8 else integers[:, ::2] | (integers[:, 1::2] << 4)
    weight = PackedWeight(packed, torch.rand(13, 2), drawn(13, 2), bits, is_table=False)
    state = packed_state("layer.weight", weight)
    words = state["weight_packed"]
    assert (words.dtype, words.shape) == (torch.int32, (13, 64 * bits // 32))
    # Element i of a row begins at bit i * bits of its words.
    unsigned = words.long() & 0xFFFFFFFF
    per_word = 32 // bits
    for i in (0, 5, 63):
        found = (unsigned[:, i // per_word] >> (bits * (i % per_word))) & (2**bits - 1)
        assert found.tolist() == integers[:, i].tolist()
    assert state["weight_zero_point"].shape == (-(-13 // per_word), 2)
    read = unpacked({f"layer.{name}": x for name, x in state.items()}, "layer", bits)
    assert torch.equal(read.integers(), integers)
    assert torch.equal(read.zero_point, weight.zero_point)


def test_the_config_says_what_is_packed(folder, quantized) -> None:
    config = json.loads((folder.path / "config.json").read_text())
    quantization = config["quantization_config"]
    weights = quantization["config_groups"]["group_0"]["weights"]
    assert (weights["num_bits"], weights["group_size"], weights["symmetric"]) == (4, 32, False)
    # A class that is no Linear to vLLM is found by its name.
    assert quantization["config_groups"]["group_0"]["targets"] == ["Linear", "lm_head"]
    assert quantization["ignore"] == ["model.layers.0.self_attn.o_proj"]
    assert config["tie_word_embeddings"] is False
    stored = load_file(folder.payload_path)
    assert "lm_head.weight_packed" in stored
    assert "model.layers.0.self_attn.o_proj.weight" in stored
    packed = [x for name, x in stored.items() if name.endswith("_packed")]
    assert folder.manifest.facts["equal_integers"] == sum(x.numel() * 8 for x in packed)
    assert (folder.path / "tokenizer.json").is_file()
    ours = decoder_weights(quantized[1], context_for(quantized[0], folder.path), "test").packed
    assert ("lm_head.weight", False) in ours
    assert ("model.embed_tokens.weight", True) in ours


@pytest.mark.slow
def test_the_router_of_a_mixture_is_written_as_it_was_rounded(tmp_path) -> None:
    sizes = {"num_hidden_layers": 1, "num_local_experts": 4, "num_experts_per_tok": 2}
    source = decoder(tmp_path, "Mixtral", **sizes)
    stage = QuantizeWeights(exclude=("*.experts",), activation_bits=32)
    model = stage(source, context_for(source, tmp_path / "quantized"))
    context = context_for(source, tmp_path / "folder")
    stored = load_file(ExportCompressedTensors().run(model, context).payload_path)
    name = "model.layers.0.mlp.gate.weight"
    assert torch.equal(
        stored[name], decoder_weights(model, context, "test").packed[name, False].dequantized()
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bits", "excluded", "is_tied"),
    [
        (4, ("lm_head", "model.embed_tokens"), True),
        # How 8 bits are packed is in the first test; the folder of the tests above is untied.
        pytest.param(8, (), False, marks=pytest.mark.soak),
        pytest.param(4, ("lm_head",), False, marks=pytest.mark.soak),
    ],
)
def test_a_table_is_tied_to_a_float_last_layer_and_zero_points_in_the_middle_are_not_stored(
    source, bits, excluded, is_tied, tmp_path, caplog
) -> None:
    context = context_for(source, tmp_path / "quantized")
    settings = {"symmetric": True, "activation_bits": 32}
    model = QuantizeWeights(bits=bits, exclude=excluded, **settings)(source, context)
    made = ExportCompressedTensors().run(model, context_for(source, tmp_path / "folder"))
    assert "vLLM" not in caplog.text
    config = json.loads((made.path / "config.json").read_text())
    scheme = config["quantization_config"]["config_groups"]["group_0"]["weights"]
    assert scheme["symmetric"] is True
    stored = load_file(made.payload_path)
    assert not any(name.endswith("zero_point") for name in stored)
    packed = [x for name, x in stored.items() if name.endswith("_packed")]
    assert made.manifest.facts["equal_integers"] == sum(x.numel() * 32 // bits for x in packed)
    assert config["tie_word_embeddings"] is is_tied
    # vLLM's Gemma 2 has no last layer that a weight of this name could be read into.
    assert any(name.startswith("lm_head.weight") for name in stored) is not is_tied
    opened = streamed_folder(made.path, model.signature)
    with torch.inference_mode():
        assert relative_error(model.open()(IDS)[0], opened(IDS)[0]) < 1e-5
    if not COMPRESSED_TENSORS.missing():
        assert made.manifest.facts["scores_error"] < 1e-5


@pytest.mark.parametrize(
    ("bits", "floats", "message"),
    [
        (4, ("q_proj", "lm_head"), r"joins .*0\.self_attn\.q_proj, .* only .*k_proj, .*v_proj is"),
        (4, (), r"does not open zero points of lm_head for 257 tokens, which 8 does not divide"),
        (8, ("lm_head",), r"no kernel for 8 bits with zero points"),
        (4, ("q_proj", "k_proj", "v_proj", "lm_head"), None),
    ],
)
def test_what_vllm_does_not_open_is_said(quantized, bits, floats, message) -> None:
    module = quantized[0].load()
    packed = {
        (f"{name}.weight", False): PackedWeight(
            torch.zeros(layer.out_features, layer.in_features * bits // 8, dtype=torch.uint8),
            torch.ones(layer.out_features, layer.in_features // 32),
            torch.ones(layer.out_features, layer.in_features // 32, dtype=torch.uint8),
            bits,
            is_table=False,
        )
        for name, layer in module.named_modules()
        if isinstance(layer, torch.nn.Linear) and not name.endswith(floats or "none")
    }
    weights = DecoderWeights(module, packed, rounds_activations=False)
    scheme = quantization_config(weights)["config_groups"]["group_0"]["weights"]
    limits = [*vllm_limits(weights, scheme)]
    assert len(limits) == (message is not None)
    assert all(re.search(message, limit) for limit in limits)


@pytest.mark.slow
def test_an_integer_that_changed_is_found(quantized, folder, tmp_path) -> None:
    source, model = quantized
    stored = load_file(folder.payload_path)
    stored["lm_head.weight_packed"][3, 1] += 1
    save_file(stored, tmp_path / "model.safetensors")
    weights = decoder_weights(model, context_for(source, tmp_path), "test")
    with pytest.raises(StageFailed, match=r"lm_head\.weight: packed differs in the file"):
        compare_integers(tmp_path / "model.safetensors", weights, "export_compressed_tensors")


@pytest.mark.slow
def test_what_the_format_has_not_is_refused(source, tmp_path) -> None:
    context = context_for(source, tmp_path / "tables")
    tables = QuantizeWeights(exclude=("model.layers.*", "lm_head"))(source, context)
    with pytest.raises(StageFailed, match="found none in few bits"):
        ExportCompressedTensors().run(tables, context_for(source, tmp_path / "out"))
    weight = PackedWeight(
        torch.zeros(2, 16, dtype=torch.uint8), torch.ones(2, 1), torch.ones(2, 1) / 2, 4, False
    )
    with pytest.raises(StageFailed, match="method hqq fits them"):
        packed_state("layer.weight", weight)


@needs_library
def test_transformers_answers_as_the_quantized_graph(quantized, folder) -> None:
    facts = folder.manifest.facts
    assert facts["opened_by"].startswith("compressed-tensors ")
    assert facts["scores_error"] < 1e-5
    assert relative_error(quantized[1].open()(IDS)[0], folder.open()(IDS)[0]) < 1e-5
