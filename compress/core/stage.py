"""Stage: immutable settings that turn one artifact into the next, and the context it runs in."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, Self, TypeVar

from compress.artifacts.artifact import Artifact, Step
from compress.common.atomic_files import remove
from compress.common.config import Settings, StageName
from compress.common.dependency_recorder import Recording, note, recording
from compress.common.errors import StageFailed
from compress.common.requirements import Requirement, requirements_of
from compress.core.evaluation import evaluate_gates, refusal, run_stage
from compress.core.gates import AnyGate
from compress.core.loss import INFERRED, Loss
from compress.core.metrics import Metric

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Set
    from pathlib import Path

    import torch

    from compress.artifacts.artifact import Predictor
    from compress.common.signature import Signature
    from compress.core.gate import Verdict
    from compress.core.run_history import History
    from compress.data.splits import Splits
    from compress.profiling.batch_dependence import BatchDependence
    from compress.profiling.benchmark import Comparison

Reads = TypeVar("Reads", bound=Artifact)
Writes = TypeVar("Writes", bound=Artifact)

DEFAULT_CALIBRATION_SAMPLES = 512
"""Drawn where a stage's ``calibration_samples`` leaves the number open and there are as many."""
COMPARED_BATCHES = 4
"""Seeded batches compared where there is no data."""


class Progress(Protocol):
    """Where a stage says how far it is."""

    def __call__(self, task: str, done: int, total: int, note: str = "") -> None:
        """Say that ``done`` of ``total`` steps of a task are done; ``note`` is shown beside it."""
        ...


def silent(task: str, done: int, total: int, note: str = "") -> None:
    """Say nothing."""


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
            from compress.core.batch_probing import batch_dependence

            self.dependences[artifact.digest] = batch_dependence(artifact, self)
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
        from compress.core.metrics import evaluate

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


class Stage(Settings, Generic[Reads, Writes]):
    """A step of the road; a subclass's type arguments say what it reads and writes."""

    stage: str
    name: StageName | None = None
    """Name of this step in the report and on disk; the stage's type by default."""
    input: str | None = None
    """Earlier stage whose artifact is read, or `source`; the previous stage by default."""
    gates: tuple[AnyGate, ...] = ()
    """Rules that the result must satisfy."""

    requirements: ClassVar[tuple[Requirement, ...]] = ()
    records_history: ClassVar[bool] = False
    """Whether the result holds how its input came about."""

    def run(self, model: Reads, context: Context) -> Writes:
        """Do the work and seal the result at ``context.root``."""
        raise NotImplementedError

    def check_parity(self, model: Reads, artifact: Writes, context: Context) -> None:
        """Hold a result of an earlier run against its input, on the data of this one.

        Only stages whose results are to answer as their inputs do have something to prove.

        Raises:
            StageFailed: it answers otherwise.
        """

    def __call__(self, model: Reads, context: Context) -> Writes:
        """Run, let the gates judge, and return the artifact.

        Raises:
            GateRefused: a gate refused; the artifact is kept and named.
            StageFailed: the stage could not do its work.
        """
        artifact = run_stage(self.run, model, context)
        context.clear_work()
        refused = refusal(self.title, self.judge(model, artifact, context), artifact.path)
        if refused:
            raise refused
        return artifact

    def judge(self, model: Artifact, artifact: Artifact, context: Context) -> list[Verdict]:
        """Return every gate's verdict on the result."""
        return list(evaluate_gates(self.gates, model, artifact, context))

    @property
    def title(self) -> str:
        """The stage's name, or its type."""
        return self.name or self.stage

    @property
    def needs_data(self) -> bool:
        """Whether the stage cannot run without data."""
        return False

    @property
    def uses_data(self) -> bool:
        """Whether the result depends on the data, where there is any."""
        return self.needs_data

    @property
    def uses_loss(self) -> bool:
        """Whether the loss on the data's targets decides the result."""
        return False

    def check_loss(self, loss: Loss) -> None:
        """Refuse settings that do not go with the task's loss, which has a name.

        Raises:
            CompressError: a setting does not.
        """

    @property
    def drawn_samples(self) -> int:
        """Upper bound of the samples that the stage draws from the calibration split."""
        drawn: int | None = getattr(self, "calibration_samples", 0)
        return DEFAULT_CALIBRATION_SAMPLES if drawn is None else drawn

    @property
    def machine_parts(self) -> dict[str, Any]:
        """What of the machine decides the result; most artifacts are the same everywhere."""
        return {}

    @property
    def extra_inputs(self) -> tuple[str, ...]:
        """Names of the artifacts read besides the input."""
        return ()

    @property
    def extra_input_types(self) -> tuple[type[Artifact], ...]:
        """Kinds that those artifacts may be of."""
        return (Artifact,)

    @property
    def activation_formats(self) -> frozenset[str]:
        """What activations of the result may be besides float32, so far as the settings tell."""
        return frozenset()

    def unsupported_input_reason(self, formats: Set[str]) -> str:
        """Return why an input with activations of these formats cannot be read, or nothing."""
        return ""

    def resolve_paths(self, folder: Path, code: Path) -> Self:
        """Return the same stage with its paths relative to a pipeline's folders.

        Args:
            folder: where the pipeline file lies.
            code: where the user's modules lie.

        Raises:
            CompressError: a file is not there.
        """
        return self

    def all_requirements(self) -> tuple[Requirement, ...]:
        """Return what the stage, or a setting within it, cannot do without."""
        return tuple(requirements_of(self))

    def own_settings(self) -> dict[str, Any]:
        """Return the settings that decide the result."""
        return self.model_dump(mode="json", exclude={"name", "input", "gates"})

    def lineage(self, model: Artifact, **others: Artifact) -> tuple[Step, ...]:
        """Return the input's lineage with this step added."""
        inputs = {"input": model.digest, **{role: a.digest for role, a in others.items()}}
        step = Step(stage=self.stage, settings=self.own_settings(), inputs=inputs)
        return (*model.manifest.lineage, step)

    @classmethod
    def reads(cls) -> Any:
        """Return the artifact type, or union of types, that the stage reads."""
        return cls._type_arguments()[0]

    @classmethod
    def writes(cls) -> type[Artifact]:
        """Return the artifact type that the stage writes."""
        return cls._type_arguments()[1]  # type: ignore[no-any-return]

    @classmethod
    def _type_arguments(cls) -> tuple[Any, Any]:
        for base in cls.__mro__:
            if arguments := getattr(base, "__pydantic_generic_metadata__", {}).get("args"):
                return arguments[0], arguments[1]
        raise TypeError(f"{cls.__name__} must inherit from Stage[Reads, Writes]")
