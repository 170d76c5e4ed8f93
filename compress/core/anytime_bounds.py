"""Tests and bounds that hold at every moment, for what is watched without end.

Bets against a supposed share are placed before each sample is seen: one that supposes `ratio` times
its odds multiplies its money by ``ratio ** differs / (1 + share * (ratio - 1))``, on average by 1
at most where the share is no larger. By Ville's inequality (1939) the money of all reaches ``1 /
(1 - confidence)`` with a probability of at most ``1 - confidence``, however many samples are seen
(Robbins, 1970; Waudby-Smith and Ramdas, "Estimating means of bounded random variables by betting",
2024).
"""

from __future__ import annotations

import math

LOG_RATIOS = tuple(math.log(2) * 2.0**k for k in range(-5, 4))
"""Logarithms of the odds' ratios: from 1.02, by which a share is told apart after many samples, to
256, by which the worst failures are found after a few."""
WEIGHTS = tuple(0.5 if ratio == math.log(2) else 0.5 / 8 for ratio in LOG_RATIOS)
"""Parts of the money: half of it bets on a share that has doubled."""
AT_ONCE = 0.5
"""Part of the money that is bet from the first sample on. The rest is held back and placed little
by little: what was bet before is lost where the share was small, and could not show a change."""
SLOPES = (-1.9, -1.0, -0.25, 0.25, 1.0, 1.9)
"""Slopes of the bets that ranks are no uniform numbers: on low and high ones, and on ones near the
middle and the ends."""


def first_bets() -> list[float]:
    """Return the money of each bet before the first sample."""
    return [AT_ONCE * weight for weight in WEIGHTS]


def held_back(samples: int, limit: float) -> float:
    """Return the money that is not yet bet after so many samples.

    It falls with the logarithm of the other answers that the limit lets expect, so that a change at
    any time finds some.
    """
    return (1 - AT_ONCE) / (1 + math.log1p(samples * limit))


def next_bets(bets: list[float], samples: int, differs: bool, limit: float) -> list[float]:
    """Return the bets against a limit after one more sample, of which there were `samples` before.

    ``sum(bets) + held_back(samples, limit)`` is the evidence that the share was above the limit at
    some time. `differs` may be an array, of as many streams.
    """
    placed = held_back(samples, limit) - held_back(samples + 1, limit)
    return [
        (bet + placed * weight) * math.exp(ratio) ** differs / (1 + limit * math.expm1(ratio))
        for bet, ratio, weight in zip(bets, LOG_RATIOS, WEIGHTS, strict=True)
    ]


def first_rank_bets() -> list[float]:
    """Return the money of each bet against ranks before the first one."""
    return [AT_ONCE / 2 / len(SLOPES)] * 2 * len(SLOPES)


def next_rank_bets(bets: list[float], samples: int, rank: float) -> list[float]:
    """Return the bets against uniform ranks after one more, of which there were `samples` before.

    `rank` is that of a new sample among it and all samples before, from 0 to 1, ties broken by
    chance: such ranks are uniform and independent where the samples are exchangeable. ``sum(bets) +
    held_back(samples, 1)`` is the evidence that they are not (Vovk, "Testing randomness online",
    2021). `rank` may be an array, of as many streams.
    """
    placed = (held_back(samples, 1) - held_back(samples + 1, 1)) / len(bets)
    seen = [rank - 0.5] * len(SLOPES) + [abs(2 * rank - 1) - 0.5] * len(SLOPES)
    return [
        (bet + placed) * (1 + slope * x)
        for bet, slope, x in zip(bets, SLOPES * 2, seen, strict=True)
    ]


def share_bounds(count: int, samples: int, confidence: float) -> tuple[float, float]:
    """Return a lower and an upper bound of a share, of which the samples so far have a `count`.

    Each holds at all moments at once with the confidence. The lower one is above a limit only where
    the evidence of the same samples reaches ``1 / (1 - confidence)``.
    """
    wins = -math.log(1 - confidence) - math.log(AT_ONCE)

    def excluded(share: float, sign: int) -> bool:
        logs = [
            math.log(weight)
            + sign * ratio * count
            - samples * math.log1p(share * math.expm1(sign * ratio))
            for ratio, weight in zip(LOG_RATIOS, WEIGHTS, strict=True)
        ]
        most = max(logs)
        return most + math.log(sum(math.exp(each - most) for each in logs)) >= wins

    ends = []
    for sign, inside in ((1, count / max(1, samples)), (-1, count / max(1, samples))):
        outside = 0.0 if sign > 0 else 1.0
        if not excluded(outside, sign):
            inside = outside
        while abs(inside - outside) > 1e-6 * max(inside, 1e-3):
            middle = (inside + outside) / 2
            inside, outside = (inside, middle) if excluded(middle, sign) else (middle, outside)
        ends.append(outside)
    return ends[0], ends[1]
