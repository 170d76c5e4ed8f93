"""Widths of a model's channel groups: what cuts lose, and which reach a target of latency."""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Protocol

from compress.artifacts.recipe import KeepIndices
from compress.common.errors import StageFailed
from compress.core.progress import Progress, silent
from compress.profiling.interaction_sum import InteractionSum
from compress.pruning.allocation.ranking import Ranking, rank
from compress.pruning.channel_settings import ChannelSelection, ChannelSettings
from compress.pruning.dependency.channel_groups import GroupSlice, SlicePlan
from compress.pruning.depth.block_search import OutputErrorMeter
from compress.pruning.importance.scores import ScoringSamples
from compress.pruning.latency.solver import Limit, Programme
from compress.pruning.recovery.recovery import recovered_slice, rounded, usual_calibration
from compress.pruning.verification.masked_equivalence import VerificationInputs, sliced_copy
from compress.pruning.verification.module_rewrites import rewrite_

if TYPE_CHECKING:
    from torch import nn

    from compress.artifacts.eager_model import EagerModel
    from compress.core.context import Context
    from compress.data.batch import Batch
    from compress.profiling.benchmark import MeasuredShare

    LossIncreases = dict[str, dict[int, float]]

log = logging.getLogger(__name__)

LARGEST_CUT = 0.8  # largest fraction of a group's channels that is removed
REFITTED_ON = 128
"""Calibration samples on which layers are refitted; the models that are kept get all of them."""
MOST_DRAWS = 10
"""Draws of a group's random width, so that it differs from those of the variants before."""
MOST_CHECKS = 6  # models that are cut, exported and measured at most
MOST_CUTS, MOST_VALUES, FEWEST_VALUES = 64, 5, 3
"""Single cuts that are evaluated, about as many at most, and widths of a group."""
AIMED_SHARE = 0.99
"""Share of the target that the solver aims at, as half of all models are slower than predicted."""


@dataclass(frozen=True)
class WidthSpace:
    """The groups of a model's channels, and the widths that each may have."""

    ranking: Ranking
    grid: Mapping[str, tuple[int, ...]]
    """Group → its widths, the model's own first."""
    batches: Sequence[Batch]
    """Calibration samples on which layers are refitted."""
    device: str
    refit: bool = True
    """Whether layers that lost inputs are refitted; BatchNorm statistics are taken anew anyway."""
    slices: Mapping[str, GroupSlice] = field(default_factory=dict)
    """Group → its smallest width as a slice that was verified."""

    @classmethod
    def from_model(
        cls,
        model: EagerModel,
        context: Context,
        selection: ChannelSelection,
        values: int,
        batches: Sequence[Batch] | None = None,
        *,
        refit: bool = True,
    ) -> WidthSpace:
        """Rank a model's channels, and lay a grid of widths; the model is not changed.

        Each group has at most so many ``values``, the whole width and the largest cut among them.
        Channels are ranked, and layers refitted, on ``batches``, by default drawn.

        Raises:
            PipelineInvalid: a pattern matches no module.
            StageFailed: the model cannot be traced, or there are no samples to rank by.
        """
        if batches is None:
            batches = usual_calibration(context, "compress auto", REFITTED_ON)
        module = model.load()
        inputs = VerificationInputs.from_signature(model.signature, context, selection)
        rewrite_(module, inputs)
        scoring = ScoringSamples.from_context(context, model.signature, batches)
        ranking = rank(module, inputs, selection, scoring, progress=context.progress)
        # Whatever the scope: widths are chosen here, not by comparing groups.
        limits = ChannelSelection(round_to=selection.round_to, min_channels=selection.min_channels)
        smallest = ranking.verify(ranking.allocate(LARGEST_CUT, limits), selection.on_unverified)
        slices = {one.group.name: one for one in smallest.groups}
        grid: dict[str, set[int]] = {}
        for step in range(values):
            ratio = LARGEST_CUT * step / max(1, values - 1)
            counts = ranking.allocate(ratio, limits)
            for one, count in zip(ranking.ranked, counts, strict=True):
                if one.group.name in slices:
                    grid.setdefault(one.group.name, {len(one.scores)}).add(count)
        widths = {name: tuple(sorted(own, reverse=True)) for name, own in grid.items()}
        cuttable = {name: own for name, own in widths.items() if len(own) > 1}
        return cls(ranking, cuttable, batches, context.device, refit, slices)

    @classmethod
    def empty(cls, device: str) -> WidthSpace:
        """Return a space in which all widths stay."""
        return cls(None, {}, (), device)  # type: ignore[arg-type]  # nothing is cut

    @property
    def whole(self) -> dict[str, int]:
        """The model's own widths."""
        return {group: widths[0] for group, widths in self.grid.items()}

    def cut(self, group: str, width: int) -> nn.Module:
        """Return the module with one group cut to a width, refitted without training."""
        if self.batches:
            # Not verified anew, which takes longest: the smallest widths were, together, and those
            # that are chosen will be.
            (removed,) = filter(None, self.ranking.removed(self._counts({group: width})))
            sliced = replace(self.slices[group], removed=removed)
            with suppress(StageFailed):  # a slice that fits only together with others
                return self._recovered(SlicePlan.combine([sliced], {}, self.ranking.graph))
        return self.cut_all({group: width})

    def cut_all(self, widths: Mapping[str, int]) -> nn.Module:
        """Return the module with several groups cut, refitted without training."""
        return self._recovered(self.ranking.verify(self._counts(widths)))

    def _counts(self, widths: Mapping[str, int]) -> list[int]:
        return [widths.get(one.group.name, len(one.scores)) for one in self.ranking.ranked]

    def uniform(self) -> Iterator[dict[str, int]]:
        """Yield widths at which all groups lose about the same share, the largest first."""
        last = max(len(widths) for widths in self.grid.values()) - 1
        for step in range(last + 1):
            yield {g: own[round(step / last * (len(own) - 1))] for g, own in self.grid.items()}

    def _recovered(self, plan: SlicePlan) -> nn.Module:
        whole, batches = self.ranking.module, self.batches
        return recovered_slice(whole, plan, batches, self.device, refit=self.refit)


def measure_loss_increases(
    space: WidthSpace,
    progress: Progress,
    loss_of: Callable[[nn.Module], float],
    known: dict[str, float] | None = None,
    save: Callable[[], Any] = lambda: None,
    deadline: float = math.inf,
    assumed: Mapping[str, Mapping[int, float]] | None = None,
) -> LossIncreases:
    """Measure what cutting each group alone loses; return group → width → loss (0 if uncut).

    The smallest widths first. Losses in ``known``, by `group:width`, are not measured again; what
    is measured is added, and saved. Widths that were not measured by a ``deadline`` on the clock of
    :func:`time.monotonic` are taken to lose in proportion to the square of the channels that they
    lack, or what is ``assumed`` for groups of which no width was measured.
    """
    known = {} if known is None else known
    # The smallest width of each group, then the next ones; the whole width costs nothing.
    order = [
        (group, widths[-step])
        for step in range(1, max(map(len, space.grid.values()), default=0))
        for group, widths in space.grid.items()
        if step < len(widths)
    ]
    for done, (group, width) in enumerate(order):
        progress("sensitivity", done, len(order), f"{group} at {width}")
        key = f"{group}:{width}"
        if key in known:
            continue
        if time.monotonic() > deadline:
            break
        known[key] = loss_of(space.cut(group, width))
        save()
    increases: LossIncreases = {}
    for group, (whole, *others) in space.grid.items():
        increases[group] = {whole: 0.0}
        for width in others:
            measured = [w for w in others if w <= width and f"{group}:{w}" in known]
            if measured:  # in proportion to the square of the channels that it lacks
                share = (whole - width) / (whole - max(measured))
                loss = known[f"{group}:{max(measured)}"] * share**2
            else:
                loss = (assumed or {}).get(group, {}).get(width, (1 - width / whole) ** 2)
            increases[group][width] = loss
    return increases


class WidthVariants:
    """The groups of coupled channels of a model that can be cut, and models of other widths."""

    def __init__(
        self,
        model: EagerModel,
        selection: ChannelSelection | None = None,
        seed: int = 0,
        progress: Progress = silent,
    ) -> None:
        """Trace the model, and find the groups whose cut is verified."""
        module, self._model, self._seed = model.load(), model, seed
        selection = selection or ChannelSelection()
        example = model.signature.example(seed=seed)
        inputs = VerificationInputs(example, across_norms=selection.across_norms)
        self.rewrites = rewrite_(module, inputs)
        """What variants have other modules by than the model, as pruning needs them."""
        unranked = selection.model_copy(update={"importance": "random"})
        ranking = rank(module, inputs, unranked, ScoringSamples(seed=seed), progress=progress)
        smallest = ranking.verify(ranking.allocate(LARGEST_CUT, ChannelSelection(round_to=1)))
        groups = {one.group.name for one in ranking.ranked}
        stay = groups - {one.group.name for one in smallest.groups}
        self._ranking = ranking.without(stay, smallest.pinned)
        self.whole = {one.group.name: len(one.scores) for one in self._ranking.ranked}
        """The model's own widths: group → its channels."""

    def draw(self, count: int, round_to: int = 1) -> list[dict[str, int]]:
        """Draw widths at random; those of a group differ from each other as far as they can."""
        generator, limits = random.Random(self._seed), ChannelSelection(round_to=round_to)
        used: dict[str, set[int]] = {group: set() for group in self.whole}
        drawn = []
        for _ in range(count):
            widths = {}
            for i, (group, before) in enumerate(used.items()):
                for _ in range(MOST_DRAWS):
                    ratio = generator.uniform(0, LARGEST_CUT)
                    widths[group] = self._ranking.allocate(ratio, limits)[i]
                    if widths[group] not in before:
                        break
                before.add(widths[group])
            drawn.append(widths)
        return drawn

    def build(self, widths: Mapping[str, int], folder: Path) -> tuple[dict[str, int], EagerModel]:
        """Cut the model; return the widths that are left, and the artifact in `folder`."""
        ranking = self._ranking
        plan = ranking.verify([widths[one.group.name] for one in ranking.ranked])
        cut = {one.group.name: len(one.group.channels) - len(one.removed) for one in plan.groups}
        sliced = sliced_copy(ranking.module, plan)
        edit = KeepIndices(kept=plan.kept, attributes=dict(plan.attributes))
        edits = [*self.rewrites, edit]
        return self.whole | cut, self._model.derive(folder, sliced, edits=edits)

    def build_some(
        self, count: int, folder: Path, round_to: int = 1
    ) -> Iterator[tuple[dict[str, int], EagerModel]]:
        """Yield models of random widths, each after it is asked for, in folders of `folder`."""
        for number, widths in enumerate(self.draw(count, round_to)):
            yield self.build(widths, folder / f"variant{number}")


class LatencyByWidths(Protocol):
    """Latency of a model at other widths where it is served, as shares of its own."""

    predicted: InteractionSum
    """The share of the unpruned model's latency, by the widths of a grid."""

    def measure(self, pruned: EagerModel, /) -> MeasuredShare:
        """Measure a pruned model in turn with the unpruned one, both as they are served."""


class ServedLatency(Protocol):
    """What a model's latency will be in the runtime that serves it, before it is exported."""

    @property
    def name(self) -> str:
        """The runtime, and what happens to the model before, in words."""

    def tables(
        self,
        model: EagerModel,
        whole: Mapping[str, int],
        grid: Mapping[str, Sequence[int]],
        variants: Callable[[int, Path, int], Iterable[tuple[Mapping[str, int], EagerModel]]],
        context: Context,
        batch: int,
    ) -> AbstractContextManager[LatencyByWidths]:
        """Measure what is needed to predict latencies over a grid of widths, the whole ones first.

        ``whole`` gives the own widths of all groups that variants cut; ``variants`` makes models of
        random widths, given how many, a folder and what their widths are multiples of.

        Raises:
            StageFailed: the model cannot be exported, or not measured now.
        """


def solve_widths(
    config: ChannelSettings, model: EagerModel, context: Context, batches: Sequence[Batch]
) -> tuple[Mapping[str, int], dict[str, Any]] | None:
    """Return the widths of least loss whose measured latency is not above a share of the model's.

    Also the facts about them. Widths are those of groups that lose channels. Latency is that of
    `context.served_latency`. It is predicted from tables; the best model by prediction is cut,
    exported and measured; where it is off, predictions are corrected and the next one is solved.
    None, with a warning, where latency cannot be predicted there.
    """
    served: ServedLatency | None = context.served_latency
    target = config.target
    if served is None or target is None or target.latency is None:
        return None
    variants = WidthVariants(model, config, context.seed, context.progress)
    few = min(REFITTED_ON, sum(map(len, batches)))
    drawn = context.need_data(config.title).calibration(few, context.seed) if few else ()
    size = target.batch if model.signature.batch_axis else model.signature.smallest_batch
    values = min(MOST_VALUES, max(FEWEST_VALUES, 1 + MOST_CUTS // max(1, len(variants.whole))))
    space = WidthSpace.from_model(model, context, config, values, list(drawn), refit=config.refits)
    if not space.grid:
        return None  # which the stage explains
    with ExitStack() as stack:
        try:
            whole, build = variants.whole, variants.build_some
            tables = served.tables(model, whole, space.grid, build, context, size)
            latency = stack.enter_context(tables)
        except StageFailed as error:
            log.warning(
                "%s: latency in %s is not predicted (%s); candidates are measured in PyTorch",
                config.title,
                served.name,
                error,
            )
            return None
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="compress-solved-")))
        search = _Search(config.title, target.latency, space, variants, latency, context, folder)
        widths = search.best(model)
        cut = {group: width for group, width in widths.items() if width < space.whole[group]}
        measured = search.measured[_key(widths)]
        return cut, {
            "runtime": served.name,
            "batch": size,
            "target": target.latency,
            "predicted": rounded(latency.predicted(widths)),
            "measured": rounded(measured.share),
            "ms": rounded(measured.ms),
            "unpruned_ms": rounded(measured.unpruned_ms),
            "models_measured": len(search.measured),
        }


@dataclass
class _Search:
    """Solves, measures and corrects until the best model by prediction is one that was measured."""

    title: str
    share: float
    space: WidthSpace
    variants: WidthVariants
    latency: LatencyByWidths
    context: Context
    folder: Path
    measured: dict[tuple[tuple[str, int], ...], MeasuredShare] = field(default_factory=dict)

    def best(self, model: EagerModel) -> dict[str, int]:
        """Return the widths of least loss among those measured that reach the share."""
        smallest = {group: widths[-1] for group, widths in self.space.grid.items()}
        if self.latency.predicted(smallest) > AIMED_SHARE * self.share:
            # Said before losses are measured, which takes longest.
            self._measure(smallest)
            if not self._reached():
                raise self._unreached()
        meter = OutputErrorMeter(model.load(), model.signature, self.context, "outputs")
        loss_increases = measure_loss_increases(
            self.space, self.context.progress, lambda m: meter.measure(m).distance ** 2
        )
        programme = Programme(self.space.grid, loss_increases)
        for _ in range(MOST_CHECKS):
            limit = Limit(self._corrected(), AIMED_SHARE * self.share)
            too_slow = [dict(key) for key, m in self.measured.items() if m.share > self.share]
            solved = programme.solve([limit], too_slow)
            if solved is None and self._reached():
                break
            widths = {group: int(width) for group, width in (solved or smallest).items()}
            if _key(widths) in self.measured:
                break
            self.context.progress(self.title, len(self.measured), MOST_CHECKS, "cut and measure")
            self._measure(widths)
        reached = self._reached()
        if not reached:
            raise self._unreached()
        return self._or_uniform(min(reached, key=programme.total_loss_increase), meter)

    def _or_uniform(self, solved: dict[str, int], meter: OutputErrorMeter) -> dict[str, int]:
        """Return widths that cut all groups alike, where these are fast enough and lose less.

        The sum of what single cuts lose is what all of them together lose only where cuts are
        small.
        """
        corrected = self._corrected()
        is_fast = (w for w in self.space.uniform() if corrected(w) <= AIMED_SHARE * self.share)
        uniform = next(is_fast, solved)
        if uniform == solved:
            return solved
        losses = [meter.measure(self.space.cut_all(w)).distance for w in (solved, uniform)]
        if losses[0] <= losses[1]:
            return solved
        if _key(uniform) not in self.measured:
            self._measure(uniform)
        return uniform if self.measured[_key(uniform)].share <= self.share else solved

    def _measure(self, widths: dict[str, int]) -> None:
        whole = {**self.variants.whole, **widths}
        _, cut = self.variants.build(whole, self.folder / f"solved{len(self.measured)}")
        self.measured[_key(widths)] = self.latency.measure(cut)

    def _corrected(self) -> InteractionSum:
        """Return the predicted share, corrected by the models that were measured."""
        predicted = self.latency.predicted
        ratios = [m.share / predicted(dict(key)) for key, m in self.measured.items()]
        return InteractionSum.combine([(median(ratios) if ratios else 1.0, predicted)], 0.0)

    def _reached(self) -> list[dict[str, int]]:
        return [dict(key) for key, m in self.measured.items() if m.share <= self.share]

    def _unreached(self) -> StageFailed:
        least = min(m.share for m in self.measured.values())
        return StageFailed(
            f"the target of {self.share:.4g} cannot be reached: the smallest that was found is "
            f"{least:.4g}; ask for more to remain, or lower round_to, min_channels or what is "
            "excluded"
        )


def _key(widths: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(widths.items()))
