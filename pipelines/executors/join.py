"""A run as other nodes see it: whether it lives, and the trainings to which it invites them."""

from __future__ import annotations

import os
import time
import uuid
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Literal

from pydantic import ValidationError

from compress.common.atomic_files import write_atomically
from compress.common.config import Settings
from compress.common.errors import (
    ArtifactInvalid,
    CompressError,
    GateRefused,
    PipelineInvalid,
    StageFailed,
)
from compress.training.launch.heartbeat import SECONDS_TO_SILENCE, THIS_PROCESS, Pulse, beating
from pipelines.store.local import WORK

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from compress.training.launch.multi_node import Meeting

RUN, BEAT = "run.json", "run.beat"
SECONDS_BETWEEN_LOOKS = 0.3
LONGEST_WAIT = 1e9
"""Seconds that a calendar can still add."""
INVITATIONS = f"{WORK}/*/*/invitation.json"


class RunStatus(Settings):
    """What a run tells other nodes of itself."""

    name: str
    """Tells this run from every other one; its signs of life are signed with it."""
    runner: str = THIS_PROCESS
    job: str | None
    """The Slurm step that it belongs to."""
    state: Literal["running", "done", "failed"] = "running"
    error: str = ""


@contextmanager
def advertise_run(store: Path) -> Iterator[None]:
    """Show in the store that a run lives during a block, and how it ended."""
    run = RunStatus(name=uuid.uuid4().hex, job=slurm_step())
    with beating(store / BEAT, run.name):
        write_atomically(store / RUN, run.model_dump_json())
        end = run.model_copy(update={"state": "done"})
        try:
            yield
        except GateRefused:
            raise  # the work is done
        except BaseException as error:
            why = str(error) or "it was interrupted"
            end = run.model_copy(update={"state": "failed", "error": why})
            raise
        finally:
            with suppress(OSError):  # on a full disk the error itself matters more
                write_atomically(store / RUN, end.model_dump_json())


def slurm_step() -> str | None:
    """Return what all tasks of one `srun` have in common, and no other ones."""
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    job, step, restart = (os.environ.get(name, "0") for name in names)
    return f"{job}.{step}.{restart}" if "SLURM_JOB_ID" in os.environ else None


def join_run(
    out: Path, announce: Callable[[str], None], *, wait: float, silence: float = SECONDS_TO_SILENCE
) -> int:
    """Take part in all trainings of a run on another node, until the run ends; return how many.

    Args:
        out: the run's directory, on a file system that both nodes have.
        announce: where a line goes while no run lives, and one per training.
        wait: seconds within which the run must have begun.
        silence: seconds without a sign of life after which the run is taken for dead.

    Raises:
        PipelineInvalid: no run can begin there.
        StageFailed: no run began, or it failed or died.
        ArtifactInvalid: a file in its directory is another user's.
    """
    _refuse_where_none_can_begin(out)
    store, deadline, waits = out / ".store", time.monotonic() + wait, _waiting(out, wait)
    pulse, joined, before = Pulse(store / BEAT), set[str](), _read(store)
    while True:
        pulse.listen()
        run = _read(store)
        # Where another run than the one whose signs are heard is told of, it is an older one.
        lives = run is not None and run.name == pulse.who
        if run and run.state != "running" and (lives or _is_ours(run, before)):
            if run.state == "failed":
                raise StageFailed(f"the run in {out} failed: {run.error}")
            return len(joined)
        if pulse.beats and pulse.silent_seconds > silence:
            raise StageFailed(
                f"the run in {out} has given no sign of life for {silence:.0f} s and is taken for "
                "dead; start `compress run` and `compress join` again, and it goes on"
            )
        if not pulse.beats and time.monotonic() > deadline:
            raise StageFailed(
                f"no run began in {out} within {wait:.0f} s; start `compress run` with "
                f"--out {out} on the first node"
            )
        if run and lives:
            _join_next(store, run, joined, announce)
        elif waits:
            announce(waits)
            waits = ""
        time.sleep(SECONDS_BETWEEN_LOOKS)


def _refuse_where_none_can_begin(out: Path) -> None:
    if not out.parent.is_dir():
        raise PipelineInvalid(
            f"{out}: there is no folder {out.parent}; expected the --out of a run on the first "
            f"node, on a file system that this node has too (before it begins: mkdir -p {out})"
        )
    if out.exists() and not out.is_dir():
        raise PipelineInvalid(f"{out}: is a file, expected the folder that is a run's --out")


def _waiting(out: Path, seconds: float) -> str:
    until = datetime.now() + timedelta(seconds=min(LONGEST_WAIT, seconds))
    return (
        f"waiting until {until:%Y-%m-%d %H:%M:%S} for a run in {out} to show signs of life; "
        f"`compress run` with --out {out} on the first node begins one"
    )


def _is_ours(run: RunStatus, before: RunStatus | None) -> bool:
    """Whether a run of which no sign of life was heard is the one to join, and not an older one."""
    return run != before or (run.job is not None and run.job == slurm_step())


def advertised_run(store: Path) -> str | None:
    """Return the name of the run that told of itself last in a store; None where none did."""
    run = _read(store)
    return run.name if run else None


def _join_next(
    store: Path, run: RunStatus, joined: set[str], announce: Callable[[str], None]
) -> None:
    """Take part in a training to which the run invites now, if it does."""
    for file in store.glob(INVITATIONS):
        from compress.training.launch.multi_node import invitation_in

        meeting = invitation_in(file.parent)
        if meeting and meeting.runner == run.runner and meeting.run_id not in joined:
            joined.add(meeting.run_id)
            _join(file.parent, meeting, announce)


def _join(folder: Path, meeting: Meeting, announce: Callable[[str], None]) -> None:
    from compress.training.launch.node_agent import join_training

    announce(f"joining a training of {meeting.nodes} nodes with {meeting.processes} processes each")
    try:
        join_training(folder, meeting)
    except ArtifactInvalid:
        raise
    except CompressError as error:
        announce(str(error))  # the run says what comes of it, or dies


def _read(store: Path) -> RunStatus | None:
    try:
        return RunStatus.model_validate_json((store / RUN).read_bytes())
    except (OSError, ValidationError):
        return None
