"""Whether a model's outputs for one row depend on the other rows of its batch.

Batch statistics in eval mode, attention over the wrong axis, and quantization ranges computed over
a whole call all cause it. Such a model passes every comparison at one batch size and computes
something else at another, or when a server batches it with other requests.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from compress.common.config import Settings
from compress.common.errors import first_line
from compress.common.lazy_modules import torch
from compress.common.signature import EXAMPLE_LENGTH, Signature, TensorSpec

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from compress.artifacts.artifact import Artifact
    from compress.common.forward import Predictor
    from compress.data.splits import Splits

    Array = NDArray[Any]
    Call = Callable[..., Sequence[Array]]

ROWS = 8  # rows of the batch that is probed; as many others serve as their neighbours
EXTREME = 1000.0  # how many times larger than real values extreme ones are
# Where only the *values* of the neighbours change, at an equal batch size and with the row at its
# place, kernels compute that row in the same order, and its outputs stay the same to the last bits.
# At another size or order kernels round differently, so that the limit is wider there.
SAME_BITS = 1e-5
"""Largest change of an output, as a share of the outputs' spread, where only the neighbours' values
change."""
FLOAT_ROUNDING = 1e-3
"""The same at another batch size or order, of a model that computes in float32."""
COARSE_ROUNDING = 0.05
"""The same where activations are rounded to 8 bits or to half precision: there a difference in the
last bit of a float32 can become a whole step."""
FLOAT32_STEPS = 1e-5
"""Changes up to this share of the largest output are float32's own rounding at another batch size,
even where outputs hardly differ from row to row."""
LAST_BITS = 1e-6  # the same at an equal batch size
LARGEST_OUTPUTS = 2**28
"""Bytes that the outputs for one batch may take: a decoder scores every token of every row."""
MEASURED_SECONDS = 0.5  # for which a model is called; for longer where even two rows take longer
CALLED_PER_ROW = 8
"""How many times each row is computed: alone, in five batches, and in two halves of three."""
FEWEST_ROWS = 2  # one that must keep its outputs, and its neighbour, which changes
AT_ONCE = 2**20
"""Outputs that are compared at a time: in float64 they take twice their memory and more."""
UNBOUNDED = 1e6  # stands for an output that became infinite or NaN, which JSON cannot represent
ProbeName = Literal[
    "asked again", "beside other rows", "beside extreme rows", "reordered", "alone", "unpadded"
]


def as_arrays(inputs: Sequence[Any]) -> list[Array]:
    """Convert tensors to arrays; bfloat16, which numpy lacks, becomes float32."""
    return [(t.float() if t.dtype == torch.bfloat16 else t).cpu().numpy() for t in inputs]


def val_rows(data: Splits, signature: Signature) -> tuple[list[Array], list[list[Array]]]:
    """Read rows of ``val``, and the first of them unpadded; empty for a row that was not padded."""
    # Evenly spaced: the first samples of a split are often of one class, and neighbours of one
    # source.
    samples = len(data.split("val"))  # type: ignore[arg-type]
    leading = signature.inputs[0].shape[:1]
    wanted = 2 * leading[0] if leading and isinstance(leading[0], int) else 2 * ROWS
    count = min(wanted, samples)
    order = [i * samples // count for i in range(count)]
    # Every other row is probed, and those in between are its neighbours.
    order = order[::2] + order[1::2]
    (batch,) = data.read("val", order, count)
    rows = as_arrays(batch.inputs)
    shapes = [array.shape[1:] for array in rows]
    unpadded = []
    has_varying_axes = bool({*signature.dynamic_axes} - {signature.batch_axis})
    for i in order[:ROWS] if has_varying_axes else ():
        (single,) = data.read("val", [i], 1)
        inputs = as_arrays(single.inputs)
        was_padded = [array.shape[1:] for array in inputs] != shapes
        unpadded.append(inputs if was_padded else [])
    return rows, unpadded


def seeded_rows(
    signature: Signature, rows: int, seed: int = 0, length: int = EXAMPLE_LENGTH
) -> list[Array]:
    """Generate rows as :meth:`Signature.example` does, but without torch and of other numbers.

    Named axes but the batch have `length` elements, or the nearest number that is allowed.
    """
    generator = np.random.default_rng(seed)
    sizes = {axis: signature.bounds(axis).nearest(length) for axis in signature.dynamic_axes}
    sizes |= {signature.batch_axis or "": rows}
    signature.refuse_too_large(sizes)
    arrays: list[Array] = []
    for spec in signature.inputs:
        shape = spec.sized(sizes)
        dtype = np.dtype("float32" if spec.dtype == "bfloat16" else spec.dtype)
        if dtype.kind == "f":
            arrays.append(generator.standard_normal(shape).astype(dtype))
        elif spec.unmasked_value is not None and shape[-1]:
            lengths = generator.integers(1, max(shape[-1], 2), (*shape[:-1], 1))
            arrays.append(spec.as_mask(np.arange(shape[-1]) < lengths).astype(dtype))
        else:
            arrays.append(generator.integers(*spec.invented_integers, shape).astype(dtype))
    return arrays


def extreme_rows(
    inputs: Sequence[Array], specs: Sequence[TensorSpec], *, masks: bool = True
) -> list[Array]:
    """Generate neighbours unlike any real row, of the same shapes.

    Floats become a thousand times larger, constant or zero; integers others of the range seen. With
    ``masks``, masks let through everything, nothing (which some models refuse), or one element.
    """
    generator = np.random.default_rng(0)
    changed = []
    for array, spec in zip(inputs, specs, strict=True):
        rows = array.copy()
        if array.ndim and array.size and array.dtype.kind in "iu":
            # Within the range seen, of each place on a fixed axis (each may index a table of its
            # own): a call with others may raise, or end the process (AOTInductor, torch 2.13).
            varying = tuple(a for a, n in enumerate(spec.shape) if not a or isinstance(n, str))
            low, high = (pick(array, axis=varying, keepdims=True)[0] for pick in (np.min, np.max))
        for i, row in enumerate(array if array.ndim and array.size else ()):
            if spec.unmasked_value is not None:
                if masks:
                    # All elements, none, or the first.
                    count = (rows.shape[-1], 0, 1)[i // 2 % 3]
                    rows[i] = spec.as_mask(np.arange(rows.shape[-1]) < count)
            elif array.dtype.kind == "f":
                finite = np.where(np.isfinite(row), row, 0).astype(np.float64)
                largest = max(float(np.abs(finite).max()), 1.0) * EXTREME
                constant = np.full_like(finite, largest)
                floats = (finite * EXTREME, constant, -finite * EXTREME, finite * 0)
                bound = float(np.finfo(array.dtype).max) / 2
                rows[i] = np.clip(floats[i // 2 % len(floats)], -bound, bound)
            elif array.dtype.kind == "b":
                rows[i] = ~row
            else:
                integers = (
                    high,
                    generator.integers(low, high, row.shape, dtype=array.dtype, endpoint=True),
                    low,
                    high - (row - low),
                )
                rows[i] = integers[i // 2 % len(integers)]
        changed.append(rows)
    return changed


class BatchDependence(Settings):
    """How far the outputs for some rows changed with the rest of their batch."""

    rows: int
    """Distinct rows whose outputs were compared."""
    source: Literal["val", "seeded"]
    """Whether the rows are samples of `val` or random."""
    calls: int = 0
    """How many times the model was called; 0 in measurements of older versions."""
    moves: dict[ProbeName, float] = {}
    """Largest change of an output by probe, as a share of the outputs' spread."""
    beyond_rounding: tuple[ProbeName, ...] = ()
    """Probes that changed outputs by more than rounding does."""
    unproven: str = ""
    """Why independence is not shown although no output changed; empty where it is."""

    @property
    def depends(self) -> bool:
        """Whether measured values depend on the batch size."""
        return bool(self.beyond_rounding)

    @property
    def why_not_joined(self) -> str:
        """Why a server must not batch requests, and how to change that; empty where it may."""
        # Without measured values: packages contain it, and their digests are the same everywhere.
        if set(self.beyond_rounding) - {"unpadded"}:
            return "answers depend on what else is in the batch"
        if self.source != "val":
            return (
                "only seeded inputs were asked, which cannot prove that rows leave each other's "
                "answers alone; give the pipeline a `data:` section with a split `val`"
            )
        return self.unproven

    def line(self) -> str:
        """Return a line on the probe that changed the outputs most."""
        probes = self.beyond_rounding
        if not probes:
            return "no answer moved"
        # Outputs of a model that draws random numbers change under every probe.
        repeated: ProbeName = "asked again"
        probe = repeated if repeated in probes else max(probes, key=lambda name: self.moves[name])
        move = self.moves[probe]
        amount = "without bound" if move >= UNBOUNDED else f"by {100 * move:.2g} % of their spread"
        return f"{probe} they move {amount} ({self.rows} rows of {self.source})"


def measure_artifact(
    artifact: Artifact,
    data: Splits | None,
    device: str,
    threads: int,
    seed: int,
    *,
    briefly: bool = False,
) -> BatchDependence:
    """Measure an artifact of any format on rows of `val`, or on seeded ones without data."""
    signature, has_val = artifact.signature, data is not None and "val" in data.datasets
    rows, unpadded = seeded_rows(signature, 2 * ROWS, seed), list[list["Array"]]()
    if data is not None and has_val:
        rows, unpadded = val_rows(data, signature)
    with artifact.open(device, threads) as predict:
        return measure(
            numpy_call(predict, signature),
            signature,
            rows,
            source="val" if has_val else "seeded",
            rounding=rounding_tolerance(artifact),
            unpadded=unpadded,
            briefly=briefly,
        )


def measure(
    call: Call,
    signature: Signature,
    batch: Sequence[Array],
    *,
    source: Literal["val", "seeded"],
    rounding: float = FLOAT_ROUNDING,
    unpadded: Sequence[Sequence[Array]] = (),
    briefly: bool = False,
) -> BatchDependence:
    """Call a model on the same rows alone, reordered, and with other and extreme neighbours.

    One whose calls take long is called on fewer rows. Where even two take longer than
    :data:`MEASURED_SECONDS`, and where it is measured `briefly`, it is called only as often as it
    takes to show dependence or independence: alone, and beside extreme rows, which move what real
    ones move.

    The batch has at best :data:`ROWS` rows and as many others as their neighbours, and ``unpadded``
    the first rows that it pads, one by one, else empty lists. ``rounding`` is the largest change
    that another batch size or order may cause, as a share of the outputs' spread.
    """
    seconds = 0.0 if briefly else MEASURED_SECONDS
    return _BatchProbes(call, signature, batch, source, rounding, unpadded, seconds).result()


def rounding_tolerance(artifact: Artifact) -> float:
    """Return how far rounding may change an artifact's outputs, as a share of their spread."""
    is_coarse = any(
        step.stage.startswith("quantize_") or step.stage == "convert_precision"
        for step in artifact.manifest.lineage
    )
    is_half = any(spec.dtype in ("float16", "bfloat16") for spec in artifact.signature.inputs)
    return COARSE_ROUNDING if is_coarse or is_half else FLOAT_ROUNDING


def numpy_call(predict: Predictor, signature: Signature) -> Call:
    """Return a predictor as a function of arrays, in which bfloat16 is float32."""
    dtypes = [getattr(torch, spec.dtype) for spec in signature.inputs]

    def call(*arrays: Array) -> list[Array]:
        tensors = (torch.from_numpy(np.ascontiguousarray(array)) for array in arrays)
        inputs = [tensor.to(dtype) for tensor, dtype in zip(tensors, dtypes, strict=True)]
        outputs = (t.detach().cpu() for t in predict(*inputs))
        return [(t.float() if t.dtype == torch.bfloat16 else t).numpy() for t in outputs]

    return call


@dataclass
class _BatchProbes:
    """Calls of a model on one batch and on changed batches, and how far outputs changed."""

    _call: Call
    _signature: Signature
    _batch: Sequence[Array]
    _source: Literal["val", "seeded"]
    _rounding: float
    _unpadded: Sequence[Sequence[Array]]
    _seconds: float

    def __post_init__(self) -> None:
        first = self._signature.inputs[0].shape[:1]
        self._fixed_size = first[0] if first and isinstance(first[0], int) else None
        inputs = self._signature.inputs
        self._has_rows = [bool(first) and spec.shape[:1] == first for spec in inputs]
        self._moves: dict[ProbeName, float] = {}
        self._beyond_rounding: list[ProbeName] = []
        self._unproven: list[str] = []
        self._calls = 0
        self._is_brief = False
        self._first_alone: list[Array] | None = None

    def result(self) -> BatchDependence:
        available = len(self._batch[0]) if self._has_rows[0] else 0
        self._size = self._fixed_size or (self._affordable_rows() if available else ROWS)
        rows = range(min(available, self._size))
        taken = [self._take_rows(self._batch, [i]) for i in rows]
        distinct = len({b"".join(array.tobytes() for array in row) for row in taken})
        if not available:
            self._unproven.append("no axis of the first input counts rows")
        elif self._fixed_size != 1:
            self._probe(available)
            if distinct < 2:
                self._unproven.append(f"the rows of {self._source} that were asked are all alike")
        return BatchDependence(
            rows=distinct,
            source=self._source,
            calls=self._calls,
            moves={probe: float(f"{move:.3g}") for probe, move in self._moves.items()},
            beyond_rounding=tuple(self._beyond_rounding),
            unproven="; ".join(self._unproven),
        )

    def _affordable_rows(self) -> int:
        """Return how many rows fit into memory and time, by calls with one row."""
        first, row_seconds = self._take_rows(self._batch, [0]), 0.0
        for _ in range(2):  # the first call may compile
            # The shorter of both: processes that wait, or several threads that compute.
            wall, cpu = time.perf_counter(), time.process_time()
            self._first_alone = self._outputs_or_none(first)
            row_seconds = min(time.perf_counter() - wall, time.process_time() - cpu)
            if CALLED_PER_ROW * ROWS * row_seconds <= self._seconds:
                break
        affordable = int(self._seconds / (CALLED_PER_ROW * max(row_seconds, 1e-9)))
        self._is_brief = affordable < FEWEST_ROWS
        row_bytes = sum(output.nbytes for output in self._first_alone or [])
        fitting = min(ROWS, affordable, LARGEST_OUTPUTS // max(row_bytes, 1))
        return max(FEWEST_ROWS, fitting // 2 * 2)

    def _probe(self, available: int) -> None:
        size = self._size
        real = self._take_rows(self._batch, np.arange(size) % available)
        start = time.perf_counter()
        try:
            self._reference = self._outputs(real)
        except Exception as error:  # noqa: BLE001 - a user's model may raise anything
            self._unproven.append(f"{size} rows together are refused: {_error_line(error)}")
            return
        if self._fixed_size is not None:
            seconds = time.perf_counter() - start
            self._is_brief = CALLED_PER_ROW * seconds > self._seconds
        self._spreads = [*map(_spread, self._reference)]
        alone = self._outputs_alone(real, min(size, available))
        self._axes = [
            _row_axis(output, alone[k] if alone else [], size)
            for k, output in enumerate(self._reference)
        ]
        for i, outputs in enumerate(zip(*alone, strict=True)):
            self._compare("alone", outputs, [i], self._rounding)
        if not self._is_brief:
            self._ask_again(real)
            self._probe_others(real, available)
        elif self._is_shown():
            self._ask_again(real)  # it may draw random numbers
            return
        # A model may refuse a row that is masked wholly: then its masks stay as they are.
        for masks in (True, False):
            extremes = extreme_rows(real, self._signature.inputs, masks=masks)
            if self._probe_neighbours("beside extreme rows", real, extremes):
                break
        else:
            self._unproven.append("a batch with extreme rows is refused")
            if self._is_brief:
                self._probe_others(real, available)
        if self._is_brief:
            if self._is_shown():
                self._ask_again(real)
            return
        order = np.arange(size)[::-1]
        if (reordered := self._outputs_or_none(self._take_rows(real, order))) is not None:
            self._compare("reordered", reordered, order, self._rounding)

    def _is_shown(self) -> bool:
        """Whether outputs depend on the batch, whatever else is probed."""
        return bool({*self._beyond_rounding} - {"unpadded"})

    def _ask_again(self, real: list[Array]) -> None:
        if (repeated := self._outputs_or_none(real)) is not None:
            self._compare("asked again", repeated, range(self._size), SAME_BITS)

    def _probe_others(self, real: list[Array], available: int) -> None:
        size = self._size
        others = (np.arange(size) + (size if available > size else 1)) % available
        self._probe_neighbours("beside other rows", real, self._take_rows(self._batch, others))

    def _outputs_alone(self, real: list[Array], rows: int) -> list[list[Array]]:
        """Return the outputs for each row alone, by output; none where the batch is fixed."""
        if self._fixed_size is not None:
            return []
        by_row = []
        for i in range(rows):
            try:
                is_known = i == 0 and self._is_brief and self._first_alone is not None
                row = self._first_alone if is_known else None
                by_row.append(row or self._outputs(self._take_rows(real, [i])))
            except Exception as error:  # noqa: BLE001 - a user's model may raise anything
                self._unproven.append(f"a row alone is refused: {_error_line(error)}")
                self._record("alone", UNBOUNDED, self._rounding)
                return []
            was_padded = i < len(self._unpadded) and bool(self._unpadded[i])
            outputs = self._outputs_or_none(self._unpadded[i]) if was_padded else None
            if outputs is None:
                continue
            for a, b, spread in zip(by_row[i], outputs, self._spreads, strict=True):
                if a.ndim == b.ndim:  # compared where both overlap
                    common = tuple(slice(min(m, n)) for m, n in zip(a.shape, b.shape, strict=True))
                    move = _largest_move(a[common], b[common], spread, FLOAT32_STEPS)
                    self._record("unpadded", move, self._rounding)
        return [list(column) for column in zip(*by_row, strict=True)]

    def _probe_neighbours(
        self, probe: ProbeName, real: list[Array], neighbours: list[Array]
    ) -> bool:
        """Replace every other row and compare the rest; False where the model refuses the batch."""
        for unchanged in (np.arange(0, self._size, 2), np.arange(1, self._size, 2)):
            mixed = []
            for own, neighbour, has_rows in zip(real, neighbours, self._has_rows, strict=True):
                array = neighbour.copy() if has_rows else own
                if has_rows:
                    array[unchanged] = own[unchanged]
                mixed.append(array)
            outputs = self._outputs_or_none(mixed)
            if outputs is None:
                return False
            self._compare(probe, outputs, unchanged, SAME_BITS)
            if self._is_brief and self._is_shown():
                break
        return True

    def _compare(
        self, probe: ProbeName, outputs: Sequence[Array], rows: Sequence[int] | Array, limit: float
    ) -> None:
        """Compare outputs, for some rows or a whole batch, with those rows of the reference."""
        steps = LAST_BITS if limit == SAME_BITS else FLOAT32_STEPS
        for reference, output, axis, spread in zip(
            self._reference, outputs, self._axes, self._spreads, strict=True
        ):
            expected, got = reference, output
            if axis is not None:
                expected = _rows_first(reference, axis, self._size)[np.asarray(rows)]
                count = 1 if probe == "alone" else self._size
                got = _rows_first(output, axis, count) if output.ndim == reference.ndim else output
                if probe.startswith("beside") and len(got) == self._size:
                    got = got[np.asarray(rows)]
            self._record(probe, _largest_move(expected, got, spread, steps), limit)

    def _record(self, probe: ProbeName, move: float, limit: float) -> None:
        self._moves[probe] = max(move, self._moves.get(probe, 0.0))
        if move > limit and probe not in self._beyond_rounding:
            self._beyond_rounding.append(probe)

    def _outputs(self, inputs: Sequence[Array]) -> list[Array]:
        self._calls += 1
        return [np.asarray(output) for output in self._call(*inputs)]

    def _outputs_or_none(self, inputs: Sequence[Array]) -> list[Array] | None:
        try:
            return self._outputs(inputs)
        except Exception:  # noqa: BLE001 - a user's model may raise anything
            return None

    def _take_rows(self, arrays: Sequence[Array], indices: Sequence[int] | Array) -> list[Array]:
        pairs = zip(arrays, self._has_rows, strict=True)
        return [array[np.asarray(indices)] if has_rows else array for array, has_rows in pairs]


def _row_axis(batched: Array, alone: Sequence[Array], rows: int) -> int | None:
    """Return the axis of an output along which rows lie, perhaps several entries for each."""
    if not alone:
        return next((axis for axis, size in enumerate(batched.shape) if size == rows), None)
    shape = alone[0].shape
    for axis, size in enumerate(shape):
        if size and batched.shape == (*shape[:axis], rows * size, *shape[axis + 1 :]):
            return axis
    return None


def _rows_first(output: Array, axis: int, rows: int) -> Array:
    """Return an output with its rows on axis 0; unchanged where it has another number of them."""
    if axis >= output.ndim or output.shape[axis] % rows:
        return output
    first = np.moveaxis(output, axis, 0)
    return first.reshape(rows, first.shape[0] // rows, *first.shape[1:])


def _spread(reference: Array) -> float:
    """Return the range of the finite outputs; their magnitude where they are all one number."""
    if reference.dtype.kind != "f":
        return 1.0
    finite = (part[np.isfinite(part)].astype(np.float64) for part in _parts(reference))
    limits = [(part.min(), part.max()) for part in finite if part.size]
    if not limits:
        return 1.0
    low, high = min(low for low, _ in limits), max(high for _, high in limits)
    return float(high - low) or float(abs(high)) or 1.0


def _parts(array: Array) -> Iterator[Array]:
    flat = array.reshape(-1)
    return (flat[start : start + AT_ONCE] for start in range(0, flat.size, AT_ONCE))


def _largest_move(a: Array, b: Array, spread: float, steps: float) -> float:
    """Return the largest difference as a share of the spread; of integers, how many differ."""
    if a.shape != b.shape:
        return UNBOUNDED
    if not a.size:
        return 0.0
    if a.dtype.kind != "f":
        return float(np.mean(a != b))
    largest = magnitude = 0.0
    for expected, got in zip(_parts(a), _parts(b), strict=True):
        x, y = expected.astype(np.float64), got.astype(np.float64)
        with np.errstate(invalid="ignore", over="ignore"):
            same = (x == y) | (np.isnan(x) & np.isnan(y))
            difference = float(np.where(same, 0.0, np.abs(x - y)).max())
        if not np.isfinite(difference):
            return UNBOUNDED
        largest = max(largest, difference)
        magnitude = max(magnitude, float(np.abs(np.where(np.isfinite(x), x, 0)).max()))
    # Differences up to `steps` times the largest value are rounding.
    return min(largest / spread, UNBOUNDED) if largest > steps * magnitude else 0.0


def _error_line(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"
