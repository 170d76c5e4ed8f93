"""Infers a model's inputs from samples of its data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from compress.common.config import first_problem
from compress.common.errors import CompressError, PipelineInvalid, located, raised_as
from compress.common.forward import unbatched_advice
from compress.common.signature import Signature, TensorSpec
from compress.data.batch import LABELS, SampleWithTeacher, adapt

if TYPE_CHECKING:
    import torch

    from compress.common.forward import Predictor
    from compress.data.splits import Splits

SAMPLES = 32  # samples read from each split, evenly spaced
SAMPLES_OF_FLOATS = 8
"""Samples read where they only show whether declared inputs of floats hold NaN or infinities."""
BATCH, LENGTH = "batch", "length"


def inputs_of(
    splits: Splits, parameters: Callable[[], Sequence[str]], float_dtype: str = "float32"
) -> tuple[TensorSpec, ...]:
    """Return the inputs of the samples: the batch and axes of varying size named, others fixed.

    Axes whose sizes vary together share a name. Mappings name their inputs; others take the names
    of forward's ``parameters``, asked for only then. Floats get the model's `float_dtype`. Raises
    PipelineInvalid where a sample cannot be read, or samples differ in more than sizes.
    """
    names: list[str] = []
    found: list[tuple[torch.Tensor, ...]] = []
    for place, sample in _samples(splits):
        with located(f"{place}: "):
            tensors = adapt(sample, names if isinstance(sample, Mapping) else ())[0]
        if not found and isinstance(sample, Mapping):
            names = [name for name in sample if name != LABELS]
        elif not found:
            count, names = len(tensors), list(parameters())[: len(tensors)]
            if len(names) < count:
                names = ["input"] if count == 1 else [f"input_{i}" for i in range(count)]
        kinds = [[(x.dim(), x.dtype) for x in each] for each in (tensors, *found[:1])]
        if kinds[0] != kinds[-1]:
            raise PipelineInvalid(
                f"{place} has other dimensions or element types than the samples before it; "
                "declare model.inputs, and let samples differ in sizes alone"
            )
        found.append(tensors)
    return tuple(_specs(names, list(zip(*found, strict=True)), float_dtype))


def takes_rows(predict: Predictor, inputs: Sequence[torch.Tensor], rows: int) -> bool:
    """Whether a model answers a number of rows, which are those of inputs again and again."""
    try:
        outputs = predict(*(x[[i % len(x) for i in range(rows)]] for x in inputs))
    except Exception:  # noqa: BLE001 - a user's model may raise anything
        return False
    return all(len(x) == rows for x in outputs)


def refuse_one_answer(
    predict: Predictor, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
) -> None:
    """Raise PipelineInvalid where a model's outputs for rows are as large as for one of them."""
    one = predict(*(x[:1] if len(x) == len(inputs[0]) else x for x in inputs))
    shapes = [[list(x.shape) for x in answer] for answer in (outputs, one)]
    if shapes[0] == shapes[1]:
        raise PipelineInvalid(
            f"model: outputs have the shape {' and '.join(map(str, shapes[0]))} for "
            f"{len(inputs[0])} samples as for one, expected an answer for each sample; let forward "
            "return a row for each row of its input, or declare that it takes one "
            f"(--input NAME={','.join(map(str, (1, *inputs[0].shape[1:])))})"
        )


def fix_unnamed_axes(
    inputs: Sequence[TensorSpec], seen: Sequence[TensorSpec]
) -> tuple[TensorSpec, ...]:
    """Return a file's inputs with the size of the samples where an axis has no name of its own.

    Exporters leave axes open that the model's code takes at few sizes. Of axes whose size varies
    among the samples, and of named ones, any size counts.

    Args:
        inputs: of the file; an axis without a name is called after its input and number.
        seen: the samples' (:func:`inputs_of`).
    """
    by_name = {spec.name: spec.shape for spec in seen}
    fixed = []
    for spec in inputs:
        sizes = by_name.get(spec.name, ())
        shape = [
            sizes[axis] if len(sizes) == len(spec.shape) and size == f"{spec.name}_{axis}" else size
            for axis, size in enumerate(spec.shape)
        ]
        fixed.append(spec.model_copy(update={"shape": tuple(shape)}))
    return tuple(fixed)


def sample_inputs(data: Splits | None, signature: Signature) -> tuple[torch.Tensor, ...] | None:
    """Return the inputs of the first samples as a batch, as some models refuse invented ones.

    None without data, or where they do not fit the signature, which stages then report.
    """
    if data is None:
        return None
    name = next((n for n in ("train", "val") if n in data.datasets), next(iter(data.datasets)))
    count = signature.inputs[0].shape[:1]
    size = count[0] if count and isinstance(count[0], int) else 2
    try:
        named = data.replaced(input_names=tuple(spec.name for spec in signature.inputs))
        (batch,) = islice(named.batches(name, size, size), 1)
    except (CompressError, ValueError):  # also where there are none
        return None
    fits = len(batch.inputs) == len(signature.inputs) and all(
        str(x.dtype).removeprefix("torch.") == spec.dtype
        and x.dim() == len(spec.shape)
        and all(d == n for d, n in zip(spec.shape, x.shape, strict=True) if isinstance(d, int))
        for x, spec in zip(batch.inputs, signature.inputs, strict=True)
    )
    return batch.inputs if fits else None


def _samples(splits: Splits, most: int = SAMPLES) -> Iterator[tuple[str, Any]]:
    for name in [n for n in ("train", "val") if n in splits.datasets] or [*splits.datasets]:
        dataset: Any = splits.split(name)
        count = len(dataset)
        for index in sorted({i * (count - 1) // (most - 1) for i in range(most)}):
            place = f"sample {index} of split {name!r}"
            with raised_as(PipelineInvalid, f"{place} cannot be read"):
                sample = dataset[index]
            if splits.loading.collate_fn:
                batch = splits.collate_fn([sample])
                yield place, (tuple(x[0] for x in batch.inputs), 0)
            else:
                yield place, sample.sample if isinstance(sample, SampleWithTeacher) else sample


def _specs(
    names: list[str], columns: list[tuple[torch.Tensor, ...]], float_dtype: str
) -> Iterator[TensorSpec]:
    axes: dict[tuple[int, ...], str] = {}
    for name, column in zip(names, columns, strict=True):
        shape: list[int | str] = [BATCH]
        for axis in range(column[0].dim()):
            sizes = tuple(x.shape[axis] for x in column)
            if len(set(sizes)) == 1:
                shape.append(sizes[0])
                continue
            own = LENGTH if column[0].dim() == 1 else f"{name}_{axis + 1}"
            own = f"{name}_{own}" if sizes not in axes and own in axes.values() else own
            shape.append(axes.setdefault(sizes, own))
        dtype = str(column[0].dtype).removeprefix("torch.")
        dtype = float_dtype if column[0].is_floating_point() else dtype
        try:
            spec = TensorSpec.model_validate({"name": name, "shape": shape, "dtype": dtype})
        except ValidationError as error:
            raise PipelineInvalid(
                f"input {name!r} of the samples, {dtype} {shape}: {first_problem(error)}; declare "
                "model.inputs"
            ) from None
        yield spec.with_seen([x[None] for x in column])


def with_values_seen(inputs: tuple[TensorSpec, ...], splits: Splits) -> tuple[TensorSpec, ...]:
    """Return declared inputs with the range, mask, NaN or infinities that fitting samples show.

    Raises PipelineInvalid where an input has another number of axes than a batch of samples, or
    samples have another number of inputs.
    """
    names = [spec.name for spec in inputs]
    count = SAMPLES if any(spec.holds_integers for spec in inputs) else SAMPLES_OF_FLOATS
    try:
        columns = [*zip(*(adapt(x, names)[0] for _, x in _samples(splits, count)), strict=True)]
    except (CompressError, ValueError):
        return inputs
    if columns and len(columns) != len(inputs):
        shapes = ", ".join(f"[{', '.join(map(str, column[0].shape))}]" for column in columns)
        raise PipelineInvalid(
            f"the model takes {len(inputs)} inputs, {described(inputs)}, and a sample has "
            f"{len(columns)}: {shapes}"
        )
    pairs = [*zip(inputs, columns, strict=True)] if columns else []
    for spec, (sample, *_) in pairs:
        if spec.shape and len(spec.shape) != sample.dim() + 1:
            batch = spec.model_copy(update={"shape": (BATCH, *sample.shape)})
            raise PipelineInvalid(
                f"a batch of samples is {described([batch])}, and declared is {described([spec])}; "
                f"declare the former, or {unbatched_advice(batch)}"
            )
    seen = tuple(spec.with_seen([x[None] for x in column]) for spec, column in pairs)
    return seen or inputs


def with_named_length(inputs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    """Return inputs whose rows of integers, such as token ids, have any length, the same one."""
    return tuple(
        spec.model_copy(update={"shape": (spec.shape[0], LENGTH)})
        if len(spec.shape) == 2 and spec.holds_integers
        else spec
        for spec in inputs
    )


def described(inputs: Sequence[TensorSpec]) -> str:
    """Describe inputs by name, shape and element type."""
    return ", ".join(f"{x.name} [{', '.join(map(str, x.shape))}] {x.dtype}" for x in inputs)
