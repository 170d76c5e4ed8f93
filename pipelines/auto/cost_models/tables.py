"""Latencies of a machine that is not here: measured there, written to a file, and read here."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any, Self, get_args

from compress.common.config import Settings
from compress.common.errors import ArtifactInvalid, PipelineInvalid
from compress.common.sealed_json import read_sealed, write_sealed
from compress.export.exporter import EXPORTERS
from compress.pipelines.auto.cost_models.latency_models import FormatModel
from compress.pipelines.config.auto_settings import Format, Runtime
from compress.profiling.interaction_sum import InteractionSum

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from compress.pipelines.auto.candidates import Candidate
    from compress.pipelines.config.auto_settings import AutoSettings
    from compress.profiling.interaction_sum import Value

TABLES_FILE = "latency_tables.json"
"""In the results' folder; `latency.json` is what `compress latency` writes there."""


class StoredSum(Settings):
    """A quantity by widths, as JSON holds it; see `InteractionSum`."""

    base: float
    terms: tuple[tuple[tuple[str, ...], tuple[int, ...], float], ...]
    """Groups, their widths, and what changes there beyond what fewer of them change."""

    @classmethod
    def from_sum(cls, quantity: InteractionSum) -> Self:
        """Return a quantity in the form that is stored."""
        return cls(
            base=quantity.base,
            terms=tuple(
                (scope, tuple(map(int, widths)), change)
                for scope, own in quantity.terms.items()
                if any(own.values())
                for widths, change in own.items()
            ),
        )

    def to_sum(self) -> InteractionSum:
        """Return the quantity."""
        terms: dict[tuple[str, ...], dict[tuple[Value, ...], float]] = {}
        for scope, widths, change in self.terms:
            terms.setdefault(scope, {})[widths] = change
        return InteractionSum(self.base, terms)


class ModelTable(Settings):
    """Latency and size of a model in one format and runtime, by its widths."""

    format: Format
    runtime: Runtime
    latency_ms: StoredSum
    bytes: StoredSum

    @classmethod
    def from_model(cls, model: FormatModel) -> Self:
        """Return a model in the form that is stored, without a correction by whole models alone."""
        return cls(
            format=model.format,
            runtime=model.runtime,
            latency_ms=StoredSum.from_sum(model.latency_ms),
            bytes=StoredSum.from_sum(model.bytes),
        )

    def to_model(self, grid: Mapping[str, Sequence[int]]) -> FormatModel:
        """Return what the solver works with."""
        return FormatModel(
            self.format,
            self.latency_ms.to_sum(),
            self.bytes.to_sum(),
            runtime=self.runtime,
            whole={group: widths[0] for group, widths in grid.items()},
            smallest={group: widths[-1] for group, widths in grid.items()},
        )


class LatencyTables(Settings):
    """What a search needs of the machine that will serve."""

    machine: dict[str, Any]
    versions: dict[str, str]
    threads: int
    batch: int
    """Samples of a call."""
    base_ms: float
    """Median time of a call of the float ONNX file, with which all others were measured in turn."""
    grid: dict[str, tuple[int, ...]]
    """Group of coupled channels → its widths, the model's own first."""
    models: tuple[ModelTable, ...]

    @classmethod
    def read(cls, file: Path) -> Self:
        """Read tables that another machine wrote; raise PipelineInvalid where these are none."""
        try:
            return read_sealed(file, cls)
        except (OSError, ArtifactInvalid) as error:
            why = error.strerror if isinstance(error, OSError) else str(error)
            raise PipelineInvalid(
                f"--tables {file}: {why}; expected what `compress auto --tables-only` writes"
            ) from error

    def write(self, out: Path) -> Path:
        """Write the tables into the results' folder, and return the file."""
        out.mkdir(parents=True, exist_ok=True)
        write_sealed(out / TABLES_FILE, self)
        return out / TABLES_FILE

    @property
    def digest(self) -> str:
        """A hash of all figures."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()

    @property
    def where(self) -> str:
        """The machine that was measured, in words."""
        runtimes = " and ".join(
            f"{name} {self.versions[name]}"
            for name in (EXPORTERS[kind].runtime.name for kind in get_args(Runtime))
            if name in self.versions
        )
        return f"{self.machine.get('processor')}, {self.machine.get('cores')} cores, {runtimes}"

    def lines(self, out: Path) -> Iterator[str]:
        """Yield what was measured, and how a search elsewhere reads it."""
        widths = sum(map(len, self.grid.values()))
        kinds = ", ".join(f"{table.format} in {table.runtime}" for table in self.models)
        file = out / TABLES_FILE
        yield f"latency of {kinds}, over {widths} widths of {len(self.grid)} groups: {file}"
        yield f"on another machine: compress auto PIPELINE.YAML --tables {TABLES_FILE}"

    def format_models(self, format: Format, runtimes: Sequence[Runtime]) -> list[FormatModel]:
        """Return the models of a format in some runtimes, with figures that are predictions."""
        return [
            table.to_model(self.grid)
            for table in self.models
            if table.format == format and table.runtime in runtimes
        ]

    def latency_ms(self, candidate: Candidate) -> float:
        """Return the predicted latency of a candidate, in milliseconds."""
        for model in self.format_models(candidate.format, [candidate.runtime]):
            whole = {group: widths[0] for group, widths in self.grid.items()}
            return model.latency_ms({**whole, **dict(candidate.widths)})
        return self.base_ms  # the float model itself, where no float ones are searched

    def refuse_other_settings(self, settings: AutoSettings, threads: int) -> None:
        """Raise PipelineInvalid for other threads, a missing format or runtime, or a p95."""
        limit = settings.limits.latency
        if limit is not None and limit.p95_ms is not None:
            raise PipelineInvalid(
                "latency tables hold medians: limit p50_ms (--latency), and p95_ms by a gate "
                "max_latency in a point's pipeline, where it runs"
            )
        self.refuse_blocks(settings)
        self._refuse_other_calls("threads", self.threads, threads)
        known = {(table.format, table.runtime) for table in self.models}
        for format in settings.space.formats:
            for runtime in settings.space.runtimes:
                if (format, runtime) not in known:
                    has = ", ".join(f"{f} in {r}" for f, r in sorted(known))
                    raise PipelineInvalid(
                        f"the latency tables have no {format} in {runtime}, only {has}; measure "
                        "again, or leave it out of auto.space"
                    )

    def refuse_other_model(self, grid: Mapping[str, Sequence[int]], batch: int) -> None:
        """Raise PipelineInvalid for other groups of channels, other widths, or another batch."""
        self._refuse_other_calls("batch", self.batch, batch)
        for group in sorted(self.grid.keys() | grid.keys()):
            there, here = self.grid.get(group), grid.get(group)
            if list(there or ()) != list(here or ()):
                raise PipelineInvalid(
                    f"the latency tables are of another model or of other widths: {group!r} has "
                    f"{json.dumps(there)} in them, and {json.dumps(here)} here; measure again "
                    "with this file"
                )

    @staticmethod
    def refuse_blocks(settings: AutoSettings) -> None:
        """Raise PipelineInvalid where blocks may be removed: tables are of all of them."""
        if settings.space.blocks:
            raise PipelineInvalid(
                "auto.space.blocks: latency tables are of models with all their blocks, and which "
                "are removed depends on the weights; leave it out with --tables and --tables-only"
            )

    @staticmethod
    def _refuse_other_calls(name: str, measured: int, asked: int) -> None:
        if measured != asked:
            raise PipelineInvalid(
                f"the latency tables are of calls with {name} {measured}, and those of the search "
                f"have {asked}; measure again with the same"
            )
