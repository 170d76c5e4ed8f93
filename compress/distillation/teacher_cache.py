"""A teacher's answers kept on disk: each sample is asked about once, however many epochs follow."""

from __future__ import annotations

import hashlib
import logging
import shutil
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Dataset

from compress.common.errors import StageFailed
from compress.common.process import threads_to_use
from compress.data.batch import SampleWithTeacher, adapt
from compress.data.record_log import RecordLog
from compress.data.sample_cache import probe, read_samples
from compress.training.loop.train_state import AUTOCAST
from compress.training.loop.trainer import cpu_threads

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from compress.core.stage import Context
    from compress.data.batch import Batch
    from compress.data.splits import Splits
    from compress.distillation.distillation_objective import Lessons
    from compress.training.config.training import Training

LARGEST_SHARE = 0.9
"""Of the free disk that answers may fill."""

log = logging.getLogger(__name__)


class CannotKeep(StageFailed):
    """Answers cannot be kept; the teacher has to be asked anew in each epoch."""


@dataclass(frozen=True)
class WithAnswers:
    """`train` with what a teacher answered to each sample."""

    folder: Path

    def __call__(self, splits: Splits, dataset: Dataset[Any]) -> Dataset[Any]:
        """Return the dataset of taught samples."""
        return TaughtDataset(dataset, self.folder)


class TaughtDataset(Dataset[Any]):
    """A dataset's samples beside the answers that lie in a folder."""

    def __init__(self, dataset: Dataset[Any], folder: Path) -> None:
        self.dataset = dataset
        self.segments = RecordLog(folder, len(dataset))  # type: ignore[arg-type]  # Splits admits sized datasets only

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> SampleWithTeacher:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[SampleWithTeacher]:
        wanted = [range(len(self))[index] for index in indices]
        samples = read_samples(self.dataset, wanted)
        return [
            SampleWithTeacher(sample, self._answers(index))
            for index, sample in zip(wanted, samples, strict=True)
        ]

    def _answers(self, index: int) -> tuple[torch.Tensor, ...]:
        content = self.segments.read(index)
        if content is None:
            raise StageFailed(
                f"cache_teacher: the answer to sample {index} in {self.segments.folder} is gone "
                "or damaged; run again, and the teacher is asked again"
            )
        return _from_bytes(content)


def with_answers(lessons: Lessons, training: Training, context: Context, task: str) -> Splits:
    """Return the splits with the teacher's answers beside each sample of `train`.

    The folder is named after all that decides the answers; what an interrupted run left there is
    taken up.

    Raises:
        CannotKeep: samples are drawn at random or padded, or the disk is too small.
    """
    data = context.need_data(task)
    _refuse_changing(data)
    decisive = repr((lessons.teacher.digest, lessons.asked, data.fingerprint(), training.precision))
    digest = hashlib.sha256(decisive.encode()).hexdigest()
    folder = context.work / f"answers-{digest[:16]}"
    folder.mkdir(parents=True, exist_ok=True)
    segments = RecordLog(folder, len(data.split("train")))  # type: ignore[arg-type]
    missing = [i for i in range(len(segments.segment_of)) if segments.read(i) is None]
    if missing:
        threads = max(1, threads_to_use() // training.parallel.ranks_per_node)
        with cpu_threads(threads):
            _fill(segments, missing, lessons, training, context, task)
    return data.seen_through(WithAnswers(folder.absolute()))


def _refuse_changing(data: Splits) -> None:
    """Refuse samples whose answers depend on when, or with which others, they are read."""
    dataset = data.split("train")
    probes = probe(dataset)
    drawn = next((p.index for p in probes if p.first != p.again), None)
    if drawn is not None:
        raise CannotKeep(
            f"sample {drawn} of split 'train' differs each time it is read, so that an answer kept "
            "would belong to another sample"
        )
    samples = read_samples(dataset, [p.index for p in probes])
    shapes = {tuple(tuple(x.shape) for x in adapt(sample)[0]) for sample in samples}
    if len(shapes) > 1:
        raise CannotKeep(
            "samples of split 'train' have different shapes, so that answers depend on how a batch "
            "is padded"
        )


def _fill(
    segments: RecordLog,
    missing: Sequence[int],
    lessons: Lessons,
    training: Training,
    context: Context,
    task: str,
) -> None:
    """Ask the teacher about the samples whose answers are missing, and keep them."""
    answer = lessons.teacher.answering(context.device, lessons.asked)
    # As many at once as training would ask, so that it gives the same to the last bit.
    size = training.batch_size // (training.parallel.replicas * training.accumulate)
    data, done = context.need_data(task), 0
    for batch in _full_batches(data, missing, size):
        with _precision(training, context.device):
            answers = answer(batch.to(context.device).inputs)
        own = missing[done : done + size]
        _refuse_other_than_rows(answers, len(batch))
        if not done:
            _refuse_too_large(segments, answers, len(batch), len(missing))
        for row, index in enumerate(own):
            _keep(segments, index, tuple(a[row] for a in answers))
        done += len(own)
        context.progress(f"{task}: teacher", done, len(missing))
    log.info("%s: the teacher's answers to %d samples are kept", task, len(missing))


def _full_batches(data: Splits, indices: Sequence[int], size: int) -> Iterator[Batch]:
    """Yield batches of one size; the last is filled up with copies of its last sample."""
    copies = [indices[-1]] * (-len(indices) % size)
    yield from data.read("train", [*indices, *copies], size)


def _precision(training: Training, device: str) -> Any:
    if training.precision == "fp32":
        return nullcontext()
    return torch.autocast(torch.device(device).type, AUTOCAST[training.precision])


def _refuse_other_than_rows(answers: tuple[torch.Tensor, ...], samples: int) -> None:
    for tensor in answers:
        if not tensor.dim() or len(tensor) != samples:
            raise CannotKeep(
                f"the teacher gives a tensor of shape {tuple(tensor.shape)} for {samples} samples, "
                "and answers are kept by sample"
            )


def _refuse_too_large(
    segments: RecordLog, answers: tuple[torch.Tensor, ...], rows: int, samples: int
) -> None:
    needed = sum(a.nbytes for a in answers) / rows * samples
    free = shutil.disk_usage(segments.folder).free * LARGEST_SHARE
    if needed > free:
        raise CannotKeep(
            f"answers would take {needed / 2**20:.0f} MiB, and {segments.folder} has "
            f"{free / 2**20:.0f} MiB left"
        )


def _keep(segments: RecordLog, index: int, answers: tuple[torch.Tensor, ...]) -> None:
    try:
        segments.append(index, _to_bytes(answers))
    except OSError as error:
        raise CannotKeep(
            f"{segments.folder} cannot be written ({error.strerror}); make room"
        ) from error


def _to_bytes(answers: tuple[torch.Tensor, ...]) -> bytes:
    from safetensors.torch import save

    return save({str(i): a.detach().cpu().contiguous().clone() for i, a in enumerate(answers)})


def _from_bytes(content: bytes) -> tuple[torch.Tensor, ...]:
    from safetensors.torch import load

    tensors = load(content)
    return tuple(tensors[str(i)] for i in range(len(tensors)))
