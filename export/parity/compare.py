"""Compare an exported model with its source: every named axis, `val`, adversarial inputs."""

from __future__ import annotations

import functools
import logging
import math
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import TYPE_CHECKING, NamedTuple

import torch

from compress.common.errors import StageFailed
from compress.common.forward import Predictor, accept_any_batch
from compress.common.malloc import release_memory
from compress.common.tensor_difference import largest, relative_error
from compress.export.parity.sample_parity import (
    FLOAT,
    NOTHING_FINITE,
    OTHER_INFINITIES,
    Float64Reference,
    Tolerance,
    check_on_samples,
    tolerance_for,
    val_inputs,
)

if TYPE_CHECKING:
    from compress.artifacts.artifact import Artifact
    from compress.common.signature import Signature
    from compress.core.context import Context
    from compress.export.parity.sample_parity import RoundingNoise

    Limits = Mapping[str, int]
    Tensors = tuple[torch.Tensor, ...]

logger = logging.getLogger(__name__)

# So all kinds together are 16 to 28 rows, an eighth to a fifth of what is compared on `val`: their
# number does not hang on the time that a call takes, or a verdict would hang on the machine's load.
ROWS = 2
RAGGED_ROWS = 8  # rows of the batch whose lengths go from one element to all
SCALE = 10.0  # how many times larger than the real samples the scaled ones are
TINY = 1e-9  # size of the smallest inputs: 1 + x loses them in float32, whose step at 1 is 1.2e-7
LARGE = (1e2, 1e3)  # sizes of the largest: float32's exp overflows from 89 on, and is 0 below -104
MIXED = (TINY, 1e-4, 1.0, 1e2, 3e2, 1e3)
"""Sizes that meet in one input, for operators that take two numbers, like logaddexp."""
TINY_KIND = f"real inputs brought to {TINY:g}"
LARGE_KINDS = {f"real inputs brought to {size:g}": size for size in LARGE}
MIXED_KIND = f"numbers of {TINY:g} to {max(MIXED):g} side by side"
NOTHING_KIND = "masks that let nothing through"
SKIPPED_KINDS: Mapping[str, tuple[str, ...]] = {
    # onnxruntime (1.31) computes them as exp(x) - 1, in steps of 6e-8. Written with expm1 they
    # would be exact, and eight kernels instead of one.
    **dict.fromkeys(("Elu", "Selu", "Celu"), (TINY_KIND,)),
    # So does AOTInductor (torch 2.13) with erf, whose kernel is 1 - exp(…) times a polynomial.
    "aten.erf.default": (TINY_KIND,),
    # Scores that are all 1, as large numbers make them, are ties: runtimes break them as they like.
    **dict.fromkeys(("TopK", "NonMaxSuppression"), (*LARGE_KINDS, MIXED_KIND)),
    # 8 bits for numbers of which the largest is 1e12 times the smallest: a step of the range, which
    # each runtime finds in its own way, is more than most of them.
    "DynamicQuantizeLSTM": (MIXED_KIND,),
}
"""Operator, of ONNX or of a compiled graph → kinds of inputs on which runtimes may differ."""


def adversarial_inputs(
    signature: Signature, val_batches: Sequence[Tensors], operators: Container[str] = ()
) -> Iterator[tuple[str, Tensors]]:
    """Yield kinds of inputs after their name, but for the operators' :data:`SKIPPED_KINDS`.

    Masks stay as they are in `val`, and integers within its range; without `val`, in that of seeded
    inputs.
    """
    skipped = {kind for name, kinds in SKIPPED_KINDS.items() if name in operators for kind in kinds}
    yield from ((kind, x) for kind, x in _all_kinds(signature, val_batches) if kind not in skipped)


def _all_kinds(
    signature: Signature, val_batches: Sequence[Tensors]
) -> Iterator[tuple[str, Tensors]]:
    val_batches = [batch for batch in val_batches if len(batch[0])] or [signature.example()]
    has_masks = any(spec.unmasked_value is not None for spec in signature.inputs)
    shape = signature.inputs[0].shape
    batch = shape[0] if shape and isinstance(shape[0], int) else None

    base = first_rows(val_batches[0], batch or ROWS)

    def filled(values: Sequence[float]) -> Tensors:
        return tuple(
            torch.full_like(x, value) if spec.unmasked_value is None else x
            for spec, x, value in zip(signature.inputs, base, values, strict=True)
        )

    def scaled_to(size: float, x: torch.Tensor) -> torch.Tensor:
        largest_value = x.double().abs().max()
        return x.double() / largest_value * size if largest_value > 0 else x

    def with_floats(change: Callable[[torch.Tensor], torch.Tensor]) -> Tensors:
        return tuple(
            change(x).to(x.dtype) if x.is_floating_point() and x.numel() else x for x in base
        )

    def extreme(pick: Callable[[torch.Tensor], torch.Tensor], xs: Tensors) -> float:
        # torch's own, as Python's min passes over a NaN behind the first batch.
        found = [pick(x).double() for x in xs if x.numel()]
        return float(pick(torch.stack(found or [torch.zeros(())])))

    columns = [*zip(*val_batches, strict=True)]
    lowest, highest = ([extreme(pick, xs) for xs in columns] for pick in (torch.min, torch.max))
    zeros = [0 if low <= 0 <= high else low for low, high in zip(lowest, highest, strict=True)]
    yield "zeros", filled(zeros)
    yield "the smallest value seen everywhere", filled(lowest)
    yield "the largest value seen everywhere", filled(highest)
    if any(x.is_floating_point() for x in base):
        yield f"real inputs times {SCALE:g}", with_floats(lambda x: x * SCALE)
        for kind, size in {TINY_KIND: TINY, **LARGE_KINDS}.items():
            yield kind, with_floats(functools.partial(scaled_to, size))
        yield MIXED_KIND, with_floats(_mixed)
    if has_masks:
        rows = batch or RAGGED_ROWS
        ragged = _masked(
            signature, first_rows(val_batches[0], rows), torch.linspace(0, 1, rows), least=1
        )
        yield "rows of every length", ragged
        shares = torch.ones(batch or ROWS)
        yield "masks that let everything through", _masked(signature, base, shares, least=1)
        yield NOTHING_KIND, _masked(signature, base, 0 * shares, least=0)


def first_rows(inputs: Tensors, rows: int) -> Tensors:
    """Return so many rows of a batch, from the start again where there are too few."""
    places = torch.arange(rows)
    return tuple(x[places % len(x)] if x.dim() else x for x in inputs)


def find_adversarial_mismatch(
    expected: Predictor,
    exported: Predictor,
    signature: Signature,
    cases: Iterable[tuple[str, Tensors]],
    tolerance: Tolerance = FLOAT,
    reference: Float64Reference | None = None,
    usual: Sequence[float] | None = None,
) -> tuple[str, Tensors, float] | None:
    """Return the first kind on which two models differ, its inputs and the error, or None.

    Inputs that the source refuses are left out, and so are its NaN, and infinities that float64
    does not have there: the other elements are compared. Errors are relative to the outputs' norm,
    and small ones beside `usual`, the usual size of each output, are none; the reference may
    explain a difference. Where the source itself is further from float64 than the limit, its
    outputs are noise: a warning says so.
    """
    expected, exported = (accept_any_batch(p, signature) for p in (expected, exported))
    limit = tolerance.adversarial
    if usual is None:
        usual = usual_sizes(expected, signature)
    least = [tolerance.of_usual / limit * size for size in usual]
    # Not for tiny inputs, whose outputs may be as tiny unless they are those of zeros.
    at_zero = tuple[torch.Tensor, ...]()
    for kind, inputs, outputs, answers, refusal, failure in outputs_for(expected, exported, cases):
        if refusal:
            continue
        if failure and any(not a.numel() or a.isfinite().any() for a in outputs):
            return kind, inputs, math.inf
        if failure:  # there is nothing to compare with
            continue
        at_zero = outputs if kind == "zeros" else at_zero
        is_tiny = kind == TINY_KIND and not (at_zero and _error(at_zero, outputs) <= limit)
        error = _error(outputs, answers, () if is_tiny else least)
        if error < math.inf and _misses_infinities(inputs, outputs, answers, reference):
            error = math.inf
        if error <= limit:
            continue
        if reference is None or not error < math.inf:
            return kind, inputs, error
        if reference.explains(inputs, answers, limit):
            logger.info("on %s float32 itself is %.2g of the norm off", kind, error)
        elif reference.finds_only_noise(inputs, answers, limit):
            logger.warning(
                "on %s the exported model's answers differ from the source's by %.2g of their "
                "norm; the source's own differ from float64's by more than %g there, so they are "
                "rounding errors, and nothing is compared",
                *(kind, error, limit),
            )
        else:
            return kind, inputs, error
    return None


def usual_sizes(
    expected: Predictor, signature: Signature, val_batches: Sequence[Tensors] = ()
) -> list[float]:
    """Return the root mean square of each output on real inputs, or without any on seeded ones.

    Empty where the source answers to none.
    """
    # Of a batch of 1 a regressor's answer may be near 0 by chance, and any rounding large beside.
    batch = {signature.batch_axis: max(BATCHES)} if signature.batch_axis else {}
    seeded = (signature.example(sizes=sizes) for sizes in (batch, {}))
    for inputs in val_batches or seeded:
        with suppress(Exception):  # whatever the user's own code raises
            finite = [t[t.isfinite()].double() for t in expected(*inputs)]
            return [float(t.square().mean()) ** 0.5 if t.numel() else 0.0 for t in finite]
    return []


def _error(expected: Tensors, outputs: Tensors, least: Sequence[float] = ()) -> float:
    """Return the worst output's error where the source is finite; infinite for other shapes.

    It is relative to the output's norm, or to that of elements of the size `least`.
    """
    errors = []
    for i, (a, b) in enumerate(zip(expected, outputs, strict=True)):
        if a.shape != b.shape:
            return math.inf
        if a.is_floating_point():  # integers are not compared: on constants they are ties
            finite = a.isfinite()
            least_norm = least[i] * a.numel() ** 0.5 if least else 0.0
            errors.append(relative_error(a.where(finite, 0), b.where(finite, 0), least_norm))
    return largest(errors)


def _misses_infinities(
    inputs: Tensors, expected: Tensors, exported: Tensors, reference: Float64Reference | None
) -> bool:
    """Whether an infinity that the source means, such as a masked score, is not in the export."""
    # Where float64 is finite, the source's infinity is an overflow of float32, not meant.
    pairs = [p for p in zip(expected, exported, strict=True) if p[0].is_floating_point()]
    missing = [a.isinf() & (a != b) for a, b in pairs]
    if reference is None or not any(m.any() for m in missing):
        return False
    exact = reference.exact(inputs)
    if exact is None:
        return False
    meant = [t.isinf() for t, a in zip(exact, expected, strict=True) if a.is_floating_point()]
    return any(bool((a & b).any()) for a, b in zip(missing, meant, strict=True))


def _mixed(x: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    places = torch.randint(len(MIXED), x.shape, generator=generator)
    numbers = torch.randn(x.shape, generator=generator, dtype=torch.float64)
    return numbers * torch.tensor(MIXED, dtype=torch.float64)[places]


def _masked(signature: Signature, base: Tensors, shares: torch.Tensor, least: int) -> Tensors:
    """Return rows whose masks let through a share of their elements, `(rows,)`, or `least`."""
    changed = []
    for spec, x in zip(signature.inputs, base, strict=True):
        if spec.unmasked_value is not None:
            lengths = (least + shares * (x.shape[-1] - least)).round()
            is_unmasked = torch.arange(x.shape[-1]) < lengths.view(-1, *[1] * (x.dim() - 1))
            x = spec.as_mask(is_unmasked).expand(x.shape).to(x.dtype)
        changed.append(x)
    return tuple(changed)


BATCHES = (1, 3, 8)
SIZES = (8, 16, 4, 7)
"""Sizes tried of named axes other than the batch, an odd one too; a model may refuse some."""
LARGEST = 1024
"""The largest allowed size of an axis is tried up to here: longer inputs take too much memory."""
# What torch.export's graph, or the code that AOTInductor compiles from it, raises for a size that
# was ruled out while tracing.
ASSERTED = re.compile(
    r"Runtime assertion failed for expression|Expected .+ to be True but received"
)
RULED_OUT = (
    ": the model's code, or torch's own, goes another way where this holds than where it does not; "
    "torch.export followed one way, and refuses the other sizes (it takes it that none within the "
    "model is 1); bound the axis with model.axes, or use export_onnx or export_torchscript"
)
BAKED_IN = (
    ", and is right at the sizes it was made with, so the axis is baked in; compute it from the "
    "input's shape in the model's code"
)


class ParityMismatch(StageFailed):
    """An exported model's outputs differ from its source's on a known input."""

    def __init__(self, message: str, kind: str = "", inputs: Tensors = ()) -> None:
        # The other arguments have defaults because errors are made anew from their message alone
        # where a stage's name is prefixed.
        super().__init__(message)
        self.kind = kind  # name of the kind of input, such as "zeros"
        self.inputs = inputs


def compare_outputs(
    source: Artifact,
    expected: Predictor,
    exported: Predictor,
    val_batches: Sequence[Tensors],
    limits: Limits | None = None,
    operators: Container[str] = (),
    noise: RoundingNoise | None = None,
) -> float:
    """Compare two models: at several sizes of each axis, on `val`, on adversarial inputs.

    `expected` is the source's predictor, or its recorded outputs. `limits` holds the largest sizes
    of named axes, `operators` the names of the exported model's operators. Returns the error on
    `val` that the source's own rounding noise allowed, 0 where it was not needed; raises
    StageFailed where outputs differ.
    """
    signature, tolerance = source.signature, tolerance_for(source)
    for inputs in val_batches:
        for spec, x in zip(signature.inputs, inputs, strict=True):
            for axis, size in zip(spec.shape, x.shape, strict=True):
                if isinstance(axis, str) and size not in signature.bounds(axis):
                    raise StageFailed(
                        f"axis {axis!r} has size {size} in a sample of `val`, and model.axes "
                        f"allows {signature.bounds(axis)}"
                    )
    reference = Float64Reference(source, expected, noise)
    predictors = accept_any_batch(expected, signature), accept_any_batch(exported, signature)
    usual = usual_sizes(predictors[0], signature, val_batches[:1])
    check_axis_sizes(
        expected, exported, signature, tolerance, reference, limits, usual, val_batches
    )
    errors = check_on_samples(*predictors, val_batches, tolerance, noise)
    cases = adversarial_inputs(signature, val_batches, operators)
    mismatch = find_adversarial_mismatch(
        expected, exported, signature, cases, tolerance, reference, usual
    )
    if mismatch:
        kind, inputs, error = mismatch
        (case,) = outputs_for(*predictors, [(kind, inputs)])
        how = (
            f" fails where the source answers ({_summary_line(case.failure)})"
            if case.failure
            else f"'s answers differ from the source's by {error:.2g} of their norm, expected at "
            f"most {tolerance.adversarial:g}"
        )
        message = f"on adversarial inputs ({kind}) the exported model{how}"
        raise ParityMismatch(message, kind, inputs)
    return errors.allowed


def parity_inputs(
    signature: Signature, val_batches: Sequence[Tensors], limits: Limits | None = None
) -> Iterator[tuple[str, Tensors]]:
    """Yield every kind of input on which two models are compared, after its name."""
    yield "seeded", signature.example()
    for axis in signature.dynamic_axes:
        for size in _sizes(signature, axis, limits):
            yield f"{axis} of {size}", signature.example(sizes={axis: size})
    rows = signature.inputs[0].shape[0] if signature.inputs[0].shape else None
    for i, inputs in enumerate(val_batches):
        fixed = tuple(x[:rows] for x in inputs) if isinstance(rows, int) else inputs
        if not isinstance(rows, int) or len(fixed[0]) == rows:
            yield f"val, batch {i}", fixed
    yield from adversarial_inputs(signature, val_batches)


class KindOutputs(NamedTuple):
    """What two models answer to one kind of input."""

    kind: str
    inputs: Tensors
    expected: Tensors = ()
    exported: Tensors = ()
    refusal: Exception | None = None
    """What the source raises; there are no outputs then."""
    failure: Exception | None = None

    @property
    def error(self) -> float:
        """The error relative to the norm: infinite where the exported model fails."""
        return math.inf if self.failure else largest_relative_error(self.expected, self.exported)


def outputs_by_kind(
    expected: Predictor, exported: Predictor, source: Artifact, context: Context
) -> Iterator[KindOutputs]:
    """Yield what two models answer to each kind of input."""
    expected, exported = (accept_any_batch(p, source.signature) for p in (expected, exported))
    cases = parity_inputs(source.signature, list(val_inputs(context, source)))
    yield from outputs_for(expected, exported, cases)


def outputs_for(
    expected: Predictor, exported: Predictor, cases: Iterable[tuple[str, Tensors]]
) -> Iterator[KindOutputs]:
    """Yield what two models answer to some inputs, which come after the name of their kind."""
    for kind, inputs in cases:
        found = KindOutputs(kind, inputs)
        try:
            found = found._replace(expected=expected(*inputs))
        except Exception as error:  # noqa: BLE001 - whatever the user's own code raises
            found = found._replace(refusal=error)
        else:
            try:
                found = found._replace(exported=exported(*inputs))
            except Exception as error:  # noqa: BLE001 - each runtime raises its own
                found = found._replace(failure=error)
        yield found


def largest_relative_error(expected: Tensors, exported: Tensors) -> float:
    """Return the largest error of an output, relative to its norm; infinite for other shapes."""
    if len(expected) != len(exported):
        return math.inf
    return largest(relative_error(a, b) for a, b in zip(expected, exported, strict=True))


def check_axis_sizes(
    expected: Predictor,
    exported: Predictor,
    signature: Signature,
    tolerance: Tolerance = FLOAT,
    reference: Float64Reference | None = None,
    limits: Limits | None = None,
    usual: Sequence[float] = (),
    val_batches: Sequence[Tensors] = (),
) -> None:
    """Compare two models on seeded inputs, at several sizes of every named axis.

    Raise StageFailed where an axis is baked in, or outputs differ; the message names the axis.
    Errors that are small beside `usual`, the usual size of each output, are none. Seeded integers
    are 0 or 1, which may be a row like no other: where outputs differ on it, rows of `val` decide.
    """
    limit, seeded = tolerance.relative, usual_sizes(expected, signature)
    shares = [tolerance.of_usual / limit * size for size in usual or seeded]
    least = [*map(max, seeded or shares, shares)]

    def problem_at(inputs: Tensors, outputs: Tensors) -> str:
        problem = _find_problem(exported, inputs, outputs, limit, least)
        if problem and reference is not None:
            with suppress(Exception):  # each runtime raises its own, and the problem quotes it
                if reference.explains(inputs, exported(*inputs), limit):
                    return ""
        return problem

    example = signature.example()
    if not signature.dynamic_axes:
        problem = problem_at(example, expected(*example))
        if problem:
            raise ParityMismatch(problem, "seeded", example)
    for axis in signature.dynamic_axes:
        accepted, refusal = 0, ""
        for size in _sizes(signature, axis, limits):
            inputs = signature.example(sizes={axis: size})
            try:
                outputs = expected(*inputs)
            except Exception as error:  # noqa: BLE001 - whatever the user's own code raises
                refusal = f"size {size}: {_summary_line(error)}"
                continue
            accepted += 1
            problem = problem_at(inputs, outputs)
            is_real = axis == signature.batch_axis and bool(val_batches)
            if problem and is_real and not any(x.is_floating_point() for x in inputs):
                seeded_problem, inputs = problem, first_rows(val_batches[0], size)
                if not (problem := problem_at(inputs, expected(*inputs))):
                    logger.warning("on rows of zeros and ones, unlike `val`, %s", seeded_problem)
            if problem:
                advice = ""
                if ASSERTED.search(problem):
                    advice = RULED_OUT
                elif not _find_problem(exported, example, expected(*example), limit, seeded):
                    advice = BAKED_IN
                raise ParityMismatch(
                    f"axis {axis!r} at size {size}: {problem}{advice}", f"{axis} of {size}", inputs
                )
        if accepted < 2:  # equal outputs at one size do not show that the axis is not baked in
            raise StageFailed(
                f"axis {axis!r} is declared dynamic and the source model takes one size only "
                f"({refusal}); declare a number instead of the name in model.inputs"
            )


def _sizes(signature: Signature, axis: str, limits: Limits | None) -> tuple[int, ...]:
    """Return the sizes of an axis that are tried: usual ones, and the ends of what is allowed."""
    bounds, limit = signature.bounds(axis), (limits or {}).get(axis, 0)
    sizes = [s for s in (BATCHES if axis == signature.batch_axis else SIZES) if s in bounds]
    largest = min(limit or math.inf, bounds.max or math.inf)
    if (not sizes or sizes[0] < largest) and largest <= LARGEST:
        sizes.append(int(largest))
    if bounds.min > 1:
        sizes += [bounds.min, bounds.nearest(2 * bounds.min)]
    return tuple(dict.fromkeys(sizes))


def _find_problem(
    exported: Predictor, inputs: Tensors, expected: Tensors, limit: float, least: Sequence[float]
) -> str:
    """Return how the exported model's outputs for one input are wrong; empty where they are not.

    Errors are relative to an output's norm, or to that of elements of the size `least`.
    """
    try:
        outputs = exported(*inputs)
    except Exception as error:  # noqa: BLE001 - each runtime raises its own
        return f"the exported model fails where the source answers ({_summary_line(error)})"
    shapes, expected_shapes = ([tuple(t.shape) for t in ts] for ts in (outputs, expected))
    if shapes != expected_shapes:
        return f"the exported model returns shapes {shapes} and the source {expected_shapes}"
    if all(a.numel() and not a.isfinite().any() for a in expected):
        return NOTHING_FINITE
    for i, (a, b) in enumerate(zip(expected, outputs, strict=True)):
        least_norm = least[i] * a.numel() ** 0.5 if least else 0.0
        relative = relative_error(a, b, least_norm)
        if math.isinf(relative):
            return OTHER_INFINITIES
        if not relative <= limit:
            return (
                f"the exported model's answers differ from the source's by {relative:.2g} of their "
                f"norm, expected at most {limit:g}"
            )
    return ""


def _summary_line(error: Exception) -> str:
    """Return the line of an error that says what happened: TorchScript's comes last."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[-1] if "TorchScript interpreter" in lines[0] else lines[0]


def on_cpu(predict: Predictor) -> Predictor:
    """Return a predictor whose outputs are moved to the CPU, where the source's are."""

    def predict_on_cpu(*inputs: torch.Tensor) -> Tensors:
        return tuple(t.cpu() for t in predict(*inputs))

    return predict_on_cpu


def source_predictor(source: Artifact, context: Context) -> AbstractContextManager[Predictor]:
    """Provide a source on the CPU; rows of `val` that were evaluated there are not called again."""
    by_row = context.answers_by_row(source)
    return context.caches.answers.predictor(
        source, "cpu", context.threads, by_row=by_row, keep_errors=True
    )


@contextmanager
def recorded_outputs(
    source: Artifact, inputs: Iterable[Tensors], context: Context
) -> Iterator[Predictor]:
    """Run a model on inputs, close it, and give its kept outputs as a predictor.

    It is opened again for an input whose output is not kept.
    """
    with source_predictor(source, context) as predict:
        answer = accept_any_batch(predict, source.signature)
        for batch in inputs:
            if not context.caches.answers.has_room(source, "cpu", context.threads):
                break
            with suppress(Exception):  # raised again where it is needed
                answer(*batch)
        del predict, answer
    release_memory()
    with source_predictor(source, context) as predict:
        yield predict
