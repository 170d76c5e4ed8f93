"""Batch: model inputs and targets, and collating samples into one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from compress.common.errors import PipelineInvalid, located, raised_as
from compress.common.lazy_modules import torch
from compress.data.targets import as_target, check_batch, describe, flatten, map_leaves, select

if TYPE_CHECKING:
    from compress.data.targets import Targets

LABELS = "labels"
IGNORED_LABEL = -100  # the target that torch's cross-entropy ignores
FEW_ROWS = 4  # with fewer in a batch, little is known of how much samples differ


@dataclass(frozen=True)
class Batch:
    """Model inputs in the signature's order, and the targets (None: unlabelled)."""

    inputs: tuple[torch.Tensor, ...]
    target: Targets | None
    teacher_outputs: tuple[torch.Tensor, ...] = ()
    """Outputs of the teacher, if they are cached: [samples, …]."""

    def __len__(self) -> int:
        return len(self.inputs[0])

    def __reduce__(self) -> tuple[Any, ...]:
        # A worker sends each tensor by a file descriptor, of which the tensors of many samples
        # would need more than a process may open; arrays are sent as bytes.
        target, no_array = self.target, torch.bfloat16  # a type that NumPy has not
        if target is not None and not isinstance(target, torch.Tensor):
            target = map_leaves(target, lambda x: x if x.dtype == no_array else x.cpu().numpy())
        return _unpickled, (self.inputs, target, self.teacher_outputs)

    def to(self, device: str) -> Batch:
        """Return the batch on a device."""
        return self._map(lambda x: x.to(device, non_blocking=True))

    def pin_memory(self) -> Batch:
        """Return the batch in page-locked memory; torch's loader calls this."""
        return self._map(torch.Tensor.pin_memory)

    def divided(self, most_bytes: int) -> Iterator[Batch]:
        """Yield batches of fewer rows whose inputs have at most so many bytes.

        Of large samples they have up to `FEW_ROWS`, in `FEW_ROWS` times the bytes, or one row.
        """
        rows, size = len(self), sum(x.nbytes for x in self.inputs)
        fitting = most_bytes * rows // max(size, 1)
        few = min(FEW_ROWS, FEW_ROWS * most_bytes * rows // max(size, 1))
        step = max(fitting, few, 1)
        if step >= rows or any(not x.ndim or len(x) != rows for x in self.inputs):
            yield self
            return
        for first in range(0, rows, step):
            part = slice(first, first + step)
            target = None if self.target is None else select(self.target, part)
            outputs = tuple(x[part] for x in self.teacher_outputs)
            yield Batch(tuple(x[part] for x in self.inputs), target, outputs)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return all its tensors: inputs, targets, teacher outputs."""
        return (*self.inputs, *flatten(self.target)[0], *self.teacher_outputs)

    def _map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        teacher_outputs = tuple(map(change, self.teacher_outputs))
        target = map_leaves(self.target, change)
        return Batch(tuple(map(change, self.inputs)), target, teacher_outputs)


def _unpickled(inputs: Any, target: Any, teacher_outputs: Any) -> Batch:
    return Batch(inputs, map_leaves(target, torch.as_tensor), teacher_outputs)


@dataclass(frozen=True)
class SampleWithTeacher:
    """A sample, and the teacher's outputs for it."""

    sample: Any
    teacher_outputs: tuple[torch.Tensor, ...]

    def __getitem__(self, key: Any) -> Any:
        return self.sample[key]


def stack_columns(columns: Mapping[Any, Any]) -> torch.utils.data.Dataset[Any]:
    """Return columns of one length as a dataset of mappings; their keys may be any."""
    stacked: Any = torch.utils.data.StackDataset(*columns.values())
    stacked.datasets = dict(columns)  # as keywords, "self" and numbers would be refused
    return stacked  # type: ignore[no-any-return]


def collate(
    samples: list[Any],
    pad_values: Mapping[str, float] | None = None,
    input_names: Sequence[str] = (),
) -> Batch:
    """Stack samples into a batch; sequences in mappings are padded to the longest of the batch.

    Inputs of mappings are padded with 0 by default and ``labels`` with -100; their order is that of
    the first sample by default. Samples without a target get -100 or NaN, unless all have none.
    Targets that are mappings, lists or tuples become a list with one entry for each sample. Raises
    PipelineInvalid: a sample has none of the accepted forms, or shapes differ.
    """
    if isinstance(samples[0], SampleWithTeacher):
        batch = collate([s.sample for s in samples], pad_values, input_names)
        outputs = zip(*(s.teacher_outputs for s in samples), strict=True)
        return replace(batch, teacher_outputs=tuple(torch.stack(column) for column in outputs))
    names: list[str] = []
    if isinstance(samples[0], Mapping):
        names = list(input_names) or [key for key in samples[0] if key != LABELS]
    fill = {LABELS: IGNORED_LABEL, **(pad_values or {})}
    pairs = [adapt(sample, names) for sample in samples]
    columns = list(zip(*(x for x, _ in pairs), strict=True))
    inputs = tuple(_stack(c, n, fill) for c, n in zip(columns, names or columns, strict=True))
    known = [y for _, y in pairs if y is not None]
    if not known:
        return Batch(inputs, None)
    tensors = [y for y in known if isinstance(y, torch.Tensor)]
    if len(tensors) < len(known):
        return Batch(inputs, [y for _, y in pairs])
    missing = math.nan if tensors[0].is_floating_point() else IGNORED_LABEL
    targets = [
        y if isinstance(y, torch.Tensor) else torch.full_like(tensors[0], missing) for _, y in pairs
    ]
    return Batch(inputs, _stack(targets, LABELS if names else None, fill))


def collate_by(
    samples: list[Any], function: Callable[[list[Any]], Any], name: str, input_names: Sequence[str]
) -> Batch:
    """Make a batch by the user's own function; raise PipelineInvalid if it does not return one."""
    where = f"data.loader.collate_fn {name!r}"
    with raised_as(PipelineInvalid, where), located(f"{where}: as a batch, ", PipelineInvalid):
        inputs, target = adapt(function(samples), input_names)
    parts: list[tuple[str, Targets]] = [("", x) for x in inputs]
    parts += [] if target is None else [("target: ", target)]
    for role, part in parts:
        if problem := check_batch(part, len(samples)):
            raise PipelineInvalid(
                f"data.loader.collate_fn {name!r} returned {role}{problem} for {len(samples)} "
                f"samples, expected [{len(samples)}, …], or a list with an entry for each"
            )
    return Batch(inputs, target)


def collate_as(
    samples: list[Any], collate_fn: Callable[[list[Any]], Batch], dtypes: Sequence[str]
) -> Batch:
    """Make a batch whose floats have the types of the model's inputs; NumPy's are float64."""
    batch = collate_fn(samples)
    wanted = [getattr(torch, name) for name in dtypes]
    if len(wanted) != len(batch.inputs):
        return batch
    inputs = (
        x.to(dtype) if x.is_floating_point() and dtype.is_floating_point else x
        for x, dtype in zip(batch.inputs, wanted, strict=True)
    )
    return replace(batch, inputs=tuple(inputs))


def adapt(
    sample: Any, input_names: Sequence[str] = ()
) -> tuple[tuple[torch.Tensor, ...], Targets | None]:
    """Return a sample's inputs (a mapping's as named) and target, or raise PipelineInvalid."""
    target = None
    if isinstance(sample, SampleWithTeacher):
        return adapt(sample.sample, input_names)
    if isinstance(sample, Mapping):
        target = sample.get(LABELS)
        own = [k for k in sample if k != LABELS]
        names = input_names or own
        if set(names) != set(own):
            raise PipelineInvalid(
                f"a sample has the entries {', '.join(map(repr, sample))}, expected "
                f'{", ".join(map(repr, names))} and "labels"; name them as model.inputs does'
            )
        inputs: Any = tuple(sample[k] for k in names)
    elif isinstance(sample, tuple | list) and len(sample) == 2:
        inputs, target = sample
    elif isinstance(sample, torch.Tensor):
        inputs = sample
    elif isinstance(sample, tuple | list) and len(sample) == 1:
        inputs = sample[0]
    else:
        raise PipelineInvalid(
            f"a sample is {describe(sample)}, expected (x, y), ((x1, x2), y) "
            'or a mapping of tensors with "labels"'
        )
    columns = inputs if isinstance(inputs, tuple | list) else (inputs,)
    return tuple(map(_input, columns)), None if target is None else as_target(target)


def _input(value: Any) -> torch.Tensor:
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise PipelineInvalid(
            f"a sample's input is {describe(value)}, expected a tensor, array or number"
        ) from error


def _stack(column: Sequence[torch.Tensor], name: object, fill: Mapping[str, float]) -> torch.Tensor:
    shapes = {tuple(x.shape) for x in column}
    if len(shapes) == 1:
        return torch.stack(list(column))
    if isinstance(name, str) and all(len(shape) == 1 for shape in shapes):
        pad = torch.nn.utils.rnn.pad_sequence
        return pad(list(column), batch_first=True, padding_value=fill.get(name, 0))
    shown = " and ".join(str(list(shape)) for shape in sorted(shapes)[:2])
    raise PipelineInvalid(
        f"samples of one batch have shapes {shown}; only 1-D tensors of mapping samples are "
        "padded, all others must be equal (targets of other lengths stand in a mapping: "
        '(x, {"boxes": boxes}))'
    )
