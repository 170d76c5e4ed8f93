"""Models of local Hugging Face folders: the real transformers, tiny weights, no network."""

import json
import shutil
import socket
from pathlib import Path

import pytest
import torch

from compress import EagerModel
from compress.artifacts.hf_folder import build, folder_digest, read_folder
from compress.artifacts.importing import import_module
from compress.common.errors import ArtifactInvalid
from compress.common.signature import Signature, TensorSpec

transformers = pytest.importorskip("transformers")

SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "vocab_size": 40,
    "max_position_embeddings": 32,
}
TOKENS = tuple(
    TensorSpec(name=name, shape=("batch", 6), dtype="int64")
    for name in ("token_type_ids", "attention_mask", "input_ids")
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder as `save_pretrained` leaves it, in half floats."""
    torch.manual_seed(0)
    config = transformers.BertConfig(num_labels=3, **SIZES)
    place = tmp_path_factory.mktemp("bert")
    transformers.BertForSequenceClassification(config).half().save_pretrained(place)
    return place


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def test_it_answers_as_transformers_does_and_needs_the_folder_no_more(folder, tmp_path) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(folder, moved)
    recipe, module = read_folder(moved, "text-classification", untrained_head=False)
    model = import_module(tmp_path / "sealed", recipe, module, Signature(inputs=TOKENS))
    shutil.rmtree(moved)
    assert [o.name for o in model.signature.outputs] == ["logits"]
    assert str(moved) not in model.manifest.model_dump_json()
    whole = transformers.BertForSequenceClassification.from_pretrained(folder, dtype="float32")
    ids = torch.arange(12).reshape(2, 6)
    mask, kinds = (ids % 4 != 0).long(), ids % 2
    with torch.no_grad():
        expected = whole(input_ids=ids, attention_mask=mask, token_type_ids=kinds).logits
    with EagerModel.from_directory(model.path).open() as predict:
        assert torch.equal(predict(kinds, mask, ids)[0], expected)


def test_the_config_names_the_class_where_no_task_does(folder) -> None:
    recipe, _ = read_folder(folder, None, untrained_head=False)
    assert recipe.arguments["architecture"] == "BertForSequenceClassification"


def test_a_head_without_weights_is_refused_unless_it_is_trained(folder) -> None:
    with pytest.raises(ArtifactInvalid, match=r"has no weights for qa_outputs\.bias, qa_out"):
        read_folder(folder, "question-answering", untrained_head=False)
    _, module = read_folder(folder, "question-answering", untrained_head=True)
    assert module.qa_outputs.weight.dtype == torch.float32


def _config(place: Path, **changes: object) -> None:
    content = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps({**content, **changes}))


FOREIGN = {
    "no folder": (shutil.rmtree, "no such folder; models are never downloaded"),
    "no config": (lambda p: (p / "config.json").unlink(), "holds no config.json"),
    "broken config": (lambda p: (p / "config.json").write_text("{"), "config.json: not JSON"),
    "no type": (lambda p: (p / "config.json").write_text("{}"), "names no model_type"),
    "pickled weights": (
        lambda p: (p / "model.safetensors").rename(p / "pytorch_model.bin"),
        "holds no model.safetensors .* writes safetensors",
    ),
    "truncated weights": (
        lambda p: (p / "model.safetensors").write_bytes(b"12345678"),
        "model.safetensors: not a readable safetensors file",
    ),
    "quantized": (lambda p: _config(p, quantization_config={"bits": 4}), "is quantized already"),
    "code of a hub": (
        lambda p: _config(p, attn_implementation="a/b"),
        "attn_implementation: names 'a/b'",
    ),
    "another architecture": (
        lambda p: _config(p, architectures=["MyOwnBert"]),
        "names 'MyOwnBert', which transformers .* code of the folder is never run",
    ),
    "no model": (
        lambda p: _config(p, architectures=["pipeline"]),
        "names 'pipeline', which transformers",
    ),
}


@pytest.mark.parametrize("problem", FOREIGN)
def test_what_is_no_folder_of_plain_weights_is_one_line(folder, tmp_path, problem) -> None:
    change, message = FOREIGN[problem]
    shutil.copytree(folder, tmp_path / "m")
    change(tmp_path / "m")
    with pytest.raises(ArtifactInvalid, match=message) as caught:
        read_folder(tmp_path / "m", None, untrained_head=False)
    assert "\n" not in str(caught.value)


def test_code_that_a_folder_brings_is_never_run(folder, tmp_path) -> None:
    shutil.copytree(folder, tmp_path / "m")
    (tmp_path / "m" / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    own = {"AutoConfig": "own.Config", "AutoModelForSequenceClassification": "own.Model"}
    _config(tmp_path / "m", auto_map=own, model_type="of_their_own")
    for task in (None, "text-classification"):
        with pytest.raises(ArtifactInvalid, match="transformers cannot read it"):
            read_folder(tmp_path / "m", task, untrained_head=False)
    assert not (tmp_path / "ran").exists()


def test_only_models_are_built_and_a_task_without_one_is_refused(folder) -> None:
    with pytest.raises(ArtifactInvalid, match="has no model 'pipeline'"):
        build("pipeline", {})
    with pytest.raises(ArtifactInvalid, match="has no bert for object-detection"):
        read_folder(folder, "object-detection", untrained_head=False)


def test_the_digest_follows_config_and_weights(folder, tmp_path) -> None:
    shutil.copytree(folder, tmp_path / "m")
    assert folder_digest(tmp_path / "m") == folder_digest(folder)
    _config(tmp_path / "m", layer_norm_eps=1e-3)
    assert folder_digest(tmp_path / "m") != folder_digest(folder)
    (tmp_path / "m" / "model.safetensors").unlink()
    assert folder_digest(tmp_path / "m") is None


def test_a_model_in_memory_needs_no_factory(folder) -> None:
    module = transformers.BertForSequenceClassification.from_pretrained(folder, dtype="float32")
    ids = torch.arange(12).reshape(2, 6)
    inputs = {"attention_mask": torch.ones_like(ids), "input_ids": ids}
    source = EagerModel.from_module(module, example_inputs=inputs)
    with source.open() as predict, torch.no_grad():
        assert torch.equal(predict(*inputs.values())[0], module(**inputs).logits)
