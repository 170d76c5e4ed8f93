"""Why an ONNX file's outputs differ from its source's: where, and what float32 itself is off."""

from __future__ import annotations

import math
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import torch

from compress.artifacts.graph_model import program_of
from compress.common.errors import CompressError
from compress.common.forward import accept_any_batch, flatten_outputs
from compress.common.tensor_difference import largest, largest_difference
from compress.export.onnx.proto_io import write
from compress.export.onnx.session import session_predictor
from compress.export.parity.bisect import LayerSearch
from compress.export.parity.compare import largest_relative_error, outputs_by_kind
from compress.export.parity.sample_parity import Float64Reference, tolerance_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    import onnx_ir as ir

    from compress.artifacts.eager_model import EagerModel
    from compress.artifacts.graph_model import GraphModel
    from compress.common.forward import Predictor
    from compress.core.context import Context
    from compress.export.diagnosis.costs import Rerun
    from compress.export.onnx.stage import ExportOnnx
    from compress.export.parity.bisect import Tensors, WrongLayer
    from compress.export.parity.compare import KindOutputs
    from compress.export.parity.report import RefusedFile

LEAST_ERROR = 1e-5
"""Relative error of an operator below which it may be the order in which floats are added."""


@dataclass
class ParityDiagnosis:
    """An export whose outputs differ from its source's."""

    stage: ExportOnnx
    source: EagerModel | GraphModel
    model: ir.Model
    context: Context
    rerun: Rerun
    kept: RefusedFile | None = None
    """The file, where it was refused when it was exported."""
    deadline: float = math.inf
    """Until when the wrong layer is searched for, on the clock of :func:`time.monotonic`."""
    measured: int = 0

    @cached_property
    def outputs(self) -> dict[str, KindOutputs]:
        """Kind of input → what source and file answer, where the source refuses none."""
        with self._opened(self.model) as exported, self._source() as expected:
            found = outputs_by_kind(expected, exported, self.source, self.context)
            return {one.kind: one for one in found if one.refusal is None}

    @cached_property
    def errors(self) -> dict[str, float]:
        """Kind of input → the file's error relative to the norm; infinite where it fails."""
        return {kind: one.error for kind, one in self.outputs.items()}

    @property
    def axis_errors(self) -> dict[str, float]:
        """Named axis → the error at the size with the largest one."""
        axes: dict[str, float] = {}
        for kind, error in self.errors.items():
            axis, is_axis, _ = kind.partition(" of ")
            if is_axis and axis in self.source.signature.dynamic_axes:
                axes[axis] = max(axes.get(axis, 0.0), error)
        return axes

    @cached_property
    def worst(self) -> Tensors:
        """The inputs on which the file is most wrong, of those that it answers to."""
        answered = [one for one in self.outputs.values() if math.isfinite(one.error)]
        return max(answered, key=lambda one: one.error).inputs

    @cached_property
    def difference(self) -> float:
        """Largest absolute difference on `val`, on seeded inputs without data, as the gate has."""
        return self._difference(self.model)

    @cached_property
    def difference_unoptimized(self) -> float:
        """The same of an export with `optimize: none`; infinite where there is none."""
        self.measured += 1
        changed = self.rerun(self.stage.title, {"optimize": "none"})
        return math.inf if changed is None else self._difference(changed)

    @cached_property
    def own_error(self) -> float | None:
        """Largest absolute difference of the source from itself in float64; None without one."""
        with self._source() as expected:
            reference = Float64Reference(self.source, expected)
            errors = []
            for inputs in self.context.comparison_inputs(self.source.signature):
                exact = reference.exact(inputs)
                if exact is None:
                    return None
                errors += [
                    largest_difference(a.double(), b)
                    for a, b in zip(expected(*inputs), exact, strict=True)
                ]
        return largest(errors)

    @cached_property
    def graph_error(self) -> float:
        """Relative error of the traced graph in PyTorch, on the worst inputs."""
        with self._source() as expected, torch.no_grad():
            module = program_of(self.source).module(check_guards=False)
            outputs = flatten_outputs(module(*self.worst))
            return largest_relative_error(expected(*self.worst), outputs)

    @cached_property
    def wrong_layer(self) -> WrongLayer | None:
        """The first operator out of tolerance; None where no part of the graph is."""
        if self.kept is not None:
            return self.stage.search_refused(self.source, self.kept, self.context, self.deadline)
        total = max(e for e in self.errors.values() if math.isfinite(e))
        # Half of the whole error, as no operator need have all of it.
        limit = max(min(tolerance_for(self.source).relative, total / 2), LEAST_ERROR)
        program, signature = program_of(self.source), self.source.signature
        with TemporaryDirectory(prefix="compress-parity-") as folder:
            file = Path(folder) / "model.onnx"
            search = LayerSearch(
                program, signature, self.worst, self.stage.reexport, file, limit, self.deadline
            )
            with suppress(CompressError):
                search.run()
        self.measured += search.exports
        return search.layer

    def _difference(self, model: ir.Model) -> float:
        with self._opened(model) as exported, self._source() as expected:
            return largest(
                largest_difference(a, b)
                for inputs in self.context.comparison_inputs(self.source.signature)
                for a, b in zip(expected(*inputs), exported(*inputs), strict=True)
            )

    @contextmanager
    def _source(self) -> Iterator[Predictor]:
        with self.source.open(threads=self.context.threads) as predict:
            yield accept_any_batch(predict, self.source.signature)

    @contextmanager
    def _opened(self, model: ir.Model) -> Iterator[Predictor]:
        with TemporaryDirectory(prefix="compress-parity-") as folder:
            write(model, file := Path(folder) / "model.onnx")
            predict = session_predictor(file, self.context.threads)
            yield accept_any_batch(predict, self.source.signature)
