"""Baselines of a speedup: the float model in PyTorch, under torch.compile, or in another runtime.

A gate compares two artifacts and needs signature, digest and ``open`` of the baseline. A float
model in another runtime is therefore an artifact too, of which nothing is written, so that gates,
latency measurement and the cache of measurements treat it as any other.

``compress`` may not import ``export``, which alone can write ONNX. Each package adds the runtimes
that it can open to :data:`BASELINES` when it is imported.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from compress.artifacts.artifact import Artifact
from compress.common.errors import StageFailed, Unavailable
from compress.common.requirements import COMPILER, Requirement

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

    def __init__(self, name: str, model: Artifact) -> None:
        """Wrap a model for the runtime of that name.

        Raises:
            StageFailed: it cannot run models of this kind.
        """
        self.runtime = BASELINES[name]
        if model.kind not in self.runtime.artifact_kinds:
            raise StageFailed(
                f"against {name}: the model came in as {model.kind}, which {name} cannot run; "
                f"it runs {' and '.join(sorted(self.runtime.artifact_kinds))}"
            )
        super().__init__(model.path, model.manifest, f"{model.digest} in {name}")
        self.name, self.model = name, model

    @contextmanager
    def open(self, device: str = "cpu", threads: int = 1) -> Iterator[Predictor]:
        """Open the model in the runtime, as a predictor.

        Raises:
            Unavailable: something that the runtime needs is not installed.
        """
        for need in self.runtime.requirements:
            if need.missing():
                raise Unavailable(f"against {self.name}: needs {need.what}; {need.install}")
        with self.runtime.open(self.model, device, threads) as predict:
            yield predict


def baseline_for(gate: Gate, model: Artifact, context: Context) -> Artifact:
    """Return the artifact that a gate compares a stage's result with.

    A stage that bears a runtime's name takes precedence.

    Args:
        gate: the gate, whose ``against`` names it.
        model: the stage's input.
        context: has the earlier artifacts.

    Raises:
        StageFailed: nothing has that name, or there is no float model that the runtime can run.
    """
    if gate.against is None:
        return model
    if gate.against in BASELINES and gate.against not in context.artifacts:
        return BaselineArtifact(gate.against, nearest_float_model(model, context))
    return context.artifact(gate.against)


def nearest_float_model(model: Artifact, context: Context) -> Artifact:
    """Return the last eager model in an artifact's lineage, or the lineage's first artifact.

    Eager models compute in the floats that they were trained in; graphs may be quantized.

    Raises:
        StageFailed: an artifact of the lineage is not in the context.
    """
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
    """Open a model under ``torch.compile``, which makes an axis dynamic when its size changes.

    With ``dynamic=False`` it would be compiled for each size, and not at all beyond the eighth.
    """
    import torch

    from compress.artifacts.eager_model import EagerModel
    from compress.artifacts.graph_model import GraphModel
    from compress.common.forward import torch_predictor

    torch.compiler.reset()  # or earlier compilations count against torch's recompile limit
    if isinstance(model, EagerModel):
        module = model.load(device)
    elif isinstance(model, GraphModel):
        module = model.program().module().to(device)
    else:
        raise StageFailed(f"{model.kind} artifacts have no module")
    with torch_predictor(torch.compile(module), device, threads) as predict:
        yield predict


IN_PYTORCH = frozenset({"eager", "graph"})
BASELINES: dict[str, BaselineRuntime] = {
    "eager": BaselineRuntime(
        lambda model, device, threads: model.open(device, threads), IN_PYTORCH
    ),
    "compiled": BaselineRuntime(_compiled, IN_PYTORCH, (COMPILER,)),
}
"""Every runtime by its name in a gate's ``against``; ``export`` adds ``onnxruntime``."""
