"""Training curves of a run: loss and metric by epoch, from the facts of each stage."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from compress.pipelines.reporting.svg_plots import DRAWN_POINTS, Plot, line_plot

if TYPE_CHECKING:
    from collections.abc import Sequence

    from compress.pipelines.reporting.stage_rows import StageRow

DRAWN_TRAININGS = 12
"""Most trainings with plots, to keep the page small; the table lists all of them."""


@dataclass(frozen=True)
class Training:
    """One stage's training."""

    name: str
    epochs: int
    kept: int
    loss: tuple[float | None, float | None]
    """Of the first and of the last epoch."""
    metric: float | None
    """On val, of the kept epoch."""
    plots: tuple[Plot, ...] = ()

    @property
    def thinned(self) -> int:
        """Interval between the epochs that the plot shows."""
        return -(-(self.epochs + 1) // DRAWN_POINTS)


def trainings_of(rows: Sequence[StageRow], metric: str) -> list[Training]:
    """Return each training; the first ones with plots."""
    found: list[Training] = []
    for row in rows:
        facts: dict[str, Any] = dict(row.report.artifact.facts) if row.report else {}
        history = facts.get("history")
        if not isinstance(history, list) or not history:
            continue
        kept = facts.get("kept_epoch", 0)
        trained = [epoch for epoch in history if epoch["epoch"] > 0]  # 0 is before the training
        losses = [_finite(epoch.get("loss")) for epoch in trained] or [None]
        plots = []
        if len(found) < DRAWN_TRAININGS:
            for key, words in (("loss", "training loss"), ("metric", f"{metric} on val")):
                values = [(epoch["epoch"], epoch.get(key)) for epoch in history]
                title, names = f"{row.name}: {words} by epoch", ("epoch", words)
                plots.append(line_plot(values, title=title, names=names, kept=kept))
        training = Training(
            name=row.name,
            epochs=len(trained),
            kept=kept,
            loss=(losses[0], losses[-1]),
            metric=next((_finite(e.get("metric")) for e in history if e["epoch"] == kept), None),
            plots=tuple(filter(None, plots)),
        )
        found.append(training)
    return found


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
