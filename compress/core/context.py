"""What a stage runs with: data, device, metric, earlier artifacts, and how models are measured."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from compress.common.atomic_files import remove
from compress.common.dependency_recorder import Recording, note, recording
from compress.common.errors import StageFailed
from compress.core.loss import INFERRED, Loss
from compress.core.metrics import Metric, evaluate
from compress.core.progress import Progress, silent

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    import torch

    from compress.artifacts.artifact import Artifact, Predictor
    from compress.common.signature import Signature
    from compress.core.run_history import History
    from compress.data.splits import Splits
    from compress.profiling.batch_dependence import BatchDependence
    from compress.profiling.benchmark import Comparison

COMPARED_BATCHES = 4
"""Seeded batches compared where there is no data."""


@dataclass(frozen=True)
class Context:
    """Where a stage runs, never what it does."""

    root: Path
    """Directory of the artifact to be written."""
    data: Splits | None = None
    loss: Loss = INFERRED
    """What training minimizes and the metric `loss` measures; by default it follows from the
    targets."""
    metric: Metric = field(default_factory=Metric)
    device: str = "cpu"
    threads: int = 1
    """CPU threads a model answers with, in every measurement alike."""
    seed: int = 0
    artifacts: Mapping[str, Artifact] = field(default_factory=dict)
    """Artifacts by stage name, for `against` and `teacher`; `source` is the model as it came in."""
    progress: Progress = silent
    scratch: Path | None = None
    """Where a stage keeps what it needs to go on after an interruption; by default at ``root``."""
    results: Path | None = None
    """Folder of what a run tells beside its artifacts, such as traces; by default ``root``'s."""
    scores: dict[tuple[Any, ...], tuple[float, Recording]] = field(
        default_factory=dict, compare=False
    )
    """Metrics measured so far, so that none is evaluated twice, and what user code read for it."""
    history: History | None = None
    """The road to the stage's input, for a stage that records it; None where no run tells it."""
    served_batch_size: int = 1
    """Rows of one call in deployment: models whose answers depend on their batch are judged so."""
    dependences: dict[str, BatchDependence] = field(default_factory=dict, compare=False)
    """Digest → whether that artifact's answers depend on their batch, as far as it was measured."""

    def __post_init__(self) -> None:
        # One definition of the loss, whatever the metric was made with.
        object.__setattr__(self, "metric", replace(self.metric, loss=self.loss))

    @property
    def work(self) -> Path:
        """A scratch directory that outlives an interruption, for checkpoints."""
        self._work.mkdir(parents=True, exist_ok=True)
        return self._work

    def clear_work(self) -> None:
        """Remove the scratch directory."""
        remove(self._work)

    @property
    def _work(self) -> Path:
        return self.scratch or self.root.with_name(f"{self.root.name}.work")

    def need_data(self, why: str) -> Splits:
        """Return the data.

        Raises:
            StageFailed: there is none.
        """
        if self.data is None:
            raise StageFailed(f"{why} needs data; add a `data:` section or pass Context(data=…)")
        return self.data

    def artifact(self, name: str) -> Artifact:
        """Return an earlier artifact.

        Raises:
            StageFailed: no stage of that name came before.
        """
        if name not in self.artifacts:
            known = ", ".join(self.artifacts) or "none"
            raise StageFailed(f"no earlier artifact is named {name!r}; known: {known}")
        return self.artifacts[name]

    def score(self, artifact: Artifact, split: str = "val") -> float:
        """Return an artifact's metric on a split."""
        batch = self.judged_batch_size(artifact)
        known = (artifact.digest, split, self.metric, id(self.data), self.device, batch)
        if known not in self.scores:
            with recording() as recorded:
                self.scores[known] = self._evaluate(artifact, split, batch), recorded
        value, recorded = self.scores[known]
        note(recorded)
        return value

    def batch_dependence(self, artifact: Artifact) -> BatchDependence:
        """Return whether an artifact's answers depend on what else is in the batch."""
        if artifact.digest not in self.dependences:
            from compress.profiling.batch_dependence import measure_artifact

            self.dependences[artifact.digest] = measure_artifact(
                artifact, self.data, self.device, self.threads, self.seed
            )
        return self.dependences[artifact.digest]

    def judged_batch_size(self, *artifacts: Artifact) -> int | None:
        """Return how many rows a call has where models are judged; the data's own where None.

        That is any number for models that answer each row by itself, and for others the number
        with which they will be served.
        """
        if not any(self.batch_dependence(artifact).depends for artifact in artifacts):
            return None
        sizes = [a.signature.inputs[0].shape[:1] for a in artifacts]
        fixed = [size[0] for size in sizes if size and isinstance(size[0], int)]
        return max(self.served_batch_size, *fixed, 1)

    def _evaluate(self, artifact: Artifact, split: str, batch: int | None) -> float:
        data = self.need_data(f"metric {self.metric.name}")
        with ExitStack() as stack:
            predict = stack.enter_context(self.predictor(artifact))
            reference = None
            if self.metric.name == "fidelity":
                reference = stack.enter_context(self.predictor(self.artifact("source")))
            metric = self.metric.settled(data)
            return evaluate(predict, data, split, metric, reference, self.progress, batch)

    @contextmanager
    def predictor(self, artifact: Artifact) -> Iterator[Predictor]:
        """Give an artifact as a predictor that takes any number of samples."""
        from compress.data.fixed_batch import any_batch

        with artifact.open(self.device, self.threads) as predict:
            yield any_batch(predict, artifact.signature)

    def compare_latency(self, before: Artifact, after: Artifact, batch: int) -> Comparison:
        """Measure two artifacts' latencies in turn, with equal threads, on samples of `val`."""
        from compress.profiling.benchmark import compare_latency

        batches = self.measured_batches(before.signature, batch)
        with (
            before.open(self.device, self.threads) as slow,
            after.open(self.device, self.threads) as fast,
        ):
            return compare_latency(slow, fast, batches)

    def peak_memory(self, artifact: Artifact, batch: int) -> float:
        """Return the mebibytes that opening an artifact and calls with samples take at most."""
        from compress.profiling.peak_memory import peak_memory

        batches = self.measured_batches(artifact.signature, batch)
        return peak_memory(artifact, self.device, self.threads, batches)

    def measured_batches(self, signature: Signature, batch: int) -> list[tuple[torch.Tensor, ...]]:
        """Return what latency and memory are measured on: `val`, or seeded inputs without data.

        Raises:
            StageFailed: the model takes another number of samples.
        """
        from compress.profiling.benchmark import measured_batches

        return measured_batches(self.data, signature, batch, self.seed)

    def comparison_inputs(
        self, signature: Signature, batch_size: int | None = None
    ) -> Iterator[tuple[torch.Tensor, ...]]:
        """Yield the inputs on which two models are compared: `val`, or seeded ones without data."""
        if self.data is not None and "val" in self.data.datasets:
            for batch in self.data.batches("val", batch_size):
                yield batch.inputs
        else:
            for i in range(COMPARED_BATCHES):
                yield signature.example(batch=batch_size or 8, seed=self.seed + i)

    def with_root(self, root: Path) -> Context:
        """Return the same context with another artifact directory."""
        return replace(self, root=root)
