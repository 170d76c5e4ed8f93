"""A test and bounds of a share hold at all moments at once, with their confidence."""

import numpy as np
import pytest

from compress.core.anytime_bounds import (
    first_bets,
    first_rank_bets,
    held_back,
    next_bets,
    next_rank_bets,
    share_bounds,
)


def evidence(answers, limit: float) -> list[float]:
    """Return the evidence after each answer, and before the first."""
    bets = first_bets()
    found = [sum(bets) + held_back(0, limit)]
    for number, differs in enumerate(answers):
        bets = next_bets(bets, number, differs, limit)
        found.append(sum(bets) + held_back(number + 1, limit))
    return found


@pytest.mark.parametrize("limit", [0.002, 0.05, 0.5])
def test_evidence_grows_on_average_only_where_the_share_is_above_the_limit(limit) -> None:
    before = [i % 37 == 0 for i in range(200)]
    now = evidence(before, limit)[-1]
    agrees, differs = (evidence([*before, answer], limit)[-1] for answer in (False, True))
    at = [share * differs + (1 - share) * agrees for share in (0.5 * limit, limit, 1.5 * limit)]
    assert at[0] < now < at[2]
    assert at[1] == pytest.approx(now)
    assert evidence([], limit) == pytest.approx([1.0])


def first_alarm(shares, limit: float, streams: int = 100) -> np.ndarray:
    """Return when each stream has evidence of 20, infinity for never."""
    rng = np.random.default_rng(0)
    answers = [(rng.random(streams) < share).astype(float) for share in shares]
    found = np.array([np.broadcast_to(e, streams) for e in evidence(answers, limit)]) >= 20
    return np.where(found.any(0), found.argmax(0), np.inf)


def test_a_doubled_share_is_found_soon_whenever_it_doubles() -> None:
    assert np.isfinite(first_alarm([0.02] * 3000, 0.02)).mean() <= 0.05
    assert np.median(first_alarm([0.04] * 1000, 0.02)) <= 3 * 192, "a fixed number takes 192"
    # What agreed for long before is not held against it.
    late = first_alarm([0.004] * 4000 + [0.04] * 3000, 0.02)
    assert (late > 4000).all()
    assert np.median(late) <= 4000 + 9 * 192


@pytest.mark.parametrize("share", [0.05, 0.3])
@pytest.mark.parametrize("end", [0, 1])
def test_a_bound_is_broken_at_any_moment_as_seldom_as_promised(share, end) -> None:
    samples = 120
    chance = np.zeros(samples + 1)  # of each count, among streams whose bound has always held
    chance[0], broken = 1.0, 0.0
    for n in range(1, samples + 1):
        chance = (1 - share) * chance + share * np.roll(chance, 1)
        likely = np.flatnonzero(chance > 1e-9)
        ends = np.array([share_bounds(int(k), n, 0.95)[end] for k in likely])
        wrong = likely[ends > share if end == 0 else ends < share]
        broken += chance[wrong].sum()
        chance[wrong] = 0.0
    assert 0 < broken <= 0.05


def test_bounds_lie_around_the_share_and_close_in_on_it() -> None:
    assert share_bounds(0, 0, 0.95) == (0.0, 1.0)
    for count, samples in ((0, 500), (3, 300), (300, 30_000), (500, 500)):
        low, high = share_bounds(count, samples, 0.95)
        assert low <= count / samples <= high
        assert high - low < 0.05
    low, high = share_bounds(300, 30_000, 0.95)
    assert 0.007 < low < high < 0.013


def test_a_lower_bound_above_the_limit_is_an_alarm() -> None:
    rng = np.random.default_rng(1)
    answers = rng.random(600) < 0.05
    found = evidence(answers.tolist(), 0.02)
    for n in range(1, 601):
        if share_bounds(int(answers[:n].sum()), n, 0.95)[0] > 0.02:
            assert max(found[: n + 1]) >= 20
            return
    raise AssertionError("no bound was above the limit")


def test_bets_on_ranks_gain_nothing_where_these_are_uniform_and_find_what_moves() -> None:
    rng, streams = np.random.default_rng(0), 400
    found, alarms = {}, {}
    for name in ("uniform", "low", "middle"):
        bets, reached = first_rank_bets(), np.zeros(streams, bool)
        for number in range(400):
            rank = rng.random(streams)
            if name == "low" and number >= 100:
                rank = rank**1.5
            if name == "middle" and number >= 100:
                rank = 0.5 + (rank - 0.5) * 0.6
            bets = next_rank_bets(bets, number, rank)
            evidence = sum(bets) + held_back(number + 1, 1)
            reached |= evidence >= 20
            if number == 20:
                found[name] = evidence.mean()
        alarms[name] = reached.mean()
    assert found["uniform"] == pytest.approx(1, abs=0.15), "the mean stays what it was"
    assert alarms["uniform"] <= 0.05
    assert min(alarms["low"], alarms["middle"]) > 0.9
