"""What 4 bits cost a decoder with outliers, before and after its residual stream is rotated."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from compress import EagerModel, MaxDivergence, QuantizeWeights, RotateWeights
from compress.data.splits import Splits
from compress.quantization.algorithms.residual_rotation import (
    Rotation,
    residual_stream,
    rotated_weights,
)
from decoder.compression import context_for, made_once, trained
from decoder.text import splits

if TYPE_CHECKING:
    from pathlib import Path

CHANNELS, FACTOR, MEASURED = 8, 64, 8
METHODS = ("rtn", "gptq")


def rescaled(model: EagerModel, folder: Path, _: Splits) -> EagerModel:
    """Multiply channels of the norms, and divide what reads them: by a power of two, so exactly."""
    module = model.load()
    stream = residual_stream(module, module.state_dict(), model.signature.example())
    chosen = torch.randperm(stream.width, generator=torch.Generator().manual_seed(0))[:CHANNELS]
    with torch.no_grad():
        for name in stream.norms:
            module.get_submodule(name).weight[chosen] *= FACTOR  # type: ignore[operator, index]
        for name in stream.readers:
            module.get_submodule(name).weight[:, chosen] /= FACTOR  # type: ignore[operator, index]
    made = model.derive(folder, module)
    ids = model.signature.example()
    if not torch.equal(model.open()(*ids)[0], made.open()(*ids)[0]):
        raise SystemExit("the rescaled model has other scores")
    return made


def in_principal_axes(model: EagerModel, folder: Path, data: Splits) -> EagerModel:
    """Rotate the residual stream so that its channels are uncorrelated: a few are large then."""
    module: Any = model.load()
    weights = module.state_dict()
    stream = residual_stream(module, weights, model.signature.example())
    gram = torch.zeros(stream.width, stream.width, dtype=torch.float64)

    def add(_: Any, args: tuple[torch.Tensor, ...]) -> None:
        rows = args[0].flatten(0, -2).double()
        gram.add_(rows.T @ rows / rows.square().mean())

    for layer in module.model.layers:
        layer.register_forward_pre_hook(add)
    samples: Any = data.datasets["calibration"]
    with torch.inference_mode():
        for index in range(MEASURED):
            module(samples[index]["input_ids"][None])
    axes = Rotation(torch.ones(stream.width).double(), (torch.linalg.eigh(gram).eigenvectors,))
    return model.derive(folder, rotated_weights(stream, weights, axes))


MODELS = {
    "as trained": lambda model, folder, data: model,
    "activations × 64": rescaled,
    "principal axes": in_principal_axes,
}
"""Outliers → how a model gets them, without other scores."""


def main(folder: Path) -> None:
    """Print what RTN and GPTQ cost each model, and its rotated form."""
    folder.mkdir(parents=True, exist_ok=True)
    data = Splits(splits(folder), batch_size=4)
    source = trained(folder, data)
    context = context_for(folder / "any", data, source=source)
    before = context.score(source)
    print(f"perplexity {before:.2f}\n\n| outliers | as it is: rise, KL | rotated: rise, KL |")
    print("|---|---|---|")
    measured: dict[tuple[str, str], str] = {}
    for name, make in MODELS.items():
        root = folder / f"rotations-{name.replace(' ', '-')}"
        plain = made_once(root / "plain", partial(make, source, root / "plain", data))
        rotated = made_once(
            root / "rotated", partial(RotateWeights(), plain, context.with_root(root / "rotated"))
        )
        for method in METHODS:
            cells = []
            for model in (plain, rotated):
                # Equal weights have equal costs: folding the norms undoes what was rescaled.
                key = (method, model.manifest.files[model.payload])
                if key not in measured:
                    to = root / f"{method}-{model.path.name}"
                    stage = QuantizeWeights(method=method, calibration_samples=24)
                    found = made_once(to, partial(stage, model, context.with_root(to)))
                    rise = 100 * (context.score(found) / before - 1)
                    divergence = MaxDivergence(nats=1).measure(source, found, context)
                    measured[key] = f"{rise:+.2f} %, {divergence:.2g}"
                cells.append(measured[key])
            print(f"| {name}, {method.upper()} | {' | '.join(cells)} |", flush=True)
