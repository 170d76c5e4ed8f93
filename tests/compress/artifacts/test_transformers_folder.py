"""Pruned models of transformers as folders that transformers opens."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from compress import Context, EagerModel, PruneChannels, PruneLayers
from compress.artifacts.hf_folder import read_folder
from compress.artifacts.importing import import_module
from compress.artifacts.libraries.transformers_folder import write_transformers_folder
from compress.cli import app
from compress.common.errors import ArtifactInvalid, StageFailed
from compress.common.signature import Signature, TensorSpec

transformers = pytest.importorskip("transformers")

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 40,
    "max_position_embeddings": 32,
    "num_labels": 3,
    "pad_token_id": 0,
}
TOKENS = Signature(
    inputs=tuple(
        TensorSpec(name=name, shape=("batch", "length"), dtype="int64")
        for name in ("input_ids", "attention_mask")
    )
)


def sealed(folder: Path, kind: str) -> EagerModel:
    """Return the artifact of a classifier with random weights."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES)
    getattr(transformers, f"{kind}ForSequenceClassification")(config).save_pretrained(folder / "hf")
    recipe, module = read_folder(folder / "hf", None, untrained_head=False)
    return import_module(folder / "source", recipe, module, TOKENS)


def pruned(model: EagerModel, **settings: object) -> EagerModel:
    stage = PruneChannels(ratio=0.5, importance="l2", **settings)
    return stage(model, Context(root=model.path.with_name("pruned")))


@pytest.mark.parametrize(
    ("kind", "settings", "changed"),
    [
        # The next cuts the inner width as well.
        pytest.param(
            *("Bert", {"include": ("*.intermediate.dense",)}, {"intermediate_size": 32}),
            marks=pytest.mark.soak,
        ),
        (
            "Bert",
            {"across_norms": True},
            {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2},
        ),
        # Half the heads, not heads of half the width, which have the same shapes.
        (
            "Llama",
            {},
            {"intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2},
        ),
    ],
)
def test_what_pruning_cut_stands_in_the_config(
    tmp_path: Path, kind: str, settings: dict, changed: dict
) -> None:
    small = pruned(sealed(tmp_path, kind), **settings)
    written = write_transformers_folder(small.path, tmp_path / "small")
    assert written.changed == changed
    config = json.loads((tmp_path / "small" / "config.json").read_text())
    assert {name: config[name] for name in changed} == changed
    opened = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "small")
    ids, mask = TOKENS.example(3)
    with torch.inference_mode(), small.open() as predict:
        (expected,) = predict(ids, mask)
        assert torch.equal(opened.eval()(input_ids=ids, attention_mask=mask).logits, expected)


def test_fewer_layers_stand_in_the_config(tmp_path: Path) -> None:
    model = sealed(tmp_path, "Bert")
    small = PruneLayers(remove=1)(model, Context(root=tmp_path / "short"))
    written = write_transformers_folder(small.path, tmp_path / "small")
    assert written.changed == {"num_hidden_layers": 1}


@pytest.mark.slow
def test_widths_that_no_config_has_are_refused(tmp_path: Path) -> None:
    small = pruned(sealed(tmp_path, "Bert"))  # a head of BERT is hidden_size / heads wide
    with pytest.raises(StageFailed, match=r"no config of Bert.* was \[32, 32\], and is \[16, 32\]"):
        write_transformers_folder(small.path, tmp_path / "small")
    assert not (tmp_path / "small").exists()


def test_other_models_are_refused(tmp_path: Path) -> None:
    model = EagerModel.from_module(
        torch.nn.Linear(2, 2), example_inputs=(torch.ones(1, 2),), root=tmp_path / "linear"
    )
    with pytest.raises(ArtifactInvalid, match="is no PyTorch model of transformers"):
        write_transformers_folder(model.path, tmp_path / "small")


def test_the_command_writes_one_folder(tmp_path: Path) -> None:
    artifact = str(sealed(tmp_path, "Bert").path)
    refused = CliRunner().invoke(app, ["package", artifact])
    assert refused.exit_code != 0
    done = CliRunner().invoke(app, ["package", artifact, "--transformers", str(tmp_path / "out")])
    assert done.exit_code == 0
    assert "BertForSequenceClassification, the config as it was" in done.stdout
