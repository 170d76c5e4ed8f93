"""Compare an exported model with its source on real samples of `val`, and with rounding errors.

Random inputs do not show everything: a network with large biases answers nearly the same to all of
them, and a lowering that is at chance on data then seems close. So errors are measured relative to
how much the outputs differ from sample to sample, and predicted labels are compared.

Outputs may be infinite, as masked scores are, or NaN: an export must be so at the same places, and
only the other places are measured.

:class:`Float64Reference` tells an error from what float32 itself is off. :class:`RoundingNoise`
tells the error of an int8 file from how far its graph's outputs move where its sums are rounded
otherwise. A float that differs in its last bit may round to the next integer, and in an
ill-conditioned network such flips grow from layer to layer: a ResNet-50 of seeded weights moves by
0.46 of its outputs' spread. A right file differs from its graph by as much, as a runtime sums in
another order. Both are made of the source and its float model alone; no export can change them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from compress.artifacts.eager_model import EagerModel
from compress.artifacts.graph_model import GraphModel
from compress.common.errors import StageFailed
from compress.common.forward import Predictor, accept_any_batch, run_in_eval, torch_predictor
from compress.common.lazy_modules import torch
from compress.common.tensor_difference import columns, equally_not_finite, largest, measured
from compress.core.context import QUICK_SAMPLES, Context
from compress.core.gates.runtime import nearest_float_model
from compress.profiling.output_summary import error_scale

if TYPE_CHECKING:
    from torch import fx

    from compress.artifacts.artifact import Artifact

    Tensors = tuple[torch.Tensor, ...]

logger = logging.getLogger(__name__)

# float32 has 24 bits: the two last ones of a number at the end of a quantizer's range, which is
# what sums in another order differ by. Of 8 bits, 2^-16 of a step.
LAST_BITS = 2.0**-24  # change of a quantizer's input, as a share of the quantizer's range
# Of right ONNX and TorchScript files of networks with up to 50 layers, the error was 0.25 to 1.0 of
# the noise.
FACTOR = 1.25
"""How many times the noise a right export may differ from its graph, and a margin for few rows."""
# Where the error is 0.7 of the spread, the graph explains half of the export's variance. Outputs
# at chance have 1.4, and constant ones 1.
LARGEST_SPREAD = 0.7  # largest error of an export, whatever the noise is
LARGEST_CHANGES = 0.5  # largest share of changed labels, whatever the noise is
# Graph and file are two draws of the same rounding, so they are equally far from the float model:
# of right files the ratio was 0.99 to 1.01. A zero point that is off by 1 in one layer of a
# ResNet-50 gives 1.1 to 1.24, a scale that is off by a tenth over 2.
FLOAT_RATIO = 1.1
"""How many times further from the float model than its graph a right export may be, and a margin
for few rows."""
ERROR_FACTOR = 4.0
"""How many times the source's own error an export may have: each sums in another order."""
NUDGE = 1e-6  # relative change of the inputs, some ulps of float32, at which no output should jump


class RoundingNoise:
    """A quantized graph whose sums are rounded otherwise, and the model that it was made of.

    Both are opened once an export is out of the fixed tolerance, and only then.
    """

    def __init__(self, source: GraphModel, context: Context) -> None:
        self._source, self._context = source, context

    @cached_property
    def _disturbed(self) -> fx.GraphModule | None:
        """The graph with noise before each of its quantizers; None where it has none."""
        from compress.graph.constant_folding import fold_constants_, fuse_rounding_

        module: Any = self._source.load()
        fold_constants_(module)
        generator = torch.Generator().manual_seed(0)

        def disturb(
            x: torch.Tensor, scale: torch.Tensor | float, least: int, most: int
        ) -> torch.Tensor:
            drawn = 2 * torch.rand(x.shape, generator=generator) - 1
            return x + (LAST_BITS * (most - least) * scale * drawn).to(x.dtype)

        quantizers = [n for n in module.graph.nodes if is_quantizer(n)]
        for node in quantizers:
            x, scale, _, least, most, *_ = node.args
            with module.graph.inserting_before(node):
                node.replace_input_with(
                    x, module.graph.call_function(disturb, (x, scale, least, most))
                )
        fuse_rounding_(module)
        return module if quantizers else None

    def outputs(self, *inputs: torch.Tensor) -> Tensors | None:
        """Return what the graph answers with other last bits; None where it rounds nothing."""
        module = self._disturbed
        if module is None:
            return None
        with torch_predictor(module, "cpu", self._context.threads) as predict:
            return accept_any_batch(predict, self._source.signature)(*inputs)

    @cached_property
    def float_model(self) -> Artifact | None:
        """The model that the graph was made from; None where it is not known here."""
        try:
            found = nearest_float_model(self._source, self._context)
        except StageFailed:
            return None  # the graph was made elsewhere
        return None if found.digest == self._source.digest else found

    @contextmanager
    def float_predictor(self) -> Iterator[Predictor]:
        """Provide the float model, or what answers for it, with the answers that are kept."""
        model, context = self.float_model or self._source, self._context
        by_row = context.answers_by_row(model)
        form = context.form_of(model)
        with context.caches.answers.predictor(
            form, "cpu", context.threads, by_row=by_row
        ) as predict:
            yield accept_any_batch(predict, model.signature)


# The margins are of what the graph itself does: an export cannot widen them.
def margin(squared_B: torch.Tensor) -> float:
    """Return two standard deviations of a sum over rows as these."""
    rows = len(squared_B)
    return 2 * float(squared_B.std()) * rows**0.5 if rows > 1 else 0.0


def count_margin(changed: int) -> float:
    """Return two standard deviations of the difference of two such counts (Poisson's)."""
    return 2 * math.sqrt(2 * changed)


def noise_of(source: Artifact, context: Context) -> RoundingNoise | None:
    """Return the rounding noise of a quantized graph; None of other models."""
    return RoundingNoise(source, context) if isinstance(source, GraphModel) else None


def is_quantizer(node: fx.Node) -> bool:
    """Whether a node rounds an activation to integers with one scale, or one for each row."""
    # Those of weights, with a scale for each channel, are folded: they round the same anywhere.
    name = str(node.target)
    return node.op == "call_function" and name.startswith(
        ("quantized_decomposed.quantize_per_tensor", "quantized_decomposed.quantize_per_token")
    )


class Float64Reference:
    """Decides whether float32 arithmetic alone explains an export's error, once one was found."""

    def __init__(
        self, source: Artifact, expected: Predictor, noise: RoundingNoise | None = None
    ) -> None:
        self._source = source if isinstance(source, EagerModel) else None
        self._expected, self._noise = expected, noise
        self._double: torch.nn.Module | None = None

    def explains(self, inputs: Tensors, exported: Tensors, limit: float) -> bool:
        """Whether an export is about as near to float64 as its source, or the source jumps here.

        A quantized graph also where its own sums, rounded otherwise, are as far from it. `limit` is
        the error, relative to the norm, that is allowed besides.
        """
        expected = self._expected(*inputs)
        if [t.shape for t in expected] != [t.shape for t in exported]:
            return False
        finite = tuple(t.isfinite() for t in expected)
        exact = self.exact(inputs)
        if exact is not None:
            both = tuple(f & e.isfinite() for f, e in zip(finite, exact, strict=True))
            source_errors, errors = _errors(exact, expected, both), _errors(exact, exported, both)
            outputs = zip(errors, source_errors, _norms(exact, both), strict=True)
            if all(e <= ERROR_FACTOR * of_source + limit * norm for e, of_source, norm in outputs):
                return True
        errors, norms = _errors(expected, exported, finite), _norms(expected, finite)

        def are_allowed(jumps: Sequence[float]) -> bool:
            return all(
                (math.isfinite(jump) and error <= jump) or error <= limit * norm
                for error, jump, norm in zip(errors, jumps, norms, strict=True)
            )

        rounded = self._noise.outputs(*inputs) if self._noise is not None else None
        moves, most = [0.0] * len(norms), [math.inf] * len(norms)
        if rounded is not None:
            moves = [FACTOR * noise for noise in _errors(expected, rounded, finite)]
            most = [LARGEST_SPREAD * norm for norm in norms]
            if are_allowed([*map(min, moves, most)]):
                return True  # without two calls more of a graph whose calls are dear
        nudged = [_errors(expected, self._expected(*_nudged(inputs, s)), finite) for s in (1, -1)]
        jumps = (ERROR_FACTOR * largest(pair) for pair in zip(*nudged, strict=True))
        return are_allowed([*map(min, map(max, jumps, moves), most)])

    def finds_only_noise(self, inputs: Tensors, exported: Tensors, limit: float) -> bool:
        """Whether an export differs from its source only in outputs that float32 gets wrong itself.

        Those are outputs whose error against float64 is, in the source too, over `limit` of the
        norm, as where a normalisation divides a constant's rounding error by almost nothing.
        """
        exact = self.exact(inputs)
        if exact is None:
            return False
        expected = self._expected(*inputs)
        both = tuple(a.isfinite() & b.isfinite() for a, b in zip(expected, exact, strict=True))
        return all(
            error <= limit * expected_norm or own_error > limit * exact_norm
            for error, expected_norm, own_error, exact_norm in zip(
                _errors(expected, exported, both),
                _norms(expected, both),
                _errors(exact, expected, both),
                _norms(exact, both),
                strict=True,
            )
        )

    def exact(self, inputs: Tensors) -> Tensors | None:
        """Return the outputs in float64; None where the source cannot be run so."""
        if self._source is None:
            return None
        try:
            if self._double is None:
                self._double = self._source.load().double()
            with _float64_for_float32():
                return run_in_eval(
                    self._double, tuple(x.double() if x.is_floating_point() else x for x in inputs)
                )
        except Exception:  # noqa: BLE001 - some code cannot run in float64
            return None


def _float64_for_float32() -> AbstractContextManager[Any]:
    """Return a context in which code that names float32 computes in float64.

    Casts of an imported ONNX file name it, and constants that a module's code makes.
    """
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_map

    def widened(x: object) -> object:
        if isinstance(x, torch.Tensor) and x.dtype == torch.float32:
            return x.double()
        return torch.float64 if x is torch.float32 else x

    class Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> object:
            return func(*tree_map(widened, args), **tree_map(widened, kwargs or {}))

    return cast("AbstractContextManager[Any]", Mode())  # type: ignore[no-untyped-call]


def _errors(expected: Tensors, outputs: Tensors, where: Tensors) -> list[float]:
    """Return the norm of each output's error, over the elements of a mask."""
    pairs = zip(expected, outputs, strict=True)
    return _norms(tuple(b.cpu().double() - a.cpu().double() for a, b in pairs), where)


def _norms(tensors: Tensors, where: Tensors) -> list[float]:
    return [
        float(torch.linalg.vector_norm(t.cpu().double().where(mask.cpu(), 0)))
        for t, mask in zip(tensors, where, strict=True)
    ]


def _nudged(inputs: Tensors, sign: int) -> Tensors:
    generator = torch.Generator().manual_seed(0)
    return tuple(
        x
        + sign * NUDGE * float(x.abs().max() or 1) * torch.randn(x.shape, generator=generator).to(x)
        if x.is_floating_point() and x.numel()
        else x
        for x in inputs
    )


SAMPLES, FEWEST_SAMPLES = 128, 32
"""Samples of `val` that are compared, spread over it; a run compares all where it measures a
metric."""
# A graph with integers takes torch 25 ms for each 10^9 in ResNet-18 on one thread, and 160 in
# EfficientNet-Lite0, whose rounding takes longer than its products: ten times as long as its file
# takes ONNX Runtime. More than half of what export_onnx took there was for 128 samples of it.
LARGEST_MACS = 12 * 10**9
"""Multiply-accumulates of all samples that the source runs, beyond the fewest."""
NEAR_TIE = 0.05
"""Distance of two classes, as a share of that of best and worst, below which either may win."""
NOTHING_FINITE = "all answers of the source are infinite or NaN: nothing can be compared"
OTHER_INFINITIES = "the exported model is infinite or NaN at other places than the source"


class Tolerance(NamedTuple):
    """Largest errors of an export that is taken for a right one.

    They separate a right graph from a wrong one; how accurate a model must be is for a gate.
    """

    relative: float
    """Norm of the error over the norm of the output, for one input."""
    adversarial: float
    """The same on adversarial inputs."""
    of_usual: float
    """Error on seeded and adversarial inputs that counts as none, as a share of the output's usual
    size: all outputs of a detector that finds nothing in noise are as small."""
    spread: float
    """Error over `val`, relative to how much the outputs differ from sample to sample."""
    label_changes: float
    """Fraction of `val` samples whose predicted label may change, near-ties left out."""


# float32 sums in another order differ by some 1e-6 of the norm, and by more in deep models. The
# spread between samples may be a small part of the norm, hence ten times as much of it.
# Sigmoids of -16, which are 1e-7, differ by 1.4e-7 in onnxruntime 1.32.
FLOAT = Tolerance(relative=1e-3, adversarial=1e-3, of_usual=1e-6, spread=1e-2, label_changes=0.01)

# A float that differs in its last bit may round to the next integer, and such flips add up from
# layer to layer. Outputs at chance have an error of 1 of the spread or more. 2^-8: an 8-bit step.
QUANTIZED = Tolerance(relative=0.1, adversarial=0.3, of_usual=2**-8, spread=0.3, label_changes=0.05)


def tolerance_for(source: Artifact) -> Tolerance:
    """Return the tolerance for exports of a model: graphs and ONNX files may hold integers."""
    in_integers = isinstance(source, GraphModel) or source.manifest.facts.get("integer_kernels")
    return QUANTIZED if in_integers else FLOAT


@dataclass
class OutputSums:
    """Sums over the batches so far, of one output: squared error, spread and norm."""

    by_row: list[torch.Tensor] = field(default_factory=list)
    """Squared error of each row, of each batch."""
    spread: float = 0.0
    """Squared distance to the mean of each batch, times n/(n - 1): as far as rows are from all."""
    norm: float = 0.0
    finite: int = 0
    not_finite: int = 0
    """Elements that are the same infinity in both, or NaN in both."""
    nan: int = 0

    def add(self, expected: torch.Tensor, exported: torch.Tensor) -> None:
        """Add a batch."""
        squared_B = torch.zeros(1, dtype=torch.float64)
        for expected_BN, exported_BN in columns(expected, exported):
            equal = equally_not_finite(expected_BN, exported_BN)
            a, b = measured(expected_BN, exported_BN)
            finite_N = (~equal).sum(0)
            mean = a.sum(0) / finite_N.clamp(min=1)
            squared_B = squared_B + (b - a).square_().sum(1)
            distance_N = (a - mean).masked_fill_(equal, 0).square_().sum(0)
            # Of few rows the own mean is nearer than that of all: Bessel's correction.
            self.spread += float((distance_N * finite_N / (finite_N - 1).clamp(min=1)).sum())
            self.norm += float(a.square().sum())
            self.finite += int((~equal).sum())
            self.not_finite += int(equal.sum())
            self.nan += int((equal & expected_BN.isnan()).sum())
        self.by_row.append(squared_B)

    def relative(self, squared_error: float) -> float:
        """Return an error relative to the spread."""
        return float((squared_error / max(error_scale(self.spread, self.norm), 1e-18)) ** 0.5)

    @property
    def relative_error(self) -> float:
        """Error relative to the spread; NaN where one side alone is not finite."""
        return self.relative(sum(float(squared_B.sum()) for squared_B in self.by_row))


@dataclass
class SampleErrors:
    """How far two models are apart on the samples so far."""

    samples: int = 0
    allowed: float = 0.0
    """Largest error that was allowed because rounding alone is as large; 0 where none was."""
    changed: int = 0
    """Samples whose label is clearly another one."""
    outputs: list[OutputSums] = field(default_factory=list)

    def add(self, rows: int, expected: Tensors, exported: Tensors) -> None:
        """Add the outputs for a batch of some rows."""
        self.samples += rows
        self.outputs = self.outputs or [OutputSums() for _ in expected]
        for sums, a, b in zip(self.outputs, expected, exported, strict=True):
            sums.add(a, b)
        scores = expected[0]
        if scores.dim() == 2 and scores.shape[1] > 1 and scores.is_floating_point():
            self.changed += count_changed_labels(scores, exported[0])

    @property
    def relative_error(self) -> float:
        """That of the worst output; NaN where one side alone is not finite."""
        return largest(sums.relative_error for sums in self.outputs)


def count_changed_labels(expected_BC: torch.Tensor, exported_BC: torch.Tensor) -> int:
    """Count the samples whose best class is another one, near-ties left out."""
    best_B1, other_B1 = (x.argmax(1, keepdim=True) for x in (expected_BC, exported_BC))
    lost_B1 = expected_BC.gather(1, best_B1) - expected_BC.gather(1, other_B1)
    finite_BC = expected_BC.isfinite()
    highest_B1 = expected_BC.where(finite_BC, -math.inf).amax(1, keepdim=True)
    lowest_B1 = expected_BC.where(finite_BC, math.inf).amin(1, keepdim=True)
    range_B1 = (highest_B1 - lowest_B1).clamp(min=0)
    return int((lost_B1 > NEAR_TIE * range_B1).sum())


def check_on_samples(
    expected: Predictor,
    exported: Predictor,
    batches: Sequence[Tensors],
    tolerance: Tolerance = FLOAT,
    noise: RoundingNoise | None = None,
) -> SampleErrors:
    """Compare two models on real inputs; StageFailed where outputs or labels differ.

    `noise` is measured where the tolerance is exceeded, and may explain it.
    """
    errors = SampleErrors()
    for inputs in batches:
        pair = (tuple(t.cpu() for t in predict(*inputs)) for predict in (expected, exported))
        errors.add(len(inputs[0]), *pair)
    if not errors.samples:
        return errors
    spreads, changes = [tolerance.spread] * len(errors.outputs), tolerance.label_changes
    problem = problem_of(errors, spreads, changes)
    found = None
    if problem and noise is not None and math.isfinite(errors.relative_error):
        found = noise_on(batches, noise, expected, exported)
    if found is not None:
        limits = limits_of_noise(found, tolerance)
        moved = f"int8 rounding alone moves the graph by {limits.noise.relative_error:.2g}"
        problem = problem_of(errors, limits.spreads, limits.label_changes)
        problem = problem or float_problem(found, tolerance)
        problem = problem and f"{problem} ({moved})"
        errors.allowed = max(limits.spreads)
        logger.info(
            "differs from its graph by %.2g of the spread; %s", errors.relative_error, moved
        )
    if problem:
        raise StageFailed(f"on {errors.samples} samples of `val` {problem}")
    nan = sum(sums.nan for sums in errors.outputs)
    if nan:
        logger.warning(
            "on %d samples of `val` %d of the source's answers are NaN, and the exported model's "
            "too: these say nothing of the export",
            *(errors.samples, nan),
        )
    logger.info(
        "on %d samples of `val` answers differ by %.2g of their spread, %d labels clearly",
        *(errors.samples, errors.relative_error, errors.changed),
    )
    return errors


@dataclass
class NoiseOnSamples:
    """A quantized graph, the graph with other last bits and its export, on the same samples."""

    moved: SampleErrors = field(default_factory=SampleErrors)
    """How far the other last bits move the graph."""
    graph: SampleErrors = field(default_factory=SampleErrors)
    """How far the graph is from the float model, as are the two below; without samples where that
    is not known, or answers otherwise."""
    disturbed: SampleErrors = field(default_factory=SampleErrors)
    export: SampleErrors = field(default_factory=SampleErrors)


def noise_on(
    batches: Sequence[Tensors], noise: RoundingNoise, expected: Predictor, exported: Predictor
) -> NoiseOnSamples | None:
    """Measure the noise on samples, in one pass over them; None where there is none."""
    found, is_comparable = NoiseOnSamples(), noise.float_model is not None
    with noise.float_predictor() as float_model:
        for inputs in batches:
            rows, disturbed = len(inputs[0]), noise.outputs(*inputs)
            if disturbed is None:
                return None
            graph = expected(*inputs)
            found.moved.add(rows, graph, disturbed)
            outputs = float_model(*inputs) if is_comparable else ()
            if [t.shape for t in outputs] != [t.shape for t in graph]:
                is_comparable = False  # it answers otherwise
                continue
            export = tuple(t.cpu() for t in exported(*inputs))
            found.graph.add(rows, outputs, graph)
            found.disturbed.add(rows, outputs, disturbed)
            found.export.add(rows, outputs, export)
    if is_comparable:
        return found
    return NoiseOnSamples(found.moved)


class SampleLimits(NamedTuple):
    """What the noise that was measured on samples allows."""

    noise: SampleErrors
    spreads: tuple[float, ...]
    """Largest error of each output, relative to its spread."""
    label_changes: float


def limits_of_noise(noise: NoiseOnSamples, fixed: Tolerance) -> SampleLimits:
    """Return what the noise on samples allows."""
    own, spreads = noise.moved, []
    for sums in own.outputs:
        squared_B = torch.cat(sums.by_row)
        most = FACTOR**2 * float(squared_B.sum()) + 2**0.5 * margin(squared_B)
        allowed = min(LARGEST_SPREAD, sums.relative(most)) if math.isfinite(most) else 0.0
        spreads.append(max(fixed.spread, allowed))
    changed = FACTOR * own.changed + count_margin(own.changed)
    changes = min(LARGEST_CHANGES, changed / own.samples)
    return SampleLimits(own, tuple(spreads), max(fixed.label_changes, changes))


def float_problem(noise: NoiseOnSamples, fixed: Tolerance) -> str:
    """Return how an export is further from the float model than its graph; empty if it is not.

    As far as the graph is where its own sums are rounded in either way.
    """
    graph, disturbed, export = noise.graph, noise.disturbed, noise.export
    if not graph.samples:
        return ""
    spreads = []
    for sums in zip(graph.outputs, disturbed.outputs, export.outputs, strict=True):
        graph_B, disturbed_B = (torch.cat(one.by_row) for one in sums[:2])
        most = FLOAT_RATIO**2 * max(float(graph_B.sum()), float(disturbed_B.sum()))
        spreads.append(sums[2].relative(most + margin(disturbed_B - graph_B)))
    changed = max(graph.changed, disturbed.changed)
    slack = max(fixed.label_changes * graph.samples, count_margin(changed))
    logger.info(
        "from the float model the graph differs by %.2g of the spread, and the export by %.2g",
        *(graph.relative_error, export.relative_error),
    )
    allowed_changes = (changed + slack) / graph.samples
    problem = problem_of(export, spreads, allowed_changes, "the float model")
    return problem and f"{problem}, which is how far its graph is"


def problem_of(
    errors: SampleErrors, spreads: Sequence[float], label_changes: float, of: str = "the source"
) -> str:
    """Return what is wrong with an export, by the largest errors allowed; empty if nothing."""
    allowed_changes = label_changes * errors.samples
    if any(s.not_finite for s in errors.outputs) and not any(s.finite for s in errors.outputs):
        return NOTHING_FINITE
    if not math.isfinite(errors.relative_error):
        return OTHER_INFINITIES
    for sums, limit in zip(errors.outputs, spreads, strict=True):
        if not sums.relative_error <= limit:
            return (
                f"the exported model's answers differ from {of}'s by {sums.relative_error:.2g} of "
                f"their spread, expected at most {limit:.3g}"
            )
    if errors.changed > allowed_changes:
        return (
            f"the exported model gives {errors.changed} other labels than {of} that are no "
            f"near-ties, expected at most {int(allowed_changes)}"
        )
    return ""


def val_inputs(context: Context, model: Artifact) -> Iterator[Tensors]:
    """Yield inputs of samples that are spread over ``val``; none where there is no data."""
    if context.data is not None and "val" in context.data.datasets:
        limit = QUICK_SAMPLES
        if not context.is_quick:  # which reads and traces a graph
            macs = context.macs(model, context.typical_sizes(model.signature)) or 1
            limit = max(FEWEST_SAMPLES, min(SAMPLES, LARGEST_MACS // macs))
        for batch in context.data.batches("val", limit=limit):
            yield batch.inputs
