"""Stage: immutable settings that turn one artifact into the next."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Generic, Self, TypeVar, get_args

from pydantic import Field

from compress.artifacts.artifact import Artifact, Step
from compress.common.config import Settings, StageName, Unmet
from compress.common.errors import GateRefused, Unavailable, exits_refused
from compress.common.process import gc_frozen
from compress.common.requirements import Requirement, refuse_unmet, requirements_of, unmet_in
from compress.core.gates.gate import AnyGate, Gate
from compress.core.gates.runtime import baseline_for, baseline_name
from compress.core.verdict import Verdict, explain

if TYPE_CHECKING:
    from compress.core.context import Context
    from compress.core.objectives.loss import Loss
    from compress.core.objectives.task import Task
    from compress.data.splits import Splits

Reads = TypeVar("Reads", bound=Artifact)
Writes = TypeVar("Writes", bound=Artifact)


def members_of(artifact_type: Any) -> tuple[type[Artifact], ...]:
    """Return the members of an artifact type or union of types."""
    return get_args(artifact_type) or (artifact_type,)


def _evaluate(gate: Gate, before: Artifact, after: Artifact, context: Context) -> Verdict:
    verdict = gate.evaluate(before, after, context)
    if not gate.compares:
        return verdict
    name = baseline_name(gate, after.kind, "input", context.baseline)
    return verdict.model_copy(update={"against": name})


def evaluate_gates(
    gates: Sequence[Gate],
    model: Artifact,
    artifact: Artifact,
    context: Context,
    evaluate: Callable[[Gate, Artifact, Artifact, Context], Verdict] = _evaluate,
) -> tuple[Verdict, ...]:
    """Evaluate a stage's gates on its input and its result, in their order.

    ``evaluate`` gets a gate, what it compares with and the result; a run looks up known values.
    """
    with artifact.keep_loaded():
        return tuple(
            evaluate(each, baseline_for(each, model, artifact, context), artifact, context)
            for gate in gates
            for each in gate.on_each()
        )


def refusal(
    stage: str, verdicts: Iterable[Verdict], kept_at: Path, run: Path | None = None
) -> GateRefused | None:
    """Return the error that names the gates that refused a stage's result; None if all passed."""
    refused = "; ".join(explain(verdict) for verdict in verdicts if not verdict.passed)
    why = f"; why: compress explain {shlex.quote(str(run))}" if run else ""
    message = f"{stage}: {refused} (artifact kept in {kept_at}{why})"
    return GateRefused(message) if refused else None


DEFAULT_CALIBRATION_SAMPLES = 512
CalibrationSamples = Annotated[int, Field(ge=1)] | None
"""Samples drawn from the calibration split: exactly so many, which it is an error not to have.

None, the default of every stage, is as many as there are up to :attr:`Stage.default_samples`."""


class Stage(Settings, Generic[Reads, Writes]):
    """One step of a pipeline; a subclass's type arguments are the artifacts it reads and writes."""

    stage: str
    name: StageName | None = None
    """Name of this step in the report and on disk; the stage's type by default."""
    input: str | None = None
    """Earlier stage whose artifact is read, or `source`; the previous stage by default."""
    gates: tuple[AnyGate, ...] = ()
    """Rules that the result must satisfy."""

    requirements: ClassVar[tuple[Requirement, ...]] = ()
    streams: ClassVar[bool] = False
    """Whether it takes a model whose weights stay on disk (`model.stream`)."""
    keeps_outputs: ClassVar[bool] = False
    """Whether the result must compute the outputs of its input, up to :meth:`rounding_error`."""
    records_history: ClassVar[bool] = False
    """Whether the result includes :attr:`Context.history`."""
    default_samples: ClassVar[int] = DEFAULT_CALIBRATION_SAMPLES
    """Most samples drawn where `calibration_samples` is not set."""

    def run(self, model: Reads, context: Context) -> Writes:
        """Do the stage's work and write its artifact to ``context.root``."""
        raise NotImplementedError

    def run_checked(self, model: Reads, context: Context) -> Writes:
        """Run; raise CompressError where something is missing, or user code calls `sys.exit()`."""
        if self.needs_data:
            context.need_data(self.title)
        refuse_unmet(self.unmet(context), self.title)
        with gc_frozen(), exits_refused():
            return self.run(model, context)

    def rounding_error(self, model: Artifact, artifact: Artifact) -> float:
        """Return the error of outputs, relative to their spread, that rounding numbers explains."""
        # Of float32: sums in another order differ by some 1e-6 of the norm, of which the spread
        # between samples may be a small part. An error so large costs an R² 0.0001.
        return 1e-2

    def check_parity(self, model: Reads, artifact: Writes, context: Context) -> None:
        """Raise StageFailed if a cached result computes other than its input; for exporters."""

    @property
    def not_run(self) -> str:
        """Why the result cannot be called on this machine, in words; empty where it can."""
        return ""

    def unmet_by_gate(self, gate: Gate) -> Iterator[Unmet]:
        """Yield why a gate cannot be measured on the result, which nothing here can call."""
        if (gate.depends_on_batch or gate.may_vary) and (reason := self.not_run):
            problem = (
                f"calls the result of {self.title}, which is {reason}; leave the gate out, or run "
                "the pipeline on such a machine"
            )
            yield Unmet((), problem, Unavailable)

    def __call__(self, model: Reads, context: Context) -> Writes:
        """Run, and return the artifact; raise GateRefused, which names it, if a gate refuses it."""
        for gate in self.gates if context.task is None else self.for_task(context.task).gates:
            if gate.needs_data:
                context.need_data(f"{self.title}: {gate.gate}")
            lacks = (*self.unmet_by_gate(gate), *gate.unmet(context))
            refuse_unmet(lacks, f"{self.title}: {gate.gate}")
        artifact = self.run_checked(model, context)
        context.clear_work()
        verdicts = self.judge(model, artifact, context)
        if refused := refusal(self.title, verdicts, artifact.path):
            raise refused
        return artifact

    def judge(self, model: Artifact, artifact: Artifact, context: Context) -> list[Verdict]:
        """Return every gate's verdict on the result."""
        stage = self if context.task is None else self.for_task(context.task)
        # A gate `on` a device may be against this very file, here.
        context = replace(context, artifacts={**context.artifacts, self.title: artifact})
        return list(evaluate_gates(stage.gates, model, artifact, context))

    def for_task(self, task: Task) -> Self:
        """Return the stage without those of its default gates that do not suit the task."""
        if not self.has_default("gates"):
            return self
        gates = tuple(gate for gate in self.gates if not gate.unsuitable_task(task))
        return self.model_copy(update={"gates": gates})

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
        """Whether the result depends on the data, if the pipeline has any."""
        return self.needs_data

    @property
    def uses_loss(self) -> bool:
        """Whether the result depends on the loss."""
        return False

    @property
    def uses_calibration_labels(self) -> bool:
        """Whether targets of the calibration samples are read."""
        return False

    def check_loss(self, loss: Loss) -> None:
        """Raise CompressError if a setting does not go with the loss, whose name is known."""

    def unmet(self, context: Context) -> Iterator[Unmet]:
        """Yield what keeps the stage from running, as far as settings, data and machine show it."""
        yield from unmet_in(self, self.all_requirements(), context)

    def unmet_by(self, context: Context) -> Iterator[Unmet]:
        """Yield what is wrong with the split that calibration samples are drawn from."""
        yield from super().unmet_by(context)
        data, drawn = context.data, self.drawn_samples
        if data is None or not (drawn and self.needs_data):
            return
        name = data.calibration_split
        if name not in data.datasets:
            found = ", ".join(map(repr, data.datasets))
            yield Unmet((), f"draws samples from split {name!r}, and the data has {found}; add it")
        elif self.available_samples(data) > (available := len(data.split(name))):  # type: ignore[arg-type]
            problem = (
                f"{drawn} samples asked for and split {name!r} has {available}; lower "
                "calibration_samples or bring more data"
            )
            yield Unmet(("calibration_samples",), problem)

    @property
    def drawn_samples(self) -> int:
        """Upper bound of the samples that the stage draws from the calibration split."""
        samples: int | None = getattr(self, "calibration_samples", 0)
        return self.default_samples if samples is None else samples

    def available_samples(self, data: Splits) -> int:
        """Return how many calibration samples to draw: those set, or all up to the default."""
        available = len(data.split(data.calibration_split))  # type: ignore[arg-type]
        is_set = getattr(self, "calibration_samples", None) is not None
        return self.drawn_samples if is_set else min(self.drawn_samples, available)

    @property
    def machine_parts(self) -> dict[str, Any]:
        """Properties of the machine that the result depends on, such as its CPU; usually none."""
        return {}

    @property
    def extra_inputs(self) -> tuple[str, ...]:
        """Names of the artifacts read besides the input."""
        return ()

    @property
    def extra_input_types(self) -> tuple[type[Artifact], ...]:
        """Types that those artifacts may have."""
        return (Artifact,)

    @property
    def activation_formats(self) -> frozenset[str]:
        """Formats of the result's activations besides float32, as far as the settings decide it."""
        return frozenset()

    def unsupported_input_reason(self, formats: Set[str]) -> str:
        """Return why an input with activations of these formats is refused; empty if it is not."""
        return ""

    def resolve_paths(self, folder: Path, code: Path) -> Self:
        """Return the stage with paths below the pipeline's folder, or that of user code."""
        return self

    def all_requirements(self) -> tuple[Requirement, ...]:
        """Return the modules and programs that the stage, or a setting within it, needs."""
        return tuple(requirements_of(self))

    def with_settings(self, changes: Mapping[str, Any]) -> Self:
        """Return the stage without its gates and with other, fitting settings; None removes one."""
        own = {name: value for name, value in self if name not in {"gates", *changes}}
        changed = {name: value for name, value in changes.items() if value is not None}
        return type(self).model_validate({**own, **changed})

    def own_settings(self) -> dict[str, Any]:
        """Return the settings that decide the result: all but name, input and gates."""
        return self.model_dump(mode="json", exclude={"name", "input", "gates"})

    def lineage(self, model: Artifact, **others: str) -> tuple[Step, ...]:
        """Return the input's lineage with this step added; other inputs are digests by role."""
        inputs = {"input": model.digest, **others}
        step = Step(stage=self.stage, settings=self.own_settings(), inputs=inputs)
        return (*model.manifest.lineage, step)

    @classmethod
    def reads(cls) -> Any:
        """Return the artifact type, or union of types, that the stage reads."""
        return cls._type_arguments()[0]

    @classmethod
    def writes(cls) -> Any:
        """Return the artifact type, or union of types, that the stage writes."""
        return cls._type_arguments()[1]

    @classmethod
    def _type_arguments(cls) -> tuple[Any, Any]:
        for base in cls.__mro__:
            if arguments := getattr(base, "__pydantic_generic_metadata__", {}).get("args"):
                return arguments[0], arguments[1]
        raise TypeError(f"{cls.__name__} must inherit from Stage[Reads, Writes]")
