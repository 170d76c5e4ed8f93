"""Gates on a runtime: which kernels compute a file, and how it answers in another runtime."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import Field

from compress.artifacts.kinds import import_announced
from compress.common.config import Count
from compress.common.errors import StageFailed
from compress.core.gates.gate import Gate

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch
    from pydantic import JsonValue

    from compress.artifacts.artifact import Artifact
    from compress.common.requirements import Requirement
    from compress.core.context import Context

logger = logging.getLogger(__name__)


class _ShareGate(Gate):
    # On a share of the work that the exporter counted.
    limit_field: ClassVar[str] = "share"
    higher_passes: ClassVar[bool] = True
    compares: ClassVar[bool] = False
    fact: ClassVar[str]
    """The artifact's fact that has the share."""
    counted_where: ClassVar[str]
    """Attribute of the types of artifacts that have it."""
    not_counted: ClassVar[str]
    """What to say of others, with `{kind}`."""

    def unsuitable_artifact(self, written: type[Artifact]) -> str:
        has_share = getattr(written, self.counted_where)
        return "" if has_share else self.not_counted.format(kind=written.kind)

    def measure(self, before: Artifact, after: Artifact, context: Context) -> float:
        if problem := self.unsuitable_artifact(type(after)):
            raise StageFailed(problem)
        share: Any = after.fact(self.fact)
        if share is None:
            raise StageFailed(
                "the multiply-accumulates of this file cannot be counted: it has none, or an "
                "operator that multiplies in ways that are not counted, such as a loop"
            )
        return float(share)


class MinDelegated(_ShareGate):
    """The backend that a file was lowered for computes nearly all of the model."""

    gate: Literal["min_delegated"] = "min_delegated"
    share: Annotated[float, Field(gt=0, le=1)]
    """Least share of the multiply-accumulates that is in the backend's own kernels; of the
    operators where nothing is multiplied."""

    rule_template: ClassVar[str] = "delegated share >= {share:g}"
    report_template: ClassVar[str] = (
        "the backend computes at least {percent:g} % of the multiply-accumulates"
    )
    fact: ClassVar[str] = "delegated_share"
    counted_where: ClassVar[str] = "reports_delegation"
    not_counted: ClassVar[str] = (
        "is for the results of export_executorch, found {kind}: its runtime has kernels of its own "
        "alone, and leaves nothing to others; how much of it is computed in integers is judged by "
        "min_integer_macs"
    )


class MinIntegerMacs(_ShareGate):
    """The runtime computes nearly all of a quantized model with integer kernels."""

    gate: Literal["min_integer_macs"] = "min_integer_macs"
    share: Annotated[float, Field(gt=0, le=1)]
    """Least share of the multiply-accumulates that integer kernels do, of those of convolutions,
    matrix products and recurrent layers, the products of attention included."""

    rule_template: ClassVar[str] = "share of integer multiply-accumulates >= {share:g}"
    report_template: ClassVar[str] = (
        "integer kernels do at least {percent:g} % of the multiply-accumulates"
    )
    fact: ClassVar[str] = "integer_share"
    counted_where: ClassVar[str] = "reports_integer_share"
    not_counted: ClassVar[str] = (
        "is for the results of export_onnx, export_aot and export_executorch, found {kind}: what "
        "its kernels multiply is not counted"
    )


class OtherRun(NamedTuple):
    """What a file did in another runtime."""

    difference: float
    """Largest absolute difference of an output to that of the artifact's own runtime."""
    p50_ms: float
    p90_ms: float
    described: str
    """The runtime with its version, and where it ran."""


class OtherRuntime(NamedTuple):
    """A runtime that opens a kind of artifact's files elsewhere than in this process."""

    run: Callable[[Artifact, Sequence[tuple[torch.Tensor, ...]]], OtherRun]
    """Runs an artifact on batches of inputs."""
    artifact_kinds: frozenset[str]
    requirements: tuple[Requirement, ...]
    versions: Callable[[], Mapping[str, str]]
    """Versions that its answers depend on."""


OTHER_RUNTIMES: dict[str, OtherRuntime] = {}
"""By a gate's ``runtime``. As ``compress`` may not import ``export``, that adds its own here."""


def _runtime_named(name: str) -> OtherRuntime:
    if name not in OTHER_RUNTIMES:
        import_announced()
    return OTHER_RUNTIMES[name]


class RunsIn(Gate):
    """The file runs in another runtime, and answers there as it does here, on samples of `val`.

    `web`: in a browser, by onnxruntime-web in a headless Chromium, for results of `export_onnx`.
    The latency there is logged.
    """

    gate: Literal["runs_in"] = "runs_in"
    runtime: Literal["web"] = "web"
    """Where the file is to run."""
    atol: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    """Largest absolute difference allowed between its outputs there and in this process."""
    batch: Count = 1
    """Samples per call."""

    limit_field: ClassVar[str] = "atol"
    rule_template: ClassVar[str] = "max |difference| in runtime {runtime} <= {atol:g}"
    compares: ClassVar[bool] = False

    @property
    def requirements(self) -> tuple[Requirement, ...]:
        """The runtime's libraries and programs."""
        return _runtime_named(self.runtime).requirements

    def measure(self, before: Artifact, after: Artifact, context: Context) -> float:
        """Return the largest absolute difference to the answers in this process."""
        if problem := self.unsuitable_artifact(type(after)):
            raise StageFailed(problem)
        batches = context.measured_batches(after.signature, self.batch)
        found = _runtime_named(self.runtime).run(after, batches)
        logger.info(
            "%s: a call of %d takes %.3g ms (median), %.3g ms (90th percentile)",
            *(found.described, self.batch, found.p50_ms, found.p90_ms),
        )
        if math.isnan(found.difference):
            raise StageFailed(f"an output is NaN or of another shape in {found.described}")
        return found.difference

    def unsuitable_artifact(self, written: type[Artifact]) -> str:
        """Return why the runtime cannot open such a result."""
        kinds = _runtime_named(self.runtime).artifact_kinds
        runs = f"{self.runtime} runs {' and '.join(sorted(kinds))} files"
        return "" if written.kind in kinds else f"{runs}, found {written.kind}"

    def measurement_key(self) -> dict[str, JsonValue]:
        """Return what changes the value."""
        return {**super().measurement_key(), **_runtime_named(self.runtime).versions()}
