"""What a server's shadow has shown so far: counts, bounds and the verdict, kept in a file."""

from __future__ import annotations

import random
from bisect import bisect
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from compress.common.config import Ratio, Settings
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
WORST = 5
"""Tensors that are listed."""


class Subject(Settings):
    """What is compared, and what counts as another answer."""

    served: str
    """Digest of the artifact that answers the clients."""
    uncompressed: str
    """Digest of the artifact that it is compared with."""
    gate: MaxDisagreement
    """The limit that is watched, and the error of an answer that counts as another."""
    task: str | None = None
    """Kind of the answers; None for the label of the largest score."""

    @property
    def confidence(self) -> float:
        """Probability that there is no alarm as long as the limit holds."""
        return self.gate.confidence

    @property
    def expected(self) -> float:
        """Evidence of a change that a request brings by itself: the share that may differ."""
        return self.gate.percent / 100


class DriftSubject(Settings):
    """What is watched where there is no uncompressed model, and against which rows."""

    served: str
    """Digest of the artifact that answers the clients."""
    reference: str
    """SHA-256 of the file of rows that it was judged on."""
    task: str | None = None
    """Kind of the answers; None for the label of the largest score."""
    confidence: Ratio = 0.95
    """Probability that there is no alarm as long as inputs are like those rows."""

    @property
    def expected(self) -> float:
        """Evidence of a change that a request brings by itself: each has a score."""
        return 1.0


class WatchState(Settings):
    """What the drawn requests of a server have shown, over all its restarts."""

    version: Literal[1] = 1
    of: Subject | DriftSubject
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
    """Requests, compared ones and the figure at some moments, evenly spaced in compared ones."""

    def counted(self, bets: Sequence[float], **changed: Any) -> Self:
        """Return the state with one more request, which changed this."""
        compared, found = self.compared + 1, {**changed, "compared": self.compared + 1}
        if not self.broken_at:  # afterwards they would only grow, beyond all numbers
            found["bets"] = tuple(bets)
        state = self.model_copy(update=found)
        every = 1 << max(0, compared.bit_length() - KEPT_POINTS.bit_length() + 1)
        if compared % every == 0:
            thinned = (point for point in state.history if point[1] % every == 0)
            state = state.model_copy(
                update={"history": (*thinned, (self.requests, compared, state.figure))}
            )
        if not self.broken_at and state.evidence >= self.needed_evidence:
            state = state.model_copy(update={"broken_at": now()})
        return state

    @property
    def evidence(self) -> float:
        """Evidence for the alarm; it suffices from then on."""
        found = sum(self.bets) + held_back(self.compared, self.of.expected)
        return max(found, self.needed_evidence) if self.broken_at else found

    @property
    def needed_evidence(self) -> float:
        """Evidence that suffices."""
        return 1 / (1 - self.of.confidence)

    @property
    def figure(self) -> float:
        """What the history keeps."""
        return self.evidence


class ShadowState(WatchState):
    """The comparisons of a server with the same two models."""

    of: Subject
    other: int = 0
    """Compared requests that were answered otherwise."""
    bets: tuple[float, ...] = tuple(first_bets())
    history: tuple[tuple[int, int, int], ...] = ()

    def after(self, error: float, range_ends: Sequence[float] = ()) -> ShadowState:
        """Return the state with one more answer, of this error."""
        differs = error > (self.of.gate.error or 0)
        bets = next_bets([*self.bets], self.compared, differs, self.of.expected)
        return self.counted(bets, other=self.other + differs)

    @property
    def figure(self) -> int:
        """What the history keeps."""
        return self.other

    @property
    def problem(self) -> str:
        """What an alarm says."""
        return (
            f"more than {self.of.gate.percent:g} % of the requests are answered otherwise than by "
            "the uncompressed model"
        )

    @property
    def alarm(self) -> str:
        """The alarm in a line, with its figures; empty for none."""
        return self.broken_at and (
            f"certificate broken at {self.broken_at}: of {self.compared} compared requests "
            f"{self.other} are answered otherwise than by the uncompressed model, and the limit is "
            f"{self.of.gate.percent:g} %"
        )

    def percents(self, compared: int, other: int) -> tuple[float, float, float]:
        """Return lower bound, share and upper bound after so many comparisons, in percent."""
        low, high = share_bounds(other, compared, self.of.gate.confidence)
        return 100 * low, 100 * other / max(1, compared), 100 * high

    def figures(self) -> dict[str, Any]:
        """Return the counts, the bounds, the limit and the evidence."""
        low, share, high = self.percents(self.compared, self.other)
        left_out = {"of", "bets", "history", "version"}
        ends = {"lower": low, "share": share, "upper": high, "limit": self.of.gate.percent}
        ends |= {"evidence": self.evidence, "certificate_broken": bool(self.broken_at)}
        return self.model_dump(exclude=left_out) | ends

    def lines(self) -> Iterator[str]:
        """Yield the verdict and the figures."""
        found, sure = self.figures(), f"{100 * self.of.gate.confidence:g} %"
        yield (
            f"at most {found['limit']:g} % other answers: "
            + (f"broken since {self.broken_at}" if self.broken_at else "not broken")
        )
        yield f"requests since {self.since}: {self.requests}"
        yield f"compared: {self.compared}; dropped: {self.dropped}; failed: {self.failed}"
        yield (
            f"other answers: {self.other}, {found['share']:.3g} % (at all moments at once, with "
            f"{sure} each: at least {found['lower']:.3g} %, at most {found['upper']:.3g} %)"
        )
        yield (
            f"evidence that the share was above the limit: {self.evidence:.3g}; "
            f"{self.needed_evidence:.3g} suffices"
        )
        yield f"served: {self.of.served}"
        yield f"uncompressed: {self.of.uncompressed}"


class DriftState(WatchState):
    """How far a server's inputs are like the rows that its artifact was judged on."""

    of: DriftSubject
    score: str
    """What each row was scored by."""
    edges: tuple[float, ...]
    """Between the bins of scores: percentiles of one half of the judged rows."""
    bins: tuple[int, ...]
    """Rows in each bin: of the other half, and those of the requests."""
    bets: tuple[float, ...] = tuple(first_rank_bets())
    tensors: tuple[str, ...] = ()
    """Quantized tensors, each with an end of its range."""
    judged: tuple[float, ...] = ()
    """Share of each tensor's values at that end, of the judged rows."""
    seen: tuple[float, ...] = ()
    """Sums of the same shares over the requests."""

    def after(self, score: float, range_ends: Sequence[float] = ()) -> DriftState:
        """Return the state with one more row, and the shares of its call."""
        bins, place = [*self.bins], bisect(self.edges, score)
        above = sum(bins[place + 1 :]) + random.random() * (bins[place] + 1)
        bets = next_rank_bets([*self.bets], self.compared, above / (sum(bins) + 1))
        bins[place] += 1
        seen = tuple(a + b for a, b in zip(self.seen, range_ends, strict=True))
        return self.counted(bets, bins=tuple(bins), seen=seen)

    problem: ClassVar[str] = (
        "inputs differ from those that the artifact was judged on; that answers differ is not shown"
    )

    @property
    def alarm(self) -> str:
        """The alarm in a line, with its figures; empty for none."""
        return self.broken_at and (
            f"inputs differ from those that were judged, at {self.broken_at}: {self.score} is "
            f"distributed otherwise, by {self.compared} requests; that answers differ is not shown"
        )

    def figures(self) -> dict[str, Any]:
        """Return the counts, the evidence, and the share of values at the ends of ranges."""
        left_out = {"of", "bets", "history", "version", "edges", "bins", "tensors", "judged"}
        shares = [each / max(1, self.compared) for each in self.seen]
        return self.model_dump(exclude=left_out | {"seen"}) | {
            "evidence": self.evidence,
            "inputs_differ": bool(self.broken_at),
            "range_end": dict(zip(self.tensors, shares, strict=True)),
            "range_end_judged": dict(zip(self.tensors, self.judged, strict=True)),
        }

    def lines(self) -> Iterator[str]:
        """Yield the verdict, the figures, and the tensors with the most values at an end."""
        found = self.figures()
        yield "inputs like those that were judged: " + (
            f"they differ since {self.broken_at}" if self.broken_at else "no difference shown"
        )
        yield f"requests since {self.since}: {self.requests}"
        yield f"scored: {self.compared}; dropped: {self.dropped}; failed: {self.failed}"
        yield (
            f"evidence that {self.score} is distributed otherwise: {self.evidence:.3g}; "
            f"{self.needed_evidence:.3g} suffices"
        )
        shares, judged = found["range_end"], found["range_end_judged"]
        worst = sorted(shares, key=lambda name: judged[name] - shares[name])[:WORST]
        for name in worst if self.compared else ():
            yield (
                f"{name}: {100 * shares[name]:.3g} % of the values, and {100 * judged[name]:.3g} % "
                "of the judged rows'"
            )
        yield f"served: {self.of.served}"
        yield f"judged rows: {self.of.reference}"


def now() -> str:
    """Return the time of day, to the second, UTC."""
    return datetime.now(UTC).isoformat(" ", "seconds")


def read_state(
    file: Path, subject: Subject | DriftSubject | None = None
) -> ShadowState | DriftState | None:
    """Return the state in a file; None where there is no file.

    ArtifactInvalid where it was changed by hand, or is of another `subject`.
    """
    try:
        state: ShadowState | DriftState = read_sealed(file, ShadowState | DriftState)  # type: ignore[arg-type]
    except FileNotFoundError:
        return None
    for name, expected in dict(subject or {}).items():
        if (found := getattr(state.of, name, "none")) != expected:
            said, wanted = (getattr(each, "rule", each) for each in (found, expected))
            raise ArtifactInvalid(
                f"{file}: is of {name} {said}, expected {wanted}; delete it to begin anew, or "
                "name another file with --shadow-state"
            )
    return state
