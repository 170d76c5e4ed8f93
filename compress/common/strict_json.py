"""JSON in canonical form, and without duplicate keys."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ValidationError

from compress.common.errors import ArtifactInvalid, first_line

if TYPE_CHECKING:
    from collections.abc import Callable

    from compress.common.config import Settings

T = TypeVar("T", bound="Settings")


def canonical_json(value: Any) -> str:
    """Return the same JSON for equal values; raise ValueError for NaN and infinities."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


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


def load_strictly(raw: bytes) -> Any:
    """Return JSON of which no key stands twice, or raise ValueError."""
    return json.loads(raw, object_pairs_hook=reject_duplicate_keys)


def parse_settings(
    kind: type[T], raw: bytes, where: object, load: Callable[[bytes], Any] = load_strictly
) -> T:
    """Return JSON as settings, or raise ArtifactInvalid, which names the first entry at fault.

    No key may be unknown: another program that reads the file could load what it names.
    """
    try:
        return kind.model_validate(load(raw))
    except ValidationError as error:
        first = error.errors()[0]
        problem = "unknown entry" if first["type"] == "extra_forbidden" else first["msg"]
        raise ArtifactInvalid(f"{where}: {'.'.join(map(str, first['loc']))}: {problem}") from error
    except (ArtifactInvalid, ValueError, RecursionError) as error:
        raise ArtifactInvalid(f"{where}: {first_line(error)}") from error
