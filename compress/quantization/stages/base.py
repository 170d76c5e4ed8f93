"""Base classes of the quantization stages: shared settings, calibration, and saving the graph."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from textwrap import shorten
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

from pydantic import Field, model_validator

from compress.artifacts.eager_model import EagerModel
from compress.artifacts.graph_model import GraphModel
from compress.common.errors import PipelineInvalid, StageFailed
from compress.core.stage import CalibrationSamples, Stage
from compress.quantization.config.dtype_scheme import Target, added_observers, scheme_for

if TYPE_CHECKING:
    import torch
    from torch.export import ExportedProgram

    from compress.artifacts.artifact import Artifact
    from compress.core.context import Context
    from compress.data.batch import Batch
    from compress.data.splits import Splits
    from compress.quantization.numeric_debug.fidelity_report import Fidelity
    from compress.quantization.pt2e.quantizer import OnnxRuntimeQuantizer
    from compress.quantization.ptq.calibrate import Corrections

logger = logging.getLogger(__name__)
FEW_SAMPLES = 16  # fewer samples say little about the range of activations
QUICK_CALIBRATION = 32  # samples with which models are quantized whose speed alone is looked at
FIDELITY = "fidelity"  # fact of every artifact that a quantization stage writes
LONGEST_FACT = 300  # characters of a fact in the log; the manifest has all of it


@dataclass(frozen=True)
class CalibrationData:
    """A seeded sample of the data; iterating it again yields the same batches."""

    data: Splits
    samples: int
    seed: int
    has_any_rows: bool = True
    """Whether the model takes batches of any size, so that those of large samples are divided."""

    def __iter__(self) -> Iterator[Batch]:
        batches = self.data.calibration(self.samples, self.seed)
        if not self.has_any_rows:
            return batches
        return (part for batch in batches for part in self.data.divided(batch))


def is_weight(name: str, tensor: torch.Tensor) -> bool:
    """Whether a tensor of a graph is a matrix, a kernel or a table in float32."""
    is_part = name.endswith(("_scale", "_zero_point"))  # of one in few bits
    return tensor.dim() > 1 and str(tensor.dtype) == "torch.float32" and not is_part


class QuantizationStage(Stage[EagerModel | GraphModel, GraphModel]):
    """A stage that turns a float model into a graph of fewer bits."""

    exclude: tuple[str, ...] = ()
    """Names of modules left in float; `*` and `?` stand for any characters."""
    calibration_samples: CalibrationSamples = None
    """Samples of the data on which the model is looked at. By default 512 (128 for
    `quantize_weights` and `convert_precision`, 256 for `smooth` of `quantize_dynamic`), or all
    there are."""

    uses_data: ClassVar[bool] = True
    """Always: the result is compared with the float model on `val`."""

    def rounding_error(self, model: Artifact, artifact: Artifact) -> float:
        """Return the error that fewer bits explain where they cost an R² 0.01."""
        return 0.1

    @property
    def needs_data(self) -> bool:
        """Whether calibration reads data; always, unless a stage says when."""
        return True

    def load_float(self, model: EagerModel | GraphModel) -> torch.nn.Module:
        """Load the float module; refuse a quantized one, and an `exclude` that names no part."""
        from torch.fx import GraphModule

        from compress.graph.torch_export import has_integer_operators

        module = model.load()
        is_integer = isinstance(module, GraphModule) and has_integer_operators(module.graph)
        # Few bits and half precision are no integer operators: these stages record them.
        if is_integer or FIDELITY in model.manifest.facts:
            raise StageFailed(
                f"{self.title}: the graph is quantized already, expected a float model; quantize "
                "the model that it was made from"
            )
        self.refuse_unknown_names(module)
        return module

    def refuse_unknown_names(self, module: torch.nn.Module) -> None:
        """Raise PipelineInvalid where a pattern of `exclude` names no part of a module."""
        names = [name for name, _ in module.named_modules() if name]
        for pattern in self.exclude:
            if not any(fnmatchcase(name, pattern) for name in names):
                close = get_close_matches(pattern, names, n=1, cutoff=0)
                hint = f"; did you mean {close[0]!r}?" if close else ""
                raise PipelineInvalid(f"exclude: no module is named {pattern!r}{hint}")

    def calibration_data(self, model: EagerModel | GraphModel, context: Context) -> CalibrationData:
        """Draw `calibration_samples` samples; unless they are set, whole batches of the model."""
        data, signature = context.need_data("calibration"), model.signature
        samples = self.available_samples(data)
        if self.calibration_samples is None:
            samples -= samples % min(signature.smallest_batch, samples)
        if 0 < samples < FEW_SAMPLES:
            logger.warning("%s: calibrated on %d samples alone", self.title, samples)
        if signature.batch_axis is None and signature.inputs[0].shape:
            batch_size = int(signature.inputs[0].shape[0])
            if samples % batch_size:
                raise StageFailed(
                    f"calibration_samples is {samples} and the model takes batches of "
                    f"{batch_size}; make it a multiple"
                )
            data = data.replaced(batch_size=batch_size)
        has_any_rows = signature.batch_axis is not None
        calibration = CalibrationData(data, samples, context.seed, has_any_rows)
        iter(calibration)  # refuses more samples than there are, before a model is traced
        return calibration

    def calibration_progress(self, context: Context) -> Callable[[int], None]:
        """Return a callback that shows how many samples calibration has seen."""
        return lambda samples: context.progress("calibrate", samples, self.drawn_samples)

    def save_graph(
        self,
        model: EagerModel | GraphModel,
        program: ExportedProgram,
        quantized: Mapping[str, int],
        facts: dict[str, Any],
        context: Context,
        rescaled: Collection[str] = (),
    ) -> GraphModel:
        """Compare a quantized graph with the float model, log the result and save the graph.

        The manifest records `facts` and the number of quantized operators by kind. Modules whose
        outputs have other scales, as after equalization, are not compared one by one.
        """
        from compress.common.malloc import release_memory
        from compress.quantization.numeric_debug.compare import compare

        # A graph's parts refer to one another: the float weights of the one that was quantized
        # would stay beside those that are loaded here.
        release_memory()
        graph = program.module(check_guards=False)
        module = model.load()
        fidelity = compare(module, graph, model.signature, context, rescaled)
        left, total = (
            sum(x.numel() for name, x in state.items() if is_weight(name, x))
            for state in (program.state_dict, module.state_dict())
        )
        del module, graph  # while the program is written, which takes its size twice
        release_memory()
        stay = f"{100 * left / max(1, total):.0f} % of the weights stay in float32"
        saved = GraphModel.create(
            context.root,
            program,
            model.signature,
            lineage=self.lineage(model),
            facts=self.recorded(quantized, facts, fidelity, stay),
            carried=model.carried_files(),
        )
        if not context.is_quick:  # the export and the report ask for it, the one without sizes
            with suppress(Exception):  # which then tell what is wrong
                saved.count(program, {}, context.typical_sizes(model.signature))
        return saved

    def recorded(
        self, quantized: Mapping[str, int], facts: Mapping[str, Any], fidelity: Fidelity, *said: str
    ) -> dict[str, Any]:
        """Log what was quantized, and how near the outputs are; return all of it for a manifest."""
        counts = dict(sorted(quantized.items()))
        summary = [
            shorten(f"{name.replace('_', ' ')}: {value or 'none'}", LONGEST_FACT)
            for name, value in facts.items()
        ]
        logger.info("%s: quantized %s; %s", self.title, counts, "; ".join([*said, *summary]))
        logger.info("%s: %s", self.title, fidelity.line())
        return {"quantized_operators": counts, **facts, FIDELITY: fidelity.model_dump(mode="json")}


class IntegerStage(QuantizationStage):
    """A quantization stage whose layers are computed by a runtime's integer kernels."""

    target: Target = "onnxruntime-cpu"
    """Runtime whose fused integer kernels decide which operators are quantized, and how."""
    embeddings: bool = True
    """Whether tables of embeddings are held in 8 bits too, each row with its own scale."""

    @model_validator(mode="before")
    @classmethod
    def _backend_is_pt2e(cls, settings: Any) -> Any:
        # Users of torch.ao's FX and eager modes look for this key.
        if isinstance(settings, dict) and "backend" in settings:
            raise ValueError(
                "backend: torch.ao's fx and eager modes are deprecated and not supported; leave "
                "the key out (the backend is torchao's pt2e)"
            )
        return settings

    @property
    def machine_parts(self) -> dict[str, Any]:
        """Package and version of an observer that another package adds."""
        entry = added_observers().get(getattr(self, "observer", ""))
        if entry is None or entry.dist is None:
            return {}
        return {"observer": f"{entry.dist.name} {entry.dist.version}"}

    @property
    def activation_formats(self) -> frozenset[str]:
        """The integer type of the target's activations."""
        return frozenset({scheme_for(self.target).activations.dtype})

    def save_integers(
        self,
        model: EagerModel | GraphModel,
        program: ExportedProgram,
        quantizer: OnnxRuntimeQuantizer,
        facts: Mapping[str, Any],
        context: Context,
        corrections: Corrections | None = None,
    ) -> GraphModel:
        """Save a graph with what its quantizer and its corrections record, besides other facts."""
        all_facts = {
            "target": self.target,
            "float_modules": quantizer.float_modules,
            **quantizer.ranges,
            **facts,
            **(corrections.facts if corrections else {}),
        }
        rescaled = corrections.rescaled if corrections else ()
        return self.save_graph(model, program, quantizer.quantized, all_facts, context, rescaled)


class CalibratedStage(IntegerStage):
    """An integer stage that needs the ranges of activations beforehand."""

    calibration_samples: Annotated[int, Field(ge=FEW_SAMPLES)] | None = None
    """Samples on which the ranges of activations are observed; fewer than 16 tell too little. By
    default 512, or all there are."""

    def calibrated_quickly(self, **changed: Any) -> Self:
        """Return the stage with few samples and changed settings, for a model of the same speed."""
        few = min(QUICK_CALIBRATION, self.drawn_samples)
        return self.model_copy(update={"calibration_samples": few, **changed})
