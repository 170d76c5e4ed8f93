"""Sensitivity analysis: the accuracy loss and the speedup of pruning each channel group alone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING

from compress.common.config import Settings
from compress.common.forward import torch_predictor
from compress.graph.flops import count_macs
from compress.profiling.benchmark import compare_latency
from compress.pruning.allocation.ranking import rank
from compress.pruning.channel_settings import FROM_DATA, ChannelSelection
from compress.pruning.dependency.channel_groups import GroupSlice, SlicePlan
from compress.pruning.depth.block_search import OutputErrorMeter
from compress.pruning.importance.scores import ScoringSamples
from compress.pruning.recovery.recovery import usual_calibration
from compress.pruning.verification.masked_equivalence import VerificationInputs, sliced_copy
from compress.pruning.verification.module_rewrites import rewrite_

if TYPE_CHECKING:
    from compress.artifacts.eager_model import EagerModel
    from compress.core.context import Context
    from compress.data.batch import Batch

MEASURED_SECONDS = 0.3
"""Seconds for which a pruned and the unpruned model are called when latencies are compared."""
RATIOS = (0.25, 0.5, 0.75)


class Point(Settings):
    """One group pruned at one ratio, all others unpruned."""

    ratio: float
    """Fraction of the group's channels that was asked to be removed."""
    removed: int
    """Channels removed."""
    distance: float
    """Norm of the difference of the outputs, over the norm of the unpruned outputs."""
    points: float | None
    """Drop of the metric in hundredths (percentage points); None without targets."""
    macs: float
    """Remaining multiply-accumulates, as a share of the unpruned model's."""
    latency: float | None
    """Remaining latency, as a share of the unpruned model's, measured alternating; None if not
    asked for, or if the machine was too busy to measure it."""


class FamilySensitivity(Settings):
    """Results for one group of channels."""

    name: str
    modules: tuple[str, ...]
    """Modules that output the channels."""
    channels: int
    points: tuple[Point, ...]


class Sensitivity(Settings):
    """How sensitive a model is to pruning each channel group alone."""

    judged_by: str
    """What groups are ranked by: `metric`, or `outputs` if there are no targets."""
    metric: str | None
    value: float | None
    """The metric of the unpruned model on the same samples."""
    samples: int
    families: tuple[FamilySensitivity, ...]
    """The least sensitive first."""
    pinned: dict[str, str]
    """Module whose channels stay → why."""


def measure_sensitivity(
    model: EagerModel,
    context: Context,
    selection: ChannelSelection | None = None,
    *,
    ratios: Sequence[float] = RATIOS,
    samples: int = 512,
    latency: bool = True,
) -> Sensitivity:
    """Measure what pruning each channel group alone does to a model; nothing is trained.

    ``ratios`` of each group's channels are removed in turn. Outputs are compared on so many
    ``samples`` of `val`, without data on a few seeded ones; latency is measured alternating with
    the model's, which is not changed.

    Raises:
        PipelineInvalid: a pattern matches no module.
        StageFailed: the model cannot be traced or run.
    """
    selection = selection or ChannelSelection()
    module, device, threads = model.load(), context.device, context.threads
    inputs = VerificationInputs.from_signature(model.signature, context, selection)
    rewrite_(module, inputs)
    batches: list[Batch] = []
    if selection.importance in FROM_DATA:
        batches = usual_calibration(context, f"importance: {selection.importance}", samples)
    scoring = ScoringSamples.from_context(context, model.signature, batches)
    ranking = rank(module, inputs, selection, scoring, progress=context.progress)
    # All groups are sliced and verified together; each verified slice is then measured alone.
    slices: dict[tuple[str, float], GroupSlice] = {}
    pinned: dict[str, str] = {}
    for ratio in ratios:
        plan = ranking.verify(ranking.allocate(ratio, ChannelSelection(round_to=1)))
        slices |= {(one.group.name, ratio): one for one in plan.groups}
        pinned |= plan.pinned
    sizes = context.typical_sizes(model.signature)
    example = model.signature.example(1, context.seed, sizes=sizes)
    one_sample = tuple(x.to(device) for x in example)
    meter = OutputErrorMeter(module, model.signature, context, None, samples)
    macs = count_macs(module, one_sample)
    timed = (
        context.measured_batches(model.signature, model.signature.smallest_batch) if latency else []
    )
    points: dict[str, list[Point]] = {}
    for done, ((name, ratio), one) in enumerate(slices.items(), 1):
        plan = SlicePlan.combine([one], {}, ranking.graph)
        pruned = sliced_copy(module, plan)
        error, share = meter.measure(pruned), None
        if timed:
            slow, fast = (partial(torch_predictor, m, device, threads) for m in (module, pruned))
            share = compare_latency(slow, fast, timed, MEASURED_SECONDS, threads=threads).share
        point = Point(
            ratio=ratio,
            removed=len(one.removed),
            distance=error.distance,
            points=error.points,
            macs=count_macs(pruned, one_sample) / macs,
            latency=share,
        )
        points.setdefault(name, []).append(point)
        context.progress("sensitivity", done, len(slices), f"{name} at {ratio:g}")
    families = [
        FamilySensitivity(
            name=group.name,
            modules=group.producers,
            channels=len(group.channels),
            points=tuple(points[group.name]),
        )
        for group in (one.group for one in ranking.ranked)
        if group.name in points
    ]
    # By the mean metric drop over the ratios, and among equals by the mean output error.
    families.sort(
        key=lambda family: (
            fmean(point.points or 0.0 for point in family.points),
            fmean(point.distance for point in family.points),
        )
    )
    return Sensitivity(
        judged_by=meter.judged_by,
        metric=None if meter.base is None else context.metric.name,
        value=meter.base,
        samples=sum(len(outputs[0]) for outputs in meter.expected),
        families=tuple(families),
        pinned={name: reason for name, reason in pinned.items() if name not in points},
    )
