"""The first layer whose value leaves tolerance, found by exporting parts of the graph again."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch
from pydantic import ValidationError

from compress.common.errors import CompressError, StageFailed
from compress.common.signature import OutputSpec, Signature
from compress.common.tensor_difference import largest, relative_error
from export.parity.subgraph import (
    alone,
    leading_to,
    module_of,
    operator_of,
    prefix,
    retrace,
    values_before,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import fx
    from torch.export import ExportedProgram

Outputs = tuple[torch.Tensor, ...]

SECONDS = 180.0
"""How long is searched at most; one export may end later."""


class Exporting(Protocol):
    """How a format is made from a program, and answers."""

    def __call__(
        self, program: ExportedProgram, signature: Signature, file: Path, inputs: Outputs
    ) -> Outputs:
        """Write the file and return its answers to the inputs."""
        ...


@dataclass(frozen=True)
class Layer:
    """Where an exported model leaves its source."""

    module: str
    """Path of the user's module; empty where the graph does not tell."""
    operator: str
    node: str
    """Name in the graph of torch.export."""
    error: float
    """Relative to the norm of the value."""
    verified: bool
    """Whether everything that it is computed from was found within tolerance."""

    def __str__(self) -> str:
        return f"{self.module or self.node} ({self.operator})"


@dataclass
class Search:
    """A search in one graph, on one input where the export answers otherwise."""

    program: ExportedProgram
    signature: Signature
    inputs: Outputs
    exporting: Exporting
    scratch: Path
    limit: float
    """Largest error of a layer, relative to its norm."""
    seconds: float = SECONDS
    exports: int = 0
    """How many parts were exported."""
    out_of_time: bool = False
    refused: bool = False
    """Whether not even the whole graph could be exported again."""
    refusal: str = ""
    """Why the last part that could not be exported was not."""
    node: fx.Node | None = None
    """What was found."""
    module: fx.GraphModule = field(init=False)

    def __post_init__(self) -> None:
        self.module = self.program.module(check_guards=False)
        self._found: dict[fx.Node, float] = {}
        self._ends = time.monotonic() + self.seconds

    def run(self) -> Layer | None:
        """Return the first layer out of tolerance; None where no part of the graph is."""
        outputs = [n for n in self.module.graph.output_node().all_input_nodes if leading_to(n)]
        errors = {n: self._error(n) for n in outputs}
        self.refused = bool(errors) and all(e is None for e in errors.values())
        bad = [n for n, e in errors.items() if (e or 0) > self.limit]
        if not bad:
            return None
        worst, verified = bad[0], False
        while not (verified or self.out_of_time):
            worst = self._bisect(worst)
            before = values_before(worst)
            # Errors need not grow along the graph, so what was found is looked at again.
            found = self._errors([*before, worst])
            if found is None:
                break
            earlier = [n for n, e in zip(before, found, strict=False) if e > self.limit]
            verified = not earlier and found[-1] > self.limit
            if not earlier:
                break
            worst = earlier[0]
        self.node = worst
        place = module_of(worst), operator_of(worst), worst.name
        return Layer(*place, self._found[worst], verified)

    def _bisect(self, bad: fx.Node) -> fx.Node:
        """Return a layer out of tolerance on the way to one, the one before it being within."""
        line = leading_to(bad)
        good = -1
        while len(line) - good > 2 and not self.out_of_time:
            middle = (good + len(line) - 1) // 2
            error = self._error(line[middle])
            if error is None:
                del line[middle]  # this part cannot be exported: cut elsewhere
            elif error > self.limit:
                del line[middle + 1 :]
            else:
                good = middle
        return line[-1]

    def _error(self, node: fx.Node) -> float | None:
        errors = self._errors([node])
        return errors[0] if errors else None

    def _errors(self, nodes: Sequence[fx.Node]) -> list[float] | None:
        """Return the errors of some layers; None where the part up to them cannot be exported."""
        self.out_of_time = self.out_of_time or time.monotonic() > self._ends
        if self.out_of_time:
            return None
        part = prefix(self.module, nodes)
        self.exports += 1
        try:
            signature = self.named(len(nodes))
            errors = errors_of(part, signature, self.inputs, self.exporting, self.scratch)
        except StageFailed as error:
            self.refusal = str(error)
            return None
        self._found |= dict(zip(nodes, errors, strict=True))
        return errors

    def named(self, outputs: int) -> Signature:
        """Return the signature of a part with some outputs."""
        names = tuple(OutputSpec(name=f"value_of_part_{i}") for i in range(outputs))
        return self.signature.model_copy(update={"outputs": names})

    def smallest(
        self, node: fx.Node, file: Path
    ) -> tuple[fx.GraphModule, Signature, Outputs, float]:
        """Return the smallest part that shows the difference, what to feed it with, and its error.

        That is the operator alone, or else all that leads to it.

        Args:
            node: what was found.
            file: where the part is exported to.

        Raises:
            StageFailed: the part cannot be exported on its own.
        """
        try:
            part, taken = alone(self.module, node)
            with torch.no_grad():
                inputs = tuple(t.clone() for t in prefix(self.module, taken)(*self.inputs))
            signature = Signature.from_examples(inputs, batch_axis=None)
            error = largest(errors_of(part, signature, inputs, self.exporting, file))
            if error > self.limit:
                return part, signature, inputs, error
        except (CompressError, ValidationError):
            pass  # it needs sizes that are not its own, or types that no signature has
        part, signature = prefix(self.module, [node]), self.named(1)
        errors = errors_of(part, signature, self.inputs, self.exporting, file)
        return part, signature, self.inputs, largest(errors)


def errors_of(
    part: fx.GraphModule, signature: Signature, inputs: Outputs, exporting: Exporting, file: Path
) -> list[float]:
    """Export a part and return the error of each output, infinite where it does not answer.

    Raises:
        StageFailed: the part cannot be exported.
    """
    with torch.no_grad():
        expected = part(*inputs)
    program = retrace(part, signature, signature.example())
    try:
        got = exporting(program, signature, file, inputs)
    except StageFailed:
        raise
    except Exception:  # noqa: BLE001 - each runtime raises its own
        return [float("inf")] * len(expected)
    return [relative_error(a, b) for a, b in zip(expected, got, strict=True)]
