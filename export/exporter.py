"""What all exporters share: the artifact that a runtime opens, and the stage that writes it."""

from __future__ import annotations

import logging
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from compress.artifacts.artifact import NOT_RUN, Artifact
from compress.common.errors import StageFailed
from compress.common.forward import Predictor, accept_any_batch, count_forwards, opened_model
from compress.common.requirements import Requirement, require_all
from compress.core.gates.runtime import BASELINES, BaselineRuntime
from compress.core.stage import Reads, Stage, Writes, members_of
from compress.export.common.runtime import Runtime, warn_of_other_target

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from compress.common.signature import Signature
    from compress.core.context import Context
    from compress.export.parity.bisect import Tensors, WrongLayer
    from compress.export.parity.report import ParityContext, RefusedFile

logger = logging.getLogger(__name__)
ALLOWED = "allowed_error"
"""Fact of a file of an ill-conditioned quantized graph: what its rounding noise allows on `val`."""


class ExportedModel(Artifact):
    """A model as a file that a runtime executes."""

    runtime: ClassVar[Runtime]
    is_native_code: ClassVar[bool] = False
    """Whether opening a file executes it: its hash is then checked each time."""
    needs_facts: ClassVar[tuple[str, ...]] = ()
    """Entries of the manifest that :meth:`open_file` reads."""

    @classmethod
    def open_file(
        cls, file: Path, signature: Signature, facts: Mapping[str, Any], device: str, threads: int
    ) -> AbstractContextManager[Predictor]:
        """Open a file, sealed or not, on a device with a number of threads.

        Raise ArtifactInvalid where the runtime cannot load it, Unavailable on another machine than
        its own.
        """
        raise NotImplementedError

    @property
    def needs_to_open(self) -> tuple[Requirement, ...]:
        """What must be installed to open the file."""
        # Native code needs no compiler any more; opening it says what of this machine is missing.
        return () if self.is_native_code else self.runtime.requirements

    @opened_model
    def open(self, device: str = "cpu", threads: int = 1) -> Iterator[Predictor]:
        """Load the model as a predictor, on the device of :meth:`runs_on`.

        Raise ArtifactInvalid where it was altered after sealing or cannot be loaded, Unavailable
        where the runtime is not installed or the file is for another machine.
        """
        require_all(self.needs_to_open, str(self.path))
        for name in self.needs_facts:
            self.fact(name)
        if self.is_native_code:
            self.verify()
        else:
            self.verify_cached()
        facts, device = self.manifest.facts, self.runs_on(device)
        with self.open_file(self.payload_path, self.signature, facts, device, threads) as predict:
            yield predict

    @property
    def payload_bytes(self) -> int:
        """Size in bytes of the file, and of weights beside it."""
        return sum(file.bytes for file in self.model_files.values())


class Exporter(Stage[Reads, Writes]):
    """A stage that writes a model for a runtime, and compares what it wrote with its source.

    Requirements are checked, the artifact becomes visible once it is complete and answers as its
    source does. A runtime implements :meth:`write`, and its artifact's `open_file`; with
    :meth:`write_program` a wrong export is searched for its first wrong layer.
    """

    keeps_outputs: ClassVar[bool] = True
    proves_itself: ClassVar[bool] = False
    """Whether :meth:`write` itself compares what it wrote with the source, and nothing more is."""
    runtime: ClassVar[Runtime] = Runtime(name="any", title="any")
    """That of the artifact that is written, where it is one alone."""

    opened_by: ClassVar[Requirement | None] = None
    """Library whose version is a part of the result, as it writes or opens it where installed."""

    @property
    def machine_parts(self) -> dict[str, Any]:
        """Which version of :attr:`opened_by` is here; None where none is."""
        if (library := self.opened_by) is None:
            return {}
        name = library.what.replace("_", "-")
        return {name: None if library.missing() else version(name)}

    @classmethod
    def __pydantic_init_subclass__(cls, **options: Any) -> None:
        """Make the runtime a baseline of `min_speedup`, and its exporter known to packages."""
        super().__pydantic_init_subclass__(**options)
        kinds = members_of(cls.writes())
        is_template = cls.__pydantic_generic_metadata__["origin"] is not None
        if is_template or len(kinds) > 1 or not issubclass(kinds[0], ExportedModel):
            return
        kind: Any = kinds[0]
        cls.runtime = runtime = kind.runtime
        if kind.kind in EXPORTERS:  # a subclass writes what its base is known for
            return
        if taken := BASELINES.get(runtime.name):
            raise ValueError(f"runtime {runtime.name!r} is taken, by {taken.title}")
        EXPORTERS[kind.kind] = cls
        if runtime.runs_in:
            host = BASELINES[runtime.runs_in]
            BASELINES[host.name] = host._replace(kinds=host.kinds | {kind.kind})
            return
        BASELINES[runtime.name] = BaselineRuntime(
            name=runtime.name,
            title=runtime.title,
            # An artifact that is no export, such as an imported ONNX file, is run as it is.
            kinds=frozenset({kind.kind}),
            exporter=cls.for_baseline,
            reads=frozenset(one.kind for one in members_of(cls.reads())),
            requirements=runtime.requirements,
        )

    @classmethod
    def for_baseline(cls, result: Artifact, context: Context) -> Self:
        """Return the stage that exports the uncompressed model, to be compared with a result."""
        return cls.model_validate({})

    def all_requirements(self) -> tuple[Requirement, ...]:
        """Return what the runtime needs."""
        return (*self.runtime.requirements, *super().all_requirements())

    def unsupported_input_reason(self, formats: Set[str]) -> str:
        """Return why the runtime does not compute in one of these formats; empty where it does."""
        refused = self.runtime.refused_formats
        return next((why for name, why in refused.items() if name in formats), "")

    def write(self, model: Reads, file: Path, context: Context) -> dict[str, Any]:
        """Write the model as a file, in a folder that becomes the artifact; return its facts."""
        raise NotImplementedError

    def write_program(
        self, program: ExportedProgram, signature: Signature, file: Path, device: str = "cpu"
    ) -> dict[str, Any]:
        """Write a model's graph, or a part of it, that a device runs; return its facts."""
        raise NotImplementedError

    def open(
        self, file: Path, model: Reads, facts: dict[str, Any], context: Context
    ) -> AbstractContextManager[Predictor]:
        """Open what was written; facts that opening shows, such as kernels, are added."""
        device = self.device_for(context)
        return self.writes().open_file(file, model.signature, facts, device, context.threads)  # type: ignore[no-any-return]

    def device_for(self, context: Context) -> str:
        """Return where the file is opened to be compared."""
        return "cpu"

    def reexport(
        self, program: ExportedProgram, signature: Signature, file: Path, inputs: Tensors
    ) -> Tensors:
        """Export a part of a model's graph alone, and return its outputs for inputs."""
        facts = self.write_program(program, signature, file)
        with self.writes().open_file(file, signature, facts, "cpu", 1) as predict:
            return tuple(t.cpu() for t in predict(*inputs))

    def copy_for_report(self, model: Reads, file: Path, copy: Path) -> None:
        """Write the whole model as the runtime's reproducer reads it."""
        shutil.copyfile(file, copy)

    def compare(
        self,
        model: Reads,
        expected: Predictor,
        exported: Predictor,
        facts: Mapping[str, Any],
        val_batches: Sequence[Tensors],
        context: Context,
    ) -> float:
        """Raise StageFailed where the exported model answers otherwise than its source.

        Return the error on `val` that the source's rounding noise allowed; 0 where none is needed.
        """
        from compress.export.parity.compare import compare_outputs
        from compress.export.parity.sample_parity import noise_of

        limits, operators = facts.get("axis_limits"), facts.get("operators", ())
        noise = noise_of(model, context)
        return compare_outputs(model, expected, exported, val_batches, limits, operators, noise)

    def run(self, model: Reads, context: Context) -> Writes:
        """Write, open, compare with the source."""
        return self._export(model, context, self.prove)

    def run_as_baseline(self, model: Reads, context: Context) -> Writes:
        """Write a file that others are compared with, and that nobody ships."""
        return self._export(model, context, self.prove_baseline)

    def _export(
        self,
        model: Reads,
        context: Context,
        prove: Callable[[Reads, Path, dict[str, Any], Context, float], None],
    ) -> Writes:
        kind = self.writes()
        warn_of_other_target(model.manifest.facts.get("target"), self.runtime.targets, self.title)
        facts: dict[str, Any] = {}
        began = time.monotonic()
        with kind.atomic_write(
            context.root,
            model.signature,
            lineage=self.lineage(model),
            facts=facts,
            carried=model.carried_files(),
        ) as folder:
            file = folder / kind.payload
            facts |= self.write(model, file, context)
            if reason := self.not_run:
                facts[NOT_RUN] = reason
            elif not self.proves_itself:
                prove(model, file, facts, context, began)
        self.log(facts)
        return kind.from_directory(context.root)  # type: ignore[no-any-return]

    def prove_baseline(
        self, model: Reads, file: Path, facts: dict[str, Any], context: Context, began: float
    ) -> None:
        """Raise StageFailed where a file that nobody ships answers otherwise than its source.

        To 16 samples of `val` alone, where there are any and no size but that of the batch varies.
        """
        has_val = context.data is not None and "val" in context.data.datasets
        if not has_val or {*model.signature.dynamic_axes} - {model.signature.batch_axis}:
            self.prove(model, file, facts, context, began)
            return
        from compress.export.parity.compare import on_cpu, recorded_outputs
        from compress.export.parity.sample_parity import (
            check_on_samples,
            noise_of,
            tolerance_for,
            val_inputs,
        )

        kind, device = self.writes(), self.device_for(context)
        batches = [*val_inputs(replace(context, is_quick=True), model)]
        with (
            recorded_outputs(model, batches, context) as expected,
            kind.open_file(file, model.signature, facts, device, context.threads) as opened,
        ):
            exported = on_cpu(count_forwards(opened, kind.kind))
            check_on_samples(
                accept_any_batch(expected, model.signature),
                accept_any_batch(exported, model.signature),
                *(batches, tolerance_for(model), noise_of(model, context)),
            )

    def prove(
        self, model: Reads, file: Path, facts: dict[str, Any], context: Context, began: float
    ) -> None:
        """Raise StageFailed where a written file answers otherwise than its source.

        `began` is when the stage did, on the clock of :func:`time.monotonic`.
        """
        from compress.export.parity.compare import parity_inputs
        from compress.export.parity.report import report_on_mismatch
        from compress.export.parity.sample_parity import val_inputs

        val_batches = [*val_inputs(context, model)]
        tried = parity_inputs(model.signature, val_batches, facts.get("axis_limits"))
        inputs = chain((x for _, x in tried), val_batches)
        with (
            self._parity_context(model, file, facts, context, inputs) as parity,
            report_on_mismatch(replace(parity, began=began)),
        ):
            expected, exported = parity.expected, parity.exported
            allowed = self.compare(model, expected, exported, facts, val_batches, context)
        if allowed:  # the comparison on all of `val` needs it
            facts[ALLOWED] = allowed

    @contextmanager
    def _parity_context(
        self,
        model: Reads,
        file: Path,
        facts: dict[str, Any],
        context: Context,
        inputs: Iterable[Tensors],
    ) -> Iterator[ParityContext]:
        from compress.export.parity.compare import on_cpu, recorded_outputs
        from compress.export.parity.report import ParityContext

        written = time.monotonic()
        # The source runs first, and leaves memory before the runtime loads the file.
        with (
            recorded_outputs(model, inputs, context) as expected,
            self.open(file, model, facts, context) as opened,
        ):
            yield ParityContext(
                title=self.title,
                source=model,
                expected=expected,
                exported=on_cpu(count_forwards(opened, self.writes().kind)),
                file=file,
                facts=facts,
                copy_export=partial(self.copy_for_report, model, file),
                reexport=self.reexport,
                runtime=self.runtime,
                context=context,
                written=written,
            )

    def search_refused(
        self, model: Reads, kept: RefusedFile, context: Context, deadline: float
    ) -> WrongLayer | None:
        """Search a file that was kept when it was refused for its first wrong layer.

        Report and script are written anew; `deadline` is on the clock of :func:`time.monotonic`.
        """
        from compress.export.parity.report import search_refused

        with self._parity_context(model, kept.file, dict(kept.facts), context, ()) as parity:
            return search_refused(parity, kept, deadline)

    def log(self, facts: Mapping[str, Any]) -> None:
        """Log what the manifest says of kernels, or of integers that were compared."""
        if "integer_kernels" in facts:
            logger.info("%s: %s, %s", self.title, facts["integer_kernels"], facts["float_kernels"])
        if "equal_integers" in facts:
            logger.info("%s: %d integers read back", self.title, facts["equal_integers"])

    def rounding_error(self, model: Artifact, artifact: Artifact) -> float:
        """Return the largest error of an export that is taken for a right one."""
        from compress.export.parity.sample_parity import LARGEST_SPREAD, tolerance_for

        allowed: Any = artifact.manifest.facts.get(ALLOWED, 0.0)
        return max(tolerance_for(model).spread, min(float(allowed), LARGEST_SPREAD))

    def check_parity(self, model: Reads, artifact: Writes, context: Context) -> None:
        """Compare a file of an earlier run with its source, on the data of this one."""
        from compress.export.parity.compare import on_cpu, source_predictor
        from compress.export.parity.sample_parity import val_inputs

        facts, val_batches = artifact.manifest.facts, [*val_inputs(context, model)]
        with (
            artifact.open(self.device_for(context), context.threads) as exported,
            source_predictor(model, context) as expected,
        ):
            self.compare(model, expected, on_cpu(exported), facts, val_batches, context)


EXPORTERS: dict[str, type[Exporter[Any, Any]]] = {}
"""Kind of a runtime's file → the stage that writes it, of this toolkit and of other packages."""


def refuse_scores(error: float, wrong: str) -> float:
    """Return how far scores of a written file are off; StageFailed where it is over rounding."""
    from compress.export.parity.sample_parity import FLOAT

    if not error <= FLOAT.relative:
        raise StageFailed(
            f"{wrong}, by {error:.2g} of the norm, expected at most {FLOAT.relative:g}"
        )
    return error


def source_counts(model: Artifact) -> dict[str, Any]:
    """Return facts that files do not show: weights and multiply-accumulates of the source."""
    return {"parameters": model.parameters(), "macs": model.macs()}


def graph_facts(model: Artifact, program: ExportedProgram, title: str) -> dict[str, Any]:
    """Return what a file from a model's graph records of it: counts, operators, axes' limits."""
    from compress.graph.torch_export import input_limit_facts

    nodes = program.graph_module.graph.nodes
    operators = Counter(str(node.target) for node in nodes if node.op == "call_function")
    return {
        **source_counts(model),
        "operators": dict(sorted(operators.items())),
        **input_limit_facts(program, model.signature, title),
    }
