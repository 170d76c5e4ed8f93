"""The user's data: named splits, batches of them, and a fingerprint."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sized
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, Dataset, Subset

from compress.core.errors import PipelineInvalid, StageFailed, first_line
from compress.core.factory import local_sources, resolve, sources_digest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

SAMPLED_FOR_FINGERPRINT = 2048
"""Samples hashed at most of a dataset that does not hold its tensors in memory."""


@dataclass(frozen=True)
class Batch:
    """Model inputs in the signature's order, and what is to be predicted (None: unlabelled)."""

    inputs: tuple[torch.Tensor, ...]
    target: torch.Tensor | None

    def __len__(self) -> int:
        return len(self.inputs[0])

    def to(self, device: str) -> Batch:
        """Return the batch on a device."""
        moved = tuple(x.to(device, non_blocking=True) for x in self.inputs)
        return Batch(moved, None if self.target is None else self.target.to(device))


@dataclass(frozen=True)
class DataReference:
    """Where the splits come from, small enough to be sent to another process."""

    factory: str
    arguments: dict[str, Any]
    folder: Path | None
    batch_size: int
    input_names: tuple[str, ...] = ()

    def load(self) -> Splits:
        """Call the factory.

        Raises:
            PipelineInvalid: it failed, or did not return a mapping of datasets.
        """
        try:
            datasets = resolve(self.factory, self.folder)(**self.arguments)
        except PipelineInvalid:
            raise
        except (Exception, SystemExit) as error:
            raise PipelineInvalid(
                f"data.factory {self.factory!r}: {type(error).__name__}: {error}"
            ) from error
        return Splits(datasets, self.batch_size, self.input_names, source=self)


@dataclass(frozen=True)
class Splits:
    """Datasets by name: ``train``, ``val``, and as needed ``calibration`` and ``test``.

    A sample is ``(x, y)``, ``((x1, x2), y)``, a mapping of tensors with ``labels``, or bare inputs.
    Training uses ``train``; calibration a seeded sample of ``calibration``, else ``train``; every
    decision and gate uses ``val``; ``test`` is touched once, for the report.
    """

    datasets: Mapping[str, Dataset[Any]]
    batch_size: int = 128
    """Samples per batch in evaluation."""
    input_names: tuple[str, ...] = ()
    """Order in which the model takes the entries of a mapping; the mapping's own by default."""
    source: DataReference | None = field(default=None, compare=False)
    """How another process obtains the same splits; without it they are pickled."""

    def __post_init__(self) -> None:
        where = f"data.factory {self.source.factory!r}" if self.source else "the data"
        if not isinstance(self.datasets, Mapping) or not self.datasets:
            raise PipelineInvalid(
                f"{where} returned {_describe(self.datasets)}, "
                'expected {"train": Dataset, "val": Dataset, …}'
            )
        for name, dataset in self.datasets.items():
            if not isinstance(dataset, Sized) or not hasattr(dataset, "__getitem__"):
                raise PipelineInvalid(
                    f"{where}: split {name!r} is {_describe(dataset)}, "
                    "expected a Dataset with a length"
                )
            if len(dataset) == 0:
                raise PipelineInvalid(f"{where}: split {name!r} is empty")

    def __reduce__(self) -> tuple[Any, ...]:
        if self.source is not None:
            return DataReference.load, (self.source,)
        return Splits, (dict(self.datasets), self.batch_size, self.input_names)

    def split(self, name: str) -> Dataset[Any]:
        """Return one dataset.

        Raises:
            StageFailed: there is no such split.
        """
        if name not in self.datasets:
            raise StageFailed(f"the data has no split {name!r}; it has {', '.join(self.datasets)}")
        return self.datasets[name]

    def batches(
        self, name: str, batch_size: int | None = None, limit: int | None = None
    ) -> Iterator[Batch]:
        """Yield a split's batches in order.

        Args:
            name: the split.
            batch_size: samples per batch; the splits' own by default.
            limit: stop after this many samples.
        """
        dataset = self.split(name)
        if limit is not None and limit < len(dataset):  # type: ignore[arg-type]
            dataset = Subset(dataset, range(limit))
        yield from loader(dataset, batch_size or self.batch_size, self.input_names)

    def calibration(self, samples: int, seed: int) -> Iterator[Batch]:
        """Yield a seeded random sample of ``calibration``, or of ``train`` where there is none.

        Raises:
            StageFailed: there are fewer samples than asked for.
        """
        name = "calibration" if "calibration" in self.datasets else "train"
        dataset = self.split(name)
        available = len(dataset)  # type: ignore[arg-type]
        if samples > available:
            raise StageFailed(
                f"{samples} calibration samples asked for and split {name!r} has {available}; "
                "lower calibration_samples or bring more data"
            )
        order = torch.randperm(available, generator=torch.Generator().manual_seed(seed))
        chosen = Subset(dataset, order[:samples].tolist())
        yield from loader(chosen, self.batch_size, self.input_names)

    def fingerprint(self) -> str:
        """Return a SHA-256 over the splits' contents, batches, and the source that makes them.

        Datasets that hold tensors are hashed whole, others by evenly spaced samples and length.

        Raises:
            PipelineInvalid: a sample cannot be read.
        """
        digest = hashlib.sha256(f"batches of {self.batch_size}".encode())
        if self.source:
            digest.update(
                repr((self.source.factory, sorted(self.source.arguments.items()))).encode()
            )
            sources = local_sources(self.source.factory, self.source.folder)
            digest.update(sources_digest(sources).encode())
        for name in sorted(self.datasets):
            dataset = self.datasets[name]
            digest.update(f"{name}:{len(dataset)}".encode())  # type: ignore[arg-type]
            try:
                for tensor in _tensors_of(dataset):
                    _update(digest, tensor)
            except Exception as error:
                where = f"data.factory {self.source.factory!r}" if self.source else "the data"
                raise PipelineInvalid(
                    f"{where}: a sample of split {name!r} cannot be read: "
                    f"{type(error).__name__}: {first_line(error)}"
                ) from error
        return digest.hexdigest()


def loader(
    dataset: Dataset[Any],
    batch_size: int,
    input_names: Sequence[str] = (),
    *,
    generator: torch.Generator | None = None,
    sampler: Any = None,
) -> DataLoader[Batch]:
    """Return a loader of :class:`Batch`, in order unless a sampler is given."""
    return DataLoader(
        dataset,
        batch_size=batch_size,
        sampler=sampler,
        collate_fn=partial(collate, input_names=input_names),
        generator=generator,
    )


def collate(samples: list[Any], input_names: Sequence[str] = ()) -> Batch:
    """Stack samples into a batch.

    Args:
        samples: samples of any accepted form.
        input_names: order of a mapping's entries; the first sample's own by default.

    Raises:
        PipelineInvalid: a sample has none of the accepted forms, or lacks an entry.
    """
    if isinstance(samples[0], Mapping) and not input_names:
        input_names = [key for key in samples[0] if key != "labels"]
    pairs = [_adapt(sample, input_names) for sample in samples]
    inputs = tuple(torch.stack(column) for column in zip(*(x for x, _ in pairs), strict=True))
    targets = [y for _, y in pairs if y is not None]
    return Batch(inputs, torch.stack(targets) if targets else None)


def _adapt(
    sample: Any, input_names: Sequence[str] = ()
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None]:
    """Return a sample's inputs and target."""
    target = None
    if isinstance(sample, Mapping):
        target = sample.get("labels")
        names = input_names or [key for key in sample if key != "labels"]
        if set(names) != {key for key in sample if key != "labels"}:
            raise PipelineInvalid(
                f"a sample has the entries {', '.join(map(repr, sample))}, expected "
                f'{", ".join(map(repr, names))} and "labels"; name them as model.inputs does'
            )
        inputs: Any = tuple(sample[key] for key in names)
    elif isinstance(sample, tuple | list) and len(sample) == 2:
        inputs, target = sample
    elif isinstance(sample, torch.Tensor):
        inputs = sample
    elif isinstance(sample, tuple | list) and len(sample) == 1:
        inputs = sample[0]
    else:
        raise PipelineInvalid(
            f"a sample is {_describe(sample)}, expected (x, y), ((x1, x2), y) "
            'or a mapping of tensors with "labels"'
        )
    columns = inputs if isinstance(inputs, tuple | list) else (inputs,)
    return (
        tuple(torch.as_tensor(x) for x in columns),
        None if target is None else torch.as_tensor(target),
    )


def _tensors_of(dataset: Dataset[Any]) -> Iterator[torch.Tensor]:
    held = getattr(dataset, "tensors", None)
    if isinstance(held, tuple | list) and all(isinstance(t, torch.Tensor) for t in held):
        yield from held
        return
    count = len(dataset)  # type: ignore[arg-type]
    for index in range(0, count, -(-count // SAMPLED_FOR_FINGERPRINT)):
        inputs, target = _adapt(dataset[index])
        yield from inputs
        if target is not None:
            yield target


def _update(digest: Any, tensor: torch.Tensor) -> None:
    digest.update(f"{tuple(tensor.shape)}{tensor.dtype}".encode())
    digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _describe(value: Any) -> str:
    return "nothing (None)" if value is None else f"a {type(value).__name__}"
