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
    if "module" in settings:
        # Written by the benchmark itself, with the classes of a package in `code`.
        net = torch.load(settings["module"], weights_only=False).eval()
    else:
        from models import resnet20

        net = resnet20().eval()
        net.load_state_dict(torch.load(settings["weights"], weights_only=True))
    data = torch.load(settings["data"], weights_only=True)
    results = {}
    importances = {
        "l2": tp.importance.GroupMagnitudeImportance(p=2),
        "taylor": tp.importance.GroupTaylorImportance(),
    }
    for name in settings.get("importances", importances):
        importance = importances[name]
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
    head = [module for module in net.modules() if isinstance(module, torch.nn.Linear)][-1]
    pruner = tp.pruner.BasePruner(
        net,
        example,
        importance=importance,
        global_pruning=True,
        pruning_ratio=0.99,
        max_pruning_ratio=0.9,
        iterative_steps=steps,
        ignored_layers=[head],
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
    labels = torch.cat([net(batch).argmax(1) for batch in data["test_x"].split(64)])
    return float((labels == data["test_y"]).float().mean())


if __name__ == "__main__":
    main()
