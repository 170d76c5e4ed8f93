"""The widths that lose least and reach a share of the latency where the model will be served."""

from __future__ import annotations

import logging
import math
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

from compress.common.errors import StageFailed
from compress.profiling.interaction_sum import InteractionSum
from compress.pruning.depth.output_error import OutputErrorMeter
from compress.pruning.latency.solver import Limit, Programme
from compress.pruning.latency.widths import REFITTED_ON, WidthSpace, WidthVariants, measure_harms

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from compress.artifacts.eager_model import EagerModel
    from compress.core.context import Context, LatencyByWidths, ServedLatency
    from compress.data.batch import Batch
    from compress.profiling.benchmark import MeasuredShare
    from compress.pruning.channel_settings import ChannelSettings

log = logging.getLogger(__name__)

CHECKS = 6
"""Models that are cut, exported and measured at most."""
MOST_CUTS, MOST_VALUES, FEWEST_VALUES = 64, 5, 3
"""Single cuts that are judged, about as many at most, and widths of a group."""
ROOM = 0.99
"""Share of the target that the solver aims at, as half of all models are slower than predicted."""


class SolvedWidths(NamedTuple):
    """What a target of latency has led to."""

    widths: Mapping[str, int]
    """Group of coupled channels → how many stay, of groups that lose some."""
    facts: dict[str, Any]
    """Predicted and measured latency, for the artifact's manifest."""


def solve_widths(
    config: ChannelSettings,
    share: float,
    batch: int,
    model: EagerModel,
    context: Context,
    batches: Sequence[Batch],
) -> SolvedWidths | None:
    """Return the widths of least harm whose measured latency is not above a share of the model's.

    Latency is that of `context.served_latency`. It is predicted from tables; the best model by
    prediction is cut, exported and measured; where it is off, predictions are corrected and the
    next one is solved. None, with a warning, where latency cannot be predicted there.

    Args:
        config: settings of `prune_channels`.
        share: of the unpruned model's latency that may remain.
        batch: samples of a call.
        model: the unpruned model.
        context: where it will be served; data, device and seed.
        batches: calibration samples.

    Raises:
        PipelineInvalid: a pattern matches no module.
        StageFailed: the model cannot be traced, no widths reach the share, or the machine is too
            busy to measure it.
    """
    served = context.served_latency
    if served is None:
        return None
    chosen: dict[str, Any]
    chosen = {n: getattr(config, n) for n in ("include", "exclude", "across_norms")}
    variants = WidthVariants(model, seed=context.seed, **chosen)
    few = min(REFITTED_ON, sum(map(len, batches)))
    drawn = context.need_data(config.title).calibration(few, context.seed) if few else ()
    size = batch if model.signature.batch_axis else model.signature.smallest_batch
    space = WidthSpace.of_model(
        model,
        context,
        values=min(MOST_VALUES, max(FEWEST_VALUES, 1 + MOST_CUTS // max(1, len(variants.whole)))),
        round_to=config.limits.round_to,
        min_channels=config.limits.min_channels,
        importance=config.importance,
        on_unverified=config.on_unverified,
        batches=list(drawn),
        refit=config.refits,
        **chosen,
    )
    if not space.grid:
        return None  # which the stage explains
    with ExitStack() as stack:
        try:
            latency = stack.enter_context(
                served.tables(
                    *(model, variants.whole, space.grid, variants.build_some, context, size)
                )
            )
        except StageFailed as error:
            log.warning(
                "%s: latency in %s is not predicted (%s); candidates are measured in PyTorch",
                *(config.title, served.name, error),
            )
            return None
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="compress-solved-")))
        search = _Search(config.title, share, space, variants, latency, context, folder)
        widths = search.best(model)
        cut = {group: width for group, width in widths.items() if width < space.whole[group]}
        return SolvedWidths(cut, search.facts(widths, served, size))


class _Search:
    """Solves, measures and corrects until the best model by prediction is one that was measured."""

    def __init__(
        self,
        title: str,
        share: float,
        space: WidthSpace,
        variants: WidthVariants,
        latency: LatencyByWidths,
        context: Context,
        folder: Path,
    ) -> None:
        self._title, self._share, self._space = title, share, space
        self._variants, self._latency, self._context = variants, latency, context
        self._folder = folder
        self._measured: dict[tuple[tuple[str, int], ...], MeasuredShare] = {}

    def best(self, model: EagerModel) -> dict[str, int]:
        """Return the widths of least harm among those measured that reach the share.

        Raises:
            StageFailed: the smallest widths do not.
        """
        smallest = {group: widths[-1] for group, widths in self._space.grid.items()}
        if self._latency.predicted(smallest) > ROOM * self._share:
            # Said before harms are measured, which takes longest.
            self._measure(smallest)
            if not self._reached():
                raise self._unreached()
        meter = OutputErrorMeter(model.load(), model.signature, self._context, "outputs")
        harms = measure_harms(
            self._space,
            self._context.progress,
            lambda module: meter.measure(module).distance ** 2,
            {},
            lambda: None,
            math.inf,
        )
        programme = Programme(self._space.grid, harms)
        for _ in range(CHECKS):
            limit = Limit(self._corrected(), ROOM * self._share)
            too_slow = [dict(key) for key, m in self._measured.items() if m.share > self._share]
            solved = programme.solve([limit], too_slow)
            if solved is None and self._reached():
                break
            widths = {group: int(width) for group, width in (solved or smallest).items()}
            if _key(widths) in self._measured:
                break
            self._context.progress(self._title, len(self._measured), CHECKS, "cut and measure")
            self._measure(widths)
        reached = self._reached()
        if not reached:
            raise self._unreached()
        return self._or_uniform(min(reached, key=programme.total_harm), meter)

    def _or_uniform(self, solved: dict[str, int], meter: OutputErrorMeter) -> dict[str, int]:
        """Return widths that cut all groups alike, where these are fast enough and lose less.

        The sum of what single cuts lose is what all of them together lose only where cuts are
        small.
        """
        corrected = self._corrected()
        is_fast = (w for w in self._space.uniform() if corrected(w) <= ROOM * self._share)
        uniform = next(is_fast, solved)
        if uniform == solved:
            return solved
        losses = [meter.measure(self._space.cut_all(w)).distance for w in (solved, uniform)]
        if losses[0] <= losses[1]:
            return solved
        if _key(uniform) not in self._measured:
            self._measure(uniform)
        return uniform if self._measured[_key(uniform)].share <= self._share else solved

    def facts(self, widths: dict[str, int], served: ServedLatency, batch: int) -> dict[str, Any]:
        """Return what was predicted of some widths and what was measured."""
        measured = self._measured[_key(widths)]
        return {
            "runtime": served.name,
            "batch": batch,
            "target": self._share,
            "predicted": _rounded(self._latency.predicted(widths)),
            "measured": _rounded(measured.share),
            "ms": _rounded(measured.ms),
            "unpruned_ms": _rounded(measured.unpruned_ms),
            "models_measured": len(self._measured),
        }

    def _measure(self, widths: dict[str, int]) -> None:
        whole = {**self._variants.whole, **widths}
        _, cut = self._variants.build(whole, self._folder / f"solved{len(self._measured)}")
        self._measured[_key(widths)] = self._latency.measure(cut)

    def _corrected(self) -> InteractionSum:
        """Return the predicted share, corrected by the models that were measured."""
        predicted = self._latency.predicted
        ratios = [m.share / predicted(dict(key)) for key, m in self._measured.items()]
        return InteractionSum.combine([(median(ratios) if ratios else 1.0, predicted)], 0.0)

    def _reached(self) -> list[dict[str, int]]:
        return [dict(key) for key, m in self._measured.items() if m.share <= self._share]

    def _unreached(self) -> StageFailed:
        least = min(m.share for m in self._measured.values())
        return StageFailed(
            f"the target of {self._share:.4g} cannot be reached: the smallest that was found is "
            f"{least:.4g}; ask for more to remain, or lower round_to, min_channels or what is "
            "excluded"
        )


def _key(widths: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(widths.items()))


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
