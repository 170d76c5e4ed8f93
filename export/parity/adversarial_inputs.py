"""Inputs that a model seldom sees: constants, extremes, tiny and large numbers, short rows."""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING

import torch

from compress.common.forward import accept_any_batch
from compress.common.tensor_difference import (
    largest,
    largest_difference,
    largest_finite,
    relative_error,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator, Mapping, Sequence

    from compress.common.forward import Predictor
    from compress.common.signature import Signature
    from export.parity.float64_reference import Float64Reference

logger = logging.getLogger(__name__)

Outputs = tuple[torch.Tensor, ...]

ROWS = 2
RAGGED_ROWS = 8
"""Rows of the batch whose lengths go from one element to all."""
SCALE = 10.0
"""How many times larger than the real samples the scaled ones are."""
TINY = 1e-9
"""Size of the smallest numbers asked: beside 1 they are nothing, so that 1 + x loses them."""
LARGE = (1e2, 1e3)
"""Sizes of the largest: float32's exp overflows from 89 on, and is 0 below -104."""
MIXED = (TINY, 1e-4, 1.0, 1e2, 3e2, 1e3)
"""Sizes that meet in one input, for operators that take two numbers, like logaddexp."""
TINY_KIND = f"real inputs brought to {TINY:g}"
LARGE_KINDS = {f"real inputs brought to {size:g}": size for size in LARGE}
MIXED_KIND = f"numbers of {TINY:g} to {max(MIXED):g} side by side"
UNLIKE: Mapping[str, tuple[str, ...]] = {
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
"""Operators, of ONNX or of a graph that was compiled → kinds of inputs to which they answer
otherwise than torch's, by their nature."""
ROUNDING = torch.finfo(torch.float32).eps


def adversarial_inputs(
    signature: Signature, seen: Sequence[Outputs], operators: Container[str] = ()
) -> Iterator[tuple[str, Outputs]]:
    """Yield kinds of inputs with their name; integers stay within the range that was seen.

    Args:
        signature: the model's interface; masks keep rows that are not wholly masked.
        seen: batches of real inputs; seeded ones where there are none.
        operators: those that the exported model has; what they are :data:`UNLIKE` on is left out.
    """
    left_out = {kind for name, kinds in UNLIKE.items() if name in operators for kind in kinds}
    yield from ((kind, x) for kind, x in _all_kinds(signature, seen) if kind not in left_out)


def _all_kinds(signature: Signature, seen: Sequence[Outputs]) -> Iterator[tuple[str, Outputs]]:
    seen = [batch for batch in seen if len(batch[0])] or [signature.example()]
    rows = _rows(signature, RAGGED_ROWS if _masks(signature) else ROWS)
    base = tuple(_repeated(x, rows) for x in seen[0])
    lowest, highest = (_extreme(seen, pick) for pick in (torch.min, torch.max))
    free = [not spec.is_mask for spec in signature.inputs]

    def filled(values: Sequence[float]) -> Outputs:
        return tuple(
            torch.full_like(x, value) if changed and x.numel() else x
            for x, value, changed in zip(base, values, free, strict=True)
        )

    zeros = [0 if low <= 0 <= high else low for low, high in zip(lowest, highest, strict=True)]
    yield "zeros", filled(zeros)
    yield "the smallest value seen everywhere", filled(lowest)
    yield "the largest value seen everywhere", filled(highest)
    if any(x.is_floating_point() for x in base):
        yield f"real inputs times {SCALE:g}", _floats_changed(base, lambda x: x * SCALE)
        for kind, size in {TINY_KIND: TINY, **LARGE_KINDS}.items():
            yield kind, _floats_changed(base, functools.partial(_brought_to, size=size))
        yield MIXED_KIND, _floats_changed(base, _mixed)
    if _masks(signature):
        yield "rows of every length", _ragged(signature, base)


def check_on_hostile(
    expected: Predictor,
    got: Predictor,
    signature: Signature,
    cases: Iterator[tuple[str, Outputs]],
    limit: float,
    truth: Float64Reference | None = None,
) -> tuple[str, Outputs, float] | None:
    """Return the first kind on which two models differ, its inputs and the error, or None.

    What the source refuses tells nothing, and no more does a NaN among its answers, or an infinity
    that float64 does not have there: the other elements are compared. Integers that a model answers
    with are not compared here: on constants they are ties. But for tiny inputs, whose answers may
    be as tiny, no difference counts that is less than the rounding of a usual answer: a sigmoid of
    -25 may be 0.

    Args:
        expected: the source model.
        got: the exported one.
        signature: their interface.
        cases: kinds of inputs.
        limit: largest error, relative to the norm of the answers.
        truth: what excuses a difference.
    """
    expected, mine = accept_any_batch(expected, signature), accept_any_batch(got, signature)
    negligible = ROUNDING * _largest_answer(expected, signature)
    for kind, inputs in cases:
        try:
            answers = expected(*inputs)
        except Exception:  # noqa: BLE001 - whatever the user's own code raises
            continue
        error = _error(mine, inputs, answers, 0.0 if kind == TINY_KIND else negligible)
        if error < float("inf") and not _has_infinities(mine, inputs, answers, truth):
            error = float("inf")
        if error <= limit:
            continue
        if (
            truth is not None
            and error < float("inf")
            and truth.explains(inputs, mine(*inputs), limit)
        ):
            logger.info("on %s float32 itself is %.2g of the norm off", kind, error)
            continue
        return kind, inputs, error
    return None


def _error(got: Predictor, inputs: Outputs, expected: Outputs, negligible: float) -> float:
    """Return the worst output's error where the source is finite; infinite where the model fails.

    Args:
        got: the exported model.
        inputs: what it is asked.
        expected: the source's answers.
        negligible: the difference of an element that counts as none.
    """
    try:
        answers = got(*inputs)
    except Exception:  # noqa: BLE001 - each runtime raises its own
        return float("inf")
    errors = []
    for a, b in zip(expected, answers, strict=True):
        if a.shape != b.shape:
            return float("inf")
        if a.is_floating_point():
            known = a.isfinite()
            a, b = a.where(known, 0), b.where(known, 0)
            small = largest_difference(a, b) <= negligible
            errors.append(0.0 if small else relative_error(a, b))
    return largest(errors)


def _has_infinities(
    got: Predictor, inputs: Outputs, expected: Outputs, truth: Float64Reference | None
) -> bool:
    """Whether a model is infinite where its source is, overflows of float32 left out."""
    pairs = [p for p in zip(expected, got(*inputs), strict=True) if p[0].is_floating_point()]
    others = [a.isinf() & (a != b) for a, b in pairs]
    if truth is None or not any(other.any() for other in others):
        return True
    exact = truth.exact(inputs)
    if exact is None:
        return True
    meant = [t.isinf() for t, a in zip(exact, expected, strict=True) if a.is_floating_point()]
    return not any((a & b).any() for a, b in zip(others, meant, strict=True))


def _largest_answer(expected: Predictor, signature: Signature) -> float:
    """Return the largest finite number that a model answers to seeded inputs; 0 where it fails."""
    try:
        answers = expected(*signature.example())
    except Exception:  # noqa: BLE001 - whatever the user's own code raises
        return 0.0
    return largest(largest_finite(t) for t in answers if t.is_floating_point())


def _floats_changed(base: Outputs, change: Callable[[torch.Tensor], torch.Tensor]) -> Outputs:
    return tuple(change(x).to(x.dtype) if x.is_floating_point() and x.numel() else x for x in base)


def _brought_to(x: torch.Tensor, size: float) -> torch.Tensor:
    """Return a tensor scaled so that its largest number has a size; zeros stay zeros."""
    largest_number = x.double().abs().max()
    return x.double() / largest_number * size if largest_number > 0 else x


def _mixed(x: torch.Tensor) -> torch.Tensor:
    """Return seeded numbers of either sign, of all sizes."""
    generator = torch.Generator().manual_seed(0)
    places = torch.randint(len(MIXED), x.shape, generator=generator)
    numbers = torch.randn(x.shape, generator=generator, dtype=torch.float64)
    return numbers * torch.tensor(MIXED, dtype=torch.float64)[places]


def _masks(signature: Signature) -> bool:
    return any(spec.is_mask for spec in signature.inputs)


def _rows(signature: Signature, rows: int) -> int:
    size = signature.inputs[0].shape[0] if signature.inputs[0].shape else rows
    return size if isinstance(size, int) else rows


def _repeated(x: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the first rows, from the start again where there are too few."""
    return x[torch.arange(rows) % len(x)] if x.dim() else x


def _extreme(seen: Sequence[Outputs], pick: Callable[[torch.Tensor], torch.Tensor]) -> list[float]:
    columns = zip(*seen, strict=True)
    return [
        pick(
            torch.stack(
                [pick(x).double() for x in column if x.numel()] or [torch.zeros(()).double()]
            )
        ).item()
        for column in columns
    ]


def _ragged(signature: Signature, base: Outputs) -> Outputs:
    """Return rows whose masks let through one element, some, and all, from the left."""
    changed = []
    for spec, x in zip(signature.inputs, base, strict=True):
        if spec.is_mask and x.dim() > 1 and x.shape[-1]:
            lengths = torch.linspace(1, x.shape[-1], len(x)).round()
            shape = (len(x), *[1] * (x.dim() - 1))
            x = (torch.arange(x.shape[-1]) < lengths.view(shape)).expand(x.shape).to(x.dtype)
        changed.append(x)
    return tuple(changed)
