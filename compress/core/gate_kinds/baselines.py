"""Baselines of a speedup: the float model in PyTorch, torch.compile, or another runtime."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from compress.artifacts.artifact import Artifact
from compress.common.errors import StageFailed
from compress.common.forward import opened_model
from compress.common.requirements import COMPILER, Requirement, require_all

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from compress.common.forward import Predictor
    from compress.core.context import Context
    from compress.core.gate import Gate


class BaselineRuntime(NamedTuple):
    """A runtime that can execute the float model."""

    open: Callable[[Artifact, str, int], AbstractContextManager[Predictor]]
    """Opens an artifact on a device with a number of threads, as a predictor."""
    artifact_kinds: frozenset[str]
    """Kinds of artifacts that it can open."""
    requirements: tuple[Requirement, ...] = ()


class BaselineArtifact(Artifact):
    """A float model that another runtime executes; nothing is written."""

    # An artifact, as gates, latency measurement and the cache of measurements need a signature, a
    # digest and ``open`` of the baseline, and then treat it as any other.

    def __init__(self, name: str, model: Artifact) -> None:
        """Wrap a model for a runtime; raise StageFailed if that cannot run models of its kind."""
        self.runtime = BASELINES[name]
        if model.kind not in self.runtime.artifact_kinds:
            raise StageFailed(
                f"against {name}: the model came in as {model.kind}, which {name} cannot run; "
                f"it runs {' and '.join(sorted(self.runtime.artifact_kinds))}"
            )
        super().__init__(model.path, model.manifest, f"{model.digest} in {name}")
        self.name, self.model = name, model

    @opened_model
    def open(self, device: str = "cpu", threads: int = 1) -> Iterator[Predictor]:
        """Open the model in the runtime; raise Unavailable if something for it is not installed."""
        require_all(self.runtime.requirements, f"against {self.name}")
        with self.runtime.open(self.model, device, threads) as predict:
            yield predict


def baseline_for(gate: Gate, model: Artifact, context: Context) -> Artifact:
    """Return the artifact that a gate's ``against`` names, by default the stage's input."""
    if gate.against is None:
        return model
    # A stage that bears a runtime's name takes precedence.
    if gate.against in BASELINES and gate.against not in context.artifacts:
        return BaselineArtifact(gate.against, nearest_float_model(model, context))
    return context.artifact(gate.against)


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


IN_PYTORCH = frozenset({"eager", "graph"})
# A registry, as ``compress`` may not import ``export``, which alone can write ONNX: each package
# adds the runtimes that it can open when it is imported.
BASELINES: dict[str, BaselineRuntime] = {
    "eager": BaselineRuntime(
        lambda model, device, threads: model.open(device, threads), IN_PYTORCH
    ),
    "compiled": BaselineRuntime(_compiled, IN_PYTORCH, (COMPILER,)),
}
"""Every runtime by its name in a gate's ``against``; ``export`` adds those of its files."""
