"""Whether a model's answer to one row depends on the other rows of its batch.

Batch statistics in eval mode, attention over the wrong axis and quantization ranges taken from a
whole call all make it so. Such a model passes every comparison at one batch size and answers
something else at another, or beside other requests.

Two kinds of probes find it. At an equal batch size, and with a row at its place, only the *values*
of its neighbours change: kernels then compute that row in the same order, so that its answer stays
the same to the last bits. At another size or order kernels round otherwise, so that some rounding
is allowed there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from compress.common.config import Settings
from compress.common.errors import first_line

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from compress.artifacts.artifact import Artifact
    from compress.common.forward import Predictor
    from compress.common.signature import Signature, TensorSpec

    Array = NDArray[Any]
    Call = Callable[..., Sequence[Array]]

ROWS = 8
"""Rows of the batch that is probed; as many others serve as their neighbours."""
SAME_BITS = 1e-5
"""Largest move, as a share of the outputs' spread, where only the neighbours' values change."""
FLOAT_ROUNDING = 1e-3
"""The same at another batch size or order, of a model that computes in float32."""
COARSE_ROUNDING = 0.05
"""The same where activations are rounded to 8 bits or to half precision: there a difference in the
last bit of a float32 can become a whole step."""
FLOAT32_STEPS = 1e-5
"""Moves up to this share of the largest output are float32's own rounding at another batch size,
however alike answers are from row to row."""
LAST_BITS = 1e-6
"""The same at an equal batch size."""
UNBOUNDED = 1e6
"""Stands for an answer that became infinite or NaN, which JSON cannot hold."""
EXTREME = 1000.0
"""How many times larger than real values extreme ones are."""

Probe = Literal[
    "asked again", "beside other rows", "beside extreme rows", "reordered", "alone", "unpadded"
]


class BatchDependence(Settings):
    """How far the answers to some rows moved with what else was in their batch."""

    rows: int
    """Distinct rows whose answers were compared."""
    source: Literal["val", "seeded"]
    """Where the rows are from."""
    moves: dict[Probe, float] = {}
    """Largest change of an answer by probe, as a share of the outputs' spread."""
    beyond_rounding: tuple[Probe, ...] = ()
    """Probes that moved answers by more than rounding does."""
    unproven: str = ""
    """Why independence is not shown although no answer moved; empty where it is."""

    @property
    def depends(self) -> bool:
        """Whether the batch size at which the model is measured decides what is measured."""
        return bool(self.beyond_rounding)

    @property
    def lets_requests_join(self) -> bool:
        """Whether rows of `val` have shown that requests may be answered in one call."""
        return not self.why_not_joined

    @property
    def why_not_joined(self) -> str:
        """Why requests must not be answered together, and how to mend it; empty where they may.

        Without figures: packages seal it, and their digests are the same on every machine.
        """
        if set(self.beyond_rounding) - {"unpadded"}:
            return "answers depend on what else is in the batch"
        if self.source != "val":
            return (
                "only seeded inputs were asked, which cannot prove that rows leave each other's "
                "answers alone; give the pipeline a `data:` section with a split `val`"
            )
        return self.unproven

    def line(self) -> str:
        """Return how far answers moved, in words."""
        probes = self.beyond_rounding
        if not probes:
            return "no answer moved"
        # A model that answers otherwise each time moves them under every probe.
        again: Probe = "asked again"
        probe = again if again in probes else max(probes, key=lambda name: self.moves[name])
        move = self.moves[probe]
        far = "without bound" if move >= UNBOUNDED else f"by {100 * move:.2g} % of their spread"
        return f"{probe} they move {far} ({self.rows} rows of {self.source})"


def measure(
    call: Call,
    signature: Signature,
    batch: Sequence[Array],
    *,
    source: Literal["val", "seeded"],
    rounding: float = FLOAT_ROUNDING,
    unpadded: Sequence[Sequence[Array]] = (),
) -> BatchDependence:
    """Ask a model the same rows alone, in another order, and beside other and extreme rows.

    Args:
        call: the model as a function of arrays.
        signature: its interface.
        batch: inputs, best :data:`ROWS` rows and as many others to stand beside them.
        source: where they are from.
        rounding: largest move that another batch size or order may cause.
        unpadded: inputs of the first rows, one by one, where `batch` pads them to one length; none
            for those that it does not.
    """
    return _Probing(call, signature, batch, source, rounding, unpadded).result()


def rounding_of(artifact: Artifact) -> float:
    """Return how far rounding alone may move an artifact's answers."""
    coarse = any(
        step.stage.startswith("quantize_") or step.stage == "convert_precision"
        for step in artifact.manifest.lineage
    )
    half = any(spec.dtype in ("float16", "bfloat16") for spec in artifact.signature.inputs)
    return COARSE_ROUNDING if coarse or half else FLOAT_ROUNDING


def as_call(predict: Predictor, signature: Signature) -> Call:
    """Return a predictor as a function of arrays, in which bfloat16 is float32."""
    import torch

    dtypes = [getattr(torch, spec.dtype) for spec in signature.inputs]

    def call(*arrays: Array) -> list[Array]:
        held = (torch.from_numpy(np.ascontiguousarray(array)) for array in arrays)
        inputs = [tensor.to(dtype) for tensor, dtype in zip(held, dtypes, strict=True)]
        outputs = (t.detach().cpu() for t in predict(*inputs))
        return [(t.float() if t.dtype == torch.bfloat16 else t).numpy() for t in outputs]

    return call


def as_arrays(inputs: Sequence[Any]) -> list[Array]:
    """Return tensors as arrays; bfloat16, which numpy lacks, as float32."""
    import torch

    return [(t.float() if t.dtype == torch.bfloat16 else t).cpu().numpy() for t in inputs]


def seeded_rows(signature: Signature, rows: int, seed: int = 0) -> list[Array]:
    """Return rows that differ, without torch: normal floats, zeros and ones for integers.

    Masks let through one element at least of each row, from the left.
    """
    generator = np.random.default_rng(seed)
    sizes = {axis: signature.bounds(axis).nearest(8) for axis in signature.dynamic_axes}
    sizes |= {signature.batch_axis or "": rows}
    arrays: list[Array] = []
    for spec in signature.inputs:
        shape = spec.sized(sizes)
        dtype = np.dtype("float32" if spec.dtype == "bfloat16" else spec.dtype)
        if dtype.kind == "f":
            arrays.append(generator.standard_normal(shape).astype(dtype))
        elif spec.is_mask and shape[-1]:
            lengths = generator.integers(1, shape[-1] + 1, (*shape[:-1], 1))
            arrays.append((np.arange(shape[-1]) < lengths).astype(dtype))
        else:
            arrays.append(generator.integers(0, 2, shape).astype(dtype))
    return arrays


def extreme_rows(
    inputs: Sequence[Array], specs: Sequence[TensorSpec], *, masks: bool = True
) -> list[Array]:
    """Return neighbours unlike any real row, of the same shapes.

    Floats become a thousand times larger, constant or zero; integers stay within the range seen,
    as those beyond may lie outside a table; masks let through everything, nothing, or one element.

    Args:
        inputs: real rows.
        specs: what the inputs are.
        masks: whether masks are changed too; some models refuse a row of which nothing counts.
    """
    generator = np.random.default_rng(0)
    changed = []
    for array, spec in zip(inputs, specs, strict=True):
        rows = array.copy()
        for i in range(len(rows) if array.ndim and array.size else 0):
            if spec.is_mask:
                rows[i] = _extreme_mask(rows[i], i // 2 % 3) if masks else rows[i]
            elif array.dtype.kind == "f":
                rows[i] = _extreme_floats(array, i)
            elif array.dtype.kind == "b":
                rows[i] = ~rows[i]
            else:
                rows[i] = _extreme_integers(array, i, generator)
        changed.append(rows)
    return changed


def _extreme_mask(row: Array, kind: int) -> Array:
    mask = np.full_like(row, kind == 0)
    if kind == 2:
        mask[..., :1] = 1
    return mask


def _extreme_floats(rows: Array, i: int) -> Array:
    finite = np.where(np.isfinite(rows[i]), rows[i], 0).astype(np.float64)
    largest = max(float(np.abs(finite).max()), 1.0) * EXTREME
    kinds = (finite * EXTREME, np.full_like(finite, largest), -finite * EXTREME, finite * 0)
    bound = float(np.finfo(rows.dtype).max) / 2
    chosen: Array = np.clip(kinds[i // 2 % len(kinds)], -bound, bound).astype(rows.dtype)
    return chosen


def _extreme_integers(rows: Array, i: int, generator: np.random.Generator) -> Array:
    low, high, row = int(rows.min()), int(rows.max()), rows[i]
    kinds = (
        np.full_like(row, high),
        generator.integers(low, high, row.shape, dtype=rows.dtype, endpoint=True),
        np.full_like(row, low),
        generator.permutation(row.ravel()).reshape(row.shape),
    )
    return kinds[i // 2 % len(kinds)]


class _Probing:
    """The calls of a model that show what moves its answers."""

    def __init__(
        self,
        call: Call,
        signature: Signature,
        batch: Sequence[Array],
        source: Literal["val", "seeded"],
        rounding: float,
        unpadded: Sequence[Sequence[Array]],
    ) -> None:
        self._call, self._signature, self._batch = call, signature, batch
        self._source, self._rounding, self._unpadded = source, rounding, unpadded
        first = signature.inputs[0].shape[:1]
        self._fixed = first[0] if first and isinstance(first[0], int) else None
        self._size = self._fixed or ROWS
        self._counts_rows = [bool(first) and spec.shape[:1] == first for spec in signature.inputs]
        self._moves: dict[Probe, float] = {}
        self._beyond: list[Probe] = []
        self._unproven: list[str] = []

    def result(self) -> BatchDependence:
        available = len(self._batch[0]) if self._counts_rows[0] else 0
        distinct = self._distinct(min(available, self._size))
        if not available:
            self._unproven.append("no axis of the first input counts rows")
        elif self._fixed != 1:
            self._probe(available)
            if distinct < 2:
                self._unproven.append(f"the rows of {self._source} that were asked are all alike")
        return BatchDependence(
            rows=distinct,
            source=self._source,
            moves={probe: float(f"{move:.3g}") for probe, move in self._moves.items()},
            beyond_rounding=tuple(self._beyond),
            unproven="; ".join(self._unproven),
        )

    def _probe(self, available: int) -> None:
        size = self._size
        real = self._picked(self._batch, np.arange(size) % available)
        try:
            self._reference = self._asked(real)
        except Exception as error:  # noqa: BLE001 - a user's model may raise anything
            self._unproven.append(f"{size} rows together are refused: {_reason(error)}")
            return
        self._scales = [*map(_scale, self._reference)]
        alone = self._alone(real, min(size, available))
        self._axes = [
            _row_axis(output, alone[k] if alone else [], size)
            for k, output in enumerate(self._reference)
        ]
        for i, answers in enumerate(zip(*alone, strict=True)):
            self._compare("alone", answers, [i], self._rounding)
        if (again := self._answers(real)) is not None:
            self._compare("asked again", again, range(size), SAME_BITS)
        others = (np.arange(size) + (size if available > size else 1)) % available
        self._beside("beside other rows", real, self._picked(self._batch, others))
        self._beside_extremes(real)
        order = np.arange(size)[::-1]
        if (turned := self._answers(self._picked(real, order))) is not None:
            self._compare("reordered", turned, order, self._rounding)

    def _alone(self, real: list[Array], rows: int) -> list[list[Array]]:
        """Return the answers to each row alone, by output; none where the batch is fixed."""
        if self._fixed is not None:
            return []
        answers = []
        for i in range(rows):
            try:
                answers.append(self._asked(self._picked(real, [i])))
            except Exception as error:  # noqa: BLE001 - a user's model may raise anything
                self._unproven.append(f"a row alone is refused: {_reason(error)}")
                self._note("alone", UNBOUNDED, self._rounding)
                return []
            if i < len(self._unpadded) and self._unpadded[i]:
                self._without_padding(answers[i], self._unpadded[i])
        return [list(column) for column in zip(*answers, strict=True)]

    def _without_padding(self, padded: list[Array], inputs: Sequence[Array]) -> None:
        answers = self._answers(inputs)
        if answers is None:
            return
        for a, b, scale in zip(padded, answers, self._scales, strict=True):
            if a.ndim == b.ndim:
                common = tuple(slice(min(m, n)) for m, n in zip(a.shape, b.shape, strict=True))
                move = _move(a[common], b[common], scale, FLOAT32_STEPS)
                self._note("unpadded", move, self._rounding)

    def _beside_extremes(self, real: list[Array]) -> None:
        specs = self._signature.inputs
        for masks in (True, False):
            extremes = extreme_rows(real, specs, masks=masks)
            if self._beside("beside extreme rows", real, extremes):
                return
        self._unproven.append("a batch with extreme rows is refused")

    def _beside(self, probe: Probe, real: list[Array], neighbours: list[Array]) -> bool:
        """Compare rows while those at every other place are exchanged; False where refused."""
        for kept in (np.arange(0, self._size, 2), np.arange(1, self._size, 2)):
            mixed = []
            for own, other, counts in zip(real, neighbours, self._counts_rows, strict=True):
                array = other.copy() if counts else own
                if counts:
                    array[kept] = own[kept]
                mixed.append(array)
            answers = self._answers(mixed)
            if answers is None:
                return False
            self._compare(probe, answers, kept, SAME_BITS)
        return True

    def _compare(
        self, probe: Probe, answers: Sequence[Array], rows: Sequence[int] | Array, limit: float
    ) -> None:
        """Hold answers to some rows against those of the whole batch.

        Args:
            probe: what was changed.
            answers: of as many rows as are compared, or of a whole batch.
            rows: their places in the first batch.
            limit: largest move that is no dependence.
        """
        steps = LAST_BITS if limit == SAME_BITS else FLOAT32_STEPS
        outputs = zip(self._reference, answers, self._axes, self._scales, strict=True)
        for whole, answer, axis, scale in outputs:
            expected, got = whole, answer
            if axis is not None:
                expected = _rows(whole, axis, self._size)[np.asarray(rows)]
                count = 1 if probe == "alone" else self._size
                got = _rows(answer, axis, count) if answer.ndim == whole.ndim else answer
                if probe.startswith("beside") and len(got) == self._size:
                    got = got[np.asarray(rows)]
            self._note(probe, _move(expected, got, scale, steps), limit)

    def _note(self, probe: Probe, move: float, limit: float) -> None:
        self._moves[probe] = max(move, self._moves.get(probe, 0.0))
        if move > limit and probe not in self._beyond:
            self._beyond.append(probe)

    def _asked(self, inputs: Sequence[Array]) -> list[Array]:
        return [np.asarray(output) for output in self._call(*inputs)]

    def _answers(self, inputs: Sequence[Array]) -> list[Array] | None:
        try:
            return self._asked(inputs)
        except Exception:  # noqa: BLE001 - a user's model may raise anything
            return None

    def _picked(self, arrays: Sequence[Array], places: Sequence[int] | Array) -> list[Array]:
        pairs = zip(arrays, self._counts_rows, strict=True)
        return [array[np.asarray(places)] if counts else array for array, counts in pairs]

    def _distinct(self, rows: int) -> int:
        picked = [self._picked(self._batch, [i]) for i in range(rows)]
        return len({b"".join(array.tobytes() for array in row) for row in picked})


def _row_axis(whole: Array, alone: Sequence[Array], rows: int) -> int | None:
    """Return the axis of an output that counts rows, perhaps several places for each; or None."""
    if not alone:
        return next((axis for axis, size in enumerate(whole.shape) if size == rows), None)
    shape = alone[0].shape
    if len(shape) != whole.ndim:
        return None
    for axis, (size, one) in enumerate(zip(whole.shape, shape, strict=True)):
        others = (
            n == m for k, (n, m) in enumerate(zip(whole.shape, shape, strict=True)) if k != axis
        )
        if one and size == rows * one and all(others):
            return axis
    return None


def _rows(output: Array, axis: int, rows: int) -> Array:
    """Return an output with its rows first; as it is where it has another number of them."""
    if axis >= output.ndim or output.shape[axis] % rows:
        return output
    first = np.moveaxis(output, axis, 0)
    return first.reshape(rows, first.shape[0] // rows, *first.shape[1:])


def _scale(reference: Array) -> float:
    """Return how far finite outputs lie apart; their size where they are all one number."""
    if reference.dtype.kind != "f":
        return 1.0
    finite = reference[np.isfinite(reference)].astype(np.float64)
    if not finite.size:
        return 1.0
    return float(np.ptp(finite)) or float(np.abs(finite).max()) or 1.0


def _move(a: Array, b: Array, scale: float, steps: float) -> float:
    """Return the largest difference as a share of a scale; of integers, how many differ.

    Differences up to `steps` of the largest number are none.
    """
    if a.shape != b.shape:
        return UNBOUNDED
    if not a.size:
        return 0.0
    if a.dtype.kind != "f":
        return float(np.mean(a != b))
    a, b = a.astype(np.float64), b.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        same = (a == b) | (np.isnan(a) & np.isnan(b))
        difference = np.where(same, 0.0, np.abs(a - b))
    largest = float(difference.max())  # NaN stays NaN
    if not np.isfinite(largest):
        return UNBOUNDED
    size = float(np.abs(np.where(np.isfinite(a), a, 0)).max())
    return min(largest / scale, UNBOUNDED) if largest > steps * size else 0.0


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"
