"""Inputs that a model seldom sees: constants, extremes, tiny and large numbers, short rows."""

from __future__ import annotations

import functools
import logging
import math
from contextlib import suppress
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
    from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence

    from compress.common.forward import Predictor
    from compress.common.signature import Signature
    from compress.export.parity.arithmetic_error import Float64Reference

    Tensors = tuple[torch.Tensor, ...]

logger = logging.getLogger(__name__)

# So all kinds together are 16 to 28 rows, an eighth to a fifth of what is compared on `val`: their
# number does not hang on the time that a call takes, or a verdict would hang on the machine's load.
ROWS = 2
RAGGED_ROWS = 8
"""Rows of the batch whose lengths go from one element to all."""
SCALE = 10.0
"""How many times larger than the real samples the scaled ones are."""
TINY = 1e-9
"""Size of the smallest inputs: 1 + x loses them in float32, whose step at 1 is 1.2e-7."""
LARGE = (1e2, 1e3)
"""Sizes of the largest: float32's exp overflows from 89 on, and is 0 below -104."""
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
ROUNDING = torch.finfo(torch.float32).eps


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

    def first_rows(rows: int) -> Tensors:
        # From the start again where there are too few.
        places = torch.arange(batch or rows)
        return tuple(x[places % len(x)] if x.dim() else x for x in val_batches[0])

    base = first_rows(ROWS)

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

    lowest, highest = (_extreme(val_batches, pick) for pick in (torch.min, torch.max))
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
        ragged = _masked(signature, first_rows(rows), torch.linspace(0, 1, rows), least=1)
        yield "rows of every length", ragged
        shares = torch.ones(batch or ROWS)
        yield "masks that let everything through", _masked(signature, base, shares, least=1)
        yield NOTHING_KIND, _masked(signature, base, 0 * shares, least=0)


def find_adversarial_mismatch(
    expected: Predictor,
    exported: Predictor,
    signature: Signature,
    cases: Iterable[tuple[str, Tensors]],
    limit: float,
    reference: Float64Reference | None = None,
) -> tuple[str, Tensors, float] | None:
    """Return the first kind on which two models differ, its inputs and the error, or None.

    Inputs that the source refuses are left out, and so are its NaN, and infinities that float64
    does not have there: the other elements are compared. Errors are relative to the outputs' norm;
    the reference may explain a difference. Where the source itself is further from float64 than the
    limit, its outputs are noise: a warning says so.
    """
    expected, exported = (accept_any_batch(p, signature) for p in (expected, exported))
    # A difference below the rounding of a usual output counts as none, as a sigmoid of -25 may be
    # 0; but not for tiny inputs, whose outputs may be as tiny.
    rounding = 0.0
    with suppress(Exception):  # whatever the user's own code raises
        outputs = expected(*signature.example())
        rounding = ROUNDING * largest(largest_finite(t) for t in outputs if t.is_floating_point())
    for kind, inputs in cases:
        try:
            outputs = expected(*inputs)
        except Exception:  # noqa: BLE001 - whatever the user's own code raises
            continue
        try:
            answers = exported(*inputs)
        except Exception:  # noqa: BLE001 - each runtime raises its own
            return kind, inputs, math.inf
        error = _error(outputs, answers, 0.0 if kind == TINY_KIND else rounding)
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


def _error(expected: Tensors, outputs: Tensors, rounding: float) -> float:
    """Return the worst output's error where the source is finite; infinite for other shapes.

    A largest difference up to `rounding` counts as none.
    """
    errors = []
    for a, b in zip(expected, outputs, strict=True):
        if a.shape != b.shape:
            return math.inf
        if a.is_floating_point():  # integers are not compared: on constants they are ties
            finite = a.isfinite()
            a, b = a.where(finite, 0), b.where(finite, 0)
            negligible = largest_difference(a, b) <= rounding
            errors.append(0.0 if negligible else relative_error(a, b))
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
    """Return seeded numbers of either sign, of all sizes."""
    generator = torch.Generator().manual_seed(0)
    places = torch.randint(len(MIXED), x.shape, generator=generator)
    numbers = torch.randn(x.shape, generator=generator, dtype=torch.float64)
    return numbers * torch.tensor(MIXED, dtype=torch.float64)[places]


def _extreme(
    batches: Sequence[Tensors], pick: Callable[[torch.Tensor], torch.Tensor]
) -> list[float]:
    """Return the smallest or largest value of each input over all batches; 0 where empty."""
    return [
        float(
            pick(torch.stack([pick(x).double() for x in column if x.numel()] or [torch.zeros(())]))
        )
        for column in zip(*batches, strict=True)
    ]


def _masked(signature: Signature, base: Tensors, shares: torch.Tensor, least: int) -> Tensors:
    """Return rows whose masks let through a share of their elements from the left, `(rows,)`.

    They are `least` at least.
    """
    changed = []
    for spec, x in zip(signature.inputs, base, strict=True):
        if spec.unmasked_value is not None:
            lengths = (least + shares * (x.shape[-1] - least)).round()
            is_unmasked = torch.arange(x.shape[-1]) < lengths.view(-1, *[1] * (x.dim() - 1))
            x = spec.as_mask(is_unmasked).expand(x.shape).to(x.dtype)
        changed.append(x)
    return tuple(changed)
