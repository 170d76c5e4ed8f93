"""Signatures, seeded models and data that the tests of quantization share."""

from pathlib import Path

import torch
from torch.utils.data import TensorDataset

from compress.artifacts.artifact import Artifact
from compress.artifacts.eager_model import EagerModel
from compress.artifacts.recipe import Recipe
from compress.common.signature import OutputSpec, Signature, TensorSpec
from compress.data.splits import Splits

NETWORKS = Path(__file__).parent
"""Folder of the modules `networks`, `sequences`, `recurrences` and `halves`."""
IMAGE = Signature(
    inputs=(TensorSpec(name="image", shape=("batch", 1, 8, 8)),),
    outputs=(OutputSpec(name="logits"),),
)
TOKENS = Signature(
    inputs=(TensorSpec(name="tokens", shape=("batch", "length"), dtype="int64"),),
    outputs=(OutputSpec(name="states"),),
)


def build_model(
    path: Path,
    factory: str,
    signature: Signature = IMAGE,
    folder: Path = NETWORKS,
    *,
    random_batch_norm: bool = False,
    **arguments: object,
) -> EagerModel:
    """Save a model with seeded weights, and where asked for with BatchNorms that do something."""
    torch.manual_seed(0)
    recipe = Recipe(factory=factory, arguments=arguments)
    module = recipe.build(folder)
    for layer in module.modules():
        if random_batch_norm and isinstance(layer, torch.nn.BatchNorm2d):
            torch.nn.init.uniform_(layer.running_mean, -0.5, 0.5)
            torch.nn.init.uniform_(layer.weight, 0.5, 1.5)
    return EagerModel.create(path, recipe, module.state_dict(), signature, folder=folder)


def images(samples: int = 64) -> torch.Tensor:
    """Return seeded random images."""
    return torch.randn(samples, 1, 8, 8, generator=torch.Generator().manual_seed(1))


def labelled_images(samples: int = 64) -> Splits:
    """Return random images with the labels 0 to 9 in turn."""
    data = TensorDataset(images(samples), torch.arange(samples) % 10)
    return Splits({"train": data, "val": data}, 32)


def answer(model: Artifact, *inputs: torch.Tensor) -> torch.Tensor:
    """Return a model's first output."""
    with model.open() as predict:
        return predict(*inputs)[0]


def relative_error(expected: torch.Tensor, got: torch.Tensor) -> float:
    """Return the norm of the difference over that of the expected tensor."""
    return float((got - expected).norm() / expected.norm())
