"""What a stage runs with: data, device, metric, earlier artifacts, and how models are measured."""

from __future__ import annotations

import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import pairwise
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import TYPE_CHECKING, Any

from compress.common.atomic_files import remove, temporary_folder
from compress.common.dependency_recorder import Recording, add_to_recordings, recording
from compress.common.errors import CompressError, StageFailed
from compress.common.forward import accept_any_batch, bytes_of
from compress.common.lazy_modules import torch
from compress.common.process import gc_frozen
from compress.core.metrics import Metric, evaluate
from compress.core.objectives.loss import INFERRED_LOSS, Loss
from compress.core.progress import Progress, silent
from compress.profiling import benchmark, peak_memory
from compress.profiling.output_summary import OutputSummarizer

if TYPE_CHECKING:
    from compress.artifacts.artifact import Artifact
    from compress.common.forward import Predictor, Tensors
    from compress.common.signature import Signature
    from compress.core.metrics.score import Score
    from compress.core.objectives.task import Task
    from compress.core.verdict import History, Uncertainty
    from compress.data.splits import Splits
    from compress.profiling.batch_dependence import BatchDependence
    from compress.profiling.benchmark import Comparison

    StoredTensor = tuple[int, torch.dtype, tuple[int, ...]]
    """Offset in a file, dtype and shape."""

QUICK_SAMPLES = 16  # of `val`, on which a quick judgement compares two models
COMPARED_BATCHES = 4  # seeded batches compared where there is no data

# A classifier's 50,000 samples of 1,000 classes take 0.2 GB; a decoder that scores 150,000 tokens
# takes 0.6 GB for 16 texts of 64 tokens, and computes those of more texts again where needed.
MAX_BYTES = 2**30  # bytes of outputs kept of one artifact
MAX_TOTAL_BYTES = 2**32
"""Bytes kept of all artifacts: those of the one that was not read for the longest time go first."""
LARGE_BYTES = 2**26  # of all files of models timed in turn; larger ones are opened in a fixed order
MAX_MODELS = 64  # artifacts of which outputs are kept; each has a file open


class ExportCache:
    """Exports of uncompressed models, with which speeds are compared; each is written once."""

    def __init__(self) -> None:
        self._exports: dict[str, Artifact | CompressError] = {}

    def get_or_write(self, key: str, write: Callable[[Path], Artifact]) -> Artifact:
        """Return the export of a key, or write it into a folder; an error is raised each time."""
        if key not in self._exports:
            try:
                with gc_frozen():
                    self._exports[key] = self._find_or_write(key, write)
            except CompressError as error:
                self._exports[key] = error
        if isinstance(found := self._exports[key], CompressError):
            raise found
        return found

    def _find_or_write(self, key: str, write: Callable[[Path], Artifact]) -> Artifact:
        return write(temporary_folder() / "export")


class KeptAnswers:
    """Outputs of artifacts by the inputs that they were called with, until this process ends.

    Metric, gates and parity read the same ones, so that a model is called once for each batch of a
    split, whatever compares its outputs. They are in unnamed files on the disk of a folder, by
    default that of temporary files, so that nobody else reads or changes them. Inputs are known by
    their content: data that differ each time they are read are never answered from here. Other
    processes begin with none.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._by_model: OrderedDict[tuple[str, str, int], _Answers] = OrderedDict()

    def __reduce__(self) -> tuple[type[KeptAnswers], tuple[()]]:
        return KeptAnswers, ()

    @contextmanager
    def predictor(
        self,
        artifact: Artifact,
        device: str,
        threads: int,
        *,
        by_row: bool = False,
        keep_errors: bool = False,
    ) -> Iterator[Predictor]:
        """Provide an artifact's predictor, which calls it for new inputs alone.

        The artifact is opened for the first of them. With `by_row`, rows are also taken from other
        batches, for models whose outputs do not depend on the rest of a batch. With `keep_errors`,
        inputs that were refused are refused again without a call.
        """
        answers = self._answers_of(artifact, device, threads)
        with ExitStack() as stack:
            load = cache(lambda: stack.enter_context(artifact.open(device, threads)))

            def answer(*inputs: torch.Tensor) -> Tensors:
                return answers.get_or_compute(inputs, load, by_row=by_row, keep_errors=keep_errors)

            try:
                yield answer
            finally:
                for error in answers.errors.values():
                    error.__traceback__ = None  # its frames would keep the model in memory
        total = sum(answers.bytes for answers in self._by_model.values())
        while len(self._by_model) > 1 and (
            total > MAX_TOTAL_BYTES or len(self._by_model) > MAX_MODELS
        ):
            total -= self._by_model.popitem(last=False)[1].bytes

    def has_room(self, artifact: Artifact, device: str, threads: int) -> bool:
        """Whether more outputs of an artifact would be kept."""
        return not self._answers_of(artifact, device, threads).is_full

    def _answers_of(self, artifact: Artifact, device: str, threads: int) -> _Answers:
        key = artifact.digest, device, threads
        if key not in self._by_model:
            self._by_model[key] = _Answers(self._folder)
        self._by_model.move_to_end(key)
        return self._by_model[key]


class _Answers:
    """One artifact's outputs in a file, by the hashes of batches and of their rows."""

    def __init__(self, folder: Path | None) -> None:
        self.bytes = 0
        self.is_full = False  # whether outputs were left out for want of room
        self._folder = folder
        self._file = -1
        self._lock = threading.Lock()
        self._batches: dict[bytes, tuple[StoredTensor, ...]] = {}
        self._rows: dict[bytes, tuple[tuple[StoredTensor, ...], int]] = {}
        """Of a row: its batch's outputs, and its number in the batch."""
        self.errors: dict[bytes, Exception] = {}
        self._recorded = Recording()  # what user code read while the model was opened and called

    def __del__(self) -> None:
        if self._file >= 0:
            os.close(self._file)

    def get_or_compute(
        self, inputs: Tensors, load: Callable[[], Predictor], *, by_row: bool, keep_errors: bool
    ) -> Tensors:
        """Return the outputs that are kept for inputs, else those that the loaded model returns."""
        rows = _row_hashes(inputs)
        batch = hashlib.sha256(b"".join(rows))
        batch.update("".join(f"{x.dtype}{tuple(x.shape)}" for x in inputs).encode())
        for x in () if rows else inputs:
            batch.update(bytes_of(x))
        key = batch.digest()
        if keep_errors and key in self.errors:
            raise self.errors[key]
        outputs = None
        if key in self._batches:
            outputs = tuple(self._read(*tensor) for tensor in self._batches[key])
        elif by_row:
            outputs = self._read_rows(rows)
        if outputs is not None:
            # The measurement depends on what the model's code read, as if it had called it itself.
            add_to_recordings(self._recorded)
            return outputs
        with recording() as recorded:
            predict = load()
            try:
                outputs = predict(*inputs)
            except Exception as error:
                if keep_errors:
                    self.errors[key] = error
                raise
        self._recorded.add(recorded)
        try:
            # Parity asks at sizes that a model may refuse: its calls answer whole batches alone.
            self._keep(key, [] if keep_errors else rows, outputs)
        except OSError:  # no room on the disk
            self.is_full = True
        return outputs

    def _keep(self, key: bytes, rows: list[bytes], outputs: Tensors) -> None:
        contents = [t.detach().cpu() for t in outputs if t.layout == torch.strided]
        size = sum(t.nbytes for t in contents)
        if self.bytes + size > MAX_BYTES or len(contents) < len(outputs):
            self.is_full = True
            return
        with self._lock:
            if self._file < 0:
                if self._folder is not None:
                    self._folder.mkdir(parents=True, exist_ok=True)
                with TemporaryFile(dir=self._folder) as file:
                    self._file = os.dup(file.fileno())
            offset, stored = self.bytes, []
            for t in contents:
                stored.append((offset, t.dtype, tuple(t.shape)))
                written = bytes_of(t)
                while written:
                    done = os.pwrite(self._file, written, offset)
                    written, offset = written[done:], offset + done
            self.bytes = offset
            self._batches[key] = place = tuple(stored)
        if rows and all(t.dim() and len(t) == len(rows) for t in contents):
            self._rows |= {row: (place, i) for i, row in enumerate(rows)}

    def _read_rows(self, rows: list[bytes]) -> Tensors | None:
        if any(row not in self._rows for row in rows):
            return None
        outputs: list[list[torch.Tensor]] = []
        for tensors, i in map(self._rows.__getitem__, rows):
            outputs.append([])
            for offset, dtype, (_, *shape) in tensors:
                size = torch.Size(shape).numel() * dtype.itemsize
                outputs[-1].append(self._read(offset + i * size, dtype, tuple(shape)))
        columns = [*zip(*outputs, strict=True)]
        if any(a.shape != b.shape for column in columns for a, b in pairwise(column)):
            return None  # padded to other lengths
        return tuple(map(torch.stack, columns)) or None

    def _read(self, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        size = torch.Size(shape).numel() * dtype.itemsize
        if not size:
            return torch.empty(shape, dtype=dtype)
        content, done = bytearray(size), 0
        while done < size:  # Linux reads at most 2 GiB at once
            done += os.preadv(self._file, [memoryview(content)[done:]], offset + done)
        return torch.frombuffer(content, dtype=dtype).reshape(shape)


def _row_hashes(inputs: Tensors) -> list[bytes]:
    """Hash each row's values, types and shapes; none where the inputs have no rows in common."""
    rows = {len(x) if x.dim() else 0 for x in inputs}
    if len(rows) != 1 or 0 in rows or not inputs[0].numel():
        return []
    form = "".join(f"{x.dtype}{tuple(x.shape[1:])}" for x in inputs).encode()
    columns = [(bytes_of(x), x.nbytes // len(x)) for x in inputs]
    hashes = []
    for row in range(len(inputs[0])):
        digest = hashlib.sha256(form)
        for column, size in columns:
            digest.update(column[row * size : (row + 1) * size])
        hashes.append(digest.digest())
    return hashes


@dataclass(frozen=True)
class Caches:
    """What was measured of artifacts, for all contexts of a run."""

    scores: dict[tuple[Any, ...], tuple[Score, Recording]] = field(default_factory=dict)
    """Measured metrics, with the files and packages that user code read for each."""
    dependences: dict[str, BatchDependence] = field(default_factory=dict)
    """An artifact's digest → whether its outputs depend on the batch."""
    comparisons: dict[tuple[Any, ...], tuple[Comparison, Recording]] = field(default_factory=dict)
    """Compared latencies, with what user code read for each."""
    answers: KeptAnswers = field(default_factory=KeptAnswers)


@dataclass(frozen=True)
class Context:
    """Where and with what a stage runs; what it does is its settings."""

    root: Path
    """Directory that the stage's artifact is written to."""
    data: Splits | None = None
    loss: Loss = INFERRED_LOSS
    """What training minimizes and the metric `loss` measures; inferred from the targets."""
    metric: Metric = field(default_factory=Metric)
    device: str = "cpu"
    threads: int = 1
    """CPU threads of a forward call, the same in every measurement."""
    seed: int = 0
    artifacts: Mapping[str, Artifact] = field(default_factory=dict)
    """Artifacts by stage name, for `against` and `teacher`; `source` is the input model."""
    baseline: str = "source"
    """Name of the uncompressed model among them."""
    progress: Progress = silent
    scratch: Path | None = None
    """Folder for checkpoints, with which a stage resumes; by default beside ``root``."""
    results: Path | None = None
    """Folder for results that are no artifacts, such as traces; by default ``root``'s parent."""
    caches: Caches = field(default_factory=Caches, compare=False)
    history: History | None = None
    """The stages that led to the input, for a stage that records them; None outside of a run."""
    served_batch_size: int = 1
    """Rows of a deployed call, at which models whose outputs depend on the batch are evaluated."""
    val_chose_nothing: bool = False
    """Whether no artifact's settings were chosen on samples of `val`, as they are new."""
    is_quick: bool = False
    """Whether little is measured: comparisons see 16 samples of `val`."""
    exports: ExportCache = field(default_factory=ExportCache, compare=False)
    originals: Mapping[str, Callable[[Path], Artifact]] = field(default_factory=dict, compare=False)
    """Kind of artifact → imports the file that the uncompressed model came from as one, into a
    folder. Speeds are compared with it, not with what an exporter writes of the model again."""
    forms: Mapping[str, Artifact] = field(default_factory=dict, compare=False)
    """Digest of a graph → the file exported from it that answers in its place, where quality alone
    is measured: integers take torch ten times as long as the runtime that the file is for."""
    served_latency: Any = None
    """How fast models will be where a later stage exports them to; None where that is not known.
    A :class:`~compress.pruning.latency.widths.ServedLatency`."""

    def __post_init__(self) -> None:
        # The metric `loss` measures the task's loss, whatever loss the metric was created with.
        object.__setattr__(self, "metric", replace(self.metric, loss=self.loss))

    @property
    def task(self) -> Task | None:
        """What the model is for, where it is known."""
        return self.loss.task

    @property
    def work(self) -> Path:
        """A scratch directory for checkpoints, which outlives an interruption."""
        self._work.mkdir(parents=True, exist_ok=True)
        return self._work

    def clear_work(self) -> None:
        """Remove the scratch directory."""
        remove(self._work)

    @property
    def _work(self) -> Path:
        return self.scratch or self.root.with_name(f"{self.root.name}.work")

    def need_data(self, why: str) -> Splits:
        """Return the data; raise StageFailed, naming what needs it, where there is none."""
        if self.data is None:
            raise StageFailed(f"{why} needs data; add a `data:` section or pass Context(data=…)")
        return self.data

    def artifact(self, name: str) -> Artifact:
        """Return an earlier stage's artifact; raise StageFailed where there is no such stage."""
        if name not in self.artifacts:
            known = ", ".join(self.artifacts) or "none"
            raise StageFailed(f"no earlier artifact is named {name!r}; known: {known}")
        return self.artifacts[name]

    def score(self, artifact: Artifact, split: str = "val") -> float:
        """Return an artifact's metric on a split, measured once."""
        return self.score_by_sample(artifact, split).value

    def score_key(self, artifact: Artifact, split: str) -> tuple[Any, ...]:
        """Return the key of an artifact's metric among the scores."""
        batch, asked = self.judged_batch_size(artifact), self.form_of(artifact)
        return (asked.digest, split, self.metric, id(self.data), self.device, batch)

    def score_by_sample(self, artifact: Artifact, split: str = "val") -> Score:
        """Return an artifact's metric on a split with each sample's part in it, measured once."""
        key = self.score_key(artifact, split)
        if key not in self.caches.scores:
            data = self.need_data(f"metric {self.metric.name}")
            with (
                recording() as recorded,
                self.predictor(artifact) as predict,
                self.reference(self.metric) as reference,
            ):
                metric, summarizer = self.metric.for_model(artifact.signature), OutputSummarizer()
                watched = summarizer.watch(predict)
                # A processor takes no longer for a row of few; other devices wait for each call.
                size = key[-1] or (None if self.device == "cpu" else data.batch_size)
                score = evaluate(watched, data, split, metric, reference, self.progress, size)
                score = replace(score, outputs=summarizer.summaries())
            self.caches.scores[key] = score, recorded
        score, recorded = self.caches.scores[key]
        add_to_recordings(recorded)
        return score

    def drop_uncertainty(self, before: Artifact, after: Artifact) -> Uncertainty:
        """Return the interval of how many points worse an artifact's metric on `val` is."""
        change = self.score_by_sample(before).change_to(self.score_by_sample(after))
        return change.scaled(-100 if self.metric.higher_is_better else 100)

    def batch_dependence(self, artifact: Artifact) -> BatchDependence:
        """Return whether an artifact's outputs depend on the rest of the batch, measured once.

        Those of the file that answers in its place, where one does.
        """
        artifact = self.form_of(artifact)
        if artifact.digest not in self.caches.dependences:
            from compress.profiling.batch_dependence import measure_artifact

            self.caches.dependences[artifact.digest] = measure_artifact(
                artifact, self.data, self.device, self.threads, self.seed, briefly=self.is_quick
            )
        return self.caches.dependences[artifact.digest]

    def judged_batch_size(self, *artifacts: Artifact) -> int | None:
        """Return the batch size at which artifacts are evaluated; None for the data's own."""
        # Models whose outputs depend on the batch are evaluated at the size that they are served
        # with, or at a fixed size of theirs.
        if not any(self.batch_dependence(artifact).depends for artifact in artifacts):
            return None
        return max(self.served_batch_size, *(a.signature.smallest_batch for a in artifacts))

    def without_choosing_samples(self, artifact: Artifact) -> Context:
        """Return the context whose `val` has no samples that chose something of an artifact."""
        is_new = self.val_chose_nothing or not artifact.is_cascade
        if is_new or self.data is None or "val" not in self.data.datasets:
            return self
        # Scores are known by the data's identity, which those of the next call may have again.
        caches = replace(self.caches, scores={})
        return replace(self, data=self.data.interleaved_parts("val", 2)[1], caches=caches)

    def typical_sizes(self, signature: Signature) -> dict[str, int]:
        """Return the sizes of a model's named axes in a sample of `val` of median size; or none."""
        axes = {*signature.dynamic_axes} - {signature.batch_axis}
        if not axes or self.data is None or "val" not in self.data.datasets:
            return {}
        samples = len(self.data.split("val"))  # type: ignore[arg-type]
        # 32 samples, spread over the split: reading all may take long.
        count, found = min(32, samples), []
        for i in range(count):
            (sample,) = self.data.read("val", [i * samples // count], 1)  # alone, hence not padded
            sizes = {
                axis: size
                for spec, tensor in zip(signature.inputs, sample.inputs, strict=False)
                for axis, size in zip(spec.shape, tensor.shape, strict=False)
                if axis in axes and isinstance(axis, str)
            }
            found.append((prod(sizes.values()), sizes))
        return sorted(found, key=lambda pair: pair[0])[(count - 1) // 2][1]

    def macs(self, artifact: Artifact, sizes: Mapping[str, int]) -> int | None:
        """Return the multiply-accumulates of an artifact for a sample of these sizes, if known.

        Of a format that has not the operators, those of what it was made of.
        """
        # Without sizes where there are none: artifacts of other packages need not take them.
        counted = artifact.macs(sizes) if sizes else artifact.macs()
        lineage = artifact.manifest.lineage
        if counted is not None or not (sizes and lineage):
            return counted
        made_of = lineage[-1].inputs.get("input", "")
        source = next((a for a in self.artifacts.values() if a.digest == made_of), None)
        return self.macs(source, sizes) if source else None

    @contextmanager
    def predictor(self, artifact: Artifact, *, kept: bool = True) -> Iterator[Predictor]:
        """Provide an artifact as a predictor that takes any number of samples.

        What it was called with before, it answers from what was kept, unless not `kept`: row by
        row where it is known to answer alike in every batch.
        """
        artifact = self.form_of(artifact)
        open_model: Callable[[str, int], AbstractContextManager[Predictor]] = artifact.open
        if kept:
            by_row = self.answers_by_row(artifact)
            open_model = partial(self.caches.answers.predictor, artifact, by_row=by_row)
        with open_model(self.device, self.threads) as predict:
            yield accept_any_batch(predict, artifact.signature)

    def reference(self, metric: Metric) -> AbstractContextManager[Predictor | None]:
        """Provide the predictor that a metric compares with; None where it needs none."""
        return self.predictor(self.artifact("source")) if metric.needs_reference else nullcontext()

    def form_of(self, artifact: Artifact) -> Artifact:
        """Return the exported file that answers in an artifact's place, else the artifact."""
        return self.forms.get(artifact.digest, artifact)

    def answers_by_row(self, artifact: Artifact) -> bool:
        """Whether an artifact is known to answer to a row alike in every batch of `val`."""
        found = self.caches.dependences.get(self.form_of(artifact).digest)
        return found is not None and not found.why_not_joined

    def compare_latency(
        self, before: Artifact, after: Artifact, batch: int, seconds: float | None = None
    ) -> Comparison:
        """Measure two artifacts' latencies in turn, on samples of `val`.

        Both run on the device that runs the second, so that a file for the CPU is compared with its
        source on the CPU. Reliable ones are measured once for each number of seconds.
        """
        return self.compare_latencies([before], after, batch, seconds)[0]

    def compare_latencies(
        self, befores: Sequence[Artifact], after: Artifact, batch: int, seconds: float | None = None
    ) -> list[Comparison]:
        """Compare an artifact with each of some others; those not measured yet are so in turn.

        All at once; in pairs where a GPU has no room for more.
        """
        try:
            return self._compared_at_once(befores, after, batch, seconds)
        except torch.OutOfMemoryError:
            if len(befores) < 2:
                raise
        # Not above, where the error would keep the models that were opened.
        return [self._compared_at_once([b], after, batch, seconds)[0] for b in befores]

    def _compared_at_once(
        self, befores: Sequence[Artifact], after: Artifact, batch: int, seconds: float | None
    ) -> list[Comparison]:
        conditions = (batch, seconds, id(self.data), self.device, self.threads, self.seed)
        keys = [(before.digest, after.digest, *conditions) for before in befores]
        cache = self.caches.comparisons
        found = {k: cache[k] for k in keys if k in cache}
        new = [b for k, b in zip(keys, befores, strict=True) if k not in found]
        if new:
            models = {a.digest: a for a in (after, *new)}
            # All, as an artifact may be compared with what it is packed in.
            mixed = any(model.is_cascade for model in models.values())
            batches = self.measured_batches(new[0].signature, batch, mixed=mixed)
            device = after.runs_on(self.device)
            openers = [partial(a.open_anew, device, self.threads) for a in models.values()]
            limit = {} if seconds is None else {"seconds": seconds}
            with recording() as recorded:
                for model in models.values():
                    model.make_ready()
                # While a file is read it is in memory twice: that of the uncompressed model, which
                # comes last, beside no other one.
                files = [file for a in models.values() for file in a.manifest.files.values()]
                is_large = sum(file.bytes for file in files) > LARGE_BYTES
                measured = benchmark.compare_latencies(
                    openers,
                    batches,
                    threads=self.threads,
                    mixed=mixed,
                    opening_order=range(len(models))[::-1] if is_large else (),
                    **limit,
                )
            places = {digest: place for place, digest in enumerate(models)}
            pairs = [(before.digest, after.digest) for before in new]
            # What one takes alone was measured, too, for whoever asks for it later.
            own = [a for a in models.values() if not mixed and a.runs_on(self.device) == device]
            for first, second in (*pairs, *((a.digest, a.digest) for a in own)):
                compared = measured.comparison(places[first], places[second])
                key = (first, second, *conditions)
                if (first, second) in pairs:
                    found[key] = compared, recorded
                if not compared.unreliable_reason:  # else the machine may have less to do next time
                    cache.setdefault(key, (compared, recorded))
        for _, recorded in found.values():
            add_to_recordings(recorded)
        return [found[key][0] for key in keys]

    def peak_memory(self, artifact: Artifact, batch: int) -> float:
        """Return the peak memory of opening an artifact and calling it on samples, in MiB."""
        peak_memory.require_measurable(artifact)  # before the data are read
        batches = self.measured_batches(artifact.signature, batch)
        return peak_memory.peak_memory(artifact, self.device, self.threads, batches)

    def measured_batches(
        self, signature: Signature, batch: int, *, mixed: bool = False
    ) -> list[tuple[torch.Tensor, ...]]:
        """Return batches to measure with, or raise StageFailed if the model's own size differs.

        They are more where samples take a model longer than others (`mixed`).
        """
        return benchmark.measured_batches(self.data, signature, batch, self.seed, mixed=mixed)

    def comparison_inputs(
        self, signature: Signature, batch_size: int | None = None
    ) -> Iterator[tuple[torch.Tensor, ...]]:
        """Yield the inputs on which two models are compared: `val`, or seeded ones without it."""
        if self.data is not None and "val" in self.data.datasets:
            limit = QUICK_SAMPLES if self.is_quick else None
            for batch in self.data.batches("val", batch_size, limit=limit):
                yield batch.inputs
        else:
            for i in range(COMPARED_BATCHES):
                yield signature.example(batch=batch_size or 8, seed=self.seed + i)

    def with_root(self, root: Path) -> Context:
        """Return the same context with another artifact directory."""
        return replace(self, root=root)

    @contextmanager
    def in_temporary_folder(self) -> Iterator[Context]:
        """Provide the same context for a stage that is run again, of which nothing is kept."""
        with TemporaryDirectory(prefix="compress-rerun-") as name:
            root, scratch, results = (Path(name, x) for x in ("artifact", "work", "results"))
            yield replace(self, root=root, scratch=scratch, results=results)
