"""Runtimes that a speedup may be judged against: a float model in PyTorch, compiled, and others.

A gate compares two artifacts, and asks of the one compared with only its signature, its digest and
to be opened. So a float model in another runtime is such an artifact too, of which nothing is
written: gates, the measurement in turn and the store of known figures need no second way.

``compress`` may not import ``export``, which alone can write ONNX. Each package therefore adds the
runtimes that it can open to :data:`RUNTIMES` when it is imported, as artifacts add their kinds.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple, Protocol

from compress.artifacts.artifact import Artifact
from compress.common.errors import StageFailed, Unavailable
from compress.common.requirements import COMPILER, Requirement

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    import torch

    from compress.common.forward import Predictor
    from compress.core.gate import Gate
    from compress.core.stage import Context


class Opener(Protocol):
    """How a runtime opens a float model."""

    def __call__(
        self, model: Artifact, device: str, threads: int
    ) -> AbstractContextManager[Predictor]:
        """Give the model as a predictor for the duration of a ``with`` block."""
        ...


class Runtime(NamedTuple):
    """What runs a float model."""

    opened: Opener
    takes: frozenset[str]
    """Kinds of artifacts."""
    requirements: tuple[Requirement, ...] = ()


class BaselineArtifact(Artifact):
    """A float model as another runtime answers it; nothing is written."""

    def __init__(self, name: str, model: Artifact) -> None:
        """Take a runtime by its name.

        Raises:
            StageFailed: it cannot run models of this kind.
        """
        self.runtime = BASELINES[name]
        if model.kind not in self.runtime.takes:
            raise StageFailed(
                f"against {name}: the model came in as {model.kind}, which {name} cannot run; "
                f"it runs {' and '.join(sorted(self.runtime.takes))}"
            )
        super().__init__(model.path, model.manifest, f"{model.digest} in {name}")
        self.name, self.model = name, model

    @contextmanager
    def open(self, device: str = "cpu", threads: int = 1) -> Iterator[Predictor]:
        """Give the runtime's model as a predictor.

        Raises:
            Unavailable: something that the runtime needs is not here.
        """
        for need in self.runtime.requirements:
            if need.missing():
                raise Unavailable(f"against {self.name}: needs {need.what}; {need.install}")
        with self.runtime.opened(self.model, device, threads) as predict:
            yield predict


def baseline_for(gate: Gate, model: Artifact, context: Context) -> Artifact:
    """Return what a gate compares a stage's result with; a stage's name goes before a runtime's.

    Args:
        gate: the gate.
        model: the stage's input.
        context: with the artifacts before.

    Raises:
        StageFailed: there is nothing of that name, or no float model that the runtime could run.
    """
    if gate.against is None:
        return model
    if gate.against in BASELINES and gate.against not in context.artifacts:
        return BaselineArtifact(gate.against, float_model_of(model, context))
    return context.artifact(gate.against)


def float_model_of(model: Artifact, context: Context) -> Artifact:
    """Return the nearest eager model on the road to an artifact, or what that road began with.

    Eager models compute in the floats that they were trained in; graphs may be quantized.

    Raises:
        StageFailed: an artifact on that road is not known.
    """
    known = {artifact.digest: artifact for artifact in context.artifacts.values()}
    while model.kind != "eager" and model.manifest.lineage:
        before = model.manifest.lineage[-1].inputs.get("input", "")
        if before not in known:
            raise StageFailed(
                f"{model.path}: the float model that it was made of is not known here; pass it "
                "with Context(artifacts=…)"
            )
        model = known[before]
    return model


@contextmanager
def _eager(model: Artifact, device: str, threads: int) -> Iterator[Predictor]:
    with model.open(device, threads) as predict:
        yield predict


@contextmanager
def _compiled(model: Artifact, device: str, threads: int) -> Iterator[Predictor]:
    """Give what ``torch.compile`` makes of a model: for one size, or any where it is asked several.

    With ``dynamic=False`` it would be compiled for each size, and not at all beyond the eighth.
    """
    import torch

    from compress.common.forward import torch_predictor

    torch.compiler.reset()  # else what was compiled before counts against torch's limit
    compiled = torch.compile(_module(model, device))
    with torch_predictor(compiled, device, threads) as predict:
        yield predict


def _module(model: Artifact, device: str) -> torch.nn.Module:
    from compress.artifacts.eager_model import EagerModel
    from compress.artifacts.graph_model import GraphModel

    if isinstance(model, EagerModel):
        return model.load(device)
    if isinstance(model, GraphModel):
        return model.program().module().to(device)
    raise StageFailed(f"{model.kind} artifacts have no module")


IN_PYTORCH = frozenset({"eager", "graph"})
BASELINES: dict[str, Runtime] = {
    "eager": Runtime(_eager, IN_PYTORCH),
    "compiled": Runtime(_compiled, IN_PYTORCH, (COMPILER,)),
}
"""Every runtime by its name in ``against``; ``export`` adds ``onnxruntime``."""
