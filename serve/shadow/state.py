"""What a server's shadow has shown so far: counts, bounds and the verdict, kept in a file."""

from __future__ import annotations

import random
from bisect import bisect
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, Self

from compress.common.config import Settings
from compress.common.errors import ArtifactInvalid
from compress.common.sealed_json import read_sealed
from compress.core.anytime_bounds import (
    first_bets,
    first_rank_bets,
    held_back,
    next_bets,
    next_rank_bets,
    share_bounds,
)
from compress.core.gates.disagreement import MaxDisagreement

KEPT_POINTS = 128
"""Most points of the history."""
CONFIDENCE = 0.95
"""Of the alarm that inputs differ."""
WORST = 5
"""Tensors that are listed."""


class Subject(Settings):
    """What is watched, and against what."""

    served: str
    """Digest of the artifact that answers the clients."""
    uncompressed: str = ""
    """Digest of the artifact that it is compared with; empty without one."""
    reference: str = ""
    """SHA-256 of the file of reference rows, where inputs are compared with those."""
    gate: MaxDisagreement | None = None
    """The limit that is watched, and the error of an answer that counts as another."""
    task: str | None = None
    """Kind of the answers; None for the label of the largest score."""


class WatchState(Settings):
    """What the drawn requests of a server have shown, over all its restarts."""

    version: Literal[1] = 1
    of: Subject
    since: str
    """When it began, UTC."""
    requests: int = 0
    """Requests that were answered."""
    dropped: int = 0
    """Requests that were drawn and not looked at: too many others waited, or for too long."""
    failed: int = 0
    """Requests that a model could not answer again, or not alike."""
    compared: int = 0
    bets: tuple[float, ...]
    broken_at: str = ""
    """When the evidence sufficed for the alarm, UTC; empty before that."""
    history: tuple[tuple[int, int, float], ...] = ()
    """Requests, compared ones, and of these the other ones (or the evidence, where there is no
    uncompressed model) at some moments, evenly spaced in compared ones."""

    def counted(self, bets: Sequence[float], **changed: Any) -> Self:
        """Return the state with one more request, which changed this."""
        compared, history = self.compared + 1, self.history
        if self.broken_at:  # they would only grow, beyond all numbers
            bets = self.bets
        changed |= {"compared": compared, "bets": tuple(bets)}
        found = self.model_copy(update=changed)
        if not self.broken_at and found.evidence >= self.needed_evidence:
            found = found.model_copy(update={"broken_at": now()})
        every = 1 << max(0, compared.bit_length() - KEPT_POINTS.bit_length() + 1)
        if compared % every == 0:
            thinned = (point for point in history if point[1] % every == 0)
            point = self.requests, compared, changed.get("other", found.evidence)
            history = (*thinned, point)
        return found.model_copy(update={"history": history})

    @property
    def confidence(self) -> float:
        """Probability that there is no alarm as long as nothing has changed."""
        return self.of.gate.confidence if self.of.gate else CONFIDENCE

    @property
    def limit(self) -> float:
        """Percent of requests that may differ; of scores all may."""
        return self.of.gate.percent if self.of.gate else 100.0

    @property
    def evidence(self) -> float:
        """Evidence for the alarm; it suffices from then on."""
        found = sum(self.bets) + held_back(self.compared, self.limit / 100)
        return max(found, self.needed_evidence) if self.broken_at else found

    @property
    def needed_evidence(self) -> float:
        """Evidence that suffices."""
        return 1 / (1 - self.confidence)

    def figures(self) -> dict[str, Any]:
        """Return the counts and the evidence."""
        shown = set(WatchState.model_fields) - {"of", "bets", "history", "version"}
        return self.model_dump(include=shown) | {"evidence": self.evidence}

    def verdict(self, watched: str, suspected: str) -> Iterator[str]:
        """Yield whether what is watched holds, the counts, the evidence, and what is compared."""
        yield f"{watched}: " + (
            f"broken since {self.broken_at}" if self.broken_at else "not broken"
        )
        yield f"requests since {self.since}: {self.requests}"
        yield f"compared: {self.compared}; dropped: {self.dropped}; failed: {self.failed}"
        yield (
            f"evidence that {suspected}: {self.evidence:.3g}; {self.needed_evidence:.3g} suffices"
        )
        yield f"served: {self.of.served}"
        against = "uncompressed" if self.of.uncompressed else "reference rows"
        yield f"{against}: {self.of.uncompressed or self.of.reference}"


class ShadowState(WatchState):
    """The comparisons of a server with the same two models."""

    other: int
    """Compared requests that were answered otherwise."""
    bets: tuple[float, ...] = tuple(first_bets())

    def after(self, error: float, range_ends: Sequence[float] = ()) -> ShadowState:
        """Return the state with one more answer, of this error."""
        differs = error > ((self.of.gate and self.of.gate.error) or 0)
        bets = next_bets([*self.bets], self.compared, differs, self.limit / 100)
        return self.counted(bets, other=self.other + differs)

    @property
    def alarm(self) -> str:
        """The alarm in a line; empty for none."""
        return self.broken_at and (
            f"certificate broken at {self.broken_at}: of {self.compared} compared requests "
            f"{self.other} are answered otherwise than by the uncompressed model, and the limit is "
            f"{self.limit:g} %"
        )

    def percents(self, compared: int, other: float) -> tuple[float, float, float]:
        """Return lower bound, share and upper bound after so many comparisons, in percent."""
        low, high = share_bounds(int(other), compared, self.confidence)
        return 100 * low, 100 * other / max(1, compared), 100 * high

    def figures(self) -> dict[str, Any]:
        """Return the counts, the bounds, the limit and the evidence."""
        low, share, high = self.percents(self.compared, self.other)
        ends = {"lower": low, "share": share, "upper": high, "limit": self.limit}
        ends |= {"other": self.other, "certificate_broken": bool(self.broken_at)}
        return super().figures() | ends

    def lines(self) -> Iterator[str]:
        """Yield the verdict and the figures."""
        low, share, high = self.percents(self.compared, self.other)
        yield from self.verdict(
            f"at most {self.limit:g} % other answers", "the share was above the limit"
        )
        yield (
            f"other answers: {self.other}, {share:.3g} % (at all moments at once, with "
            f"{100 * self.confidence:g} % each: at least {low:.3g} %, at most {high:.3g} %)"
        )


class DriftState(WatchState):
    """How far a server's inputs are like the reference rows."""

    score: str
    """What each row was scored by."""
    edges: tuple[float, ...]
    """Between the bins of scores: percentiles of one half of the reference rows."""
    bins: tuple[int, ...]
    """Rows in each bin: of the other half, and those of the requests."""
    bets: tuple[float, ...] = tuple(first_rank_bets())
    range_ends: dict[str, tuple[float, float]]
    """Of each end of a quantized tensor's range the share of the reference rows' values that
    are there, and the sum of the requests' shares."""

    def after(self, score: float, range_ends: Sequence[float] = ()) -> DriftState:
        """Return the state with one more row, and the shares of its call."""
        bins, place = [*self.bins], bisect(self.edges, score)
        above = sum(bins[place + 1 :]) + random.random() * (bins[place] + 1)
        bets = next_rank_bets([*self.bets], self.compared, above / (sum(bins) + 1))
        bins[place] += 1
        pairs = zip(self.range_ends.items(), range_ends, strict=True)
        ends = {name: (known, total + share) for (name, (known, total)), share in pairs}
        return self.counted(bets, bins=tuple(bins), range_ends=ends)

    @property
    def alarm(self) -> str:
        """The alarm in a line; empty for none."""
        return self.broken_at and (
            f"inputs differ at {self.broken_at} from the reference rows: by {self.compared} "
            f"requests {self.score} is distributed otherwise; that answers differ is not shown"
        )

    def figures(self) -> dict[str, Any]:
        """Return the counts, the evidence, and the share of values at the ends of ranges."""
        count = max(1, self.compared)
        return super().figures() | {
            "inputs_differ": bool(self.broken_at),
            "range_end": {name: total / count for name, (_, total) in self.range_ends.items()},
            "range_end_reference": {name: share for name, (share, _) in self.range_ends.items()},
        }

    def lines(self) -> Iterator[str]:
        """Yield the verdict, the figures, and the ends whose share of values has risen most."""
        yield from self.verdict(
            "inputs like the reference rows", f"{self.score} is distributed otherwise"
        )
        count, ends = max(1, self.compared), self.range_ends
        worst = sorted(ends, key=lambda name: ends[name][0] - ends[name][1] / count)[:WORST]
        for expected, total, name in ((*ends[name], name) for name in worst):
            share = f"{100 * total / count:.3g} % of the values"
            yield f"{name}: {share}, {100 * expected:.3g} % of the reference rows'"


Watched: Any = ShadowState | DriftState


def now() -> str:
    """Return the time of day, to the second, UTC."""
    return datetime.now(UTC).isoformat(" ", "seconds")


def read_state(file: Path, subject: Subject | None = None) -> ShadowState | DriftState | None:
    """Return the state in a file; None where there is no file.

    ArtifactInvalid where it was changed by hand, or is of another `subject`.
    """
    try:
        state: ShadowState | DriftState = read_sealed(file, Watched)
    except FileNotFoundError:
        return None
    for name, expected in dict(subject or {}).items():
        if (found := getattr(state.of, name)) != expected:
            said, wanted = (getattr(each, "rule", each) for each in (found, expected))
            raise ArtifactInvalid(
                f"{file}: is of {name} {said}, expected {wanted}; delete it to begin anew, or "
                "name another file with --shadow-state"
            )
    return state
