"""Sensitivity: what cutting one family of channels alone does to a model, and what it brings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from compress.artifacts.edits.slicing import keep_indices_
from compress.common.config import Settings
from compress.common.forward import torch_predictor
from compress.graph.flops import count_macs
from compress.profiling.benchmark import compare_latency
from compress.pruning.allocation.ranking import rank
from compress.pruning.allocation.ratios import Limits
from compress.pruning.dependency.group_slices import joined
from compress.pruning.depth.output_error import OutputErrorMeter
from compress.pruning.importance.criteria import FROM_DATA
from compress.pruning.verification.masked_equivalence import shallow_copy
from compress.pruning.verification.module_rewrites import rewrite_
from compress.pruning.verification.verification_inputs import real_inputs

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from torch import nn

    from compress.artifacts.eager_model import EagerModel
    from compress.core.context import Context
    from compress.data.batch import Batch
    from compress.pruning.allocation.ranking import Ranking
    from compress.pruning.dependency.channel_groups import AxisGraph
    from compress.pruning.dependency.group_slices import GroupSlice
    from compress.pruning.importance.criteria import Criterion

MEASURED_SECONDS = 0.3
"""For which each model is measured, in turn with the whole one."""
RATIOS = (0.25, 0.5, 0.75)


class Point(Settings):
    """One family cut at one ratio, all others whole."""

    ratio: float
    """Fraction of the family's channels asked to be removed."""
    removed: int
    """Channels removed."""
    distance: float
    """Norm of the difference of the outputs, over the norm of the outputs before."""
    points: float | None
    """How much worse the metric is, in hundredths, where there are targets to measure it."""
    macs: float
    """Multiply-accumulates left, as a share of the whole model's."""
    latency: float | None
    """Latency left, as a share of the whole model's, both measured in turn; None where it was not
    asked for, or the machine was too busy to measure it."""


class FamilySensitivity(Settings):
    """One family of channels that can only leave together."""

    name: str
    modules: tuple[str, ...]
    """Modules that make the channels."""
    channels: int
    points: tuple[Point, ...]


class Sensitivity(Settings):
    """How a model answers to the cut of each family alone."""

    judged_by: str
    """What families are ranked by: `metric`, or `outputs` where there are no targets."""
    metric: str | None
    value: float | None
    """The metric of the whole model on the samples judged on."""
    samples: int
    families: tuple[FamilySensitivity, ...]
    """The least sensitive first."""
    pinned: dict[str, str]
    """Module whose channels stay → why."""


@dataclass(frozen=True)
class _Measuring:
    """What each cut is measured with."""

    module: nn.Module
    graph: AxisGraph
    judge: OutputErrorMeter
    inputs: tuple[torch.Tensor, ...]
    macs: int
    timed: list[tuple[torch.Tensor, ...]]
    """What latency is measured on; nothing where it is not asked for."""
    context: Context

    def point(self, cut: GroupSlice, ratio: float) -> Point:
        """Cut a copy, and return what it does and brings."""
        trial = shallow_copy(self.module)
        alone = joined([cut], {}, self.graph)
        keep_indices_(trial, alone.kept, alone.attributes)
        harm = self.judge.harm(trial)
        return Point(
            ratio=ratio,
            removed=len(cut.removed),
            distance=harm.distance,
            points=harm.points,
            macs=count_macs(trial, self.inputs) / self.macs,
            latency=self._latency(trial) if self.timed else None,
        )

    def _latency(self, trial: nn.Module) -> float | None:
        device, threads = self.context.device, self.context.threads
        with (
            torch_predictor(self.module, device, threads) as whole,
            torch_predictor(trial, device, threads) as cut,
        ):
            return compare_latency(whole, cut, self.timed, seconds=MEASURED_SECONDS).share


def measure_sensitivity(
    model: EagerModel,
    context: Context,
    *,
    ratios: Sequence[float] = RATIOS,
    importance: Criterion = "l2",
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    samples: int = 512,
    latency: bool = True,
) -> Sensitivity:
    """Return what cutting each family of channels alone does to a model; nothing is trained.

    Args:
        model: the model; it is not changed.
        context: data, metric, device and threads.
        ratios: fractions of each family's channels that are removed in turn.
        importance: which channels leave first.
        include: patterns of module names; where there are any, only their channels are cut.
        exclude: patterns of module names whose channels stay.
        samples: samples of `val` that answers are compared on; without data a few seeded ones.
        latency: whether the latency of each cut is measured, in turn with the whole model.

    Raises:
        PipelineInvalid: a pattern matches no module.
        StageFailed: the model cannot be traced or asked.
    """
    module, inputs = model.load(), model.signature.example(seed=context.seed)
    real = real_inputs(model.signature, context)
    rewrite_(module, inputs, real)
    ranking = rank(
        module,
        inputs,
        importance,
        real=real,
        include=include,
        exclude=exclude,
        batches=_samples(importance, samples, context),
        device=context.device,
        seed=context.seed,
        loss=context.loss.infer_targets(context.data),
    )
    cuts, pinned = _cuts(ranking, ratios)
    one = tuple(x.to(context.device) for x in model.signature.example(1, context.seed))
    judge = OutputErrorMeter(module, model.signature, context, None, samples)
    macs = count_macs(module, one)
    timed = (
        context.measured_batches(model.signature, model.signature.smallest_batch) if latency else []
    )
    measuring = _Measuring(module, ranking.graph, judge, one, macs, timed, context)
    points: dict[str, list[Point]] = {}
    for done, ((name, ratio), cut) in enumerate(cuts.items(), 1):
        points.setdefault(name, []).append(measuring.point(cut, ratio))
        context.progress("sensitivity", done, len(cuts), f"{name} at {ratio:g}")
    return Sensitivity(
        judged_by=judge.judged_by,
        metric=None if judge.base is None else context.metric.name,
        value=judge.base,
        samples=len(judge.expected),
        families=_ranked(ranking, points),
        pinned={name: reason for name, reason in pinned.items() if name not in points},
    )


def _samples(importance: Criterion, samples: int, context: Context) -> list[Batch]:
    """Return the samples that an importance looks at; most look at weights alone."""
    if importance not in FROM_DATA:
        return []
    data = context.need_data(f"importance: {importance}")
    split: Any = data.split(data.calibration_split)
    return list(data.calibration(min(samples, len(split)), context.seed))


def _cuts(
    ranking: Ranking, ratios: Sequence[float]
) -> tuple[dict[tuple[str, float], GroupSlice], dict[str, str]]:
    """Return the proven cut of each family at each ratio, and why others stay."""
    cuts: dict[tuple[str, float], GroupSlice] = {}
    pinned: dict[str, str] = {}
    for ratio in ratios:
        proven = ranking.prove(ranking.allocate(ratio, Limits(round_to=1)))
        cuts |= {(cut.group.name, ratio): cut for cut in proven.groups}
        pinned |= proven.pinned
    return cuts, pinned


def _ranked(
    ranking: Ranking, points: Mapping[str, Sequence[Point]]
) -> tuple[FamilySensitivity, ...]:
    """Return the families that were cut, the least sensitive first."""
    found = [
        FamilySensitivity(
            name=family.name,
            modules=family.producers_slots,
            channels=len(family.channels),
            points=tuple(points[family.name]),
        )
        for family in (one.family for one in ranking.ranked)
        if family.name in points
    ]
    return tuple(sorted(found, key=_mean_harm))


def _mean_harm(family: FamilySensitivity) -> tuple[float, float]:
    count = len(family.points)
    return (
        sum(point.points or 0.0 for point in family.points) / count,
        sum(point.distance for point in family.points) / count,
    )
