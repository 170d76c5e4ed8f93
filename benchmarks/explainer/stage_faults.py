"""Faults of pruning, distillation and training, of known place and cause, in networks of families.

Those of pruning are put into a trained network that answers as before, or into the settings of the
stage; those of training into its settings or its data.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from compress.data.batch import Batch
from compress.pruning.allocation.ranking import rank
from compress.pruning.channel_settings import ChannelSelection
from compress.pruning.importance.scores import ScoringSamples
from compress.pruning.recovery.recovery import reestimate_batch_norms_
from compress.pruning.verification.masked_equivalence import VerificationInputs
from explainer.families import digits, net
from explainer.faults import scale_channels

FEW = 48
"""Samples of a `train` that is too small."""
GROUPS = {
    "chain": ("convs.1", "convs.2"),
    "residual": ("layers.0.conv1", "layers.1.conv1"),
    "depthwise": ("stem", "point.1"),
    "perceptron": ("layers.0", "layers.2"),
    "pooled": ("convs.1", "fc"),
    "sequence": ("fc1.0", "fc1.2"),
}
"""Family → groups of channels that are cut too narrow."""
PAIRS = {
    "chain": ("convs.2", "convs.1"),
    "residual": ("layers.1.conv2", "layers.1.conv1"),
    "depthwise": ("point.1", "point.0"),
    "perceptron": ("layers.2", "layers.1"),
    "pooled": ("convs.1", "convs.0"),
    "sequence": ("fc2.1", "fc1.1"),
}
"""Family → a layer whose inputs are scaled, and the group of these."""


@dataclass(frozen=True)
class StageFault:
    """A pipeline with a fault, or without one."""

    name: str
    cause: str
    """Key of the cause; empty for a clean control."""
    stages: tuple[dict[str, Any], ...]
    culprit: str = ""
    """Name of the stage that is to be named."""
    part: str = ""
    """The group or layer that loses; empty where no single one does."""
    data: dict[str, Any] = field(default_factory=dict)
    """Arguments of the data's factory."""
    inject: Callable[[nn.Module], None] | None = None
    """Changes the trained network, in place."""
    starts_trained: bool = True
    passes: bool = False
    """Whether its gates are to pass: then what they cost is explained."""


def data(train: str = "", calibration: str = "") -> dict[str, Any]:
    """Return digits, with `train` in `raw` pixels or of `few` samples, or `calibration` `raw`."""
    splits: dict[str, Any] = digits()
    x, y = splits["train"].tensors
    raw = torch.utils.data.TensorDataset(8 * (x + 1), y)
    if calibration == "raw":
        splits["calibration"] = raw
    if train == "raw":
        splits["train"] = raw
    elif train == "few":
        splits["train"] = torch.utils.data.TensorDataset(x[:FEW], y[:FEW])
    return splits


def poor_teacher(family: str) -> nn.Module:
    """Return a network of another seed that was trained for one epoch on a tenth of the labels."""
    torch.manual_seed(5)
    module = net(family).train()
    x, y = digits()["train"].tensors
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-3)
    for _ in range(4):
        for rows in torch.arange(100).split(25):
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(x[rows]), y[rows]).backward()
            optimizer.step()
    return module.eval()


def _batches() -> list[Batch]:
    return [Batch((part,), None) for part in digits()["train"].tensors[0].split(256)]


def _weakest(module: nn.Module, group: str, share: float) -> tuple[int, ...]:
    """Return the channels of a group that matter least."""
    ranked = rank(
        module,
        VerificationInputs((digits()["train"].tensors[0][:2],)),
        ChannelSelection(importance="obs"),
        ScoringSamples(batches=_batches()),
    ).ranked
    scores = next(one.scores for one in ranked if one.group.name == group)
    return tuple(scores.argsort()[: int(share * len(scores))].tolist())


def hide_importance(family: str) -> Callable[[nn.Module], None]:
    """Return what gives channels that matter little large weights, so that norms keep them."""
    layer, group = PAIRS[family]

    def inject(module: nn.Module) -> None:
        weakest = _weakest(module, group, 0.75)
        first, second = module.pairs()[layer]
        with torch.no_grad():
            scale_channels(first, second, weakest, 100.0)

    return inject


def add_constant_channels(family: str) -> Callable[[nn.Module], None]:
    """Return what makes a quarter of the channels before a layer constant, for its BatchNorm."""
    layer, group = PAIRS[family]

    def inject(module: nn.Module) -> None:
        norm, conv = module.pairs()[layer]
        signs = torch.randn(len(conv.weight), generator=torch.Generator().manual_seed(0)).sign()
        with torch.no_grad():
            for channel in _weakest(module, group, 0.25):
                norm.weight[channel], norm.bias[channel] = 0, 1.5
                conv.weight[:, channel] = 0.15 * signs[:, None, None]
        reestimate_batch_norms_(module, _batches())

    return inject


def stage_faults(family: str) -> list[StageFault]:
    """Return the faults of a family, and its clean controls."""
    return [
        *_pruning(family),
        *_training(family),
        *_distillation(family),
        *_both(family),
        *_controls(family),
    ]


def _prune(size: float, points: float = 2.0, **settings: Any) -> tuple[dict[str, Any], ...]:
    gates = [
        {"gate": "max_drop", "points": points},
        {"gate": "max_parameters", "ratio": size},
    ]
    stage = {"name": "pruned", "stage": "prune_channels", "round_to": 1}
    return ({**stage, **settings, "gates": gates},)


def _pruning(family: str) -> list[StageFault]:
    a, b = GROUPS[family]
    layer, group = PAIRS[family]
    whole = _width(family, group)
    beside = {b: 2, a: 3 * _width(family, a) // 4}
    found = [
        StageFault("narrow", "group_too_narrow", _prune(0.99, widths={a: 1}), "pruned", a),
        StageFault("narrow of two", "group_too_narrow", _prune(0.99, widths=beside), "pruned", b),
        StageFault("no refit", "no_refit", _prune(0.75, ratio=0.5, refit=False), "pruned"),
        StageFault(
            "hidden importance",
            "poor_criterion",
            _prune(0.99, widths={group: whole // 4}),
            "pruned",
            group,
            inject=hide_importance(family),
        ),
        StageFault(
            "raw calibration",
            "calibration_unlike_val",
            _prune(0.75, ratio=0.5),
            "pruned",
            data={"calibration": "raw"},
        ),
        StageFault(
            "few samples",
            "few_calibration_samples",
            _prune(0.75, ratio=0.5, calibration_samples=4),
            "pruned",
        ),
    ]
    if family in ("chain", "residual"):
        cut = {group: whole - whole // 4}
        found.append(
            StageFault(
                "stale BatchNorm",
                "stale_batch_norm",
                _prune(0.99, widths=cut, importance="bn_scale", calibration_samples=0),
                "pruned",
                inject=add_constant_channels(family),
            )
        )
    sparse = {
        "name": "pruned",
        "stage": "prune_weights",
        "amount": 0.3,
        "gates": [{"gate": "max_drop", "points": 2.0}],
    }
    found.append(
        StageFault(
            "sparse layer",
            "layer_too_sparse",
            ({**sparse, "amount": 0.99, "include": [layer]},),
            "pruned",
            f"{layer}.weight",
        )
    )
    return found


def _width(family: str, group: str) -> int:
    """Return how many channels a group has."""
    module = net(family)
    inputs = digits()["train"].tensors[0][:2]
    ranked = rank(
        module.eval(), VerificationInputs((inputs,)), ChannelSelection(importance="l2")
    ).ranked
    return next(len(one.scores) for one in ranked if one.group.name == group)


def _train(at: float = 0.94, **settings: Any) -> tuple[dict[str, Any], ...]:
    gates = [{"gate": "min_metric", "at": at}]
    usual = {"optimizer": "adam", "learning_rate": 0.003, "epochs": 15}
    return ({"name": "taught", "stage": "train", **usual, **settings, "gates": gates},)


def _training(family: str) -> list[StageFault]:
    def fault(name: str, cause: str, **settings: Any) -> StageFault:
        own = settings.pop("data", {})
        return StageFault(name, cause, _train(**settings), "taught", data=own, starts_trained=False)

    steady = {"schedule": "constant"}
    return [
        fault("few epochs", "not_converged", epochs=2, learning_rate=0.0003),
        fault("low rate", "not_converged", epochs=8, learning_rate=0.00003),
        fault("high rate", "learning_rate_too_high", epochs=8, learning_rate=10.0, **steady),
        fault("few to train on", "overfit", epochs=40, data={"train": "few"}),
        fault("raw train", "train_unlike_val", data={"train": "raw"}),
    ]


def _distil(family: str, **settings: Any) -> tuple[dict[str, Any], ...]:
    gates = [{"gate": "max_drop", "points": 3.0, "against": "source"}]
    usual = {
        "student": {
            "factory": "explainer.families:net",
            "arguments": {"family": family},
        },
        "optimizer": "adam",
        "learning_rate": 0.003,
        "epochs": 15,
    }
    return ({"name": "taught", "stage": "distill", **usual, **settings, "gates": gates},)


def _distillation(family: str) -> list[StageFault]:
    def teacher(which: str) -> dict[str, Any]:
        return {
            "factory": f"explainer.stage_faults:{which}",
            "arguments": {"family": family},
        }

    def fault(name: str, cause: str, **settings: Any) -> StageFault:
        return StageFault(name, cause, _distil(family, **settings), "taught")

    return [
        fault("poor teacher", "teacher_worse", teacher=teacher("poor_teacher"), hard_weight=0.0),
        fault("few lessons", "not_converged", teacher="source", epochs=2, learning_rate=0.0003),
        fault(
            "weights",
            "loss_weights",
            teacher="source",
            soft_weight=1e-4,
            hard_weight=0.0,
            optimizer="sgd",
            learning_rate=0.05,
        ),
    ]


def _both(family: str) -> list[StageFault]:
    """Return cuts that are then taught by the model before, with a fault in either stage."""
    a, _ = GROUPS[family]
    narrow, half = {"widths": {a: 1}}, {"ratio": 0.7}
    (cut,), (half_cut,) = _prune(0.99, **narrow), _prune(0.9, **half)
    (teaching,) = _distil(family, teacher="source", epochs=6, student=None)
    (short,) = _distil(family, teacher="source", epochs=2, learning_rate=1e-6, student=None)
    cut, half_cut = ({**stage, "gates": []} for stage in (cut, half_cut))
    teaching, short = (
        {k: v for k, v in stage.items() if v is not None} for stage in (teaching, short)
    )
    return [
        StageFault("narrow, then taught", "group_too_narrow", (cut, teaching), "pruned", a),
        StageFault("cut, then taught little", "not_converged", (half_cut, short), "taught"),
    ]


def _controls(family: str) -> list[StageFault]:
    """Return networks without a fault; of some a gate asks more than any of them reaches."""
    return [
        StageFault("clean cut", "", _prune(0.9, 5.0, ratio=0.25), passes=True),
        StageFault("clean training", "", _train(at=0.9), starts_trained=False, passes=True),
        StageFault("asks too much", "", _train(at=0.9999), starts_trained=False),
        StageFault("clean teaching", "", _distil(family, teacher="source"), passes=True),
    ]
