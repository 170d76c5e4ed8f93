"""What a server's comparisons have shown so far: counts, bounds and the verdict, kept in a file."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from compress.common.config import Settings
from compress.common.errors import ArtifactInvalid
from compress.common.sealed_json import read_sealed
from compress.core.anytime_bounds import first_bets, held_back, next_bets, share_bounds
from compress.core.gates.disagreement import MaxDisagreement

KEPT_POINTS = 128
"""Most points of the history."""


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


class ShadowState(Settings):
    """The comparisons of a server with the same two models, over all its restarts."""

    version: Literal[1] = 1
    of: Subject
    since: str
    """When the comparison began, UTC."""
    requests: int = 0
    """Requests that were answered."""
    dropped: int = 0
    """Requests that were drawn and not compared: too many others waited."""
    failed: int = 0
    """Requests that the uncompressed model could not answer, or not alike."""
    compared: int = 0
    other: int = 0
    """Compared requests that were answered otherwise."""
    bets: tuple[float, ...] = tuple(first_bets())
    broken_at: str = ""
    """When the evidence sufficed that the share was above the limit, UTC; empty before that."""
    history: tuple[tuple[int, int, int], ...] = ()
    """Requests, compared and other ones at some moments, evenly spaced in compared ones."""

    def after(self, differs: bool) -> ShadowState:
        """Return the state with one more comparison."""
        bets, limit, broken_at = self.bets, self.of.gate.percent / 100, self.broken_at
        if not broken_at:  # afterwards they would only grow, beyond all numbers
            bets = tuple(next_bets([*bets], self.compared, differs, limit))
        compared, other = self.compared + 1, self.other + differs
        every = 1 << max(0, compared.bit_length() - KEPT_POINTS.bit_length() + 1)
        history = self.history
        if compared % every == 0:
            history = (
                *(point for point in history if point[1] % every == 0),
                (self.requests, compared, other),
            )
        changed = {"compared": compared, "other": other, "bets": bets, "history": history}
        found = self.model_copy(update=changed)
        if not broken_at and found.evidence >= found.needed_evidence:
            found = found.model_copy(update={"broken_at": now()})
        return found

    @property
    def evidence(self) -> float:
        """Evidence that the share was above the limit; it suffices from then on."""
        found = sum(self.bets) + held_back(self.compared, self.of.gate.percent / 100)
        return max(found, self.needed_evidence) if self.broken_at else found

    @property
    def needed_evidence(self) -> float:
        """Evidence that suffices."""
        return 1 / (1 - self.of.gate.confidence)

    def percents(self, compared: int, other: int) -> tuple[float, float, float]:
        """Return lower bound, share and upper bound after so many comparisons, in percent."""
        low, high = share_bounds(other, compared, self.of.gate.confidence)
        return 100 * low, 100 * other / max(1, compared), 100 * high

    def figures(self) -> dict[str, Any]:
        """Return the counts, the bounds, the limit and the evidence."""
        low, share, high = self.percents(self.compared, self.other)
        left_out = {"of", "bets", "history", "version"}
        ends = {"lower": low, "share": share, "upper": high, "limit": self.of.gate.percent}
        return self.model_dump(exclude=left_out) | ends | {"evidence": self.evidence}

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


def now() -> str:
    """Return the time of day, to the second, UTC."""
    return datetime.now(UTC).isoformat(" ", "seconds")


def read_state(file: Path, subject: Subject | None = None) -> ShadowState | None:
    """Return the state in a file; None where there is no file.

    ArtifactInvalid where it was changed by hand, or is of another `subject`.
    """
    try:
        state = read_sealed(file, ShadowState)
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
