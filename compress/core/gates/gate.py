"""The base class of gates: a rule with a limit, and everything that a run has to know of it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple, Union

from pydantic import BeforeValidator, Field, GetJsonSchemaHandler, JsonValue, TypeAdapter
from pydantic_core import core_schema

from compress.common.config import Settings, Unmet
from compress.common.errors import (
    CompressError,
    PipelineInvalid,
    StageFailed,
    Unavailable,
    exits_refused,
    located,
    raise_if_resources_ran_out,
)
from compress.common.requirements import Requirement, announced, unmet_in
from compress.core.devices import OnDevice, device_named, devices
from compress.core.verdict import Bound, Uncertainty, Verdict
from compress.profiling.benchmark import NotMeasurable

if TYPE_CHECKING:
    from compress.artifacts.artifact import Artifact
    from compress.core.context import Context
    from compress.core.objectives.task import Task

COST_ELSEWHERE = (
    "takes gates that judge answers, such as max_drop, label_agreement and parity: time and memory "
    "in an emulator or a browser are not the device's, and a size is the same everywhere"
)


class Measured(NamedTuple):
    """A measured value, and what it rests on: the fields of :class:`Verdict`."""

    value: float
    uncertainty: Uncertainty | None = None
    bound: Bound | None = None
    outputs: Mapping[str, float] = {}


class Gate(Settings):
    """A rule with a limit: it measures one number of a stage's result.

    A subclass is an entry point of the group ``compress.gates``. One that cannot be measured fails.
    """

    gate: str
    against: str | None = None
    """Earlier stage compared with, or `source`; by default the stage's input."""
    on: Annotated[
        tuple[str, ...],
        BeforeValidator(
            lambda on: (on,) if isinstance(on, str) else on,
            json_schema_input_type=str | tuple[str, ...],
        ),
    ] = ()
    """Devices that the stage's file is opened on instead of here, of `compress devices`: a name or
    a list, each with a verdict of its own. What it is compared with answers here; `against` may
    then also name the stage itself: the same file here."""

    limit_field: ClassVar[str]
    """The setting that holds the limit."""
    rule_template: ClassVar[str]
    """The rule with its unit, as errors and `report.json` have it; settings in braces."""
    report_template: ClassVar[str] = ""
    """The rule as the table and the page have it, with `{limit}`, `{percent}` (100 times the limit)
    and `{metric}`; ``rule_template`` where empty. Its unit is that of the value beside it: percent,
    or the word that ends the rule after its limit."""
    higher_passes: ClassVar[bool] = False
    """Whether the value must reach the limit, instead of staying under it."""
    compares: ClassVar[bool] = True
    """Whether the result is compared with another artifact, the one that `against` names."""
    allows_runtime: ClassVar[bool] = False
    """Whether `against` may also name a runtime of the uncompressed model, such as `onnxruntime`,
    and is by default that of the result, as it is for speed; else it is the stage's input."""
    of_uncompressed: ClassVar[bool] = False
    """Whether it compares with the uncompressed model where `against` names none."""
    needs_data: ClassVar[bool] = False
    """Whether it cannot be measured without the pipeline's data, of which it reads `val`."""
    depends_on_batch: ClassVar[bool] = False
    """Whether outputs on `val` decide the value, so that the number of rows in a call may too."""
    may_vary: ClassVar[bool] = False
    """Whether the value differs from run to run, as times and memory do."""
    reads_all_outputs: ClassVar[bool] = False
    """Whether it looks at every output of any model; else :attr:`Measured.outputs` names those."""
    judges_quality: ClassVar[bool] = False
    """Whether it refuses a result that answers worse than the artifact compared with."""
    measured_as: ClassVar[Mapping[str, str]] = {}
    """How values are measured, where those that earlier versions stored are measured otherwise."""

    @property
    def requirements(self) -> tuple[Requirement, ...]:
        """Libraries and programs that measuring takes; a run that lacks one is refused early."""
        return ()

    def unmet(self, context: Context) -> Iterator[Unmet]:
        """Yield what keeps the gate from being measured, known before anything runs."""
        yield from unmet_in(self, self.requirements, context)
        needs = (need for name in self.on for need in device_named(name).requirements)
        yield from (Unmet(("on",), n.problem, Unavailable, n.program) for n in needs if n.missing())

    def on_each(self) -> Iterator[Gate]:
        """Yield the gate for each of its devices; itself where it is measured here."""
        if not self.on:
            yield self
        for name in self.on:
            yield self.model_copy(update={"on": (name,)})

    def unmet_by(self, context: Context) -> Iterator[Unmet]:
        """Yield that there is no split to measure on."""
        if self.needs_data and context.data is not None and "val" not in context.data.datasets:
            found = ", ".join(map(repr, context.data.datasets))
            problem = f"measures on split 'val', and the data has {found}; add a split 'val'"
            yield Unmet((), problem)

    @property
    def limit(self) -> float:
        """The number that the value is held against."""
        return float(getattr(self, self.limit_field))

    @property
    def rule(self) -> str:
        """The rule with its unit, such as ``size ratio <= 0.25``."""
        return self.rule_template.format_map(dict(self))

    def measure(self, before: Artifact, after: Artifact, context: Context) -> float | Measured:
        """Measure the value of a stage's result, `after`; raise CompressError where that fails.

        `before` is the artifact that it is compared with.
        """
        raise NotImplementedError

    def unsuitable_artifact(self, written: type[Artifact]) -> str:
        """Return, before anything runs, why a limit or this type of result cannot be meant."""
        return ""

    def unsuitable_device(self, written: type[Artifact]) -> str:
        """Return why this cannot be measured on its devices, for this type of result."""
        if self.on and not self.depends_on_batch:
            return f"on: {COST_ELSEWHERE}"
        for device in map(device_named, self.on):
            if written.kind not in device.kinds:
                opens = " and ".join(sorted(device.kinds))
                return f"{device.name} opens {opens}, found {written.kind}"
        return ""

    def unsuitable_metric(self, metric: str) -> str:
        """Return, before anything runs, why the limit does not go with the pipeline's metric."""
        return ""

    def unsuitable_task(self, task: Task) -> str:
        """Return, before anything runs, why the gate does not go with what the model is for."""
        return ""

    def measurement_key(self) -> dict[str, JsonValue]:
        """Return the settings that change the measured value, its limit left out."""
        # Measured once per pair of artifacts: tightening a limit judges again without computing.
        key = self.model_dump(mode="json", exclude={self.limit_field, "against", "on"})
        key |= {f"on {name}": devices()[name].version for name in self.on}
        return {**key, **self.measured_as}

    def evaluate(self, before: Artifact, after: Artifact, context: Context) -> Verdict:
        """Compare the measured value with the limit; raise Unavailable if a library is missing.

        Of several devices, return the verdict on the first that refuses, else on the first.
        """
        if len(self.on) > 1:
            verdicts = [each.evaluate(before, after, context) for each in self.on_each()]
            return min(verdicts, key=lambda verdict: verdict.passed)
        try:
            with exits_refused():
                if problem := self.unsuitable_device(type(after)):
                    raise PipelineInvalid(problem)
                for name in self.on:
                    # A property of the model, and costly to measure there.
                    dependence = context.batch_dependence(after)
                    after = OnDevice(after, device_named(name))
                    context.caches.dependences[after.digest] = dependence
                found = self.measure(before, after, context)
                own = found if isinstance(found, Measured) else Measured(found)
                return self.verdict(**own._asdict())
        except Unavailable:
            # What is not installed is no verdict on the model: the run ends with another exit code.
            raise
        except Exception as error:  # noqa: BLE001 - a model or metric of the user's may raise any
            if not self.on:  # of a device's memory a model may need too much
                with located(f"gate {self.gate}: ", StageFailed):
                    raise_if_resources_ran_out(error)
            if isinstance(error, CompressError):
                return self.verdict(None, str(error), was_busy=isinstance(error, NotMeasurable))
            return self.verdict(None, f"{type(error).__name__}: {error}")

    def stored_verdict(self, stored: Any) -> Verdict:
        """Hold against the limit what :attr:`Verdict.measured` returned for an earlier verdict."""
        found = stored if isinstance(stored, dict) else {"value": float(stored)}
        return Verdict.model_validate({**dict(self.verdict(found["value"])), **found})

    def verdict(self, value: float | None, reason: str = "", **basis: Any) -> Verdict:
        """Hold a measured value against the limit; None and NaN never pass.

        `basis` is what the value rests on, as :class:`Measured` has it.
        """
        if value is None or not math.isfinite(value):
            value, passed = None, False
            reason = reason or "the measured value is not finite"
        else:
            passed = value >= self.limit if self.higher_passes else value <= self.limit
        return Verdict(
            gate=self.gate,
            value=value,
            limit=self.limit,
            passed=passed,
            against=(self.against or "input") if self.compares else None,
            on=", ".join(self.on),
            rule=self.rule,
            reason=reason,
            **basis,
        )

    def reproducible(self, verdict: Verdict) -> Verdict:
        """Return a verdict of this gate without a value that differs from run to run."""
        return verdict.model_copy(update={"value": None}) if self.may_vary else verdict

    @classmethod
    def rule_in_words(cls, verdict: Verdict, metric: str) -> str:
        """Return the rule of a verdict for the table and the page."""
        values = {"limit": verdict.limit, "percent": 100 * verdict.limit, "metric": metric}
        return cls.report_template.format_map(values) or verdict.rule

    @classmethod
    def value_in_words(cls, verdict: Verdict, metric: str) -> str:
        """Return a verdict's value in the unit of :meth:`rule_in_words`, or why there is none."""
        rule = cls.report_template or verdict.rule
        if "{percent" in rule:
            return describe_value(verdict, " %", 100)
        unit = re.search(r"[\d}]( [^\s\d]+)$", rule)
        return describe_value(verdict, unit[1] if unit else "")


def describe_value(verdict: Verdict, unit: str, factor: float = 1.0) -> str:
    """Return a verdict's value, times a factor, with its unit and basis, or why it has none."""
    if verdict.value is None:
        return verdict.reason
    basis = verdict.basis(unit if unit == " %" else "", factor)
    return f"{factor * verdict.value:.5g}{unit}{basis}"


@cache
def gate_classes() -> dict[str, type[Gate]]:
    """Return every gate by its `gate` key; Unavailable where a package's is broken or clashes."""
    return announced("compress.gates", "gate", "gate")


@cache
def _every_gate() -> TypeAdapter[Gate]:
    union: Any = Annotated[Union[tuple(gate_classes().values())], Field(discriminator="gate")]  # noqa: UP007
    return TypeAdapter(union)


class AnnouncedGates:
    """Annotates a setting that takes any gate; packages are asked for theirs at its first use."""

    # Not where the class of a stage is made: the modules of gates import this one.

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(
            lambda gate: gate if isinstance(gate, Gate) else _every_gate().validate_python(gate),
            # By the gate's own class; that of the annotation knows no limits.
            serialization=core_schema.simple_ser_schema("any"),
        )

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return handler(_every_gate().core_schema)


AnyGate = Annotated[Gate, AnnouncedGates()]  # every gate, by its `gate` key


def gate_class(key: str) -> type[Gate]:
    """Return a gate's class by its `gate` key; the base class where its package is not here."""
    return gate_classes().get(key, Gate)


def rule_in_words(verdict: Verdict, metric: str) -> str:
    """Return a verdict's rule for people, with the metric's name."""
    return gate_class(verdict.gate).rule_in_words(verdict, metric)


def value_in_words(verdict: Verdict, metric: str) -> str:
    """Return what a gate measured, in the unit of :func:`rule_in_words`, or why it could not."""
    return gate_class(verdict.gate).value_in_words(verdict, metric)
