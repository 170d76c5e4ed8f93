"""Runtimes: which kernels compute a file, and what a speedup is over."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import Field

from compress.artifacts.artifact import Artifact
from compress.artifacts.eager_model import EagerModel
from compress.artifacts.graph_model import GraphModel
from compress.artifacts.kinds import import_announced
from compress.common.errors import StageFailed
from compress.common.forward import Predictor, opened_model, torch_predictor
from compress.common.lazy_modules import torch
from compress.common.requirements import COMPILER, Requirement, require_all
from compress.core.gates.gate import Gate

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from compress.core.context import Context

logger = logging.getLogger(__name__)


class _ShareGate(Gate):
    # On a share of the work that the exporter counted.
    limit_field = "share"
    higher_passes = True
    compares = False
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

    rule_template = "delegated share >= {share:g}"
    report_template = "the backend computes at least {percent:g} % of the multiply-accumulates"
    fact = "delegated_share"
    counted_where = "reports_delegation"
    not_counted = (
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

    rule_template = "share of integer multiply-accumulates >= {share:g}"
    report_template = "integer kernels do at least {percent:g} % of the multiply-accumulates"
    fact = "integer_share"
    counted_where = "reports_integer_share"
    not_counted = (
        "is for the results of export_onnx, export_aot and export_executorch, found {kind}: what "
        "its kernels multiply is not counted"
    )


class BaselineRuntime(NamedTuple):
    """A runtime in which the uncompressed model can be measured."""

    name: str
    """As in a gate's ``against``."""
    title: str
    """As in tables and messages."""
    kinds: frozenset[str]
    """Kinds of artifacts that it executes as they are."""
    exporter: Callable[[Artifact, Context], Any] | None = None
    """Returns the stage that exports a model to be compared with a result; None where none can."""
    reads: frozenset[str] = frozenset()
    """Kinds of artifacts that it exports."""
    open: Callable[[Artifact, str, int], AbstractContextManager[Predictor]] | None = None
    """Opens an artifact on a device with a number of threads; by default :meth:`Artifact.open`."""
    requirements: tuple[Requirement, ...] = ()


class BaselineArtifact(Artifact):
    """The uncompressed model in a runtime; it is exported when it is opened for the first time.

    Where it was imported from a file that the runtime executes, it is that file.
    """

    # An artifact, as gates, latency measurement and the cache of measurements need a signature, a
    # digest and ``open`` of the baseline, and then treat it as any other.

    def __init__(
        self, runtime: BaselineRuntime, model: Artifact, result: Artifact, context: Context
    ) -> None:
        self.stage, own = None, dict[str, Any]()
        if runtime.exporter is not None and model.kind in runtime.reads - runtime.kinds:
            self.stage = runtime.exporter(result, context)
            own = self.stage.model_dump(mode="json", exclude_defaults=True)
        how = "".join(f", {name} {own[name]}" for name in sorted(own.keys() - {"stage"}))
        digest = f"{model.digest} in {runtime.name} on {context.device}{how}"
        super().__init__(model.path, model.manifest, digest)
        self.runtime, self.model, self.context = runtime, model, context
        uncompressed = context.artifacts.get(context.baseline)
        is_original = uncompressed is not None and uncompressed.digest == model.digest
        originals = context.originals if is_original else {}
        self.original = next((originals[kind] for kind in runtime.kinds & originals.keys()), None)

    @opened_model
    def open(self, device: str = "cpu", threads: int = 1) -> Iterator[Predictor]:
        """Open the model in the runtime; StageFailed where that cannot execute it."""
        runtime, model = self.runtime, self.written()
        opened = runtime.open(model, device, threads) if runtime.open else None
        with opened or model.open(device, threads) as predict:
            yield predict

    def make_ready(self) -> None:
        """Export the model, so that timing does not begin with it."""
        self.written()

    def written(self) -> Artifact:
        """Return what the runtime executes, exported once; StageFailed where it cannot be."""
        runtime, model, stage = self.runtime, self.model, self.stage
        needed = stage.all_requirements() if stage else runtime.requirements
        require_all(needed, f"against {runtime.name}")
        if self.original is not None:
            return self.context.exports.get_or_write(self.digest, self.original)
        if model.kind not in runtime.kinds:
            if stage is None:
                takes = " and ".join(sorted(runtime.kinds | runtime.reads))
                raise StageFailed(
                    f"against {runtime.name}: the model came in as {model.kind}, which "
                    f"{runtime.name} cannot run; it runs {takes}"
                )
            model = self.context.exports.get_or_write(
                self.digest,
                lambda root: stage.run_as_baseline(self.model, self.context.with_root(root)),
            )
        return model


def baseline_for(gate: Gate, model: Artifact, result: Artifact, context: Context) -> Artifact:
    """Return the artifact that a gate compares a stage's result with.

    That is what its ``against`` names; by default the uncompressed model in the result's runtime
    for a gate on speed, and the stage's input for another.
    """
    # A stage that bears a runtime's name takes precedence.
    if gate.allows_runtime and gate.against not in context.artifacts:
        if gate.against is None:
            return in_runtime_of(result, context) or model
        if runtime := runtime_named(gate.against):
            return _in_runtime(runtime, result, context)
    if gate.against is None and gate.of_uncompressed:
        return context.artifacts.get(context.baseline, model)
    return model if gate.against is None else context.artifact(gate.against)


def baseline_name(gate: Gate, result_kind: str, stage_input: str, uncompressed: str) -> str:
    """Return the name of what a gate compares a result of a kind with, for reports.

    The others are the names of the stage's input and of the uncompressed model.
    """
    if gate.against is None and gate.allows_runtime and (runtime := runtime_of(result_kind)):
        return f"{uncompressed} in {runtime.title}"
    return gate.against or (uncompressed if gate.of_uncompressed else stage_input)


def runtime_named(name: str) -> BaselineRuntime | None:
    """Return the runtime of a name; None where no package here has it."""
    if name not in BASELINES:
        import_announced()
    return BASELINES.get(name)


def runtime_of(kind: str) -> BaselineRuntime | None:
    """Return the runtime that executes artifacts of a kind; None for packages, and unknown ones."""
    return next((r for r in BASELINES.values() if kind in r.kinds and r.open is None), None)


def in_runtime_of(result: Artifact, context: Context) -> Artifact | None:
    """Return the uncompressed model in the runtime of a result; None for one without a runtime.

    So that a speedup is what compression gains, and not what the runtime does.
    """
    runtime = runtime_of(result.kind)
    if runtime is None:
        return None
    # A file that was compiled for one device is compared with another for the same.
    context = replace(context, device=result.runs_on(context.device))
    return _in_runtime(runtime, result, context)


def _in_runtime(runtime: BaselineRuntime, result: Artifact, context: Context) -> Artifact:
    # The model that a run compresses, else the first one that the result's lineage shows.
    model = context.artifacts.get(context.baseline)
    if model is None:
        model = nearest_float_model(result, context)
    if model.kind in runtime.kinds and runtime.open is None:
        return model
    baseline = BaselineArtifact(runtime, model, result, context)
    if baseline.original is None and baseline.stage is not None:
        lineage = baseline.stage.lineage(model)
        exported = (result, *context.artifacts.values())
        found = [a for a in exported if a.kind in runtime.kinds and a.manifest.lineage == lineage]
        if found:  # the pipeline has exported it, to the same file
            return found[0]
    return baseline


def nearest_float_model(model: Artifact, context: Context) -> Artifact:
    """Return the last eager model in an artifact's lineage, or the lineage's first artifact."""
    # Eager models compute in the floats that they were trained in; graphs may be quantized.
    known = {artifact.digest: artifact for artifact in context.artifacts.values()}
    while model.kind != "eager" and model.manifest.lineage:
        input_digest = model.manifest.lineage[-1].inputs.get("input", "")
        if input_digest not in known:
            raise StageFailed(
                f"{model.path}: the float model that it was made of is not known here; pass it "
                "with Context(artifacts=…)"
            )
        model = known[input_digest]
    return model


def _compiled(model: Artifact, device: str, threads: int) -> AbstractContextManager[Predictor]:
    torch.compiler.reset()  # or earlier compilations count against torch's recompile limit
    if isinstance(model, EagerModel):
        module = model.load(device)
    elif isinstance(model, GraphModel):
        module = model.program(device).module()
    else:
        raise StageFailed(f"{model.kind} artifacts have no module")
    # By default an axis becomes dynamic when its size changes. With ``dynamic=False`` the model
    # would be compiled for each size, and not at all beyond the eighth.
    return torch_predictor(torch.compile(module), device, threads)


EAGER = "eager PyTorch"  # title of the runtime that models come from
IN_PYTORCH = frozenset({"eager", "graph"})
# A registry, as ``compress`` may not import ``export``, which alone can write files: each exporter
# adds its runtime when it is defined (`compress.export.exporter`).
BASELINES: dict[str, BaselineRuntime] = {
    "eager": BaselineRuntime("eager", EAGER, IN_PYTORCH),
    "compiled": BaselineRuntime(
        "compiled", "torch.compile", IN_PYTORCH, open=_compiled, requirements=(COMPILER,)
    ),
}
"""Every runtime by its name in a gate's ``against``."""
