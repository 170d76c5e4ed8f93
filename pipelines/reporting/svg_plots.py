"""Where the marks, lines and ticks of a plot stand; ``plots.html.jinja`` draws them as SVG.

Written by hand: two kinds of plots need no drawing library, and the page no script.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

LEFT, RIGHT, TOP = 60, 390, 26
"""Edges of a plot in its own units, few enough for letters to be readable on a phone."""
FLOOR, LOW_FLOOR = 254, 144
"""Lower edges: of a scatter plot, and of curves."""
MARGIN = 30
"""Beyond the right edge."""
LOG_FROM = 5.0
"""An axis of sizes or times is logarithmic once its ends differ by this factor."""
LETTER = 7.0
"""Width of a digit of a label, in units of the plot."""
DRAWN_POINTS = 100
"""Of a line: more cannot be told apart, and make the page heavy."""

Shape = Literal["front", "other", "refused"]


@dataclass(frozen=True)
class Axis:
    """What turns a value into a place."""

    low: float
    high: float
    start: float
    """Place of ``low``."""
    end: float
    log: bool = False

    def at(self, value: float) -> float:
        """Return where a value stands."""
        low, high, here = ((math.log10(v) if self.log else v) for v in (self.low, self.high, value))
        return round(self.start + (here - low) / (high - low) * (self.end - self.start), 1)

    def within(self, value: float) -> float:
        """Return where a value stands; at an end of the axis where it lies beyond it."""
        return self.at(min(max(value, self.low), self.high))

    def ticks(self, count: int = 5) -> list[float]:
        """Return round values along the axis, about so many."""
        if self.log:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            for digits in ((1, 2, 5), (1, 3), (1,)):
                found = [d * 10.0**e for e in decades for d in digits]
                found = [v for v in found if self.low <= v <= self.high]
                if len(found) <= count + 1:
                    break
            return found
        raw = (self.high - self.low) / count
        power = 10.0 ** math.floor(math.log10(raw))
        step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [round(i * step, 12) for i in range(first, last + 1)]


def spanning(values: Sequence[float], start: float, end: float, log: bool = False) -> Axis:
    """Return an axis on which all values stand, with room at both ends.

    Args:
        values: finite ones; positive where the axis may be logarithmic.
        start: where the axis begins.
        end: where it ends.
        log: whether it is logarithmic where the values lie far apart.
    """
    low, high = min(values), max(values)
    if log and high / low >= LOG_FROM:
        room = (high / low) ** 0.08
        return Axis(low / room, high * room, start, end, log=True)
    room = (high - low) * 0.08 or abs(high) * 0.05 or 1.0
    return Axis(low - room, high + room, start, end)


@dataclass(frozen=True)
class Point:
    """A mark of a scatter plot, as measured."""

    label: str
    title: str
    x: float
    y: float
    x_interval: tuple[float, float] | None = None
    refused: bool = False


@dataclass(frozen=True)
class Mark:
    """A mark of a scatter plot, as drawn."""

    x: float
    y: float
    shape: Shape
    title: str
    whisker: tuple[float, float] | None


@dataclass(frozen=True)
class Label:
    """A label, which stands where it covers no other; marks at one place share one."""

    x: float
    y: float
    text: str


@dataclass(frozen=True)
class Plot:
    """A plot, as drawn."""

    title: str
    description: str
    x_name: str
    y_name: str
    xs: list[tuple[float, str]]
    """Place and text of each tick."""
    ys: list[tuple[float, str]]
    floor: int = FLOOR
    left: int = LEFT
    right: int = RIGHT
    top: int = TOP
    marks: tuple[Mark, ...] = ()
    beyond: int = 0
    """Marks that lie beyond the vertical axis, and stand at its end."""
    labels: tuple[Label, ...] = ()
    lines: tuple[str, ...] = ()
    """Points of polylines; of a scatter plot the front's steps, of curves their unbroken parts."""


def pareto(points: Sequence[Point], higher_is_better: bool) -> set[int]:
    """Return the indices of points that no other beats: none is cheaper and as good, or better.

    What a gate refused is no choice, and neither belongs to the front nor beats what does.
    """
    sign = 1 if higher_is_better else -1
    ranked = {i: (-p.x, sign * p.y) for i, p in enumerate(points) if not p.refused}
    return {
        i
        for i, own in ranked.items()
        if not any(o != own and o[0] >= own[0] and o[1] >= own[1] for o in ranked.values())
    }


def scatter(
    points: Sequence[Point],
    front: Collection[int],
    *,
    title: str,
    names: tuple[str, str],
    shown: Callable[[float], str],
) -> Plot:
    """Return a scatter plot with its Pareto front as steps.

    What was refused may lie far off, and does not stretch the vertical axis.

    Args:
        points: at least one.
        front: indices of the front's members; empty where no direction is the better one.
        title: what is plotted.
        names: of the axes.
        shown: a value of the horizontal axis as text.
    """
    ends = [end for p in points for end in (p.x, *(p.x_interval or ()))]
    across = spanning(ends, LEFT, RIGHT, log=True)
    choices = [p.y for p in points if not p.refused]
    up = spanning(choices if len(choices) > 1 else [p.y for p in points], FLOOR, TOP)
    marks = []
    for i, p in enumerate(points):
        whisker = p.x_interval and (across.at(p.x_interval[0]), across.at(p.x_interval[1]))
        shape: Shape = "refused" if p.refused else "front" if i in front else "other"
        marks.append(Mark(across.at(p.x), up.within(p.y), shape, p.title, whisker))
    members = sorted({(marks[i].x, marks[i].y) for i in front})
    steps = [f"{x},{y}" for x, y in _steps(members)]
    named = [points[i].title for i in sorted(front, key=lambda i: points[i].x)]
    return Plot(
        title=title,
        description=f"On the Pareto front: {'; '.join(named)}." if named else "",
        x_name=f"{names[0]}{', log scale' if across.log else ''}",
        y_name=names[1],
        xs=[(across.at(v), shown(v)) for v in across.ticks()],
        ys=[(up.at(v), f"{v:.6g}") for v in up.ticks()],
        marks=tuple(marks),
        beyond=sum(not up.low <= p.y <= up.high for p in points),
        labels=tuple(_labels([(p.label, m) for p, m in zip(points, marks, strict=True)])),
        lines=(" ".join(steps),) if len(members) > 1 else (),
    )


def curve(
    values: Sequence[tuple[int, float | None]], *, title: str, names: tuple[str, str], kept: int
) -> Plot | None:
    """Return a line through values by epoch, broken where there is none; None without any.

    Args:
        values: epoch and value; not finite counts as none.
        title: what is plotted.
        names: of the axes.
        kept: the epoch that is marked.
    """
    every = -(-len(values) // DRAWN_POINTS)
    drawn = [v for i, v in enumerate(values) if i % every == 0 or v[0] == kept or v is values[-1]]
    known = [(e, v) for e, v in drawn if v is not None and math.isfinite(v)]
    if not known:
        return None
    across = spanning([e for e, _ in drawn], LEFT, RIGHT)
    up = spanning([v for _, v in known], LOW_FLOOR, TOP)
    parts: list[list[str]] = [[]]
    for epoch, value in drawn:
        if value is None or not math.isfinite(value):
            parts.append([])
        else:
            parts[-1].append(f"{across.at(epoch)},{up.at(value)}")
    marks = [
        Mark(across.at(e), up.at(v), "front", f"kept epoch {e}: {v:.4f}", None)
        for e, v in known
        if e == kept
    ]
    first, last = known[0], known[-1]
    return Plot(
        title=title,
        description=f"Epoch {first[0]}: {first[1]:.4f}; epoch {last[0]}: {last[1]:.4f}.",
        x_name=names[0],
        y_name=names[1],
        xs=[(across.at(v), f"{v:g}") for v in across.ticks() if v == int(v)],
        ys=[(up.at(v), f"{v:.4g}") for v in up.ticks(3)],
        floor=LOW_FLOOR,
        marks=tuple(marks),
        lines=tuple(" ".join(part if len(part) > 1 else part * 2) for part in parts if part),
    )


def _steps(members: Sequence[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """Yield the corners of the line below which, and left of which, nothing was found."""
    for i, (x, y) in enumerate(members):
        if i:
            yield x, members[i - 1][1]
        yield x, y


def _labels(named: Sequence[tuple[str, Mark]]) -> Iterator[Label]:
    """Yield labels that cover neither each other nor a mark; one without room is left out."""
    together: dict[tuple[float, float], list[str]] = {}
    for text, mark in named:
        together.setdefault((mark.x, mark.y), []).append(text)
    taken = [(x - 5, y - 5, x + 5, y + 5) for x, y in together]
    taken += [(m.whisker[0], m.y - 3, m.whisker[1], m.y + 3) for _, m in named if m.whisker]
    front = {(mark.x, mark.y) for _, mark in named if mark.shape == "front"}
    for (x, y), texts in sorted(together.items(), key=lambda item: item[0] not in front):
        text = ", ".join(texts) if len(texts) < 4 else f"{texts[0]} … {texts[-1]}"
        wide = len(text) * LETTER
        for left, base in ((7, 4), (-wide / 2, -8), (-wide - 7, 4), (-wide / 2, 17)):
            box = (x + left, y + base - 10, x + left + wide, y + base + 1)
            fits = box[0] >= LEFT and box[2] <= RIGHT + MARGIN and TOP - 12 <= box[1] <= FLOOR - 9
            if fits and not any(_overlap(box, other) for other in taken):
                taken.append(box)
                yield Label(round(x + left, 1), round(y + base, 1), text)
                break


def _overlap(
    one: tuple[float, float, float, float], other: tuple[float, float, float, float]
) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
