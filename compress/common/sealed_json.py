"""JSON files that end with a digest of their own bytes, so that no changed byte is believed.

A digest reveals damage and careless edits. It is no signature: whoever edits a file can compute it
anew. All state, records and caches that this toolkit writes as JSON and reads back go through here.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import to_jsonable_python

from compress.common.atomic_files import open_regular, write_atomically
from compress.common.errors import ArtifactInvalid, first_line

if TYPE_CHECKING:
    from compress.common.config import Settings

Model = TypeVar("Model", bound="Settings")
T = TypeVar("T")
SEAL = "sha256"  # key of the digest, the last one of a file
END = b',\n "%s": "%%b"\n}\n' % SEAL.encode()  # end of a file; the digest is of all bytes before it
LOCK, LOCK_DIGEST = "lock.json", "lock_sha256"
"""A file of each run's results, and the key of its digest in `report.json` beside it."""
log = logging.getLogger(__name__)


def canonical_json(value: Any) -> str:
    """Return the same JSON for equal values; raise ValueError for NaN and infinities."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object from pairs for ``json.loads``; raise ValueError if a key stands twice."""
    # Of two equal keys readers take the first or the last: two programs could see two files.
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
    kind: type[Model], raw: bytes, where: object, load: Callable[[bytes], Any] = load_strictly
) -> Model:
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


def dump_sealed(content: BaseModel | Mapping[str, Any], indent: int | None = None) -> bytes:
    """Return a JSON object, not an empty one, with the digest of its own bytes as its last key."""
    if isinstance(content, BaseModel):
        text = content.model_dump_json(indent=indent)
    else:
        # Measured values may be NaN, and Python reads back the NaN that it writes.
        separators = None if indent else (",", ":")
        text = json.dumps(content, indent=indent, separators=separators, default=to_jsonable_python)
    body = text.removesuffix("}").rstrip().encode()
    return body + END % hashlib.sha256(body).hexdigest().encode()


def is_sealed(raw: bytes) -> bool:
    """Whether bytes are an object that :func:`dump_sealed` wrote, unchanged."""
    body = raw[: -len(END % bytes(64))]
    return raw == body + END % hashlib.sha256(body).hexdigest().encode()


def load_sealed(raw: bytes) -> dict[str, Any]:
    """Return what :func:`dump_sealed` wrote; raise ArtifactInvalid for any other bytes."""
    if not is_sealed(raw):
        raise ArtifactInvalid("is not as it was written: its content does not match its digest")
    try:
        content: dict[str, Any] = json.loads(raw)
        del content[SEAL]
    except (ValueError, RecursionError, KeyError, TypeError):
        raise ArtifactInvalid("is not a JSON object") from None
    return content


def write_sealed(file: Path, content: BaseModel | Mapping[str, Any]) -> None:
    """Write a JSON object with its digest, indented, so that a crash leaves the old or the new."""
    write_atomically(file, dump_sealed(content, indent=1))


def read_sealed(file: Path, kind: type[T]) -> T:
    """Return what :func:`write_sealed` wrote, as a type that pydantic knows.

    ArtifactInvalid, which names it, where it was changed since, or is of another version.
    """
    with open_regular(file) as stream:
        raw = stream.read()
    try:
        return TypeAdapter(kind).validate_python(load_sealed(raw))
    except ArtifactInvalid as error:
        raise ArtifactInvalid(f"{file}: {error}") from None
    except ValidationError:
        raise ArtifactInvalid(f"{file}: is of another version") from None


def read_if_unchanged(file: Path, kind: type[T]) -> T | None:
    """Return what :func:`read_sealed` does, or None with a warning where that raises.

    A missing file is None without a warning.
    """
    try:
        return read_sealed(file, kind)
    except OSError:
        return None
    except ArtifactInvalid as error:
        log.warning("%s; it is not used", error)
        return None


def write_state(file: Path, key: str, content: object) -> None:
    """Write what a later process may continue with, and the key of all that it depends on."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_sealed(file, {"key": key, "content": content})


def read_state(file: Path, key: str, kind: type[T]) -> T | None:
    """Return what :func:`write_state` wrote under a key; None where it is missing or of another.

    A file that was changed, or is of another version, is named in a warning.
    """
    state = read_if_unchanged(file, dict[str, Any]) or {}
    if state.get("key") != key:
        return None
    try:
        return TypeAdapter(kind).validate_python(state.get("content"))
    except ValidationError:
        log.warning("%s: is of another version; it is not used", file)
        return None


def write_report(file: Path, report: Mapping[str, Any], lock: Mapping[str, Any]) -> None:
    """Write a run's `report.json`, which names the digest of `lock.json` beside it, and that."""
    locked = json.dumps(lock, indent=1, sort_keys=True).encode() + b"\n"
    write_atomically(file.with_name(LOCK), locked)
    # Last: where it is, a run has ended, and the other files are there.
    write_sealed(file, {**report, LOCK_DIGEST: hashlib.sha256(locked).hexdigest()})


def read_report(file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the content of a run's `report.json`, and of `lock.json` beside it if it is there.

    ArtifactInvalid, which names the file, where one was changed since the run wrote them.
    """
    report = read_sealed(file, dict[str, Any])
    digest, lock = report.pop(LOCK_DIGEST, None), file.with_name(LOCK)
    try:
        with open_regular(lock) as stream:
            raw = stream.read()
    except FileNotFoundError:  # of a report that was copied
        return report, {}
    if hashlib.sha256(raw).hexdigest() != digest:
        raise ArtifactInvalid(f"{lock}: is not as the run wrote it: {file.name} names another")
    return report, json.loads(raw)
