"""What a run has produced so far, as plain data."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress.common.dependency_recorder import Dependencies, digest_of, digest_of_variable
from compress.common.errors import CompressError, GateRefused, lines_of
from compress.core.context import Caches, Context, KeptAnswers
from compress.core.gates.runtime import runtime_of
from compress.export.imported.exported_files import import_file
from compress.pipelines.config.model_spec import SOURCE, ModelFile
from compress.pipelines.results.measurements import JUDGED_QUICKLY, Measurements
from compress.pipelines.results.schema import FailureReport, SkippedReport, StageReport, TestReport
from compress.pipelines.runner.inputs import RememberedSplits, source_parts
from compress.pipelines.store.local import WORK, Store, StoredExports
from compress.pipelines.system import signals
from compress.pipelines.system.machine_info import machine
from compress.pipelines.system.run_profile import Profiler
from compress.pipelines.system.signals import INTERRUPTED, only_signals_interrupt

if TYPE_CHECKING:
    from compress.artifacts.artifact import Artifact
    from compress.core.progress import Progress
    from compress.data.fingerprint import Contents
    from compress.data.splits import Splits
    from compress.pipelines.config.pipeline import PipelineConfig
    from compress.pipelines.planning.plan import Plan, PlannedStage
    from compress.pipelines.store.entry import Entry
    from compress.pipelines.system.jsonl_log import EventEmitter

MIN_VAL_SAMPLES = 30  # of `val`: with fewer, one sample moves an accuracy by more than three points


@dataclass(frozen=True)
class CacheLookup:
    """What the store holds of a stage's artifact."""

    name: str
    parts: dict[str, Any]
    """Everything that decides the artifact: its key in the store is their hash."""
    entry: Entry
    reason: str
    """Why the stage must run; empty where the artifact was in the store."""
    seconds: float = 0.0
    """How long the stage took when it ran."""

    @property
    def cached(self) -> bool:
        """Whether the artifact was in the store."""
        return not self.reason


@dataclass
class RunOutcome:
    """Which stages of a run failed, were refused or were skipped; the other stages go on."""

    plan: Plan
    emit: EventEmitter
    current: str = ""
    """The stage that this process works on; empty between stages."""
    running_elsewhere: tuple[str, ...] = ()
    """Stages that other processes were running when the run was ended."""
    errors: dict[str, CompressError] = field(default_factory=dict)
    """By stage name; refusals of gates are errors too."""
    failures: dict[str, FailureReport] = field(default_factory=dict)
    skipped: dict[str, SkippedReport] = field(default_factory=dict)

    @contextmanager
    def record_failures(self, name: str) -> Iterator[None]:
        """Mark a stage as the current one in a block; record its error, if it is the toolkit's."""
        self.current = name
        try:
            with only_signals_interrupt():
                yield
        except CompressError as error:
            # An error after a signal is a consequence of it.
            if signals.exit_code():
                raise
            self.current, self.errors[name] = "", error
            if not isinstance(error, GateRefused):
                self._fail(name, str(error), ends_run=False)
        self.current = ""

    def should_skip(self, planned: PlannedStage) -> bool:
        """Record and announce that a stage is skipped, if one that it needs did not pass."""
        stopped = {name: report.because for name, report in self.skipped.items()}
        stopped |= {name: name for name in self.errors}
        causes = [stopped[name] for name in planned.needs if name in stopped]
        if self.plan.baseline in self.failures:
            causes = [self.plan.baseline]  # nothing can be measured without it
        if causes:
            fields = self._stage_fields(planned.name)
            self.skipped[planned.name] = SkippedReport(**fields, because=causes[0])
            line = f"{planned.name}: skipped, as {causes[0]} did not pass"
            self.emit("stage_skipped", planned.name, line, level="warning")
        return bool(causes)

    def error(self) -> CompressError | None:
        """Return the error that ends the run: the first failure, else refusal; others are notes."""
        errors = [self.errors[name] for name in self.plan.ordered(self.errors)]
        errors.sort(key=lambda error: isinstance(error, GateRefused))
        for other in errors[1:]:
            errors[0].add_note(str(other))
        return errors[0] if errors else None

    def abort(self, error: str) -> None:
        """Record that the error of the current stage ended the run while stages were running."""
        for name in self.plan.ordered({self.current, *self.running_elsewhere}):
            self._fail(name, error if name == self.current else INTERRUPTED, ends_run=True)

    def _fail(self, name: str, error: str, *, ends_run: bool) -> None:
        failure = self.failures[name] = FailureReport(**self._stage_fields(name), error=error)
        why = "failed: " + " ".join(lines_of(error)).removeprefix(f"{name}: ")
        line = f"{name}: {INTERRUPTED if failure.status == INTERRUPTED else why}"
        # An error that ends the run is announced at its end.
        self.emit("stage_failed", name, line, {"error": error}, "error", not ends_run)

    def _stage_fields(self, name: str) -> dict[str, Any]:
        stage = self.plan.stage(name).stage.stage if name != SOURCE else SOURCE
        return {"name": name, "stage": stage, "branch": self.plan.branch(name)}


@dataclass
class RunState:
    """The settings of a run, and what its stages have produced so far."""

    pipeline: PipelineConfig
    plan: Plan
    out: Path
    store: Store
    data: Splits | None
    progress: Progress
    emit: EventEmitter
    artifacts: dict[str, Artifact] = field(default_factory=dict)
    """By stage name, as `entries` and `reports`."""
    entries: dict[str, Entry] = field(default_factory=dict)
    reports: dict[str, StageReport] = field(default_factory=dict)
    """Of the stages whose gates have been evaluated, whether they passed or not."""
    exported_as: dict[str, str] = field(default_factory=dict)
    """Stage → the later stage whose file answers for it while its quality is evaluated."""
    baseline_file: Artifact | None = None
    """The uncompressed model as an ONNX file, which answers for it wherever outputs are compared;
    None where it answers itself."""
    unmeasured: frozenset[str] = frozenset()
    """Stages of whose results only the size is measured."""
    profiler: Profiler = field(default_factory=lambda: Profiler(is_on=False))
    baseline: Measurements | None = None
    test: TestReport | None = None

    def __post_init__(self) -> None:
        self.outcome = RunOutcome(self.plan, self.emit)
        # On the disk of the store: temporary files may be in memory.
        self.caches = Caches(answers=KeptAnswers(self.store.root / WORK))

    @cached_property
    def exports(self) -> StoredExports:
        """Exports of the uncompressed model, apart by the data on which they were compared."""
        return StoredExports(self.store, {"data": self.fingerprint, **self.judging_part})

    @property
    def originals(self) -> dict[str, Callable[[Path], Artifact]]:
        """The ONNX file that the uncompressed model was imported from, if it was, by its kind."""
        spec, source = self.pipeline.model, self.artifacts.get(SOURCE)
        if not isinstance(spec, ModelFile) or spec.kind != "onnx" or self.plan.baseline != SOURCE:
            return {}
        file = self.pipeline.folder / spec.file
        return {"onnx": partial(import_file, "onnx", file, source.signature)} if source else {}

    @cached_property
    def contents(self) -> Contents | None:
        """Hashes of the data; None without data."""
        return self.data.contents() if self.data else None

    def load_data(self) -> None:
        """Load the data if they are remembered alone: a stage is going to run."""
        data: Any = self.data
        if isinstance(data, RememberedSplits):
            self.data = data.loaded
            own = {id(data): id(self.data)}  # by which keys know the data
            scores = self.caches.scores
            scores.update({tuple(own.get(k, k) for k in key): s for key, s in [*scores.items()]})

    @property
    def fingerprint(self) -> str | None:
        """One hash of all data; None without data."""
        return self.contents.fingerprint if self.contents else None

    @cached_property
    def data_warnings(self) -> tuple[str, ...]:
        """Reasons not to trust what is measured on `val`."""
        return tuple(validation_data_warnings(self.contents)) if self.contents else ()

    @cached_property
    def imported_model_parts(self) -> dict[str, Any]:
        """What decides the imported model; its files are hashed once a run."""
        return source_parts(self.pipeline, self.data)

    @cached_property
    def declared_parts(self) -> dict[str, Any]:
        """The part of cache keys that the pipeline declares under `depends:`, if it does."""
        folder, depends = self.pipeline.folder, self.pipeline.depends
        files: dict[str, str | None] = {}
        for path in (folder / name for name in depends.files):
            in_folder = sorted(file for file in path.rglob("*") if file.is_file())
            for file in in_folder if path.is_dir() else [path]:
                files[os.path.relpath(file, folder)] = digest_of(file)
        environment = {name: digest_of_variable(name) for name in depends.environment}
        declared = Dependencies(files=files, environment=environment)
        return {"depends": declared.model_dump()} if files or environment else {}

    @property
    def baseline_answered_by(self) -> str:
        """What answers for the uncompressed model, in words; empty where it answers itself."""
        runtime = runtime_of(self.baseline_file.kind) if self.baseline_file else None
        return f"{self.plan.baseline} in {runtime.title}" if runtime else ""

    @property
    def is_quick(self) -> bool:
        """Whether the run judges quickly."""
        return self.pipeline.judge == "quick"

    @property
    def why_unmeasured(self) -> str:
        """Why artifacts are not measured where the run leaves them out."""
        return JUDGED_QUICKLY if self.is_quick else "not asked for"

    @property
    def judging_part(self) -> dict[str, str]:
        """The part of keys that sets what a quick run measured apart."""
        return {"judge": "quick"} if self.is_quick else {}

    def measurement_conditions(self) -> dict[str, Any]:
        """Return what a measurement depends on, besides the artifacts that are measured."""
        return {
            "data": self.fingerprint,
            "metric": self.plan.metric.identity(),
            "threads": self.pipeline.threads,
            "device": self.pipeline.device,
            "seed": self.pipeline.seed,
            # Latencies are those of one machine.
            "machine": machine(),
            # What a quick run measured is no full judgement, nor the other way round.
            **self.judging_part,
            **self.declared_parts,
        }

    def context(self, name: str, root: Path | None = None) -> Context:
        """Return the context that a stage runs and is evaluated in, by default in its store entry.

        It sees the artifacts of its ancestors, and those that it names.
        """
        # Of the stage itself alone: what judges the file compares it with the graph's own.
        form = self.artifacts.get(self.exported_as.get(name, ""))
        forms = {self.artifacts[name].digest: form} if form else {}
        if self.baseline_file is not None:
            forms[self.artifacts[self.plan.baseline].digest] = self.baseline_file
        visible = {SOURCE, self.plan.baseline, *self.plan.branch(name), *self.plan.needs(name)}
        return Context(
            root=root or self.entries[name].artifact_path,
            data=self.data,
            loss=self.plan.loss,
            metric=self.plan.metric,
            device=self.pipeline.device,
            threads=self.pipeline.threads,
            seed=self.pipeline.seed,
            artifacts={n: artifact for n, artifact in self.artifacts.items() if n in visible},
            baseline=self.plan.baseline,
            progress=self.progress,
            # By name and not in the entry: a training resumes with another number of processes too,
            # which gives it another key.
            scratch=self.store.root / WORK / name,
            results=self.out,
            caches=self.caches,
            served_batch_size=self.pipeline.served_batch_size,
            is_quick=self.is_quick,
            exports=self.exports,
            originals=self.originals,
            forms=forms,
        )


def validation_data_warnings(contents: Contents) -> Iterator[str]:
    """Yield a line for each reason not to trust the data, or what is measured on `val`."""
    if contents.unrepeatable:
        names = " and ".join(map(repr, sorted(contents.unrepeatable)))
        yield (
            f"the same sample of split {names} differs each time it is read, whatever the seed: "
            "runs cannot be repeated, and the cache knows the data by what the dataset holds and "
            "its code; draw from torch, numpy.random, random, or generators that the dataset keeps "
            "as attributes, instead of the operating system, the time or one made anew each time"
        )
    facts = contents.facts
    labelled = int(facts["val"].rows["labelled"].sum()) if "val" in facts else 0
    # Without any target, none is needed.
    samples = labelled or contents.lengths.get("val", MIN_VAL_SAMPLES)
    with_label = " with a label" if samples < contents.lengths.get("val", 0) else ""
    if samples < MIN_VAL_SAMPLES:
        yield (
            f"val has {samples} samples{with_label}, so that one of them moves an accuracy by "
            f"{100 / samples:.2g} points; use at least {MIN_VAL_SAMPLES}"
        )
    splits = [name for name in dict.fromkeys(("val", "test", *facts)) if name in facts]
    for measured, other in combinations(splits, 2):
        # Calibration and training may share what is never measured on.
        if measured in ("val", "test") and (shared := facts[measured].shared_with(facts[other])):
            exact = all(len(facts[n].rows) == contents.lengths[n] for n in (measured, other))
            yield (
                f"{measured} shares {'' if exact else 'at least '}{shared} of its "
                f"{contents.lengths[measured]} samples with {other}, so that it tells less of new "
                "data; keep each sample in one split"
            )
