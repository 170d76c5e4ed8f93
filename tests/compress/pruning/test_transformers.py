"""Models of transformers as users hold them: at the top, or inside a module of their own."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from compress.artifacts.eager_model import EagerModel
from compress.artifacts.importing import import_checkpoint
from compress.artifacts.recipe import Recipe
from compress.common.forward import run_in_eval
from compress.common.signature import Signature, TensorSpec
from compress.core.context import Context
from compress.pruning.prune_channels import PruneChannels

HERE = Path(__file__).parent
WORDS = tuple(
    TensorSpec(name=name, shape=("batch", 8), dtype="int64")
    for name in ("input_ids", "attention_mask")
)
IMAGE = (TensorSpec(name="pixel_values", shape=("batch", 3, 16, 16)),)
CASES = {
    "bert": (WORDS, {"encoder.layer.0.attention.self.query", "encoder.layer.0.intermediate.dense"}),
    "Encoder": (
        WORDS,
        {
            "backbone.encoder.layer.1.attention.self.query",
            "backbone.encoder.layer.1.intermediate.dense",
        },
    ),
    "Named": (WORDS, {"backbone.encoder.layer.0.attention.self.query", "head.0"}),
    "llama": (WORDS, {"model.layers.0.self_attn.q_proj", "model.layers.1.mlp.gate_proj"}),
    "Classifier": (IMAGE, {"vit.layers.0.mlp.fc1", "head.0"}),
}


@pytest.mark.parametrize(
    "factory",
    # CI prunes bert in test_architectures.py, and here what users write around a model.
    [
        pytest.param(n, marks=[pytest.mark.slow if n == "Named" else pytest.mark.soak])
        if n != "llama"
        else n
        for n in CASES
    ],
)
def test_heads_and_inner_widths_are_cut(factory: str, tmp_path: Path) -> None:
    inputs, expected = CASES[factory]
    source = import_checkpoint(
        tmp_path / "source",
        Recipe(factory=f"transformers_here:{factory}"),
        Signature(inputs=inputs),
        checkpoint=None,
        folder=HERE,
    )
    pruned = PruneChannels(ratio=0.5)(source, Context(root=tmp_path / "pruned"))
    cut = {name for group in pruned.manifest.facts["families"] for name in group["modules"]}
    assert expected <= cut
    assert pruned.macs() <= 0.7 * source.macs()
    inputs = pruned.signature.example(batch=3, seed=4)
    before, after = run_in_eval(source.load(), inputs), run_in_eval(pruned.load(), inputs)
    assert [x.shape for x in after] == [x.shape for x in before]
    again = run_in_eval(EagerModel.from_directory(pruned.path).load(), inputs)
    assert all(torch.equal(a, b) for a, b in zip(after, again, strict=True))
