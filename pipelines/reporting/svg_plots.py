"""Layout of plots as inline SVG, which keeps the page free of scripts, for ``plots.html.jinja``."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

LEFT, RIGHT, TOP = 60, 390, 44
"""Edges of a plot in view-box units; few units across, so that text stays readable on a phone."""
FLOOR, LOW_FLOOR = 272, 162  # lower edge of a scatter plot, and of a line plot
LABEL_MARGIN = 30
LOG_FROM_RATIO = 5.0  # an axis is logarithmic if its ends differ by this factor or more
CHARACTER_WIDTH = 8.0  # estimated width of a label's character, in view-box units
MAX_DRAWN_POINTS = 100  # of a line: more cannot be distinguished at this size

Shape = Literal["front", "other", "refused"]
Box = tuple[float, float, float, float]
"""Left, upper, right and lower edge, in view-box units."""


@dataclass(frozen=True)
class Axis:
    """A linear or logarithmic map from values to view-box coordinates."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def position(self, value: float) -> float:
        """Return a value's coordinate."""
        low, high, here = ((math.log10(v) if self.log else v) for v in (self.low, self.high, value))
        return round(self.start + (here - low) / (high - low) * (self.end - self.start), 1)

    def clamped_position(self, value: float) -> float:
        """Return a value's coordinate, clamped to the ends of the axis."""
        return self.position(min(max(value, self.low), self.high))

    def ticks(self, count: int = 5) -> list[float]:
        """Return about `count` round values along the axis."""
        if self.log:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            # As many digits of each decade as leave few enough ticks.
            for digits in ((1, 2, 5), (1, 3), (1,)):
                found = [d * 10.0**e for e in decades for d in digits]
                found = [v for v in found if self.low <= v <= self.high]
                if len(found) <= count + 1:
                    break
            return found
        raw = (self.high - self.low) / count
        power = 10.0 ** math.floor(math.log10(raw))
        # 0.999 and 1e-9: rounding errors must not cost a tick.
        step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [round(i * step, 12) for i in range(first, last + 1)]


def axis_for(values: Sequence[float], start: float, end: float, log: bool = False) -> Axis:
    """Return an axis over all values, with 8 % of padding; `log` where they lie far apart."""
    low, high = min(values), max(values)
    if log and high / low >= LOG_FROM_RATIO:
        padding = (high / low) ** 0.08
        return Axis(low / padding, high * padding, start, end, log=True)
    padding = (high - low) * 0.08 or abs(high) * 0.05 or 1.0
    return Axis(low - padding, high + padding, start, end)


@dataclass(frozen=True)
class Point:
    """A point of a scatter plot, in data units."""

    label: str
    title: str
    x: float
    y: float
    x_interval: tuple[float, float] | None = None
    refused: bool = False
    y_interval: tuple[float, float] | None = None


@dataclass(frozen=True)
class Mark:
    """A point of a plot, in view-box coordinates."""

    x: float
    y: float
    shape: Shape
    title: str
    whisker: tuple[float, ...] | None
    """Ends of the interval of x."""
    bar: tuple[float, ...] | None = None
    """Ends of the interval of y, the lower value first."""


@dataclass(frozen=True)
class Label:
    """A text and its position."""

    x: float
    y: float
    text: str


@dataclass(frozen=True)
class Plot:
    """A plot, in view-box coordinates."""

    title: str
    description: str
    x_name: str
    y_name: str
    y_note: str
    """What stands below it: how many samples the values are of, whether lines are intervals."""
    xs: list[tuple[float, str]]
    ys: list[tuple[float, str]]
    floor: int = FLOOR
    left: int = LEFT
    right: int = RIGHT
    top: int = TOP
    marks: tuple[Mark, ...] = ()
    beyond: int = 0
    """Number of marks beyond the vertical axis, which are drawn at its end."""
    labels: tuple[Label, ...] = ()
    lines: tuple[str, ...] = ()
    """SVG points of polylines: the front's steps, or the unbroken segments of a line plot."""


def pareto_indices(points: Sequence[Point], higher_is_better: bool) -> set[int]:
    """Return the Pareto front's indices (smaller x is better), refused points left out."""
    sign = 1 if higher_is_better else -1
    ranked = {i: (-p.x, sign * p.y) for i, p in enumerate(points) if not p.refused}
    return {
        i
        for i, own in ranked.items()
        if not any(o != own and o[0] >= own[0] and o[1] >= own[1] for o in ranked.values())
    }


def scatter_plot(
    points: Sequence[Point],
    front: Collection[int],
    *,
    title: str,
    names: tuple[str, str],
    shown: Callable[[float], str],
    counted: str = "",
) -> Plot:
    """Lay out a scatter plot of points and their Pareto `front`; `shown` words a value of x.

    `counted` says how many samples or calls the values are of.
    """
    ends = [end for p in points for end in (p.x, *(p.x_interval or ()))]
    x_axis = axis_for(ends, LEFT, RIGHT, log=True)
    # Refused points may be outliers: they do not stretch the vertical axis. Intervals do: what
    # chance explains is drawn no larger than it is.
    choices = [p for p in points if not p.refused]
    choices = choices if len(choices) > 1 else list(points)
    y_axis = axis_for([y for p in choices for y in (p.y, *(p.y_interval or ()))], FLOOR, TOP)
    marks = []
    for i, p in enumerate(points):
        whisker = p.x_interval and tuple(map(x_axis.position, p.x_interval))
        bar = p.y_interval and tuple(map(y_axis.clamped_position, p.y_interval))
        shape: Shape = "refused" if p.refused else "front" if i in front else "other"
        x, y = x_axis.position(p.x), y_axis.clamped_position(p.y)
        marks.append(Mark(x, y, shape, p.title, whisker, bar))
    members = sorted({(marks[i].x, marks[i].y) for i in front})
    steps = members[:1]
    for (_, previous), (x, y) in pairwise(members):
        steps += [(x, previous), (x, y)]
    intervals = "lines are 95 % intervals" if any(m.whisker or m.bar for m in marks) else ""
    named = [points[i].title for i in sorted(front, key=lambda i: points[i].x)]
    return Plot(
        title=title,
        description=f"On the Pareto front: {'; '.join(named)}." if named else "",
        x_name=f"{names[0]}{', log scale' if x_axis.log else ''}",
        y_name=names[1],
        y_note=", ".join(filter(None, (counted, intervals))),
        xs=[(x_axis.position(v), shown(v)) for v in x_axis.ticks()],
        ys=[(y_axis.position(v), f"{v:.6g}") for v in y_axis.ticks()],
        marks=tuple(marks),
        beyond=sum(not y_axis.low <= p.y <= y_axis.high for p in points),
        labels=tuple(
            _labels(
                [(p.label, m) for p, m in zip(points, marks, strict=True) if p.label],
                [*_drawn_lines(marks, steps)],
            )
        ),
        lines=(" ".join(f"{x},{y}" for x, y in steps),) if len(members) > 1 else (),
    )


def line_plot(
    values: Sequence[tuple[int, float | None]], *, title: str, names: tuple[str, str], kept: int
) -> Plot | None:
    """Lay out a line plot of values by epoch, `kept` one marked; missing values leave a gap."""
    every = -(-len(values) // MAX_DRAWN_POINTS)
    drawn = [v for i, v in enumerate(values) if i % every == 0 or v[0] == kept or v is values[-1]]
    known = [(e, v) for e, v in drawn if v is not None and math.isfinite(v)]
    if not known:
        return None
    x_axis = axis_for([e for e, _ in drawn], LEFT, RIGHT)
    y_axis = axis_for([v for _, v in known], LOW_FLOOR, TOP)
    parts: list[list[str]] = [[]]
    for epoch, value in drawn:
        if value is None or not math.isfinite(value):
            parts.append([])
        else:
            parts[-1].append(f"{x_axis.position(epoch)},{y_axis.position(value)}")
    marks = [
        Mark(x_axis.position(e), y_axis.position(v), "front", f"kept epoch {e}: {v:.4f}", None)
        for e, v in known
        if e == kept
    ]
    first, last = known[0], known[-1]
    return Plot(
        title=title,
        description=f"Epoch {first[0]}: {first[1]:.4f}; epoch {last[0]}: {last[1]:.4f}.",
        x_name=names[0],
        y_name=names[1],
        y_note=f"{first[1]:.4g} → {last[1]:.4g}",
        xs=[(x_axis.position(v), f"{v:g}") for v in x_axis.ticks() if v == int(v)],
        ys=[(y_axis.position(v), f"{v:.4g}") for v in y_axis.ticks(3)],
        floor=LOW_FLOOR,
        marks=tuple(marks),
        # A line of one point has no length and would not be drawn: it is drawn twice.
        lines=tuple(" ".join(part if len(part) > 1 else part * 2) for part in parts if part),
    )


def _labels(named: Sequence[tuple[str, Mark]], lines: Sequence[Box]) -> Iterator[Label]:
    """Yield a label, the front's first, at each mark where one of eight positions is free."""
    together: dict[tuple[float, float], list[str]] = {}
    for text, mark in named:
        together.setdefault((mark.x, mark.y), []).append(text)
    taken = [(x - 5, y - 5, x + 5, y + 5) for x, y in together]
    taken += [(a - 2, b - 2, c + 2, d + 2) for a, b, c, d in lines]
    front = {(mark.x, mark.y) for _, mark in named if mark.shape == "front"}
    for (x, y), texts in sorted(together.items(), key=lambda item: item[0] not in front):
        text = ", ".join(texts) if len(texts) < 4 else f"{texts[0]} … {texts[-1]}"
        wide = len(text) * CHARACTER_WIDTH
        # Right of the mark, above it, left of it, below it; then between these.
        sides = ((7, 4), (-wide / 2, -8), (-wide - 7, 4), (-wide / 2, 17))
        corners = ((8, -5), (-wide - 8, -5), (8, 15), (-wide - 8, 15))
        for left, base in (*sides, *corners):
            x0, y0, x1, y1 = x + left, y + base - 10, x + left + wide, y + base + 1
            fits = x0 >= LEFT and x1 <= RIGHT + LABEL_MARGIN and TOP - 12 <= y0 <= FLOOR - 9
            if fits and not any(x0 < c and a < x1 and y0 < d and b < y1 for a, b, c, d in taken):
                taken.append((x0, y0, x1, y1))
                yield Label(round(x + left, 1), round(y + base, 1), text)
                break


def _drawn_lines(marks: Sequence[Mark], steps: Sequence[tuple[float, float]]) -> Iterator[Box]:
    """Yield the lines that no label may cross: intervals of the marks, and the front's steps."""
    for m in marks:
        if m.whisker:
            yield m.whisker[0], m.y, m.whisker[1], m.y
        if m.bar:
            yield m.x, min(m.bar), m.x, max(m.bar)
    for (x0, y0), (x1, y1) in pairwise(steps):
        yield min(x0, x1), min(y0, y1), max(x0, x1), max(y0, y1)
