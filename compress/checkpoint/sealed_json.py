"""JSON files that carry a digest of their own content, so that damage and edits are noticed.

The digest is no signature: whoever edits a file can compute it anew.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from compress.common.errors import ArtifactInvalid

if TYPE_CHECKING:
    from collections.abc import Mapping

SEAL = "sha256"
"""Key of the digest, which is over the canonical JSON of all other keys."""
RUN_SEAL = "seal"
"""The same in `report.json`, over that and `lock.json`."""


def sealed(content: Mapping[str, Any]) -> bytes:
    """Return a mapping as canonical JSON that holds its own digest."""
    return _canonical({**content, SEAL: seal_of(content)})


def seal_of(content: Mapping[str, Any]) -> str:
    """Return the digest of a mapping; equal mappings have equal ones."""
    return hashlib.sha256(_canonical(content)).hexdigest()


def seal_of_run(report: Mapping[str, Any], lock: Mapping[str, Any]) -> str:
    """Return the digest that a run's `report.json` holds: of itself, and of `lock.json`."""
    return seal_of({"report": report, "lock": lock})


def refuse_changed_run(report: Mapping[str, Any], lock: Mapping[str, Any]) -> None:
    """Refuse the records of a run where one of them is not as the run wrote it.

    Args:
        report: content of `report.json`.
        lock: content of `lock.json`.

    Raises:
        ArtifactInvalid: the digest in the report is of other contents.
    """
    content = {**report}
    seal = content.pop(RUN_SEAL, None)  # older versions wrote none
    if seal is not None and seal != seal_of_run(content, lock):
        raise ArtifactInvalid(
            "report.json or lock.json is not as the run wrote it; run the pipeline again"
        )


def unsealed(raw: bytes) -> dict[str, Any]:
    """Return the mapping that :func:`sealed` was given.

    Every byte counts: a duplicate key or an added space, which a JSON parser would pass over, is
    refused like another value.

    Raises:
        ArtifactInvalid: these are not the bytes that were written.
    """
    try:
        content = json.loads(raw)
        seal = content.pop(SEAL)
    except (ValueError, RecursionError):
        raise ArtifactInvalid("is cut off or damaged") from None
    except (AttributeError, TypeError, KeyError):
        raise ArtifactInvalid("has no digest of its content") from None
    if seal != seal_of(content) or sealed(content) != raw:
        raise ArtifactInvalid("is not as it was written: its content does not match its digest")
    return dict(content)


def _canonical(content: Any) -> bytes:
    # NaN is let through, as Python reads back what it writes: what was measured is kept as it was.
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
