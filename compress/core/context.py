"""What a stage runs with: data, device, metric, earlier artifacts, and how models are measured."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from compress.common.atomic_files import remove, temporary_folder
from compress.common.dependency_recorder import Recording, add_to_recordings, recording
from compress.common.errors import CompressError, StageFailed
from compress.core.answers import KeptAnswers
from compress.core.metrics import Metric, evaluate
from compress.core.objectives.loss import INFERRED_LOSS, Loss
from compress.core.progress import Progress, silent
from compress.profiling.output_summary import OutputSummarizer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import AbstractContextManager

    import torch

    from compress.artifacts.artifact import Artifact
    from compress.common.forward import Predictor
    from compress.common.signature import Signature
    from compress.core.metrics.score import Score
    from compress.core.objectives.task import Task
    from compress.core.verdict import History, Uncertainty
    from compress.data.splits import Splits
    from compress.profiling.batch_dependence import BatchDependence
    from compress.profiling.benchmark import Comparison

TYPICAL_OF = 32
"""Samples of `val` of whose sizes the median is typical: reading all may take long."""
QUICK_SAMPLES = 16
"""Of `val`, on which a quick judgement compares two models."""
COMPARED_BATCHES = 4
"""Seeded batches compared where there is no data."""


class ExportCache:
    """Exports of uncompressed models, with which speeds are compared; each is written once."""

    def __init__(self) -> None:
        """Create an empty cache, whose files are removed when the process ends."""
        self._exports: dict[str, Artifact | CompressError] = {}

    def get_or_write(self, key: str, write: Callable[[Path], Artifact]) -> Artifact:
        """Return the export of a key, or write it into a folder; an error is raised each time."""
        if key not in self._exports:
            try:
                self._exports[key] = self._find_or_write(key, write)
            except CompressError as error:
                self._exports[key] = error
        found = self._exports[key]
        if isinstance(found, CompressError):
            raise found
        return found

    def _find_or_write(self, key: str, write: Callable[[Path], Artifact]) -> Artifact:
        return write(temporary_folder() / "export")


@dataclass(frozen=True)
class Context:
    """Where and with what a stage runs; what it does is its settings."""

    root: Path
    """Directory that the stage's artifact is written to."""
    data: Splits | None = None
    loss: Loss = INFERRED_LOSS
    """What training minimizes and the metric `loss` measures; by default inferred from the
    targets."""
    metric: Metric = field(default_factory=Metric)
    device: str = "cpu"
    threads: int = 1
    """CPU threads of a forward call, the same in every measurement."""
    seed: int = 0
    artifacts: Mapping[str, Artifact] = field(default_factory=dict)
    """Artifacts by stage name, for `against` and `teacher`; `source` is the input model."""
    baseline: str = "source"
    """Name of the uncompressed model among them."""
    progress: Progress = silent
    scratch: Path | None = None
    """Folder for a stage's checkpoints, with which it resumes after an interruption; by default
    beside ``root``."""
    results: Path | None = None
    """Folder for results that are no artifacts, such as traces; by default ``root``'s parent."""
    scores: dict[tuple[Any, ...], tuple[Score, Recording]] = field(
        default_factory=dict, compare=False
    )
    """Cache of measured metrics, with the files and packages that user code read for each."""
    history: History | None = None
    """The stages that led to the input, for a stage that records them; None outside of a run."""
    served_batch_size: int = 1
    """Rows of one call in deployment, at which models whose outputs depend on the batch are
    evaluated."""
    is_quick: bool = False
    """Whether little is measured: comparisons see 16 samples of `val`."""
    dependences: dict[str, BatchDependence] = field(default_factory=dict, compare=False)
    """Cache: an artifact's digest → whether its outputs depend on the batch."""
    comparisons: dict[tuple[Any, ...], tuple[Comparison, Recording]] = field(
        default_factory=dict, compare=False
    )
    """Cache of compared latencies, with what user code read for each."""
    exports: ExportCache = field(default_factory=ExportCache, compare=False)
    """Exports of the uncompressed model."""
    answers: KeptAnswers = field(default_factory=KeptAnswers, compare=False)
    """Outputs of the models that were called so far."""
    forms: Mapping[str, Artifact] = field(default_factory=dict, compare=False)
    """Digest of a graph → the file exported from it that answers in its place, where quality alone
    is measured: integers take torch ten times as long as the runtime that the file is for."""
    served_latency: Any = None
    """How fast models will be where a later stage exports them to; None where that is not known.
    A :class:`~compress.pruning.latency.widths.ServedLatency`."""

    def __post_init__(self) -> None:
        # The metric `loss` measures the task's loss, whatever loss the metric was created with.
        object.__setattr__(self, "metric", replace(self.metric, loss=self.loss))

    @property
    def task(self) -> Task | None:
        """What the model is for, where it is known."""
        return self.loss.task

    @property
    def work(self) -> Path:
        """A scratch directory for checkpoints, which outlives an interruption."""
        self._work.mkdir(parents=True, exist_ok=True)
        return self._work

    def clear_work(self) -> None:
        """Remove the scratch directory."""
        remove(self._work)

    @property
    def _work(self) -> Path:
        return self.scratch or self.root.with_name(f"{self.root.name}.work")

    def need_data(self, why: str) -> Splits:
        """Return the data; raise StageFailed, naming what needs it, where there is none."""
        if self.data is None:
            raise StageFailed(f"{why} needs data; add a `data:` section or pass Context(data=…)")
        return self.data

    def artifact(self, name: str) -> Artifact:
        """Return an earlier stage's artifact; raise StageFailed where there is no such stage."""
        if name not in self.artifacts:
            known = ", ".join(self.artifacts) or "none"
            raise StageFailed(f"no earlier artifact is named {name!r}; known: {known}")
        return self.artifacts[name]

    def score(self, artifact: Artifact, split: str = "val") -> float:
        """Return an artifact's metric on a split, measured once."""
        return self.score_by_sample(artifact, split).value

    def score_key(self, artifact: Artifact, split: str) -> tuple[Any, ...]:
        """Return the key of an artifact's metric in :attr:`scores`."""
        batch, asked = self.judged_batch_size(artifact), self.form_of(artifact)
        return (asked.digest, split, self.metric, id(self.data), self.device, batch)

    def score_by_sample(self, artifact: Artifact, split: str = "val") -> Score:
        """Return an artifact's metric on a split with each sample's part in it, measured once."""
        key = self.score_key(artifact, split)
        if key not in self.scores:
            data = self.need_data(f"metric {self.metric.name}")
            with recording() as recorded, ExitStack() as stack:
                predict = stack.enter_context(self.predictor(artifact))
                reference = None
                if self.metric.needs_reference:
                    reference = stack.enter_context(self.predictor(self.artifact("source")))
                metric, summarizer = self.metric.for_model(artifact.signature), OutputSummarizer()
                watched = summarizer.watch(predict)
                score = evaluate(watched, data, split, metric, reference, self.progress, key[-1])
                score = replace(score, outputs=summarizer.summaries())
            self.scores[key] = score, recorded
        score, recorded = self.scores[key]
        add_to_recordings(recorded)
        return score

    def drop_uncertainty(self, before: Artifact, after: Artifact) -> Uncertainty:
        """Return the interval of how many points worse an artifact's metric on `val` is."""
        change = self.score_by_sample(before).change_to(self.score_by_sample(after))
        return change.scaled(-100 if self.metric.higher_is_better else 100)

    def batch_dependence(self, artifact: Artifact) -> BatchDependence:
        """Return whether an artifact's outputs depend on the rest of the batch, measured once."""
        if artifact.digest not in self.dependences:
            from compress.profiling.batch_dependence import measure_artifact

            self.dependences[artifact.digest] = measure_artifact(
                artifact, self.data, self.device, self.threads, self.seed, briefly=self.is_quick
            )
        return self.dependences[artifact.digest]

    def judged_batch_size(self, *artifacts: Artifact) -> int | None:
        """Return the batch size at which artifacts are evaluated; None for the data's own."""
        # Models whose outputs depend on the batch are evaluated at the size that they are served
        # with, or at a fixed size of theirs.
        asked = {a.digest: a for a in (*artifacts, *map(self.form_of, artifacts))}
        if not any(self.batch_dependence(artifact).depends for artifact in asked.values()):
            return None
        sizes = [a.signature.inputs[0].shape[:1] for a in artifacts]
        fixed = [size[0] for size in sizes if size and isinstance(size[0], int)]
        return max(self.served_batch_size, *fixed, 1)

    def typical_sizes(self, signature: Signature) -> dict[str, int]:
        """Return the sizes of a model's named axes in a sample of `val` of median size.

        Empty where all sizes but the batch's are fixed, and without `val`.
        """
        axes = {*signature.dynamic_axes} - {signature.batch_axis}
        if not axes or self.data is None or "val" not in self.data.datasets:
            return {}
        samples = len(self.data.split("val"))  # type: ignore[arg-type]
        count, found = min(TYPICAL_OF, samples), []
        for i in range(count):
            (sample,) = self.data.read("val", [i * samples // count], 1)  # alone, hence not padded
            sizes = {
                axis: size
                for spec, tensor in zip(signature.inputs, sample.inputs, strict=False)
                for axis, size in zip(spec.shape, tensor.shape, strict=False)
                if axis in axes and isinstance(axis, str)
            }
            found.append((prod(sizes.values()), sizes))
        return sorted(found, key=lambda pair: pair[0])[(count - 1) // 2][1]

    def macs(self, artifact: Artifact, sizes: Mapping[str, int]) -> int | None:
        """Return the multiply-accumulates of an artifact for a sample of these sizes.

        Of a format that has not the operators, those of what it was made of; None where that is not
        known either.
        """
        # Without sizes where there are none: artifacts of other packages need not take them.
        counted = artifact.macs(sizes) if sizes else artifact.macs()
        lineage = artifact.manifest.lineage
        if counted is not None or not (sizes and lineage):
            return counted
        made_of = lineage[-1].inputs.get("input", "")
        source = next((a for a in self.artifacts.values() if a.digest == made_of), None)
        return self.macs(source, sizes) if source else None

    @contextmanager
    def predictor(self, artifact: Artifact, *, kept: bool = True) -> Iterator[Predictor]:
        """Provide an artifact as a predictor that takes any number of samples.

        What it was called with before, it answers from :attr:`answers`, unless not `kept`.
        """
        from compress.common.forward import accept_any_batch

        artifact = self.form_of(artifact)
        opened: AbstractContextManager[Predictor]
        if kept:
            opened = self.answers.predictor(artifact, self.device, self.threads)
        else:
            opened = artifact.open(self.device, self.threads)
        with opened as predict:
            yield accept_any_batch(predict, artifact.signature)

    def form_of(self, artifact: Artifact) -> Artifact:
        """Return the exported file that answers in an artifact's place, else the artifact."""
        return self.forms.get(artifact.digest, artifact)

    def answers_by_row(self, artifact: Artifact) -> bool:
        """Whether an artifact is known to answer to a row alike in every batch of `val`."""
        found = self.dependences.get(artifact.digest)
        return found is not None and not found.why_not_joined

    def compare_latency(
        self, before: Artifact, after: Artifact, batch: int, seconds: float | None = None
    ) -> Comparison:
        """Measure two artifacts' latencies in turn, on samples of `val`.

        Both run on the device that runs the second, so that a file for the CPU is compared with its
        source on the CPU. Reliable ones are measured once for each number of seconds; see
        :func:`~compress.profiling.benchmark.compare_latencies`.
        """
        from compress.profiling.benchmark import compare_latency

        conditions = (id(self.data), self.device, self.threads, self.seed)
        key = (before.digest, after.digest, batch, seconds, *conditions)
        if key not in self.comparisons:
            batches = self.measured_batches(before.signature, batch)
            device = after.runs_on(self.device)
            second = partial(after.open_anew, device, self.threads)
            is_same = before.digest == after.digest
            first = second if is_same else partial(before.open_anew, device, self.threads)
            measure = partial(compare_latency, first, second, batches, threads=self.threads)
            with recording() as recorded:
                compared = measure() if seconds is None else measure(seconds=seconds)
            if compared.unreliable_reason:  # the machine may have less to do next time
                add_to_recordings(recorded)
                return compared
            self.comparisons[key] = compared, recorded
        compared, recorded = self.comparisons[key]
        add_to_recordings(recorded)
        return compared

    def peak_memory(self, artifact: Artifact, batch: int) -> float:
        """Return the peak memory of opening an artifact and calling it on samples, in MiB."""
        from compress.profiling.peak_memory import peak_memory, require_measurable

        require_measurable(artifact)  # before the data are read
        batches = self.measured_batches(artifact.signature, batch)
        return peak_memory(artifact, self.device, self.threads, batches)

    def measured_batches(self, signature: Signature, batch: int) -> list[tuple[torch.Tensor, ...]]:
        """Return batches to measure with, or raise StageFailed if the model's own size differs."""
        from compress.profiling.benchmark import measured_batches

        return measured_batches(self.data, signature, batch, self.seed)

    def comparison_inputs(
        self, signature: Signature, batch_size: int | None = None
    ) -> Iterator[tuple[torch.Tensor, ...]]:
        """Yield the inputs on which two models are compared: `val`, or seeded ones without it."""
        if self.data is not None and "val" in self.data.datasets:
            limit = QUICK_SAMPLES if self.is_quick else None
            for batch in self.data.batches("val", batch_size, limit=limit):
                yield batch.inputs
        else:
            for i in range(COMPARED_BATCHES):
                yield signature.example(batch=batch_size or 8, seed=self.seed + i)

    def with_root(self, root: Path) -> Context:
        """Return the same context with another artifact directory."""
        return replace(self, root=root)

    @contextmanager
    def in_temporary_folder(self) -> Iterator[Context]:
        """Provide the same context for a stage that is run again, of which nothing is kept.

        Artifact, checkpoints and results are in a folder that is removed afterwards, so that those
        of the run itself stay as they are.
        """
        with TemporaryDirectory(prefix="compress-rerun-") as name:
            folder = Path(name)
            yield replace(
                self,
                root=folder / "artifact",
                scratch=folder / "work",
                results=folder / "results",
            )
