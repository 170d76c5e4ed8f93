"""Checkpointer: a training's state on its way to disk, and back."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Self

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import async_save

from compress.common.errors import StageFailed
from compress.training.checkpoint.metadata import (
    Progress,
    begin,
    commit,
    newest,
    read_progress,
    remove_unfinished,
    rotate,
)
from compress.training.checkpoint.state_dict import one_line_errors
from compress.training.distributed.base import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from compress.training.config.checkpoint import Checkpoints
    from compress.training.distributed.base import Strategy
    from compress.training.loop.train_state import TrainState


class Checkpointer:
    """Where a training's checkpoints lie, and the one that is being written."""

    def __init__(self, folder: Path, settings: Checkpoints, strategy: Strategy) -> None:
        """Every process takes part; what an interruption left unfinished is removed."""
        self.folder = folder
        self.settings = settings
        self.strategy = strategy
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self.pending: Future[None] | None = None
        # Its exchange must not get between that of the steps, which goes on meanwhile.
        self.group = (
            dist.new_group(backend="gloo", timeout=PATIENCE) if dist.is_initialized() else None
        )
        if strategy.is_main:
            remove_unfinished(folder)
        strategy.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Let what is being written be written, also where training was interrupted."""
        self.thread.shutdown()

    def due(self, steps: int) -> bool:
        """Whether a checkpoint is to be written after so many steps of an epoch."""
        every = self.settings.every_steps
        return every is not None and steps % every == 0

    def save(
        self,
        step: int,
        progress: Progress,
        learner: TrainState,
        tell: Callable[[], None] | None = None,
    ) -> None:
        """Write the state after a step, at once or while training goes on.

        Args:
            step: counted over the whole training.
            progress: how far it is.
            learner: what it has learnt.
            tell: called in the leading process when all is on disk, from a thread.

        Raises:
            StageFailed: it cannot be written, or the one before it could not.
        """
        self.wait()
        partial = begin(self.folder, step)
        self.strategy.save_local(partial)
        # Each process counted its own batches; the first one's numbers are kept at every exchange.
        self.strategy.share_buffers_(learner.module)
        state = learner.tensors()
        with one_line_errors(f"checkpoint {partial} cannot be written"):
            written: Any = async_save(
                state, checkpoint_id=partial, process_group=self.group, no_dist=self.group is None
            )
        self.pending = self.thread.submit(self._write, partial, progress, written, tell)
        if not self.settings.asynchronous:
            self.wait()

    def resume(self, learner: TrainState, trusted: str | None) -> Progress | None:
        """Put everything where the newest whole checkpoint left it; None where there is none."""
        leads = self.strategy.is_main
        found: Path | None = self.strategy.share(newest(self.folder, trusted) if leads else None)
        if found is None:
            return None
        progress = read_progress(found)
        self._refuse_another_engine(progress, learner.training.parallel.layout, found)
        learner.restore(found, progress)
        if progress.layouts[-1] == learner.training.parallel.layout:
            self.strategy.load_local(found)
        return progress

    def let_finish(self) -> None:
        """Wait for what this process writes; whether it could is told elsewhere."""
        if self.pending is not None:
            self.pending.exception()

    def wait(self) -> None:
        """Return when the checkpoint that is being written lies on disk.

        Raises:
            StageFailed: it could not be written.
        """
        if self.pending is not None:
            self.pending.result()
            self.pending = None
        self.strategy.wait()

    def _refuse_another_engine(self, progress: Progress, layout: str, found: Path) -> None:
        before = progress.layouts[-1]
        if ("deepspeed" in before) != ("deepspeed" in layout):
            raise StageFailed(
                f"checkpoint {found} was written with {before} and cannot be taken up with "
                f"{layout}, because DeepSpeed keeps the optimizer's state its own way; go on as it "
                f"was begun, or remove {found.parent} to train anew"
            )

    def _write(
        self,
        partial: Path,
        progress: Progress,
        written: Future[Any],
        tell: Callable[[], None] | None,
    ) -> None:
        """Commit what all processes have written; the first knows when they have."""
        with one_line_errors(f"checkpoint {partial} cannot be written"):
            written.result()
        if self.strategy.is_main:
            commit(partial, progress)
            rotate(self.folder, self.settings.keep)
            if tell:
                tell()
