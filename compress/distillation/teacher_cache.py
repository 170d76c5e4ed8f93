"""Disk cache of a teacher's outputs: it runs once for each sample, for any number of epochs."""

from __future__ import annotations

import hashlib
import logging
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.utils.data import Dataset

from compress.common.errors import StageFailed
from compress.common.process import threads_to_use, torch_threads
from compress.data.batch import SampleWithTeacher, adapt
from compress.data.sample_cache import RecordLog, Sample, probe, read_samples
from compress.training.loop.train_state import autocast

if TYPE_CHECKING:
    from compress.core.context import Context
    from compress.data.splits import Splits
    from compress.distillation.distillation_objective import DistillationObjective
    from compress.training.config.training import Training

LARGEST_SHARE = 0.9  # share of the free disk space that the outputs may fill

log = logging.getLogger(__name__)


class CannotCache(StageFailed):
    """The outputs cannot be cached; the teacher has to run in each epoch."""


class DatasetWithTeacher(Dataset[Any]):
    """A dataset's samples, each with the teacher's outputs from a folder."""

    # No CachedDataset, whose samples are known not to change.
    def __init__(self, dataset: Dataset[Any], folder: Path) -> None:
        self.dataset = dataset
        self.records = RecordLog(folder, len(dataset))  # type: ignore[arg-type]  # Splits admits sized datasets only

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> SampleWithTeacher:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[SampleWithTeacher]:
        wanted = [range(len(self))[index] for index in indices]
        samples = []
        for index, sample in zip(wanted, read_samples(self.dataset, wanted), strict=True):
            content = self.records.read(index)
            if content is None:
                raise StageFailed(
                    f"cache_teacher: the answer to sample {index} in {self.records.folder} is gone "
                    "or damaged; run again, and the teacher is asked again"
                )
            outputs = Sample.from_bytes(content).inputs
            samples.append(SampleWithTeacher(sample, outputs))
        return samples


def _view(folder: Path, splits: Splits, dataset: Dataset[Any]) -> Dataset[Any]:
    return DatasetWithTeacher(dataset, folder)


def with_teacher_outputs(
    objective: DistillationObjective, training: Training, context: Context, task: str
) -> Splits:
    """Return the splits with the teacher's outputs for each sample of `train`.

    Raises CannotCache if samples are random or padded, or the disk is too small.
    """
    data, teacher = context.need_data(task), objective.teacher
    # The outputs must not depend on when, or with which others, a sample is read.
    if data.loading.collate_fn:
        raise CannotCache(
            f"data.loader.collate_fn {data.loading.collate_fn!r} may make another input of a "
            "sample in each batch"
        )
    dataset = data.split("train")
    probes = probe(dataset)
    drawn = next((index for index, (first, again) in probes.items() if first != again), None)
    if drawn is not None:
        raise CannotCache(
            f"sample {drawn} of split 'train' differs each time it is read, so that an answer kept "
            "would belong to another sample"
        )
    samples = read_samples(dataset, [*probes])
    shapes = {tuple(tuple(x.shape) for x in adapt(sample)[0]) for sample in samples}
    if len(shapes) > 1:
        raise CannotCache(
            "samples of split 'train' have different shapes, so that answers depend on how a batch "
            "is padded"
        )
    # All that the outputs depend on, so that an interrupted run continues with what it has written.
    decisive = (teacher.digest, objective.teacher_modules, data.fingerprint(), training.precision)
    digest = hashlib.sha256(repr(decisive).encode()).hexdigest()
    folder = context.work / f"answers-{digest[:16]}"
    folder.mkdir(parents=True, exist_ok=True)
    records = RecordLog(folder, len(dataset))  # type: ignore[arg-type]
    missing = [i for i in range(len(records.segment_of)) if records.read(i) is None]
    if missing:
        threads = max(1, threads_to_use() // training.parallel.ranks_per_node)
        with torch_threads(threads):
            _fill(records, missing, objective, training, context, task)
    return data.with_view(partial(_view, folder.absolute()))


def _fill(
    records: RecordLog,
    missing: Sequence[int],
    objective: DistillationObjective,
    training: Training,
    context: Context,
    task: str,
) -> None:
    teacher = objective.teacher.load(context.device, objective.teacher_modules)
    # The batch size of a training step, so that the outputs are equal to the last bit.
    size = training.batch_size // (training.parallel.replicas * training.accumulate)
    data, done = context.need_data(task), 0
    precision = autocast(training, context.device)
    # The last batch is filled up with copies of its last sample.
    copies = [missing[-1]] * (-len(missing) % size)
    for batch in data.read("train", [*missing, *copies], size):
        with precision:
            outputs = teacher(batch.to(context.device).inputs)
        for tensor in outputs:
            if not tensor.dim() or len(tensor) != len(batch):
                raise CannotCache(
                    f"the teacher gives a tensor of shape {tuple(tensor.shape)} for {len(batch)} "
                    "samples, and answers are kept by sample"
                )
        if not done:  # the first batch tells how large a row is
            needed = sum(y.nbytes for y in outputs) / len(batch) * len(missing)
            free = shutil.disk_usage(records.folder).free * LARGEST_SHARE
            if needed > free:
                raise CannotCache(
                    f"answers would take {needed / 2**20:.0f} MiB, and {records.folder} has "
                    f"{free / 2**20:.0f} MiB left"
                )
        for row, index in enumerate(missing[done : done + size]):
            try:
                answer = Sample(tuple(y[row] for y in outputs), target=None, names=None)
                records.append(index, answer.to_bytes())
            except OSError as error:
                raise CannotCache(
                    f"{records.folder} cannot be written ({error.strerror}); make room"
                ) from error
        done = min(done + size, len(missing))
        context.progress(f"{task}: teacher", done, len(missing))
    log.info("%s: the teacher's outputs for %d samples are cached", task, len(missing))
