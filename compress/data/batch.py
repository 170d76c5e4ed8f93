"""Batch: model inputs and targets, and collating samples into one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils.rnn import pad_sequence

from compress.common.errors import PipelineInvalid, first_line

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

LABELS = "labels"
IGNORED_LABEL = -100
"""The target that torch's cross-entropy ignores."""


@dataclass(frozen=True)
class Batch:
    """Model inputs in the signature's order, and the targets (None: unlabelled)."""

    inputs: tuple[torch.Tensor, ...]
    target: torch.Tensor | None
    teacher_outputs: tuple[torch.Tensor, ...] = ()
    """Outputs of the teacher, if they are cached: [samples, …]."""

    def __len__(self) -> int:
        return len(self.inputs[0])

    def to(self, device: str) -> Batch:
        """Return the batch on a device."""
        return self._map(lambda x: x.to(device, non_blocking=True))

    def pin_memory(self) -> Batch:
        """Return the batch in page-locked memory; torch's loader calls this."""
        return self._map(torch.Tensor.pin_memory)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return all its tensors: inputs, target, teacher outputs."""
        targets = [] if self.target is None else [self.target]
        return (*self.inputs, *targets, *self.teacher_outputs)

    def _map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        target = None if self.target is None else change(self.target)
        return Batch(
            tuple(map(change, self.inputs)), target, tuple(map(change, self.teacher_outputs))
        )


@dataclass(frozen=True)
class SampleWithTeacher:
    """A sample, and the teacher's outputs for it."""

    sample: Any
    teacher_outputs: tuple[torch.Tensor, ...]

    def __getitem__(self, key: Any) -> Any:
        return self.sample[key]


def collate(
    samples: list[Any],
    pad_values: Mapping[str, float] | None = None,
    input_names: Sequence[str] = (),
) -> Batch:
    """Stack samples into a batch; sequences in mappings are padded to the longest of the batch.

    Inputs of mappings are padded with 0 by default and ``labels`` with -100; their order is that of
    the first sample by default. Samples without a target get -100 or NaN, unless all have none.

    Raises:
        PipelineInvalid: a sample has none of the accepted forms, or shapes differ.
    """
    if isinstance(samples[0], SampleWithTeacher):
        batch = collate([s.sample for s in samples], pad_values, input_names)
        outputs = zip(*(s.teacher_outputs for s in samples), strict=True)
        return replace(
            batch, teacher_outputs=tuple(torch.stack(list(column)) for column in outputs)
        )
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
    missing = math.nan if known[0].is_floating_point() else IGNORED_LABEL
    targets = [torch.full_like(known[0], missing) if y is None else y for _, y in pairs]
    return Batch(inputs, _stack(targets, LABELS if names else None, fill))


def collate_by(
    samples: list[Any], function: Callable[[list[Any]], Any], name: str, input_names: Sequence[str]
) -> Batch:
    """Make a batch by the user's own function; raise PipelineInvalid if it does not return one."""
    try:
        inputs, target = adapt(function(samples), input_names)
    except PipelineInvalid as error:
        raise PipelineInvalid(f"data.loader.collate_fn {name!r}: as a batch, {error}") from error
    except Exception as error:
        raise PipelineInvalid(
            f"data.loader.collate_fn {name!r}: {type(error).__name__}: {first_line(error)}"
        ) from error
    columns = inputs if target is None else (*inputs, target)
    for tensor in columns:
        if not tensor.dim() or len(tensor) != len(samples):
            raise PipelineInvalid(
                f"data.loader.collate_fn {name!r} returned a tensor of shape "
                f"{list(tensor.shape)} for {len(samples)} samples, expected [{len(samples)}, …]"
            )
    return Batch(inputs, target)


def adapt(
    sample: Any, input_names: Sequence[str] = ()
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None]:
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
    return (
        tuple(_tensor(x, "input") for x in columns),
        None if target is None else _tensor(target, "target"),
    )


def _tensor(value: Any, role: str) -> torch.Tensor:
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise PipelineInvalid(
            f"a sample's {role} is {describe(value)}, expected one tensor, array or number; "
            "several targets can be one tensor, such as torch.stack([y1, y2])"
            if role == "target"
            else f"a sample's {role} is {describe(value)}, expected a tensor, array or number"
        ) from error


def describe(value: Any) -> str:
    """Describe a value by its type, with the keys of a mapping."""
    if isinstance(value, Mapping):
        entries = ", ".join(repr(key) for key in value)
        return f"a {type(value).__name__} with the entries {entries or 'none'}"
    return "nothing (None)" if value is None else f"a {type(value).__name__}"


def _stack(
    tensors: Sequence[torch.Tensor], name: object, fill: Mapping[str, float]
) -> torch.Tensor:
    shapes = {tuple(t.shape) for t in tensors}
    if len(shapes) == 1:
        return torch.stack(list(tensors))
    if isinstance(name, str) and all(len(shape) == 1 for shape in shapes):
        return pad_sequence(list(tensors), batch_first=True, padding_value=fill.get(name, 0))
    shown = " and ".join(str(list(shape)) for shape in sorted(shapes)[:2])
    raise PipelineInvalid(
        f"samples of one batch have shapes {shown}; only 1-D tensors of mapping samples are "
        "padded, all others must be equal"
    )
