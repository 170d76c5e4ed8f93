"""Rotated decoders: equal outputs in floats, what is refused, and what is exported of them."""

import json
from pathlib import Path

import pytest
import torch

from compress import Context, EagerModel, QuantizeWeights, RotateWeights
from compress.artifacts.importing import import_streamed
from compress.artifacts.libraries.transformers_folder import write_transformers_folder
from compress.common.errors import StageFailed
from compress.common.tensor_difference import relative_error
from compress.export import ExportCompressedTensors, ExportGenai, ExportGguf
from compress.export.common.packed_weights import decoder_weights
from compress.quantization.algorithms import residual_rotation
from compress.quantization.algorithms.weight_rounding import round_to_nearest
from tests.compress.quantization.builders import TOKENS, build_model
from tests.export.tiny_decoder import TOKENS as TEXT
from tests.export.tiny_decoder import VOCABULARY, context_for, decoder

pytest.importorskip("transformers")
HEAD = "lm_head.weight"


def ids(length: int = 20) -> torch.Tensor:
    return torch.arange(2 * length).view(2, length) * 7 % VOCABULARY


def drawn(folder: Path, kind: str, **sizes: object) -> EagerModel:
    """Return a decoder whose norms and biases are drawn too: at 1 and 0 they fold into anything."""
    model = decoder(folder, kind, **sizes)
    module = model.load()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() == 1:
                parameter.copy_(torch.rand(parameter.shape, generator=generator) + 0.5)
    return model.derive(folder / "drawn", module)


def rotated(model: EagerModel, root: Path, **settings: bool) -> EagerModel:
    return RotateWeights.model_validate(settings)(model, context_for(model, root))


@pytest.mark.parametrize(
    ("kind", "sizes", "heads"),
    [
        ("Llama", {"attention_bias": True, "mlp_bias": True}, 2),
        ("Llama", {"tie_word_embeddings": True, "hidden_size": 96, "num_attention_heads": 4}, 2),
        ("Qwen3", {"head_dim": 32}, 2),
        ("Phi3", {"pad_token_id": 0}, 0),  # queries, keys and values in one layer
        ("Gemma", {"head_dim": 16}, 2),  # its norms multiply by 1 + weight
        ("Granite", {"embedding_multiplier": 3.0, "residual_multiplier": 0.5}, 2),
        # Norms, tables and layers of these are those of the families above.
        *(
            pytest.param(kind, sizes, 2, marks=pytest.mark.soak)
            for kind, sizes in (
                ("Mistral", {"sliding_window": 8}),
                ("Qwen2", {}),
                ("SmolLM3", {"no_rope_layers": [1, 0], "pad_token_id": 0}),
                ("Glm", {"head_dim": 16, "pad_token_id": 0}),
                ("Helium", {"head_dim": 16, "pad_token_id": 0}),
                ("Ernie4_5", {"head_dim": 16, "pad_token_id": 0}),
            )
        ),
    ],
)
def test_a_rotated_decoder_answers_as_before(kind, sizes, heads, tmp_path: Path) -> None:
    model = drawn(tmp_path, kind, **sizes)
    result = rotated(model, tmp_path / "rotated", heads=heads > 0)
    expected, found = model.open()(ids())[0], result.open()(ids())[0]
    assert relative_error(expected, found) < 5e-6
    facts = result.manifest.facts
    assert facts["outputs_error"] < 5e-6
    assert facts["rotated_values"] == heads
    before, after = model.load().state_dict(), result.load().state_dict()
    unit = float(kind != "Gemma")
    names = [name for name in before if "norm" in name and "q_norm" not in name]
    names = [name for name in names if "k_norm" not in name]
    assert len(names) == 5
    assert all((after[name] == unit).all() for name in names)
    matrices = [name for name, weight in before.items() if weight.dim() > 1]
    assert all(relative_error(before[name], after[name]) > 0.5 for name in matrices)
    tied = model.load().config.tie_word_embeddings
    assert facts["untied"] == ({HEAD: list(before[HEAD].shape)} if tied else {})
    assert result.parameters() - model.parameters() == tied * before[HEAD].numel()
    config = json.loads(result.carried_files()["config.json"])
    assert not config["tie_word_embeddings"]
    assert not result.load().config.tie_word_embeddings


def test_values_are_rotated_where_that_is_asked_for(tmp_path: Path) -> None:
    model = drawn(tmp_path, "Llama")
    with_heads = rotated(model, tmp_path / "heads", heads=True).load().state_dict()
    without = rotated(model, tmp_path / "stream").load().state_dict()
    differ = [name for name in without if not torch.equal(without[name], with_heads[name])]
    assert {name.split(".")[-2] for name in differ} == {"v_proj", "o_proj"}
    assert len(differ) == 4
    fused = decoder(tmp_path / "fused", "Phi3", pad_token_id=0)
    with pytest.raises(StageFailed, match="named v_proj and o_proj, found none"):
        rotated(fused, tmp_path / "none", heads=True)


@pytest.mark.parametrize(
    ("kind", "sizes", "message"),
    [
        ("GPT2", {}, "norms are RMSNorm, found LayerNorm (transformer.h.0.ln_1)"),
        (
            "Gemma2",
            {"head_dim": 16},
            "model.layers.0.post_attention_layernorm is an RMSNorm that no linear layer reads",
        ),
        ("Olmo", {"pad_token_id": 0}, "k_proj reads no RMSNorm and writes 32 channels"),
    ],
)
def test_what_no_rotation_folds_into_is_refused(kind, sizes, message, tmp_path: Path) -> None:
    model = decoder(tmp_path, kind, **sizes)
    with pytest.raises(StageFailed) as error:
        rotated(model, tmp_path / "none")
    assert message in str(error.value)
    assert str(error.value).startswith("rotate_weights: ")
    assert not (tmp_path / "none").exists()


GATED = """
import torch
from torch import nn


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.norm = nn.Embedding(50, 16), nn.RMSNorm(16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.last, self.head = nn.RMSNorm(16), nn.Linear(16, 50)
        self.shift = nn.Parameter(torch.ones({}))

    def forward(self, tokens):
        x = self.table(tokens)
        x = x + self.down(self.up(self.norm(x)).relu())
        return self.head(self.last({}))
"""


@pytest.mark.parametrize(
    ("shift", "stream", "message"),
    [
        ("1", "x", ""),
        ("1", "x * x.sigmoid()", "answers otherwise, by .* Gated reads single channels"),
        ("16", "x + self.shift", "answers otherwise"),
        ("1, 16", "x + self.shift", r"shift \[1, 16\] is a weight of Gated"),
    ],
)
def test_models_of_ones_own(shift: str, stream: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "gated.py").write_text(GATED.format(shift, stream))
    model = build_model(tmp_path / "source", "gated:Gated", TOKENS, tmp_path)
    context = Context(root=tmp_path / "rotated")
    if not message:
        assert RotateWeights()(model, context).manifest.facts["rotated_layers"] == 3
        return
    with pytest.raises(StageFailed, match=message):
        RotateWeights()(model, context)
    assert not context.root.exists()


@pytest.fixture(scope="module")
def tied(tmp_path_factory) -> EagerModel:
    sizes = {"tie_word_embeddings": True, "num_hidden_layers": 1}
    return drawn(tmp_path_factory.mktemp("tied"), "Llama", **sizes)


@pytest.mark.parametrize(
    "method", ["rtn", pytest.param("gptq", marks=[pytest.mark.slow, pytest.mark.soak])]
)
def test_the_integers_of_the_rotated_weights_are_exported(method, tied, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    floats = rotated(tied, tmp_path / "rotated")

    def context(name: str) -> Context:
        known = {"source": tied, "rotate_weights": floats}
        made = context_for(tied, tmp_path / name)
        object.__setattr__(made, "artifacts", known)
        return made

    stage = QuantizeWeights(method=method, symmetric=True, activation_bits=32)
    small = stage(floats, context("small"))
    if method == "rtn":
        packed = decoder_weights(small, context("x"), "test").packed
        assert len(packed) == 7 + 2
        for (name, is_table), weight in packed.items():
            values = floats.load().get_parameter(name)
            bits, group = (8, values.shape[1]) if is_table else (4, 32)
            expected = round_to_nearest(values, bits, group, symmetric=True)
            assert torch.equal(weight.integers().int(), expected.integers_OI.int()), name
    scores = small.open()(ids())[0]
    file = ExportGguf()(small, context("gguf"))
    assert relative_error(scores, file.open()(ids())[0]) < 2e-3  # scales have 11 bits
    assert file.manifest.facts["equal_integers"] > 0
    if method == "rtn":
        folder = ExportCompressedTensors().run(small, context("folder"))
        assert not json.loads((folder.path / "config.json").read_text())["tie_word_embeddings"]
        assert folder.manifest.facts["equal_integers"] > 0
        if folder.manifest.facts["opened_by"]:
            assert relative_error(scores, folder.open()(ids())[0]) < 1e-5


@pytest.mark.slow
def test_the_genai_folder_writes_what_the_model_writes(tied, tmp_path: Path) -> None:
    floats = rotated(tied, tmp_path / "rotated")
    context = context_for(tied, tmp_path / "genai")
    object.__setattr__(context, "artifacts", {"source": tied, "rotate_weights": floats})
    facts = ExportGenai()(floats, context).manifest.facts
    assert facts["equal_tokens"] > 0


def test_outliers_of_activations_and_weights_are_gone(tied, tmp_path: Path) -> None:
    """Channels are rescaled by powers of two, so exactly; rotated weights show nothing of it."""
    expected = rotated(tied, tmp_path / "rotated")
    for factor in (64, 1 / 64):
        module = tied.load()
        stream = residual_rotation.residual_stream(module, module.state_dict(), (ids(),))
        with torch.no_grad():
            for name in stream.norms.keys() - {"model.norm"}:  # its reader is the table, too
                module.get_submodule(name).weight[::16] *= factor
            for name in stream.readers.keys() - {"lm_head"}:
                module.get_submodule(name).weight[:, ::16] /= factor
        model = tied.derive(tmp_path / f"rescaled-{factor}", module)
        assert torch.equal(tied.open()(ids())[0], model.open()(ids())[0])
        found = rotated(model, tmp_path / f"rotated-{factor}")
        file = "weights.safetensors"
        assert model.manifest.files[file] != tied.manifest.files[file]
        assert found.manifest.files[file] == expected.manifest.files[file]


def test_transformers_opens_the_untied_head(tied, tmp_path: Path) -> None:
    result = rotated(tied, tmp_path / "rotated")
    # It compares the folder's outputs with the artifact's, bit for bit.
    folder = write_transformers_folder(result.path, tmp_path / "folder")
    assert folder.changed == {}
    assert not json.loads((tmp_path / "folder" / "config.json").read_text())["tie_word_embeddings"]


def test_weights_on_disk_are_rotated_to_the_same_bytes(tied, tmp_path: Path) -> None:
    module = tied.load()
    module.save_pretrained(tmp_path / "hf")
    streamed = import_streamed(tmp_path / "streamed", tmp_path / "hf", None, TEXT)
    file = "weights.safetensors"
    assert streamed.manifest.files[file] == tied.manifest.files[file]
    result = rotated(streamed, tmp_path / "rotated")
    assert result.is_streamed
    whole = rotated(tied, tmp_path / "whole")
    assert result.manifest.files[file] == whole.manifest.files[file]
    assert result.manifest.facts["untied"] == whole.manifest.facts["untied"]


def test_a_weight_that_stays_as_it_was_is_found(tied, tmp_path: Path, monkeypatch) -> None:
    rotate = residual_rotation.rotated_weights

    def forgetful(stream, *args, **settings):
        return rotate(stream._replace(writers=stream.writers[1:]), *args, **settings)

    monkeypatch.setattr(residual_rotation, "rotated_weights", forgetful)
    with pytest.raises(StageFailed, match="the rotated model answers otherwise, by"):
        rotated(tied, tmp_path / "none")
