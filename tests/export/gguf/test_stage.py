"""Decoders as GGUF files, read back by gguf and by transformers."""

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from compress import QuantizeWeights
from compress.artifacts.streaming.packed_model import PackedWeight
from compress.common.errors import StageFailed
from compress.common.tensor_difference import relative_error
from compress.export import ExportGguf, GgufModel
from compress.export.gguf.tensors import (
    add_vocabulary,
    block_type,
    blocks_of,
    check_family,
    integers_of,
)
from tests.export.tiny_decoder import context_for, decoder, save_tokenizer

gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")

MERGES = [("h", "e"), ("t", "h"), ("i", "s"), ("Ġ", "w")]
TEXT = "The with statement: it's 123 ways — naïve\n\n  x<|end|>y"


BPE = {"type": "BPE", "merges": ["h e"]}


def drawn(bits: int, groups: int, *, symmetric: bool) -> PackedWeight:
    generator = torch.Generator().manual_seed(0)

    def integers(*shape: int) -> torch.Tensor:
        return torch.randint(0, 2**bits, shape, generator=generator).to(torch.uint8)

    values = integers(5, 128)
    packed = values if bits == 8 else values[:, ::2] | (values[:, 1::2] << 4)
    zeros = torch.full((5, groups), 2 ** (bits - 1)).to(torch.uint8)
    scale = torch.rand(5, groups, generator=generator)
    return PackedWeight(
        packed, scale.half().float(), zeros if symmetric else integers(5, groups), bits, False
    )


@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize(
    ("bits", "symmetric", "kind"), [(8, True, "Q8_0"), (4, True, "Q4_0"), (4, False, "Q4_1")]
)
def test_gguf_reads_the_blocks_as_the_weights_they_hold(bits, symmetric, kind, groups) -> None:
    weight = drawn(bits, groups, symmetric=symmetric)
    assert block_type(weight) == kind
    blocks = blocks_of("layer", weight)
    found = gguf.dequantize(blocks, gguf.GGMLQuantizationType[kind])
    # The scales are halves; the smallest number of a block of Q4_1 is rounded to one.
    exact = 0 if symmetric else 2**-11 * 15
    assert np.abs(found - weight.dequantized().numpy()).max() <= exact
    assert integers_of(blocks, kind).tolist() == weight.integers().tolist()


def test_what_gguf_has_no_blocks_for_is_refused() -> None:
    with pytest.raises(StageFailed, match=r"layer: .* no type of 8 bits .* symmetric: true"):
        blocks_of("layer", drawn(8, 4, symmetric=False))
    with pytest.raises(StageFailed, match="by 32 numbers, found 16"):
        blocks_of("layer", drawn(4, 8, symmetric=True))
    weight = drawn(4, 4, symmetric=True)
    with pytest.raises(StageFailed, match="beyond half precision"):
        blocks_of("layer", weight._replace(scale=weight.scale * 1e6))


@pytest.mark.parametrize(
    ("kind", "sizes", "settings", "types"),
    [
        # Tied, but in other integers as a table than as a layer.
        pytest.param(
            "Llama",
            {"tie_word_embeddings": True, "num_hidden_layers": 1},
            {"symmetric": True},
            {"token_embd.weight": "Q8_0", "output.weight": "Q4_0", "blk.0.attn_q.weight": "Q4_0"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "Mistral",
            {"sliding_window": None},
            {"symmetric": True, "bits": 8},
            {"token_embd.weight": "Q8_0", "blk.1.ffn_down.weight": "Q8_0"},
            marks=pytest.mark.soak,
        ),
        # A table of 8 bits with zero points has no blocks.
        pytest.param(
            "Qwen2",
            {},
            {"exclude": ("*.o_proj",)},
            {
                "token_embd.weight": "F16",
                "blk.0.attn_output.weight": "F32",
                "blk.0.attn_k.weight": "Q4_1",
                "blk.0.attn_k.bias": "F32",
            },
            marks=[pytest.mark.slow, pytest.mark.soak],
        ),
        (
            "Qwen3",
            {"head_dim": 32},
            None,
            {"token_embd.weight": "F32", "blk.0.attn_q_norm.weight": "F32"},
        ),
    ],
)
def test_families_answer_as_what_they_were_made_from(
    kind, sizes, settings, types, tmp_path
) -> None:
    model = source = decoder(tmp_path, kind, **sizes)
    if settings is not None:
        stage = QuantizeWeights(activation_bits=32, **settings)
        model = stage(source, context_for(source, tmp_path / "quantized"))
    file = ExportGguf()(model, context_for(source, tmp_path / "file"))
    tensors = {t.name: t.tensor_type.name for t in gguf.GGUFReader(file.payload_path).tensors}
    assert types.items() <= tensors.items()
    facts = file.manifest.facts
    assert facts["scores_error"] < 1e-6
    blocks = [t for t in gguf.GGUFReader(file.payload_path).tensors if t.tensor_type.name[0] == "Q"]
    assert facts["equal_integers"] == sum(int(t.n_elements) for t in blocks)
    assert bool(facts["equal_integers"]) == (settings is not None)
    ids = torch.arange(24)[None]
    # Scales have 11 bits.
    assert relative_error(model.open()(ids)[0], file.open()(ids)[0]) < (2e-3 if settings else 1e-6)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[object, object, GgufModel]:
    root = tmp_path_factory.mktemp("gguf")
    source = decoder(root, merges=MERGES, num_hidden_layers=1)
    stage = QuantizeWeights(symmetric=True, activation_bits=32)
    model = stage(source, context_for(source, root / "quantized"))
    return source, model, ExportGguf()(model, context_for(source, root / "file"))


@pytest.mark.slow
def test_a_changed_byte_is_found(made, tmp_path) -> None:
    source, model, file = made
    folder = shutil.copytree(file.path, tmp_path / "file")
    reader = gguf.GGUFReader(folder / "model.gguf", "r+")
    (tensor,) = [t for t in reader.tensors if t.name == "blk.0.attn_k.weight"]
    tensor.data[3, 7] ^= 1
    reader.data.flush()
    changed = GgufModel.from_directory(folder)
    with pytest.raises(StageFailed, match=r"layers\.0\.self_attn\.k_proj\.weight: integers differ"):
        ExportGguf().check_parity(model, changed, context_for(source, tmp_path / "x"))
    ExportGguf().check_parity(model, file, context_for(source, tmp_path / "x"))


@pytest.mark.slow
def test_the_file_splits_text_as_the_tokenizer_does(made) -> None:
    *_, file = made
    ours = transformers.AutoTokenizer.from_pretrained(file.path)
    theirs = transformers.AutoTokenizer.from_pretrained(file.path, gguf_file="model.gguf")
    assert ours(TEXT).input_ids == theirs(TEXT).input_ids
    assert max(ours(TEXT).input_ids) == 256 + len(MERGES)  # pairs were merged
    fields = gguf.GGUFReader(file.payload_path).fields
    assert fields["tokenizer.ggml.pre"].contents() == "gpt-2"
    assert fields["tokenizer.ggml.eos_token_id"].contents() == 256
    assert fields["tokenizer.ggml.tokens"].contents()[256] == "<|end|>"


@pytest.mark.parametrize("where", ["file", "settings", "list"])
def test_the_chat_template_is_found_where_transformers_puts_it(where, tmp_path) -> None:
    template = "{{ messages[0].content }}"
    save_tokenizer(tmp_path, MERGES, template)
    carried = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    if where != "file":  # as older versions of transformers save it
        named = [{"name": "default", "template": template}, {"name": "rag", "template": "x"}]
        settings = json.loads(carried["tokenizer_config.json"])
        settings["chat_template"] = template if where == "settings" else named
        carried["tokenizer_config.json"] = json.dumps(settings).encode()
        del carried["chat_template.jinja"]
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    config = SimpleNamespace(vocab_size=261, eos_token_id=256)
    assert not add_vocabulary(writer, carried, SimpleNamespace(config=config))
    assert writer.kv_data[0]["tokenizer.chat_template"].value == template


@pytest.mark.parametrize(
    ("tokenizer", "reason"),
    [
        (None, "the model has no tokenizer.json"),
        ({"model": {"type": "Unigram"}}, "of type Unigram, expected byte-level BPE"),
        ({"model": {"type": "BPE", "merges": []}}, "its tokenizer has no merges"),
        (
            {"model": BPE, "pre_tokenizer": {"type": "Whitespace"}},
            'its tokenizer splits text by {"type": "Whitespace"}',
        ),
        (
            {
                "model": BPE,
                "normalizer": {"type": "Lowercase"},
                "pre_tokenizer": {"type": "ByteLevel"},
            },
            "its tokenizer normalizes text by Lowercase",
        ),
    ],
)
def test_a_tokenizer_that_llama_cpp_has_not_is_left_out(tokenizer, reason, tmp_path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "file", "llama")
    carried = {} if tokenizer is None else {"tokenizer.json": json.dumps(tokenizer).encode()}
    assert reason in add_vocabulary(writer, carried, None)
    assert writer.kv_data[0]["tokenizer.ggml.model"].value == "no_vocab"


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("GPT2", {}, "families llama, mistral, qwen2, qwen3, found gpt2"),
        ("Mistral", {"sliding_window": 16}, "found sliding_window 16 in a context of 131072"),
        ("Llama", {"hidden_act": "gelu"}, "hidden_act silu, found gelu"),
        (
            "Qwen2",
            {"hidden_size": 64, "num_attention_heads": 2, "head_dim": 16},
            r"hidden_size \(64\) numbers together, found 2 heads of 16",
        ),
        (
            "Llama",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
            "type default, found linear",
        ),
    ],
)
def test_what_llama_cpp_would_compute_otherwise_is_refused(kind, settings, message) -> None:
    config = getattr(transformers, f"{kind}Config")(**settings)
    with pytest.raises(StageFailed, match=message):
        check_family(config, "export_gguf")
