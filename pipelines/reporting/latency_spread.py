"""How the latencies of a run were distributed: calls by quantiles, ratios by blocks of calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipelines.reporting.svg_plots import Axis, spanning

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipelines.reporting.stage_rows import Row

STRIP = 180
"""Width of a strip in its own units."""


@dataclass(frozen=True)
class Calls:
    """The middle nine tenths of the calls, as places on a strip."""

    low: float
    first: float
    median: float
    third: float
    high: float


@dataclass(frozen=True)
class Blocks:
    """The ratio of each block, its median and where that lies, as places on a strip."""

    dots: str
    """A path of dots."""
    low: float
    median: float
    high: float


@dataclass(frozen=True)
class Spreads:
    """A strip for each row, on axes that all share."""

    calls: dict[int, Calls]
    """By the row's number; without those of which an older run kept no quantiles."""
    blocks: dict[int, Blocks]
    calls_ends: tuple[float, float]
    """Milliseconds at the ends of the strips."""
    blocks_ends: tuple[float, float]
    equal: float | None
    """Where on a strip the candidate is as fast as the baseline."""


def spreads_of(rows: Sequence[Row]) -> Spreads | None:
    """Return the distributions that a run kept; None where it kept none."""
    measured = {row.number: row.measured for row in rows if row.measured}
    times = {n: m.latency_ms.ventiles for n, m in measured.items() if not m.latency_ms.reason}
    times = {number: ventiles for number, ventiles in times.items() if len(ventiles) == 19}
    ratios = {
        number: (m.speedup_blocks, m.speedup, m.speedup_interval)
        for number, m in measured.items()
        if m.speedup_blocks and m.speedup and m.speedup_interval
    }
    if not times or not ratios:
        return None
    across = _axis([end for ventiles in times.values() for end in (ventiles[0], ventiles[-1])])
    ends = [end for ratio, _, interval in ratios.values() for end in (*ratio, *interval)]
    beside = _axis(ends)
    return Spreads(
        calls={
            number: Calls(*(across.at(ventiles[i]) for i in (0, 4, 9, 14, 18)))
            for number, ventiles in times.items()
        },
        blocks={
            number: Blocks(
                dots="".join(f"M{beside.at(one):g} 9h0" for one in each),
                low=beside.at(interval[0]),
                median=beside.at(median),
                high=beside.at(interval[1]),
            )
            for number, (each, median, interval) in ratios.items()
        },
        calls_ends=(across.low, across.high),
        blocks_ends=(beside.low, beside.high),
        equal=beside.at(1) if beside.low <= 1 <= beside.high else None,
    )


def _axis(values: Sequence[float]) -> Axis:
    return spanning(values, 3, STRIP - 3, log=True)
