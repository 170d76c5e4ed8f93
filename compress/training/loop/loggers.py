"""Trackers: where the figures of each epoch are written, for people who watch a training."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from compress.common.errors import Unavailable, first_line
from compress.common.requirements import Requirement

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from compress.training.config.profiling import Profile
    from compress.training.loop.step_metrics import EpochMetrics

EXPERIMENT = "compress"
FOLDER = "tracking"
TRAINING = "compress.training"
"""The tag of an MLflow run that says which training it is."""
REQUIREMENTS = {
    "tensorboard": Requirement(
        what="tensorboard", install="pip install 'compress-pipeline[tensorboard]'"
    ),
    "mlflow": Requirement(what="mlflow", install="pip install 'compress-pipeline[mlflow]'"),
}

log = logging.getLogger(__name__)


class Tracker(Protocol):
    """What writes the figures of one training."""

    def write(self, epoch: int, figures: Mapping[str, float]) -> None:
        """Write an epoch's figures, to be seen at once."""
        ...

    def close(self) -> None:
        """End, whether the training did well or not."""
        ...


@dataclass(frozen=True)
class Place:
    """Where a tracker writes."""

    uri: str
    """Of a tracking server or database."""
    folder: Path | None
    """On this machine; None for an address."""


def place_of(kind: str, uri: str | None, results: Path) -> Place:
    """Return where a tracker writes: an address, or a folder relative to that of the results."""
    if uri is not None and "://" in uri:
        return Place(uri, None)
    folder = results / (uri or FOLDER)
    if kind == "mlflow":
        folder.mkdir(parents=True, exist_ok=True)
    # MLflow 3 has given up plain folders.
    return Place(f"sqlite:///{folder.absolute() / 'mlflow.db'}", folder)


class TensorBoard:
    """Scalars in an event file."""

    def __init__(self, folder: Path, done: int) -> None:
        """Go on after a number of epochs; what an earlier run wrote of later ones is void."""
        from torch.utils import tensorboard

        make: Any = tensorboard.SummaryWriter
        self.writer = make(str(folder), purge_step=done + 1)

    def write(self, epoch: int, figures: Mapping[str, float]) -> None:
        """Append to the event file."""
        for name, value in figures.items():
            self.writer.add_scalar(name, value, epoch)
        self.writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self.writer.close()


class MLflow:
    """Metrics of an MLflow run; a training that goes on finds its run again."""

    def __init__(self, place: Place, training: str, name: str, done: int) -> None:
        """Open a run.

        Args:
            place: the tracking server or database.
            training: what tells this training from others.
            name: the run's name.
            done: epochs trained before; an interrupted training's run is looked for.
        """
        from mlflow import MlflowClient

        logging.getLogger("mlflow").setLevel(logging.WARNING)
        self.client: Any = MlflowClient(tracking_uri=place.uri)
        known = self.client.get_experiment_by_name(EXPERIMENT)
        experiment = known.experiment_id if known else self._new_experiment(place)
        found = self.client.search_runs([experiment], f"tags.`{TRAINING}` = '{training}'")
        if done and found:
            self.run = found[0].info.run_id
            self.client.update_run(self.run, status="RUNNING")
        else:
            tags = {TRAINING: training}
            self.run = self.client.create_run(experiment, run_name=name, tags=tags).info.run_id
        self.written = {m.step for m in self.client.get_metric_history(self.run, "loss")}

    def _new_experiment(self, place: Place) -> Any:
        # A database keeps no artifacts: by default they would go to the working directory.
        artifacts = (place.folder / "artifacts").absolute().as_uri() if place.folder else None
        return self.client.create_experiment(EXPERIMENT, artifact_location=artifacts)

    def write(self, epoch: int, figures: Mapping[str, float]) -> None:
        """Send the figures, unless the run has that epoch."""
        if epoch not in self.written:
            for name, value in figures.items():
                self.client.log_metric(self.run, name, value, step=epoch)

    def close(self) -> None:
        """End the run."""
        self.client.set_terminated(self.run)


def refuse_missing(profile: Profile) -> None:
    """Refuse a tracker that is not installed.

    Raises:
        Unavailable: with what to install.
    """
    for needed in profile.requirements:
        if needed.missing():
            raise Unavailable(
                f"profile.tracker: {profile.tracker} needs {needed.what}, which is not installed; "
                f"{needed.install}"
            )


def figures_of(epoch: EpochMetrics, metric: str) -> dict[str, float]:
    """Return an epoch's figures by name, those that it has."""
    figures = {
        "loss": epoch.loss,
        f"val/{metric}": epoch.metric,
        "learning_rate": epoch.learning_rate,
        "samples_per_second": epoch.samples_per_second,
        "tokens_per_second": epoch.tokens_per_second,
    }
    peaks = {f"peak_mebibytes/rank{r}": peak for r, peak in enumerate(epoch.peak_mebibytes)}
    return {name: value for name, value in (figures | peaks).items() if value is not None}


@contextmanager
def tracking(
    profile: Profile, results: Path, title: str, identity: str, done: int, metric: str
) -> Iterator[Callable[[EpochMetrics], None]]:
    """Give what writes epochs to the tracker for a block; a tracker that fails is let go.

    Args:
        profile: names the tracker.
        results: folder that the tracker's is relative to.
        title: what is trained.
        identity: tells this training from others of that title.
        done: epochs trained before; they are written already.
        metric: name of the metric on `val`.
    """
    tracker: Tracker | None = None
    last = done

    def write(epoch: EpochMetrics) -> None:
        nonlocal tracker, last
        if tracker is None or epoch.epoch <= last:
            return
        try:
            tracker.write(epoch.epoch, figures_of(epoch, metric))
            last = epoch.epoch
        except Exception as error:  # noqa: BLE001 - a server that is gone must not end a training
            _let_go(profile, error)
            tracker = None

    try:
        tracker = _open(profile, results, f"{title}-{identity[:8]}", identity, done)
    except Exception as error:  # noqa: BLE001
        _let_go(profile, error)
    try:
        yield write
    finally:
        if tracker is not None:
            tracker.close()


def _open(profile: Profile, results: Path, name: str, identity: str, done: int) -> Tracker | None:
    if profile.tracker == "none":
        return None
    place = place_of(profile.tracker, profile.tracking_uri, results)
    if profile.tracker == "mlflow":
        return MLflow(place, identity, name, done)
    return TensorBoard((place.folder or results) / name, done)


def _let_go(profile: Profile, error: Exception) -> None:
    log.warning(
        "tracker %s failed (%s: %s); the training goes on without it",
        profile.tracker,
        type(error).__name__,
        first_line(error),
    )
