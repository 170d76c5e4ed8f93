"""What 4 bits cost a decoder, and the speed of its folders."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from compress import Artifact, Context, EagerModel, MaxDivergence, Metric, QuantizeWeights, Train
from compress.artifacts.hf_folder import files_to_carry, read_folder
from compress.artifacts.importing import import_module, inputs_of_transformer
from compress.common.signature import OutputSpec, Signature
from compress.core.objectives.loss import Loss
from compress.core.objectives.task import TASKS
from compress.data.splits import Splits
from compress.export import ExportGenai, GenaiModel
from decoder.text import initial_folder, splits

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PERPLEXITY = Metric("perplexity", (("context", 256), ("stride", 128)))
METHODS = {
    "RTN, groups of 32": {"method": "rtn"},
    "GPTQ, groups of 32": {"method": "gptq"},
    "RTN, groups of 128": {"method": "rtn", "group_size": 128},
    "GPTQ, groups of 128": {"method": "gptq", "group_size": 128},
}
"""Rows of the table: settings of `quantize_weights`."""
PROMPT, TOKENS = 128, 64


def context_for(root: Path, data: Splits, **known: Artifact) -> Context:
    """Return what every stage runs with."""
    loss = Loss(task=TASKS["causal-lm"])
    return Context(root=root, data=data, loss=loss, metric=PERPLEXITY, artifacts=known)


def imported(folder: Path) -> EagerModel:
    """Return the model that all begins with."""
    initial = initial_folder(folder)
    recipe, module = read_folder(initial, None, untrained_head=False)
    inputs, axes = inputs_of_transformer(module, folder)
    signature = Signature(inputs=inputs[:1], outputs=(OutputSpec(name="logits"),), axes=axes)
    carried = files_to_carry(initial, module)
    return import_module(folder / "source", recipe, module, signature, carried=carried)


def trained(folder: Path, data: Splits) -> EagerModel:
    """Return the trained model; train it where the folder has none."""
    if (folder / "trained" / "manifest.json").exists():
        return EagerModel.from_directory(folder / "trained")
    train = Train(
        epochs=1,
        batch_size=8,
        optimizer="adamw",
        learning_rate=1e-3,
        weight_decay=0.1,
        clip_norm=1.0,
        warmup=0.1,
    )
    return train(imported(folder), context_for(folder / "trained", data))


def made_once(folder: Path, make: Callable[[], Any]) -> Any:
    """Return the artifact of a folder, which an earlier run has made or `make` makes now."""
    if (folder / "manifest.json").exists():
        return Artifact.from_directory(folder)
    return make()


def quality(folder: Path) -> None:
    """Print what 4 bits cost by method, and the folders' sizes."""
    data = Splits(splits(folder), batch_size=4)
    source = trained(folder, data)
    context = context_for(folder / "any", data, source=source)
    before = context.score(source)
    print(
        f"{source.parameters():,} weights, perplexity {before:.2f} (val, windows of 256 by 128)\n"
    )
    print("| 4 bits | perplexity | rise | KL, nats | MB |\n|---|---|---|---|---|")
    exported = {"float32": source}
    for name, settings in METHODS.items():
        root = folder / name.replace(", groups of ", "-")
        stage = QuantizeWeights(bits=4, calibration_samples=24, **settings)
        found = made_once(root, partial(stage, source, context.with_root(root)))
        after, size = context.score(found), found.payload_bytes / 1e6
        divergence = MaxDivergence(nats=1).measure(source, found, context)
        rise = 100 * (after / before - 1)
        print(
            f"| {name} | {after:.3f} | {rise:+.2f} % | {divergence:.2g} | {size:.1f} |", flush=True
        )
        if name == "GPTQ, groups of 32":
            exported["int4"] = found
    print("\n| genai folder | MB | equal greedy tokens |\n|---|---|---|")
    for name, model in exported.items():
        made = ExportGenai()(model, context.with_root(folder / f"genai-{name}"))
        facts = made.manifest.facts
        equal = f"{facts['equal_tokens']} of {facts['greedy_tokens']}"
        print(f"| {name} | {made.payload_bytes / 1e6:.1f} | {equal} |", flush=True)


def speed(folder: Path) -> None:
    """Print how fast the folders generate, in turn in this process."""
    print("| genai folder | first token, ms | tokens/s |\n|---|---|---|")
    rounds: dict[str, list[tuple[float, float]]] = {"float32": [], "int4": []}
    models = {name: GenaiModel.from_directory(folder / f"genai-{name}") for name in rounds}
    for _ in range(3):
        for name, model in models.items():
            rounds[name].append(model.generation_speed(PROMPT, TOKENS, 1))
    for name, found in rounds.items():
        first, rate = (sorted(values)[1] for values in zip(*found, strict=True))
        print(f"| {name} | {first:.1f} | {rate:.1f} |")


def main(folder: Path, *, speed_alone: bool) -> None:
    """Print all tables, or that of the speed of an earlier run's folders."""
    folder.mkdir(parents=True, exist_ok=True)
    if not speed_alone:
        quality(folder)
        print()
    speed(folder)
