"""Receivers of steps and epochs: TensorBoard, MLflow and the user's callbacks."""

from __future__ import annotations

import logging
import os
import re
import shutil
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from compress.common.dependency_recorder import recording_paused
from compress.common.errors import CompressError, StageFailed, exits_refused, first_line
from compress.common.factories import resolve
from compress.common.process import random_state_kept
from compress.training.config.training import Callbacks
from compress.training.loop.step_metrics import StepRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from compress.training.config.training import Profile
    from compress.training.loop.step_metrics import EpochMetrics, TrainingRecord

EXPERIMENT = "compress"
FOLDER = "tracking"
STEP = "step/"
"""Before the names of values that are logged by step and not by epoch."""
IDENTITY_TAG = "compress.training"
"""Tag of an MLflow run by which a resumed training finds its run."""
PARAMS_PER_BATCH = 100
"""MLflow refuses more parameters in one request."""
LONGEST_PARAM = 500
NOT_IN_MLFLOW_NAMES = re.compile(r"[^\w/. :-]")
MLFLOW_STATUS = {"passed": "FINISHED", "interrupted": "KILLED"}
"""MLflow's words for how a run ended; all others are FAILED."""

log = logging.getLogger(__name__)


class TensorBoardLogger:
    """Scalars in an event file."""

    def __init__(self, folder: Path, first_step: int) -> None:
        """Open a folder; values that an interrupted run wrote from this step on are voided."""
        from torch.utils import tensorboard

        writer: Any = tensorboard.SummaryWriter
        self.folder = folder
        self.writer = writer(str(folder), purge_step=first_step)

    def by_step(self, first_step: int) -> TensorBoardLogger:
        """Open a logger for training steps: in a folder below, as voiding is by number alone."""
        return TensorBoardLogger(self.folder / "steps", first_step)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Append to the event file, visible at once."""
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def write_settings(self, settings: Mapping[str, str]) -> None:
        """Write a table as text."""
        rows = "\n".join(f"| {name} | {value} |" for name, value in settings.items())
        self.writer.add_text("settings", f"| setting | value |\n|---|---|\n{rows}")

    def finish(self, status: str, report: Path) -> None:
        """Write how the run ended, and copy its report, if there is one, beside the event file."""
        self.writer.add_text("status", status)
        self.close()
        if report.exists():
            shutil.copyfile(report, self.folder / report.name)

    def close(self) -> None:
        """Close the event file."""
        self.writer.close()


class MLflowLogger:
    """Metrics and parameters of an MLflow run; a resumed training appends to its earlier run."""

    def __init__(
        self, uri: str, folder: Path | None, identity: str, name: str, first_step: int
    ) -> None:
        """Open a run; where ``first_step`` is above 1, one of the same identity is resumed."""
        from mlflow import MlflowClient

        # MLflow retries for minutes by default where nobody answers.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "15")
        logging.getLogger("mlflow").setLevel(logging.WARNING)
        self.client: Any = MlflowClient(tracking_uri=uri)
        known = self.client.get_experiment_by_name(EXPERIMENT)
        if known:
            experiment = known.experiment_id
        else:
            # A local database keeps no artifacts: they would go to the working directory. A server,
            # for which there is no folder, does.
            artifacts = (folder / "artifacts").absolute().as_uri() if folder else None
            experiment = self.client.create_experiment(EXPERIMENT, artifact_location=artifacts)
        earlier = self.client.search_runs([experiment], f"tags.`{IDENTITY_TAG}` = '{identity}'")
        if first_step > 1 and earlier:
            self.run = earlier[0].info.run_id
            self.client.update_run(self.run, status="RUNNING")
        else:
            tags = {IDENTITY_TAG: identity}
            self.run = self.client.create_run(experiment, run_name=name, tags=tags).info.run_id
        self.written: dict[str, set[int]] = {}

    def by_step(self, first_step: int) -> MLflowLogger:
        """Return the logger for training steps: this one, as each name has steps of its own."""
        return self

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Send the values in one request, except those that the resumed run has of that step."""
        from mlflow.entities import Metric

        now, metrics = int(time.time() * 1000), []
        for name, value in ((mlflow_name(name), value) for name, value in values.items()):
            if name not in self.written:
                history = self.client.get_metric_history(self.run, name)
                self.written[name] = {metric.step for metric in history}
            if step not in self.written[name]:
                metrics.append(Metric(name, value, now, step))
        if metrics:
            self.client.log_batch(self.run, metrics=metrics)

    def write_settings(self, settings: Mapping[str, str]) -> None:
        """Send the settings as parameters."""
        from mlflow.entities import Param

        params = [Param(mlflow_name(n), value[:LONGEST_PARAM]) for n, value in settings.items()]
        for start in range(0, len(params), PARAMS_PER_BATCH):
            self.client.log_batch(self.run, params=params[start : start + PARAMS_PER_BATCH])

    def finish(self, status: str, report: Path) -> None:
        """Send the report as an artifact, and end the run."""
        if report.exists():
            self.client.log_artifact(self.run, str(report))
        self.client.set_terminated(self.run, status=MLFLOW_STATUS.get(status, "FAILED"))

    def close(self) -> None:
        """End the run as finished."""
        self.client.set_terminated(self.run)


ExperimentLogger: TypeAlias = TensorBoardLogger | MLflowLogger


def open_logger(
    kind: str, uri: str | None, results: Path, name: str, identity: str, first_step: int
) -> ExperimentLogger:
    """Open the logger of a kind, `tensorboard` or `mlflow`, for one of several runs of a name.

    ``uri`` is the address of an MLflow server, or a folder relative to that of the results,
    `tracking` if None. Steps from ``first_step`` on, which an interrupted run wrote, are replaced.
    """
    is_address = uri is not None and "://" in uri
    folder = results if is_address else results / (uri or FOLDER)
    if kind == "tensorboard":
        return TensorBoardLogger(folder / name, first_step)
    if uri is not None and is_address:
        return MLflowLogger(uri, None, identity, name, first_step)
    folder.mkdir(parents=True, exist_ok=True)
    # A database, because MLflow 3 no longer writes plain folders.
    database = f"sqlite:///{folder.absolute() / 'mlflow.db'}"
    return MLflowLogger(database, folder, identity, name, first_step)


def mlflow_name(name: str) -> str:
    """Replace characters that MLflow refuses in names, such as the equal sign of a branch's."""
    return NOT_IN_MLFLOW_NAMES.sub(":", name)


def epoch_values(epoch: EpochMetrics, metric: str) -> dict[str, float]:
    """Return an epoch's known values by the names under which they are logged."""
    values = {
        "loss": epoch.loss,
        f"val/{metric}": epoch.metric,
        "learning_rate": epoch.learning_rate,
        "samples_per_second": epoch.samples_per_second,
        "tokens_per_second": epoch.tokens_per_second,
    }
    peaks = {f"peak_mebibytes/rank{r}": peak for r, peak in enumerate(epoch.peak_mebibytes)}
    return {name: value for name, value in (values | peaks).items() if value is not None}


def step_values(record: StepRecord) -> dict[str, float]:
    """Return a step's known values by the names under which they are logged."""
    values = record.model_dump(exclude={"step", "epoch"})
    return {f"{STEP}{name}": value for name, value in values.items() if value is not None}


@contextmanager
def log_records(
    profile: Profile,
    results: Path,
    title: str,
    identity: str,
    trained_epochs: int,
    trained_steps: int,
    metric: str,
) -> Iterator[Callable[[TrainingRecord], None]]:
    """Give a function that logs steps and epochs; a logger that fails is dropped with a warning."""
    logger: ExperimentLogger | None = None
    step_logger: ExperimentLogger | None = None
    last_epoch, last_step = trained_epochs, trained_steps  # an interrupted run has logged these

    def write(record: TrainingRecord) -> None:
        nonlocal logger, step_logger, last_epoch, last_step
        if logger is None:
            return
        try:
            if isinstance(record, StepRecord):
                step_logger = step_logger or logger.by_step(trained_steps + 1)
                if record.step > last_step:
                    step_logger.write(record.step, step_values(record))
                last_step = max(last_step, record.step)
            elif record.epoch > last_epoch:
                logger.write(record.epoch, epoch_values(record, metric))
                last_epoch = record.epoch
        except Exception as error:  # noqa: BLE001 - a server that is gone must not end a training
            _warn(profile, error)
            logger = None

    if profile.tracker != "none":
        try:
            name = f"{title}-{identity[:8]}"
            uri = profile.tracking_uri
            logger = open_logger(profile.tracker, uri, results, name, identity, trained_epochs + 1)
        except Exception as error:  # noqa: BLE001 - neither must one that cannot be opened
            _warn(profile, error)
    try:
        yield write
    finally:
        for opened in dict.fromkeys((logger, step_logger)):
            if opened is not None:
                opened.close()


def _warn(profile: Profile, error: Exception) -> None:
    log.warning(
        "tracker %s failed (%s: %s); the training goes on without it",
        profile.tracker,
        type(error).__name__,
        first_line(error),
    )


EVENTS = ("on_step_end", "on_epoch_end")


class CallbackRunner:
    """Calls the user's functions once for each step and epoch, in order."""

    def __init__(self, functions: dict[str, Callable[[dict[str, Any]], object]]) -> None:
        self.functions = functions
        self.last = dict.fromkeys(EVENTS, 0)

    @classmethod
    def from_settings(cls, settings: Callbacks | str, folder: Path | None) -> Self:
        """Import the functions, or create an object of the class, from the folder of user code."""
        # Not recorded: what they read changes no artifact.
        with recording_paused(environment=True):
            if isinstance(settings, Callbacks):
                named = {event: getattr(settings, event) for event in EVENTS}
                return cls({event: resolve(n, folder) for event, n in named.items() if n})
            try:
                with exits_refused():
                    created = resolve(settings, folder)()
            except CompressError:
                raise
            except Exception as error:
                raise StageFailed(f"callbacks: {_described(settings, error)}") from error
        functions = {event: getattr(created, event, None) for event in EVENTS}
        if not any(functions.values()):
            raise StageFailed(f"callbacks: {settings} has no method {' or '.join(EVENTS)}; add one")
        return cls({event: function for event, function in functions.items() if function})

    @property
    def wants_steps(self) -> bool:
        """Whether a function is called after each step."""
        return "on_step_end" in self.functions

    def __call__(self, record: TrainingRecord) -> None:
        """Call the function for a step or an epoch; one that is trained again is left out."""
        event, number = "on_epoch_end", record.epoch
        if isinstance(record, StepRecord):
            event, number = "on_step_end", record.step
        # After a process was killed, steps since the last checkpoint are trained again.
        if event not in self.functions or number <= self.last[event]:
            return
        self.last[event] = number
        try:
            with exits_refused(), recording_paused(environment=True), random_state_kept("cpu"):
                self.functions[event](record.model_dump())
        except CompressError as error:
            raise StageFailed(f"callbacks.{event}: {error}") from error
        except Exception as error:
            where = f"{'epoch' if event == 'on_epoch_end' else 'step'} {number}"
            raise StageFailed(f"callbacks.{_described(event, error)} (after {where})") from error


def _described(what: str, error: Exception) -> str:
    return f"{what} raised {type(error).__name__}: {first_line(error)}"
