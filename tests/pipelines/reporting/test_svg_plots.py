"""Where marks, lines, ticks and labels of the page's plots stand."""

import math
from itertools import pairwise

import pytest

from compress.pipelines.reporting.svg_plots import (
    FLOOR,
    LEFT,
    MAX_DRAWN_POINTS,
    RIGHT,
    TOP,
    Axis,
    Plot,
    Point,
    line_plot,
    pareto_indices,
)
from compress.pipelines.reporting.svg_plots import scatter_plot as scattered


def points(*pairs: tuple[float, float], refused: tuple[int, ...] = ()) -> list[Point]:
    return [Point(str(i), f"p{i}", x, y, refused=i in refused) for i, (x, y) in enumerate(pairs)]


def scatter(found: list[Point], front: set[int]) -> Plot:
    return scattered(found, front, title="t", names=("x", "y"), shown=str)


def test_the_front_is_what_nothing_beats() -> None:
    found = points((1, 0.8), (2, 0.9), (3, 0.85), (2, 0.9), (0.5, 0.95))
    assert pareto_indices(found[:4], higher_is_better=True) == {0, 1, 3}, (
        "equal points beat no other"
    )
    assert pareto_indices(found, higher_is_better=True) == {4}
    assert pareto_indices(found[:4], higher_is_better=False) == {0}
    assert pareto_indices(points((1, 0.8), (1, 0.9), (2, 0.9)), higher_is_better=True) == {1}, (
        "ties"
    )
    cheap = points((1, 0.8), (2, 0.9), (0.5, 0.95), refused=(2,))
    assert pareto_indices(cheap, higher_is_better=True) == {0, 1}, "what is refused beats nothing"


def test_marks_stand_within_the_plot_and_labels_on_no_mark() -> None:
    found = points(*((10 ** (i / 5), math.sin(i)) for i in range(20)), refused=(3,))
    plot = scatter(found, pareto_indices(found, higher_is_better=True))
    for mark in plot.marks:
        assert LEFT <= mark.x <= RIGHT
        assert TOP <= mark.y <= FLOOR
    assert plot.marks[3].shape == "refused"
    assert sorted(m.x for m in plot.marks) == [m.x for m in plot.marks], "x grows with the value"
    for label in plot.labels:
        for mark in plot.marks:
            beside = abs(label.x + 3.5 * len(label.text) - mark.x) >= 5 + 3.5 * len(label.text)
            assert beside or abs(label.y - 4.5 - mark.y) >= 9, (label, mark)
    steps = [tuple(map(float, corner.split(","))) for corner in plot.lines[0].split()]
    assert all(a[0] == b[0] or a[1] == b[1] for a, b in pairwise(steps))


def test_what_was_refused_far_off_stands_at_the_edge() -> None:
    found = points((1, 0.9), (2, 0.98), (3, 0.1), refused=(2,))
    plot = scatter(found, {0, 1})
    assert plot.beyond == 1
    assert plot.marks[2].y == FLOOR
    assert plot.marks[0].y - plot.marks[1].y > (FLOOR - TOP) / 2, "the choices have the room"
    near = scatter(points((1, 0.9), (2, 0.98), (3, 0.95), refused=(2,)), {0, 1})
    assert (near.beyond, FLOOR > near.marks[2].y > TOP) == (0, True)


def test_equal_points_share_a_label() -> None:
    plot = scatter(points((1, 1), (1, 1), (2, 0)), set())
    assert {label.text for label in plot.labels} == {"0, 1", "2"}
    assert not plot.lines


@pytest.mark.parametrize(
    ("axis", "ticks"),
    [
        (Axis(0.9, 1.0, 0, 100), [0.9, 0.92, 0.94, 0.96, 0.98, 1.0]),
        (Axis(-3, 7, 0, 100), [-2, 0, 2, 4, 6]),
        (Axis(0.02, 30, 0, 100, log=True), [0.1, 1, 10]),
        (Axis(1e5, 1e6, 0, 100, log=True), [1e5, 2e5, 5e5, 1e6]),
    ],
)
def test_ticks_are_round(axis: Axis, ticks: list[float]) -> None:
    assert axis.ticks() == pytest.approx(ticks)


def test_a_curve_breaks_where_nothing_was_measured() -> None:
    values = [(0, None), (1, 3.0), (2, 2.0), (3, math.nan), (4, 1.0)]
    plot = line_plot(values, title="loss", names=("epoch", "loss"), kept=4)
    assert [len(part.split()) for part in plot.lines] == [2, 2]
    assert [mark.title for mark in plot.marks] == ["kept epoch 4: 1.0000"]
    assert line_plot([(0, None)], title="", names=("", ""), kept=0) is None


def test_a_long_curve_is_thinned_and_keeps_the_kept_epoch_and_the_last() -> None:
    values = [(epoch, 1 / (epoch + 1)) for epoch in range(1001)]
    plot = line_plot(values, title="", names=("epoch", "loss"), kept=337)
    assert len(plot.lines[0].split()) <= MAX_DRAWN_POINTS + 2
    assert plot.marks
    assert plot.description.endswith("epoch 1000: 0.0010.")


def test_an_axis_is_no_shorter_than_the_intervals_that_are_drawn_on_it() -> None:
    found = [
        Point("0", "before", 2.0, 0.9944),
        Point("1", "after", 1.0, 0.9917, None, False, (0.9789, 1.0)),
    ]
    plot = scatter(found, {0, 1})
    low, high = plot.marks[1].bar or (math.nan, math.nan)
    assert TOP <= high < low <= FLOOR
    assert plot.marks[0].bar is None
    # One sample of 360 is an eighth of the interval, and was nearly the whole axis.
    assert abs(plot.marks[0].y - plot.marks[1].y) < (low - high) / 7


def test_no_line_crosses_a_label_and_axes_say_what_they_are_of() -> None:
    found = [
        Point(str(i), f"p{i}", 1 + i % 7, y, (0.9 + i % 7, 1.3 + i % 7), False, (y - 0.2, y + 0.2))
        for i, y in enumerate(math.cos(i) / 2 + i % 7 / 4 for i in range(12))
    ]
    plot = scattered(
        found,
        pareto_indices(found, higher_is_better=True),
        title="t",
        names=("x", "y"),
        shown=str,
        counted="n = 360",
    )
    assert plot.y_note == "n = 360, lines are 95 % intervals"
    corners = [tuple(map(float, corner.split(","))) for corner in plot.lines[0].split()]
    lines = [*pairwise(corners)]
    lines += [((m.whisker[0], m.y), (m.whisker[1], m.y)) for m in plot.marks]
    lines += [((m.x, m.bar[0]), (m.x, m.bar[1])) for m in plot.marks]
    assert len(plot.labels) > 5
    for label in plot.labels:
        left, right = label.x, label.x + 8 * len(label.text)
        top, bottom = label.y - 10, label.y + 1
        for (x0, y0), (x1, y1) in lines:
            beside = max(x0, x1) < left or min(x0, x1) > right
            assert beside or max(y0, y1) < top or min(y0, y1) > bottom, (label, (x0, y0, x1, y1))
