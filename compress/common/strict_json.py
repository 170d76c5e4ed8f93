"""JSON whose bytes are checked: canonical form, no duplicate keys, files with their own digest."""

# A digest in a file reveals damage and careless edits. It is no signature: whoever edits a file can
# compute it anew.

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ValidationError

from compress.common.errors import ArtifactInvalid, first_line

if TYPE_CHECKING:
    from collections.abc import Mapping

    from compress.common.config import Settings

T = TypeVar("T", bound="Settings")
SEAL = "sha256"
"""Key of a file's own digest, which is over the canonical JSON of all other keys."""
RUN_SEAL = "seal"
"""Key in `report.json` of the digest over itself and `lock.json`."""


def canonical_json(value: Any, *, allow_nan: bool = False) -> str:
    """Return the same JSON for equal values; raise ValueError for NaN and infinities."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=allow_nan)


def reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object from pairs for ``json.loads``; raise ValueError if a key stands twice."""
    # Of two equal keys some readers take the first and others the last, so that two programs could
    # see two different files.
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"key {key[:80]!r} stands twice")
        found[key] = value
    return found


def parse_settings(kind: type[T], raw: bytes, where: object) -> T:
    """Return JSON as settings, or raise ArtifactInvalid, which names the first entry at fault.

    No key may stand twice, or be unknown: JSON of another reader's may name what that would load.
    """
    try:
        json.loads(raw, object_pairs_hook=reject_duplicate_keys)
        return kind.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors()[0]
        problem = "unknown entry" if first["type"] == "extra_forbidden" else first["msg"]
        raise ArtifactInvalid(f"{where}: {'.'.join(map(str, first['loc']))}: {problem}") from error
    except (ValueError, RecursionError) as error:
        raise ArtifactInvalid(f"{where}: {first_line(error)}") from error


def dump_sealed(content: Mapping[str, Any]) -> bytes:
    """Return a mapping as canonical JSON that holds the digest of its own content."""
    return _canonical_bytes({**content, SEAL: seal_of(content)})


def load_sealed(raw: bytes) -> dict[str, Any]:
    """Return what :func:`dump_sealed` wrote; raise ArtifactInvalid for any other bytes."""
    try:
        content = json.loads(raw)
        seal = content.pop(SEAL)
    except (ValueError, RecursionError):
        raise ArtifactInvalid("is cut off or damaged") from None
    except (AttributeError, TypeError, KeyError):
        raise ArtifactInvalid("has no digest of its content") from None
    # Every byte counts: a JSON parser would accept a duplicate key or an added space.
    if seal != seal_of(content) or dump_sealed(content) != raw:
        raise ArtifactInvalid("is not as it was written: its content does not match its digest")
    return dict(content)


def seal_of(content: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a mapping's canonical JSON."""
    return hashlib.sha256(_canonical_bytes(content)).hexdigest()


def seal_of_run(report: Mapping[str, Any], lock: Mapping[str, Any]) -> str:
    """Return the digest that a run's `report.json` holds: of itself and of `lock.json`."""
    return seal_of({"report": report, "lock": lock})


def refuse_changed_run(report: Mapping[str, Any], lock: Mapping[str, Any]) -> None:
    """Raise ArtifactInvalid if `report.json` or `lock.json` was changed after the run wrote it."""
    content = {**report}
    seal = content.pop(RUN_SEAL, None)  # older versions wrote none
    if seal is not None and seal != seal_of_run(content, lock):
        raise ArtifactInvalid(
            "report.json or lock.json is not as the run wrote it; run the pipeline again"
        )


def _canonical_bytes(content: Any) -> bytes:
    # Measured values may be NaN, and Python reads back the NaN that it writes.
    return canonical_json(content, allow_nan=True).encode()
