"""`compress diff`: differences of two runs' settings, environment and results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import JsonValue

from compress.common.config import Settings
from compress.common.errors import PipelineInvalid
from compress.pipelines.results.schema import Report
from compress.pipelines.system.templates import readable_bytes, readable_count
from compress.serve.attestation import read_attestation

if TYPE_CHECKING:
    from compress.core.verdict import Verdict

MISSING = "–"
NOT_MEASURABLE = "not measurable"
TIMED_FIGURES = ("p50_ms", "p95_ms", "speedup", "speedup_in_runtime")
"""Figures that are None where timings on a busy machine were too noisy."""


class Difference(Settings):
    """A value that differs between two runs."""

    what: str
    """Dotted path: `settings.stages.0.epochs`, `versions.torch`, `onnx.p50_ms`."""
    before: JsonValue
    after: JsonValue


class Differences(Settings):
    """All values that differ between two runs."""

    before: str
    after: str
    asked: tuple[Difference, ...]
    surroundings: tuple[Difference, ...]
    found: tuple[Difference, ...]
    """Status, and by stage the metric, sizes, latencies, verdicts and the digest; of attestations
    the verdicts of each certificate."""


def compare(before: Path, after: Path) -> Differences:
    """Compare two runs' reports, given their results directories, or two attestations."""
    kinds = {path.is_file() for path in (before, after)}
    if len(kinds) > 1:
        raise PipelineInvalid(f"{before}, {after}: expected two runs or two attestations")
    parts = [
        _attested(path) if path.is_file() else _parts(Report.read(path)) for path in (before, after)
    ]
    asked, surroundings, *found = (tuple(_differences(*pair)) for pair in zip(*parts, strict=True))
    return Differences(
        before=str(before),
        after=str(after),
        asked=asked,
        surroundings=surroundings,
        found=tuple(difference for part in found for difference in part),
    )


def row_of(difference: Difference) -> tuple[str, str, str]:
    """Return a table row: path, value before, value after."""
    return difference.what, _readable(difference, "before"), _readable(difference, "after")


def _parts(report: Report) -> tuple[dict[str, Any], ...]:
    """Return what was asked, its surroundings, and the results, apart as names may be equal."""
    settings: Any = report.lock["settings"]
    by_name = {stage["name"] or stage["stage"]: stage for stage in settings["stages"]}
    asked = {"settings": {**settings, "stages": by_name}, "data": report.lock["data"]}
    surroundings = {name: report.lock.get(name) for name in ("versions", "machine")}
    outcome = {
        "status": report.status,
        "failed": {failure.name: failure.error for failure in report.failures},
        "skipped": {skipped.name: f"as {skipped.because}" for skipped in report.skipped},
    }
    stages: dict[str, Any] = {}
    for stage in report.stages:
        stages[stage.name] = {
            **stage.measurements.figures,
            "gates": _gates(stage.verdicts),
            "made_seconds": round(stage.seconds, 1),
            "sha256": stage.artifact.sha256,
        }
    test = {"test": dict(report.test.values) if report.test else {}}
    return asked, surroundings, outcome, stages, test


def _attested(file: Path) -> tuple[dict[str, Any], ...]:
    """Return the files and data that an attestation is about, and its verdicts."""
    found = read_attestation(file, None)
    numbered = {f"certificate {n}": own for n, own in enumerate(found.certificates, start=1)}
    data = {name: {"data": own.data} for name, own in numbered.items()}
    gates = {name: {"gates": _gates(own.verdicts)} for name, own in numbered.items()}
    return {**dict(found.subjects), **data}, {}, gates


def _gates(verdicts: Sequence[Verdict]) -> dict[str, str]:
    """Return in words how each gate ended; a bound with its value."""
    return {
        # A stage may have the same gate against several, or on several.
        v.rule + v.compared: ("passed" if v.passed else "refused")
        + (f", at most {v.bound.value:.4g}" if v.bound else "")
        for v in verdicts
    }


def _differences(before: Any, after: Any, path: str = "") -> Iterator[Difference]:
    """Yield the leaves that differ, by dotted path, in the order of the first run."""
    sides = [{} if side is None else side for side in (before, after)]
    if any(sides) and all(isinstance(side, dict) for side in sides):
        for key in dict.fromkeys((*sides[0], *sides[1])):
            inner = f"{path}.{key}" if path else str(key)
            yield from _differences(sides[0].get(key), sides[1].get(key), inner)
    elif before != after:
        yield Difference(what=path, before=before, after=after)


def _readable(difference: Difference, side: str) -> str:
    value, what = getattr(difference, side), difference.what.rpartition(".")[2]
    if value is None:
        return NOT_MEASURABLE if what in TIMED_FIGURES else MISSING
    if what == "bytes":
        return readable_bytes(int(value))
    if what in ("parameters", "macs"):
        return readable_count(int(value))
    if isinstance(value, float):
        return f"{value:.4g}"
    text = str(value)
    return f"{text[:12]}…" if what in ("sha256", "data") else text
