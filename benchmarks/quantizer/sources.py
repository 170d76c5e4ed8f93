"""Float models of the benchmarks: trained on digits, of ImageNet shapes, or a sentence encoder."""

from pathlib import Path

import torch

from compress import Context, Signature, TensorSpec, Train
from compress.artifacts.artifact import Artifact
from compress.artifacts.eager_model import EagerModel
from compress.artifacts.importing import import_checkpoint
from compress.artifacts.recipe import Recipe
from compress.data.splits import DataReference
from compress.export import ExportOnnx

HERE = Path(__file__).parent
PRUNER = HERE.parent / "pruner"
SHAPES = ("mobilenet", "resnet18", "resnet50")


def image_model(root: Path, factory: str, shape: tuple[int, ...], seed: int = 0) -> EagerModel:
    """Return a network of `nets` or `shapes` for images of a shape, untrained."""
    torch.manual_seed(seed)
    signature = Signature(inputs=(TensorSpec(name="image", shape=("batch", *shape)),))
    module = "shapes" if factory in SHAPES else "nets"
    folder = HERE.parent if factory in SHAPES else HERE
    recipe = Recipe(factory=f"{module}:{factory}")
    return import_checkpoint(root / "source", recipe, signature, checkpoint=None, folder=folder)


def trained(
    root: Path, factory: str, data: str, seed: int, epochs: int
) -> tuple[EagerModel, Context]:
    """Return a network of `nets` trained on its digits, and the context of its stages."""
    splits = DataReference(f"nets:{data}", {}, HERE, 128).load()
    context = Context(root=root / "x", data=splits, seed=seed)
    source = image_model(root, factory, (1, 8, 8), seed)
    stage = Train(epochs=epochs, batch_size=64)
    return stage(source, at(context, "trained")), context


def minilm(root: Path, samples: int) -> tuple[EagerModel, Context]:
    """Return the sentence encoder, and a context with docstrings as data."""
    from sentences import minilm

    return minilm(root, train=samples, held_out=samples)


def at(context: Context, name: str) -> Context:
    """Return the same context with a directory of its own for an artifact."""
    return context.with_root(context.root.with_name(name.replace(" ", "_")))


def onnx(model: Artifact, context: Context, name: str) -> Artifact:
    """Return the model as an ONNX file."""
    return ExportOnnx()(model, at(context, f"{name}-onnx"))


def megabytes(artifact: Artifact) -> float:
    """Return the size of what is shipped, in 10^6 bytes."""
    return artifact.payload_path.stat().st_size / 1e6
