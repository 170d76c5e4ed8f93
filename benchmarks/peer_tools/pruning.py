"""Channels of a ResNet-20 removed without training, at equal multiply-accumulates."""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from quantizer.sources import at, trained

from compress import PruneChannels
from compress.artifacts.eager_model import EagerModel
from peer_tools.contest import percent
from peer_tools.environments import PEERS, run_tool

TARGETS = (0.5, 0.26)
DIGITS = Path(__file__).parents[2] / "examples" / "digits"


def tables(folder: Path, given: argparse.Namespace) -> Iterator[str]:
    """Yield one table."""
    model, context = trained(folder, "resnet20", "easy", 0, 2 if given.small else 12)
    x, y = context.data.datasets["test"].tensors
    train_x, train_y = context.data.datasets["train"].tensors
    weights, data = folder / "weights.pt", folder / "data.pt"
    torch.save(model.load().state_dict(), weights)
    torch.save({"train_x": train_x, "train_y": train_y, "test_x": x, "test_y": y}, data)
    rows = [f"| whole network | {percent(_accuracy(model, x, y))} | 1.00 |"]
    for target in TARGETS:
        for name, settings in (
            ("`l2` and `refit`", {"importance": "l2", "refit": True}),
            ("`obs` and `refit`", {"importance": "obs", "refit": True}),
        ):
            stage = PruneChannels(target={"macs": target}, scope="global", **settings)
            pruned = stage(model, at(context, f"{target}-{name.strip('`')[:3]}"))
            macs = pruned.macs() / model.macs()
            rows.append(
                f"| **compress**, {name} | {percent(_accuracy(pruned, x, y))} | {macs:.2f} |"
            )
        if "torch_pruning" in given.peers:
            rows += _torch_pruning(folder, given, weights, data, target)
    head = "| | accuracy | multiply-accumulates |\n|---|---|---|"
    yield "\n".join(["## ResNet-20, channels removed without training\n", head, *rows])


def _torch_pruning(folder, given, weights, data, target) -> Iterator[str]:
    output = folder / f"{target}.json"
    settings = {"weights": weights, "data": data, "code": DIGITS, "macs": target, "output": output}
    failed = run_tool("torch_pruning", given.environments, settings)
    if isinstance(failed, str):
        yield f"| torch_pruning | failed: {failed} | |"
        return
    for name, found in json.loads(output.read_text()).items():
        accuracy, macs = percent(found["accuracy"]), found["macs"]
        yield f"| {PEERS['torch_pruning'].release}, {name} | {accuracy} | {macs:.2f} |"


@torch.no_grad()
def _accuracy(model: EagerModel, x: torch.Tensor, y: torch.Tensor) -> float:
    return float((model.load().eval()(x).argmax(1) == y).float().mean())
