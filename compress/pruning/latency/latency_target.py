"""The widths that lose least and reach a share of the latency where the model will be served."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from compress.common.errors import StageFailed
from compress.profiling.interaction_sum import InteractionSum
from compress.pruning.depth.output_error import OutputErrorMeter
from compress.pruning.latency.solver import Limit, Programme
from compress.pruning.latency.widths import (
    REFITTED_ON,
    WidthSpace,
    WidthVariants,
    measure_loss_increases,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from compress.artifacts.eager_model import EagerModel
    from compress.core.context import Context
    from compress.data.batch import Batch
    from compress.profiling.benchmark import MeasuredShare
    from compress.pruning.channel_settings import ChannelSettings

log = logging.getLogger(__name__)

MOST_CHECKS = 6
"""Models that are cut, exported and measured at most."""
MOST_CUTS, MOST_VALUES, FEWEST_VALUES = 64, 5, 3
"""Single cuts that are evaluated, about as many at most, and widths of a group."""
AIMED_SHARE = 0.99
"""Share of the target that the solver aims at, as half of all models are slower than predicted."""


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
        """Measure what is needed to predict latencies over a grid of widths.

        Args:
            model: the unpruned model.
            whole: group of channels → the model's own width, of all groups that variants cut.
            grid: group of channels → its widths, the model's own first.
            variants: a number, a folder and what widths are multiples of → that many models of
                random widths.
            context: data, threads, seed and progress.
            batch: samples of a call.

        Raises:
            StageFailed: the model cannot be exported, or not measured now.
        """


class SolvedWidths(NamedTuple):
    """What a target of latency has led to."""

    widths: Mapping[str, int]
    """Group of coupled channels → how many stay, of groups that lose some."""
    facts: dict[str, Any]
    """Predicted and measured latency, for the artifact's manifest."""


def solve_widths(
    config: ChannelSettings, model: EagerModel, context: Context, batches: Sequence[Batch]
) -> SolvedWidths | None:
    """Return the widths of least loss whose measured latency is not above a share of the model's.

    Latency is that of `context.served_latency`. It is predicted from tables; the best model by
    prediction is cut, exported and measured; where it is off, predictions are corrected and the
    next one is solved. None, with a warning, where latency cannot be predicted there.
    """
    served: ServedLatency | None = context.served_latency
    target = config.target
    if served is None or target is None or target.latency is None:
        return None
    variants = WidthVariants(model, config, context.seed)
    few = min(REFITTED_ON, sum(map(len, batches)))
    drawn = context.need_data(config.title).calibration(few, context.seed) if few else ()
    size = target.batch if model.signature.batch_axis else model.signature.smallest_batch
    values = min(MOST_VALUES, max(FEWEST_VALUES, 1 + MOST_CUTS // max(1, len(variants.whole))))
    space = WidthSpace.from_model(model, context, config, values, list(drawn), refit=config.refits)
    if not space.grid:
        return None  # which the stage explains
    with ExitStack() as stack:
        try:
            latency = stack.enter_context(
                served.tables(
                    model=model,
                    whole=variants.whole,
                    grid=space.grid,
                    variants=variants.build_some,
                    context=context,
                    batch=size,
                )
            )
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
        return SolvedWidths(cut, search.facts(widths, served, size))


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

    def facts(self, widths: dict[str, int], served: ServedLatency, batch: int) -> dict[str, Any]:
        """Return what was predicted of some widths and what was measured."""
        measured = self.measured[_key(widths)]
        return {
            "runtime": served.name,
            "batch": batch,
            "target": self.share,
            "predicted": _rounded(self.latency.predicted(widths)),
            "measured": _rounded(measured.share),
            "ms": _rounded(measured.ms),
            "unpruned_ms": _rounded(measured.unpruned_ms),
            "models_measured": len(self.measured),
        }

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


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
