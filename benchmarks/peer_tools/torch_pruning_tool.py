"""Torch-Pruning without training: its documented recipe, and BatchNorm estimated anew."""

import copy
import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
import torch_pruning as tp


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text())
    sys.path.insert(0, settings["code"])
    from models import resnet20

    net = resnet20().eval()
    net.load_state_dict(torch.load(settings["weights"], weights_only=True))
    data = torch.load(settings["data"], weights_only=True)
    results = {}
    for name, importance in (
        ("l2", tp.importance.GroupMagnitudeImportance(p=2)),
        ("taylor", tp.importance.GroupTaylorImportance()),
    ):
        pruned, macs = _pruned(copy.deepcopy(net), data, importance, settings["macs"])
        results[name] = {"macs": macs, "accuracy": _accuracy(pruned, data)}
        _estimate_batch_norm(pruned, data["train_x"])
        results[f"{name}, BatchNorm estimated anew"] = {
            "macs": macs,
            "accuracy": _accuracy(pruned, data),
        }
    Path(settings["output"]).write_text(json.dumps(results))


def _pruned(net, data, importance, target: float):
    """Prune in steps until a share of the multiply-accumulates is left; return net and share."""
    example = data["train_x"][:1]
    whole, _ = tp.utils.count_ops_and_params(net, example)
    steps = 100
    pruner = tp.pruner.BasePruner(
        net,
        example,
        importance=importance,
        global_pruning=True,
        pruning_ratio=0.99,
        max_pruning_ratio=0.9,
        iterative_steps=steps,
        ignored_layers=[net.head],
    )
    for _ in range(steps):
        net.zero_grad()
        if isinstance(importance, tp.importance.GroupTaylorImportance):
            F.cross_entropy(net(data["train_x"][:512]), data["train_y"][:512]).backward()
        pruner.step()
        macs, _ = tp.utils.count_ops_and_params(net, example)
        if macs <= target * whole:
            break
    return net, macs / whole


@torch.no_grad()
def _estimate_batch_norm(net, images) -> None:
    for module in net.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.reset_running_stats()
            module.momentum = None  # the average of all batches
    net.train()
    for batch in images.split(128):
        net(batch)
    net.eval()


@torch.no_grad()
def _accuracy(net, data) -> float:
    return float((net(data["test_x"]).argmax(1) == data["test_y"]).float().mean())


if __name__ == "__main__":
    main()
