"""Baselines of a speedup: the uncompressed model in the result's own runtime, or in another."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from compress.artifacts.artifact import Artifact
from compress.artifacts.kinds import import_announced
from compress.common.errors import StageFailed
from compress.common.forward import opened_model
from compress.common.requirements import COMPILER, Requirement, require_all

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from compress.common.forward import Predictor
    from compress.core.context import Context
    from compress.core.gates.gate import Gate


class BaselineRuntime(NamedTuple):
    """A runtime in which the uncompressed model can be measured."""

    name: str
    """As in a gate's ``against``."""
    title: str
    """As in tables and messages."""
    kinds: frozenset[str]
    """Kinds of artifacts that it executes as they are."""
    write: Callable[[Artifact, Context], Artifact] | None = None
    """Exports a model with default settings to the context's ``root``; None where nothing can."""
    reads: frozenset[str] = frozenset()
    """Kinds of artifacts that it exports."""
    open: Callable[[Artifact, str, int], AbstractContextManager[Predictor]] | None = None
    """Opens an artifact on a device with a number of threads; by default :meth:`Artifact.open`."""
    requirements: tuple[Requirement, ...] = ()


class BaselineArtifact(Artifact):
    """The uncompressed model in a runtime; it is exported when it is opened for the first time."""

    # An artifact, as gates, latency measurement and the cache of measurements need a signature, a
    # digest and ``open`` of the baseline, and then treat it as any other.

    def __init__(self, runtime: BaselineRuntime, model: Artifact, context: Context) -> None:
        """Wrap a model for a runtime, on the context's device."""
        digest = f"{model.digest} in {runtime.name} on {context.device}"
        super().__init__(model.path, model.manifest, digest)
        self.runtime, self.model, self.context = runtime, model, context

    @opened_model
    def open(self, device: str = "cpu", threads: int = 1) -> Iterator[Predictor]:
        """Open the model in the runtime.

        Raises:
            StageFailed: the runtime cannot execute the model.
            Unavailable: something for it is not installed.
        """
        runtime, model, write = self.runtime, self.model, self.runtime.write
        require_all(runtime.requirements, f"against {runtime.name}")
        if model.kind not in runtime.kinds:
            if write is None or model.kind not in runtime.reads:
                takes = " and ".join(sorted(runtime.kinds | runtime.reads))
                raise StageFailed(
                    f"against {runtime.name}: the model came in as {model.kind}, which "
                    f"{runtime.name} cannot run; it runs {takes}"
                )
            model = self.context.exports.get_or_write(
                self.digest, lambda root: write(self.model, self.context.with_root(root))
            )
        opened = runtime.open(model, device, threads) if runtime.open else None
        with opened or model.open(device, threads) as predict:
            yield predict


def baseline_for(gate: Gate, model: Artifact, result: Artifact, context: Context) -> Artifact:
    """Return the artifact that a gate compares a stage's result with.

    That is what its ``against`` names; by default the uncompressed model in the result's runtime
    for a gate on speed, and the stage's input for another.
    """
    # A stage that bears a runtime's name takes precedence.
    if gate.allows_runtime and gate.against not in context.artifacts:
        if gate.against is None:
            return in_runtime_of(result, context) or model
        runtime = runtime_named(gate.against)
        if runtime is not None:
            return _in_runtime(runtime, uncompressed_model(result, context), context)
    return model if gate.against is None else context.artifact(gate.against)


def baseline_name(gate: Gate, result_kind: str, stage_input: str, uncompressed: str) -> str:
    """Return the name of what a gate compares with, for reports.

    Args:
        gate: the gate.
        result_kind: kind of the stage's result.
        stage_input: name of the stage's input.
        uncompressed: name of the uncompressed model.
    """
    runtime = runtime_of(result_kind) if gate.allows_runtime else None
    if gate.against is None and runtime is not None:
        return f"{uncompressed} in {runtime.title}"
    return gate.against or stage_input


def runtime_named(name: str) -> BaselineRuntime | None:
    """Return the runtime of a name; None where no package here has it."""
    if name not in BASELINES:
        import_announced()
    return BASELINES.get(name)


def runtime_of(kind: str) -> BaselineRuntime | None:
    """Return the runtime that executes artifacts of a kind; None for packages, and unknown ones."""
    found = (r for r in BASELINES.values() if kind in r.kinds and r.open is None)
    return next(found, None)


def in_runtime_of(result: Artifact, context: Context) -> Artifact | None:
    """Return the uncompressed model in the runtime of a result; None for one without a runtime.

    So that a speedup is what compression gains, and not what the runtime does.
    """
    runtime = runtime_of(result.kind)
    if runtime is None:
        return None
    # A file that was compiled for one device is compared with another for the same.
    context = replace(context, device=result.runs_on(context.device))
    return _in_runtime(runtime, uncompressed_model(result, context), context)


def _in_runtime(runtime: BaselineRuntime, model: Artifact, context: Context) -> Artifact:
    if model.kind in runtime.kinds and runtime.open is None:
        return model
    return BaselineArtifact(runtime, model, context)


def uncompressed_model(result: Artifact, context: Context) -> Artifact:
    """Return the model that a run compresses, else the first one that a result's lineage shows."""
    if context.baseline in context.artifacts:
        return context.artifacts[context.baseline]
    return nearest_float_model(result, context)


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


@contextmanager
def _compiled(model: Artifact, device: str, threads: int) -> Iterator[Predictor]:
    """Open a model under ``torch.compile``."""
    import torch

    from compress.artifacts.eager_model import EagerModel
    from compress.artifacts.graph_model import GraphModel
    from compress.common.forward import torch_predictor

    torch.compiler.reset()  # or earlier compilations count against torch's recompile limit
    if isinstance(model, EagerModel):
        module = model.load(device)
    elif isinstance(model, GraphModel):
        module = model.program(device).module()
    else:
        raise StageFailed(f"{model.kind} artifacts have no module")
    # By default an axis becomes dynamic when its size changes. With ``dynamic=False`` the model
    # would be compiled for each size, and not at all beyond the eighth.
    with torch_predictor(torch.compile(module), device, threads) as predict:
        yield predict


EAGER = "eager PyTorch"
"""Title of the runtime that models come from."""
IN_PYTORCH = frozenset({"eager", "graph"})
# A registry, as ``compress`` may not import ``export``, which alone can write files: each exporter
# adds its runtime when it is defined (`compress.export.exporter`).
BASELINES: dict[str, BaselineRuntime] = {
    "eager": BaselineRuntime("eager", EAGER, IN_PYTORCH),
    "compiled": BaselineRuntime(
        "compiled",
        "torch.compile",
        IN_PYTORCH,
        open=_compiled,
        requirements=(COMPILER,),
    ),
}
"""Every runtime by its name in a gate's ``against``."""
