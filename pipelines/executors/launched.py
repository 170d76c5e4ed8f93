"""`compress run` in each of several processes that torchrun or srun has started."""

from __future__ import annotations

import atexit
import os
import signal
import socket
import sys
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from compress.common.atomic_files import sha256_if_readable, write_atomically
from compress.common.errors import CompressError, PipelineInvalid, StageFailed
from compress.common.process import end_with_parent
from compress.pipelines.system import signals
from compress.pipelines.system.machine_info import versions
from compress.training.config.parallel import Parallel
from compress.training.launch import rank_group

if TYPE_CHECKING:
    from compress.pipelines.config.pipeline import PipelineConfig

RUN_ID = "run-id"  # file in a store, by which another machine sees that it has the same folder
REMEDY = (
    "all nodes need the folder of results, the pipeline's and the working directory on a file "
    "system that they share, under the same paths"
)


@contextmanager
def joined_processes(file: Path) -> Iterator[None]:
    """Run a block in rank 0 of those that were started; the other ranks take part in its trainings.

    They never enter the block, and leave with rank 0's exit code when it ends. A process that was
    started alone runs the block and nothing else. All must have the same pipeline file.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # The kernel stops this process with torchrun, which others may replace elsewhere.
        end_with_parent(signal.SIGTERM)
    environment = rank_group.launched_environment(os.environ)
    if environment is None or int(environment["WORLD_SIZE"]) == 1:
        yield
        return
    # A connection that closes is reported in one line, not by a stack trace of C++.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    exit_codes = [StageFailed.exit_code]

    def leave() -> None:
        # Without finalizing Python: gloo's threads outlive the process group, and one that releases
        # a tensor meanwhile aborts the process ("terminate called without an active exception").
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_codes[-1])

    # Before torch registers its exit handlers, so that it is called after them.
    atexit.register(leave)
    with _noted_exit_code(exit_codes):
        group = rank_group.RankGroup.join(environment)
        if group.rank:
            exit_codes.append(group.serve(lambda request: _answer(request, file)))
            # It has nothing to report: no exception, and of the teardown the exit handlers alone.
            signals.ignore_signals()
            atexit._run_exitfuncs()
    try:
        with _noted_exit_code(exit_codes):
            sha256 = sha256_if_readable(file)  # what cannot be read is refused below
            group.request("compare file", rank_group.SECONDS_TO_MEET, sha256=sha256)
            yield
    finally:
        group.leave(exit_codes[-1])  # the other ranks leave with this code, too


@contextmanager
def _noted_exit_code(exit_codes: list[int]) -> Iterator[None]:
    """Append the exit code that a block's end leads to."""
    try:
        yield
    except BaseException as error:
        exit_codes.append(signals.exit_code_of(error))
        raise
    exit_codes.append(0)


def check_processes(pipeline: PipelineConfig, store: Path) -> None:
    """Refuse processes that no training is for, or that do not see the run's files."""
    group = rank_group.joined_group()
    if group is None:
        return
    parts = (part for stage in pipeline.stages for _, part in stage.nested())
    if not any(isinstance(p, Parallel) and p.ranks > 1 and group.fits(p) for p in parts):
        raise PipelineInvalid(
            f"{group.world_size} processes were started, and no training of the pipeline is for "
            f"them; give one `parallel: {{nodes: {group.nodes}, processes: "
            f"{group.local_world_size}}}`, or start `compress run` alone"
        )
    group.request("enter", environment=asdict(RunEnvironment.of_this_process(store)))


def _answer(request: dict[str, Any], file: Path) -> str:
    """Return why a request of rank 0 cannot be met; nothing where it can."""
    try:
        if request["command"] == "enter":
            RunEnvironment(**request["environment"]).enter()
        elif sha256_if_readable(file) != request["sha256"]:
            return f"has another {file}; start the same command with the same file everywhere"
    except CompressError as error:
        return f"cannot take part: {error}"
    return ""


def write_run_id(store: Path) -> None:
    """Mark a store as this run's."""
    write_atomically(store / RUN_ID, uuid.uuid4().hex)


def read_run_id(store: Path) -> str | None:
    """Return the id of the last run of a store; None where it is not there."""
    with suppress(OSError):
        return (store / RUN_ID).read_text(encoding="utf-8")
    return None


@dataclass(frozen=True)
class RunEnvironment:
    """Where a run works, and with which packages."""

    store: str
    """Absolute path."""
    run_id: str | None
    folder: str
    versions: Mapping[str, str]

    @classmethod
    def of_this_process(cls, store: Path) -> Self:
        """Return what processes on other machines must find to work for this one."""
        return cls(str(store.absolute()), read_run_id(store), str(Path.cwd()), versions())

    def enter(self) -> None:
        """Change to the run's working directory, where files and packages are the same here."""
        from compress.training.launch.worker import wait_until_visible

        store, here = Path(self.store), f"node {socket.gethostname()}"
        if not wait_until_visible(store, lambda: read_run_id(store) == self.run_id):
            what = f"another {store}" if store.exists() else f"no {store}"
            raise StageFailed(f"{here} has {what}; {REMEDY}")
        try:
            os.chdir(self.folder)
        except OSError as error:
            raise StageFailed(f"{here} has no {self.folder} ({error.strerror}); {REMEDY}") from None
        # A cache key has the versions of the machine that the run was started on.
        own = versions()
        for name in sorted({*self.versions, *own}):
            expected, found = self.versions.get(name, "none"), own.get(name, "none")
            if found != expected:
                raise StageFailed(
                    f"{here} has {name} {found}, and the run has {expected}; all nodes need the "
                    "same packages"
                )
