"""What a training needs of the machine and of the data, checked before anything runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from compress.common.config import Unmet
from compress.common.errors import Unavailable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from compress.data.splits import Splits
    from compress.training.config.parallel import Parallel
    from compress.training.config.training import Profile


def unmet_by_machine(precision: str, profile: Profile, device: str) -> Iterator[Unmet]:
    """Yield settings that are for a CUDA device, where the run is on another."""
    if device.startswith("cuda"):
        return
    needs = f"needs a CUDA device and this is {device}"
    if precision == "fp16":
        mend = "use bf16 or fp32, or set `device: cuda` for the whole run where there is one"
        yield Unmet(("precision",), f"fp16 {needs}; {mend}", Unavailable)
    if profile.memory:
        problem = f"{needs}; leave it out, as the peak of each process is reported anyway"
        yield Unmet(("profile", "memory"), problem, Unavailable)


def unmet_by_data(
    data: Splits, needs_val: str | None, size: int, steps_per_epoch: int | None, parallel: Parallel
) -> Iterator[Unmet]:
    """Yield splits that are not there, and settings that do not go with the number of samples.

    ``needs_val`` is the setting that needs a split `val`, ``size`` that of a batch.
    """
    found = ", ".join(map(repr, data.datasets))
    if needs_val and "val" not in data.datasets:
        key, _, value = needs_val.partition(": ")
        mend = "set keep: last" if key == "keep" else f"leave out {key}"
        problem = f"{value} needs a split 'val', and the data has {found}; add one"
        yield Unmet((key,), f"{problem.lstrip()}, or {mend}")
    if "train" not in data.datasets:
        yield Unmet((), f"trains on split 'train', and the data has {found}; add one")
        return
    stream, ranks = data.stream, parallel.replicas
    if stream is not None:
        if not steps_per_epoch and stream.samples is None:
            problem = "split 'train' is a stream without __len__; set steps_per_epoch"
            yield Unmet(("steps_per_epoch",), problem)
        elif not steps_per_epoch and stream.samples is not None and stream.samples < size:
            problem = (
                f"split 'train' is a stream of {stream.samples} samples, expected at least a batch "
                f"of {size}; lower batch_size or set steps_per_epoch"
            )
            yield Unmet(("batch_size",), problem)
        return
    if steps_per_epoch:
        problem = "is for a stream, and split 'train' has a length; leave it out"
        yield Unmet(("steps_per_epoch",), problem)
    samples = len(data.split("train"))  # type: ignore[arg-type]  # Splits admits sized datasets only
    if samples < ranks:
        problem = "lower processes or nodes, or bring more data"
        counts = f"split 'train' has {samples} samples for {ranks} processes"
        yield Unmet(("parallel",), f"{counts}; {problem}")
    if parallel.pipeline and samples < size:
        counts = f"split 'train' has {samples} samples and a pipeline needs whole batches of {size}"
        yield Unmet(("batch_size",), f"{counts}; lower batch_size")
