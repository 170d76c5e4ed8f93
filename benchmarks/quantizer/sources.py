"""Models at their start: trained on digits, of well-known shapes, or a real sentence encoder."""

from pathlib import Path

import torch

from compress import Context, Metric, Signature, TensorSpec, Train
from compress.core.artifact import Artifact
from compress.core.checkpoint import import_checkpoint
from compress.core.data import DataReference
from compress.core.eager import EagerModel
from compress.core.recipe import Recipe
from export import ExportOnnx

HERE = Path(__file__).parent
PRUNER = HERE.parent / "pruner"
TOKENS = 32


def image_model(root: Path, factory: str, shape: tuple[int, ...], seed: int = 0) -> EagerModel:
    """Return a network of `nets` for images of a shape, untrained."""
    torch.manual_seed(seed)
    signature = Signature(inputs=(TensorSpec(name="image", shape=("batch", *shape)),))
    recipe = Recipe(factory=f"nets:{factory}")
    return import_checkpoint(root / "source", recipe, signature, checkpoint=None, folder=HERE)


def trained(
    root: Path, factory: str, data: str, seed: int, epochs: int
) -> tuple[EagerModel, Context]:
    """Return a network of `nets` trained on its digits, and where its stages run."""
    splits = DataReference(f"nets:{data}", {}, HERE, 128).load()
    context = Context(root=root / "x", data=splits, seed=seed)
    source = image_model(root, factory, (1, 8, 8), seed)
    stage = Train(epochs=epochs, batch_size=64)
    return stage(source, at(context, "trained")), context


def minilm(root: Path, samples: int) -> tuple[EagerModel, Context]:
    """Return the sentence encoder, and docstrings that it encodes."""
    signature = Signature(
        inputs=tuple(
            TensorSpec(name=name, shape=("batch", TOKENS), dtype="int64")
            for name in ("ids", "mask")
        )
    )
    from safetensors.torch import save_file
    from sentences import weights

    file = root / "minilm.safetensors"
    save_file(weights(), file)
    recipe = Recipe(factory="sentences:encoder")
    model = import_checkpoint(root / "source", recipe, signature, checkpoint=file, folder=PRUNER)
    arguments = {"train": samples, "held_out": samples}
    data = DataReference("sentences:data", arguments, PRUNER, 32).load()
    metric = Metric("sentences:cosine", direction=True, folder=PRUNER)
    return model, Context(root=root / "x", data=data, metric=metric, earlier={"source": model})


def at(context: Context, name: str) -> Context:
    """Return the same context with a directory of its own for an artifact."""
    return context.at(context.root.with_name(name.replace(" ", "_")))


def onnx(model: Artifact, context: Context, name: str) -> Artifact:
    """Return the model as an ONNX file."""
    return ExportOnnx()(model, at(context, f"{name}-onnx"))


def megabytes(artifact: Artifact) -> float:
    """Return the size of what is shipped, in 10^6 bytes."""
    return artifact.payload_path.stat().st_size / 1e6
