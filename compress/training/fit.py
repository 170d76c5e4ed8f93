"""`fit`: train a model with given settings, and resume where an interrupted run stopped."""

from __future__ import annotations

import hashlib
import logging
import pickle
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from compress.checkpoint.loading import read_state_dict
from compress.checkpoint.safetensors_io import read_safetensors
from compress.checkpoint.state_dict import Weights, as_dtype, load_state_
from compress.common.atomic_files import write_atomically
from compress.common.dependency_recorder import Recording, add_to_recordings
from compress.common.errors import CompressError, StageFailed, raised_as
from compress.common.factories import local_sources, resolve, sources_digest
from compress.common.forward import run_in_eval
from compress.common.process import threads_to_use
from compress.common.requirements import refuse_unmet, requirements_of, unmet_in
from compress.common.sealed_json import canonical_json
from compress.profiling.operator_table import OPERATORS_FILE
from compress.training.checkpoint import (
    FOLDER,
    Epoch,
    TrainProgress,
    newest_intact,
    read_progress,
    require_intact,
)
from compress.training.distributed.base import (
    DataParallelStrategy,
    Strategy,
    check_replicable,
    visible_devices,
)
from compress.training.launch.local_ranks import run_ranks
from compress.training.launch.rank_environment import LocalRanks
from compress.training.launch.rank_group import joined_group, need_group
from compress.training.launch.worker import JOB_FILE, RankKilled, one_line
from compress.training.loop.metrics import (
    CallbackRunner,
    StepRecord,
    epoch_values,
    flops_per_unit,
    log_records,
)
from compress.training.loop.train_state import Job
from compress.training.loop.trainer import is_finished, train
from compress.training.objectives.objective import AUXILIARY_PREFIX, KeepZeros

if TYPE_CHECKING:
    from pydantic import JsonValue
    from torch import nn

    from compress.artifacts.eager_model import EagerModel
    from compress.core.context import Context
    from compress.data.splits import Splits
    from compress.training.config.training import Training
    from compress.training.loop.metrics import EpochMetrics, OnRecord, TrainingRecord
    from compress.training.objectives.objective import Constraint, Objective

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Fit:
    """Result of a training."""

    start: EagerModel
    """The input model."""
    weights: Weights
    """The best, or last, weights and buffers; read from disk when they are used."""
    history: tuple[Epoch, ...]
    kept: Epoch
    """The epoch of these weights; 0 is the input model."""
    layouts: tuple[str, ...]
    """Layout of the processes, and each other one after a resumption."""

    @property
    def module(self) -> nn.Module:
        """A new module with these weights, in eval mode, on the CPU."""
        module = self.start.load()
        load_state_(module, self.weights, "the training")
        return module

    def facts(self) -> dict[str, JsonValue]:
        """Return what the manifest records of the training; equal trainings give equal facts."""
        facts: dict[str, JsonValue] = {
            "history": [epoch.model_dump() for epoch in self.history],
            "kept_epoch": self.kept.epoch,
        }
        if len(self.layouts) > 1:
            facts["resumed_across"] = list(self.layouts)
        if self.warning:
            facts["warnings"] = [self.warning]
        return facts

    @property
    def warning(self) -> str:
        """Warning about epochs in which the loss never varied; empty if there are none."""
        constant = [epoch for epoch in self.history if epoch.constant_loss]
        if not constant:
            return ""
        numbers = ", ".join(str(epoch.epoch) for epoch in constant)
        value = abs(constant[0].loss or 0.0)
        return (
            f"the training loss was {value:g} in every step of epoch {numbers}: "
            "it does not depend on the model's outputs, so that nothing was learnt; see whether "
            "`loss`, targets and outputs fit"
        )


def fit(
    start: EagerModel,
    training: Training,
    objective: Objective,
    context: Context,
    task: str,
    *,
    accept_start: bool = False,
    constraint: Constraint | None = None,
) -> Fit:
    """Train a model's weights; an interrupted training resumes from its last checkpoint.

    Checkpoints lie under ``context.work``, which the caller removes when the stage is done. With
    ``accept_start`` the weights of the input model stay if no epoch is better by the metric. Zeros
    that `prune_weights` has set stay zero, unless weights are divided among processes.

    Raises:
        StageFailed: a process failed or the loss is not finite; the message names the root cause.
    """
    data = context.need_data(task)
    training = _for_started_nodes(training.hyper_parameters(), task)
    refuse_unmet(unmet_in(training, requirements_of(training), context), task)
    strategy = Strategy()
    if training.parallel.strategy == "dp":
        strategy = _data_parallel(training, context.device, task)
    _log_separate_statistics(start, training, task)
    results = (context.results or context.root.parent).absolute()
    try:
        callbacks = CallbackRunner.from_settings(training.callbacks, context.loss.folder)
        job = _create_job(start, training, objective, context, data, accept_start, constraint)
        job = replace(job, fixed_batch=_fixed_batch(start, job))
        profiles = results / "profiles" / task
        (profiles / OPERATORS_FILE).unlink(missing_ok=True)  # of an earlier training
        every = 1 if callbacks.wants_steps else training.profile.log_every
        flops = flops_per_unit(start, job)
        job = replace(job, profiles=profiles, record_every=every, flops_per_unit=flops)
        job, earlier = _find_checkpoint(job, task)
        done = earlier.trained_epochs
        after = [f"epoch {done}"] if done else []
        after += [f"{earlier.steps} steps"] if earlier.steps else []
        beginning = f"epoch {done + 1}/{training.epochs}"
        note = f"resumed after {' and '.join(after)}" if after else beginning
        context.progress(task, done, training.epochs, note)
        if not is_finished(training, earlier.history, job.metric):
            steps = done * job.steps_per_epoch + earlier.steps
            with log_records(job, results, task, done, steps) as write:
                on_record = _record_listener(job, context, task, write, callbacks)
                if training.parallel.in_process:
                    train(job, strategy, on_record)
                else:
                    train_on_ranks(job, on_record)
        result = read_result(start, job)
    except CompressError as error:
        raise type(error)(f"{task}: {error}") from error
    except Exception as error:
        raise StageFailed(f"{task}: {one_line(error)}") from error
    log.info("%s: %d epochs, kept epoch %d", task, len(result.history), result.kept.epoch)
    if result.warning:
        log.warning("%s: %s", task, result.warning)
    return result


def _for_started_nodes(training: Training, task: str) -> Training:
    """Return the settings for as many of the started machines as the training can use."""
    need_group(training.parallel)
    group = joined_group()
    started = group.nodes if group else 1
    adapted = training.for_nodes(started)
    if adapted is not training:
        nodes = f"{adapted.parallel.nodes} of {started} started machines"
        most = training.parallel.nodes
        log.warning("%s: trains on %s; the settings are for up to %d", task, nodes, most)
    return adapted


def _data_parallel(training: Training, device: str, task: str) -> Strategy:
    """Return DataParallel over several devices, else the process alone; log what is faster."""
    devices = visible_devices(device)
    check_replicable(training, len(devices))
    if len(devices) < 2:
        log.warning(
            f"%s: strategy dp runs on {device} alone: DataParallel divides batches over CUDA "
            "devices, and with one or none it calls the model itself, so the result is the same; "
            "strategy: ddp with processes: n is faster",
            task,
        )
        return Strategy()
    log.warning(
        "%s: strategy dp: DataParallel's threads share one interpreter and copy the model to "
        f"{len(devices)} devices in each step; strategy: ddp with processes: {len(devices)} is "
        "faster",
        task,
    )
    return DataParallelStrategy(devices)


def _log_separate_statistics(start: EagerModel, training: Training, task: str) -> None:
    """Log that BatchNorm in several processes is not that of one, unless it is synchronized."""
    shares = training.parallel.replicas
    if shares == 1 or training.parallel.sync_batchnorm:
        return
    if any(name.endswith("running_mean") for name in read_safetensors(start.payload_path)):
        together = training.batch_size // training.accumulate
        own = f"the {together // shares} samples of each of {shares} processes"
        log.info(
            f"%s: BatchNorm normalizes by {own}, not by all {together}, so that the result is not "
            "that of one process; parallel.sync_batchnorm: true uses all",
            task,
        )


def _fixed_batch(start: EagerModel, job: Job) -> int | None:
    """Return the one batch size that steps and evaluation use where the model declares it.

    It may be that of exports alone: steps may have another one, unless the model takes no other,
    which raises StageFailed.
    """
    parts = job.training.parallel.replicas * job.training.accumulate
    size, rows = start.signature.smallest_batch, job.training.batch_size // parts
    if start.signature.batch_axis is not None or not start.signature.inputs[0].shape:
        return None
    if rows == size:
        return size
    samples = range(min(rows, job.train_samples))
    batch = next(iter(job.data.read("train", samples, rows, job.seed)))
    advice = f"; model.inputs declares batches of {size}: set batch_size: {size * parts}"
    with raised_as(StageFailed, f"the model takes no batch of {len(samples)}", advice):
        run_in_eval(start.load(), batch.inputs)
    return None


def _create_job(
    start: EagerModel,
    training: Training,
    objective: Objective,
    context: Context,
    data: Splits,
    accept_start: bool,
    constraint: Constraint | None,
) -> Job:
    """Describe the training; its folder is named by the hash of all that decides its result."""
    if constraint is None and start.has_pruned_weights and not training.parallel.divides_weights:
        constraint = KeepZeros()
    reference = context.artifact("source") if context.metric.needs_reference else None
    identity = {
        # Without `parallel`: a training resumes with another strategy or number of processes.
        "training": training.model_dump(mode="json", exclude={"parallel"}),
        "objective": repr(objective),
        "loss": context.loss.identity(),
        "start": start.digest,
        "data": data.fingerprint(),
        "metric": context.metric.identity(),
        "reference": reference.digest if reference else None,
        "seed": context.seed,
        "accept_start": accept_start,
        "constraint": repr(constraint) if constraint else None,
    }
    if training.has_custom_schedule:
        resolve(training.schedule, context.loss.folder)  # before any other process does
        sources = local_sources(training.schedule, context.loss.folder)
        identity["schedule"] = sources_digest(sources)
    digest = hashlib.sha256(canonical_json(identity).encode()).hexdigest()
    folder = context.work / f"fit-{digest[:32]}"
    folder.mkdir(exist_ok=True)
    return Job(
        start=start.path.absolute(),
        training=training,
        objective=objective,
        data=data,
        metric=context.metric.for_model(start.signature).with_inferred_loss(data),
        reference=reference.path.absolute() if reference else None,
        device=context.device,
        # The ranks of a machine share its cores.
        threads=max(1, threads_to_use() // training.parallel.ranks_per_node),
        seed=context.seed,
        folder=folder.absolute(),
        accept_start=accept_start,
        code_folder=context.loss.folder,
        constraint=constraint,
    )


def _find_checkpoint(job: Job, task: str) -> tuple[Job, TrainProgress]:
    checkpoint = newest_intact(job.folder)
    if checkpoint is None:
        return job, TrainProgress()
    earlier, layout = read_progress(checkpoint), job.training.parallel.layout
    if earlier.kept_in:
        require_intact(job.folder / FOLDER / earlier.kept_in)
    log.info("%s: resumed after epoch %d and %d steps", task, earlier.trained_epochs, earlier.steps)
    if earlier.layouts[-1] != layout:
        log.warning(
            f"%s: resumed with {layout} from a checkpoint of {earlier.layouts[-1]}; the result may "
            "differ by rounding from that of an uninterrupted training",
            task,
        )
    return replace(job, trusted=checkpoint.name), earlier


def train_on_ranks(job: Job, on_record: OnRecord) -> None:
    """Train on several processes, and return when all of them have ended.

    ``on_record`` is called in this process after steps and epochs. A rank's error is raised here.
    """
    parallel = job.training.parallel
    group = joined_group()
    file = job.folder / JOB_FILE
    advice = "; name it by a data factory, or set parallel.processes to 1"
    with raised_as(StageFailed, f"the data cannot be sent to {parallel.ranks} processes", advice):
        content = pickle.dumps(job)
    # In a file: through a pipe it would hang this process where a rank dies before it has read it.
    write_atomically(file, content)
    try:
        for restarts_left in reversed(range(parallel.restarts + 1)):
            try:
                # Several machines were started, or fit would have refused the settings.
                if group and (parallel.nodes > 1 or group.fits(parallel)):
                    recorded = group.train(job.folder, parallel, on_record)
                else:
                    # Port 0: the system chooses a free one.
                    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
                    ranks = LocalRanks(
                        count=parallel.ranks,
                        world_size=parallel.ranks,
                        local_world_size=parallel.ranks,
                        host="127.0.0.1",
                        port=store.port,
                        attempt="training",
                    )
                    recorded = run_ranks(job.folder, ranks, store, on_record)
            except RankKilled as error:
                if not restarts_left:
                    raise
                log.warning("%s; all are started again from the last checkpoint", error)
            else:
                add_to_recordings(Recording.from_json(recorded))
                return
    finally:
        file.unlink(missing_ok=True)


def read_result(start: EagerModel, job: Job) -> Fit:
    """Read a finished training's last checkpoint, and the weights of its best one."""
    last = newest_intact(job.folder)
    progress = read_progress(last) if last else TrainProgress()
    if progress.kept is None or not is_finished(job.training, progress.history, job.metric):
        raise StageFailed(
            f"{job.folder} has no checkpoint of the end of the training; run again to resume it"
        )
    weights: Weights = read_safetensors(start.payload_path)
    if progress.kept_in:
        checkpoint = job.folder / FOLDER / progress.kept_in
        require_intact(checkpoint)
        trained = read_state_dict(checkpoint)
        dtypes = {name: weight.dtype for name, weight in weights.items()}
        weights = {
            # With `bf16-true` they are narrower than those of the input model.
            name: as_dtype(weight, dtypes.get(name, weight.dtype))
            for name, weight in trained.items()
            if not name.startswith(AUXILIARY_PREFIX)
        }
    return Fit(start, weights, progress.history, progress.kept, progress.layouts)


def _record_listener(
    job: Job,
    context: Context,
    task: str,
    write: OnRecord,
    callbacks: CallbackRunner,
) -> OnRecord:
    """Return a function that passes steps and epochs to log, tracker, console and callbacks."""
    total, log_every = job.training.epochs, job.training.profile.log_every

    def on_step(record: StepRecord) -> None:
        note = f"epoch {record.epoch}/{total} step {record.step}/{job.total_steps}"
        loss, norm, rate = record.loss, record.gradient_norm, record.learning_rate
        for name, value in (("loss", loss), ("learning rate", rate), ("gradient norm", norm)):
            note += "" if value is None else f" {name} {value:.3g}"
        note += f", {record.format_throughput()}"
        figures = record.model_dump(exclude={"step", "epoch"}, exclude_none=True)
        fields = {"event": "step", "task": task, "step": record.step, "epoch": record.epoch}
        log.info("%s: %s", task, note, extra={"log_fields": {**fields, "figures": figures}})
        write(record)
        context.progress(task, record.epoch - 1, total, note)

    def on_epoch(epoch: EpochMetrics) -> None:
        value = "" if epoch.metric is None else f" val {job.metric.name} {epoch.metric:.4g}"
        note = f"epoch {epoch.epoch}/{total} loss {epoch.loss:.3g}{value}"
        figures = epoch_values(epoch, job.metric.name)
        fields = {"event": "epoch", "task": task, "epoch": epoch.epoch, "figures": figures}
        peaks = " ".join(f"{peak:.0f}" for peak in epoch.peak_mebibytes)
        cost = f"{epoch.format_throughput()}, peak MiB by rank: {peaks}"
        log.info("%s: %s, %s", task, note, cost, extra={"log_fields": fields})
        write(epoch)
        context.progress(task, epoch.epoch, total, f"{note} ({epoch.format_throughput()})")

    def on_record(record: TrainingRecord) -> None:
        if not isinstance(record, StepRecord):
            on_epoch(record)
        elif log_every and record.step % log_every == 0:
            on_step(record)
        callbacks(record)

    return on_record
