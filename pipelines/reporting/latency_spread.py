"""Box strips of a run's latencies (quantiles) and speedups (ratios of blocks of calls)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from compress.pipelines.reporting.svg_plots import Axis, axis_for

if TYPE_CHECKING:
    from collections.abc import Sequence

    from compress.pipelines.reporting.stage_rows import StageRow

STRIP = 180
"""Width of a strip, in units of its SVG view box."""


@dataclass(frozen=True)
class CallQuantiles:
    """5, 25, 50, 75 and 95 % quantiles of the calls, as x positions on a strip."""

    low: float
    first: float
    median: float
    third: float
    high: float


@dataclass(frozen=True)
class SpeedupBlocks:
    """Speedup of each block of calls, their median and its interval, as x positions on a strip."""

    dots: str
    """SVG path with one dot per block."""
    low: float
    median: float
    high: float


@dataclass(frozen=True)
class LatencySpreads:
    """One strip for each row; all rows share the axes."""

    calls: dict[int, CallQuantiles]
    """By row number; a row whose report has no quantiles (an older run) is missing."""
    blocks: dict[int, SpeedupBlocks]
    calls_ends: tuple[float, float]
    """Milliseconds at the ends of the strips."""
    blocks_ends: tuple[float, float]
    equal: float | None
    """x position of speedup 1; None where it lies beyond the axis."""


def latency_spreads(rows: Sequence[StageRow]) -> LatencySpreads | None:
    """Compute the strips of a run's rows; None where the report has no distributions."""
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
    time_axis = _axis([end for ventiles in times.values() for end in (ventiles[0], ventiles[-1])])
    ends = [
        end for block_ratios, _, interval in ratios.values() for end in (*block_ratios, *interval)
    ]
    ratio_axis = _axis(ends)
    return LatencySpreads(
        calls={
            # The places of 5, 25, 50, 75 and 95 % among the 19 ventiles.
            number: CallQuantiles(*(time_axis.position(ventiles[i]) for i in (0, 4, 9, 14, 18)))
            for number, ventiles in times.items()
        },
        blocks={
            number: SpeedupBlocks(
                dots="".join(f"M{ratio_axis.position(ratio):g} 9h0" for ratio in block_ratios),
                low=ratio_axis.position(interval[0]),
                median=ratio_axis.position(median),
                high=ratio_axis.position(interval[1]),
            )
            for number, (block_ratios, median, interval) in ratios.items()
        },
        calls_ends=(time_axis.low, time_axis.high),
        blocks_ends=(ratio_axis.low, ratio_axis.high),
        equal=ratio_axis.position(1) if ratio_axis.low <= 1 <= ratio_axis.high else None,
    )


def _axis(values: Sequence[float]) -> Axis:
    return axis_for(values, 3, STRIP - 3, log=True)
