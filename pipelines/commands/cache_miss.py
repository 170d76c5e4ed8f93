"""`compress why`: the parts of a stage's cache key, and which of them changed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import JsonValue

from compress.common.config import Settings
from compress.common.errors import PipelineInvalid
from compress.core.validation_errors import did_you_mean
from compress.pipelines.config.run_options import RunOptions
from compress.pipelines.runner.cache_keys import source_key_parts, stage_key_parts
from compress.pipelines.runner.run import preview_state

if TYPE_CHECKING:
    from compress.pipelines.config.pipeline import PipelineConfig


class KeyPart(Settings):
    """One part of a stage's cache key."""

    what: str
    """Dotted path: `settings.ratio`, `input`, `versions.torch`."""
    value: JsonValue
    before: JsonValue
    """Its value when the stage was last run here; equal to ``value`` if unknown."""


class CacheReason(Settings):
    """Whether a run would take a stage from the cache, and the parts of its key."""

    stage: str
    does: str
    """`cached`, or `runs (…)`."""
    parts: tuple[KeyPart, ...]
    """Empty where a stage before it must run first."""

    def lines(self) -> Iterator[str]:
        """Yield a line for the decision and one for each part of the key."""
        yield f"{self.stage}: {self.does}"
        width = max((len(part.what) for part in self.parts), default=0)
        for part in self.parts:
            was = f"   was {_text(part.before)}" if part.before != part.value else ""
            yield f"  {part.what:{width}}  {_text(part.value)}{was}"


def why(pipeline: PipelineConfig, out: Path, stage: str, store: str | None = None) -> CacheReason:
    """Explain why a run would reuse a stage's artifact (or that of `source`), or run the stage."""
    actions, state = preview_state(pipeline, out, RunOptions(store=store))
    if stage not in actions:
        raise PipelineInvalid(
            f"{pipeline.file}: no stage is named {stage!r}; {did_you_mean(stage, set(actions))}"
        )
    planned = next((p for p in state.plan.stages if p.name == stage), None)
    parts: dict[str, Any] = {}
    if planned is None:
        parts = source_key_parts(state)
    # Without its inputs there is no key: it has their digests.
    elif all(name in state.artifacts for name in planned.reads):
        parts = stage_key_parts(state, planned)
    before = state.store.last_parts(stage) or parts
    return CacheReason(stage=stage, does=actions[stage], parts=tuple(_parts(parts, before)))


def _parts(now: Any, before: Any, path: str = "") -> Iterator[KeyPart]:
    if isinstance(now, dict) and now:
        past = before if isinstance(before, dict) else {}
        for key, value in now.items():
            yield from _parts(value, past.get(key), f"{path}.{key}" if path else key)
    elif path:
        yield KeyPart(what=path, value=now, before=before)


def _text(value: JsonValue) -> str:
    return value if isinstance(value, str) else json.dumps(value)
