"""`CheckpointManager`: writes a training's state while training goes on, and restores it."""

from __future__ import annotations

import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Self

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import async_save

from compress.common.errors import StageFailed
from compress.training.checkpoint import (
    FOLDER,
    PARTIAL,
    TrainProgress,
    commit,
    create_partial,
    newest_intact,
    one_line_errors,
    read_progress,
    rotate,
)
from compress.training.distributed.base import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from compress.training.config.training import Checkpoints
    from compress.training.distributed.base import Strategy
    from compress.training.loop.train_state import TrainState


class CheckpointManager:
    """The checkpoints of a training, of which one may be in the course of being written."""

    def __init__(self, folder: Path, settings: Checkpoints, strategy: Strategy) -> None:
        """Remove incomplete checkpoints; every process calls this."""
        self.folder = folder
        self.settings = settings
        self.strategy = strategy
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self.pending: Future[None] | None = None
        """Done when this process has written its part of the present checkpoint."""
        self.on_written: Callable[[], None] | None = None
        # A group of its own: its collectives run beside those of the training steps, and would
        # be matched with them in the default group.
        self.group = (
            dist.new_group(backend="gloo", timeout=PATIENCE) if dist.is_initialized() else None
        )
        if strategy.is_main:
            for unfinished in list((folder / FOLDER).glob(f"step-*{PARTIAL}")):
                shutil.rmtree(unfinished)
        strategy.barrier()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Wait until the present checkpoint is written, even if training was interrupted."""
        self.thread.shutdown()
        if self.pending is not None and not self.pending.exception():
            self.notify_if_written()

    def save(
        self,
        step: int,
        progress: TrainProgress,
        state: TrainState,
        on_written: Callable[[], None] | None = None,
    ) -> None:
        """Write the state after a step, counted over the whole training, at once or in a thread.

        The tensors are copied before this returns. Once all is on disk, the main process calls
        ``on_written``, in this thread: see :meth:`notify_if_written`. Raises StageFailed if this
        checkpoint or the one before cannot be written.
        """
        self.wait()  # one at a time: they share the group
        partial = create_partial(self.folder, step)
        self.strategy.save_local(partial)
        # Buffers such as BatchNorm's follow each process's own batches; rank 0's are saved.
        self.strategy.broadcast_buffers_(state.module)
        with one_line_errors(f"checkpoint {partial} cannot be written"):
            written: Any = async_save(
                state.tensors(),
                checkpoint_id=partial,
                process_group=self.group,
                no_dist=self.group is None,
            )
        self.pending = self.thread.submit(self._write, partial, progress, written)
        self.on_written = on_written if self.strategy.is_main else None
        if not self.settings.asynchronous:
            self.wait()

    def notify_if_written(self) -> None:
        """Call ``on_written`` of the present checkpoint if it is on disk; for after each step."""
        if self.on_written is not None and self.pending is not None and self.pending.done():
            self.pending.result()
            on_written, self.on_written = self.on_written, None
            on_written()

    def resume(self, state: TrainState, trusted: str | None) -> TrainProgress | None:
        """Restore the newest intact checkpoint in place; return None if there is none."""
        newest = newest_intact(self.folder, trusted) if self.strategy.is_main else None
        checkpoint: Path | None = self.strategy.broadcast(newest)
        if checkpoint is None:
            return None
        progress, layout = read_progress(checkpoint), state.training.parallel.layout
        before = progress.layouts[-1]
        if ("deepspeed" in before) != ("deepspeed" in layout):
            raise StageFailed(
                f"checkpoint {checkpoint} was written with {before} and cannot be resumed with "
                f"{layout}, because DeepSpeed stores the optimizer's state in a format of its own; "
                f"resume with the settings it was written with, or remove {checkpoint.parent} to "
                "train anew"
            )
        state.restore(checkpoint, progress)
        # What each process saves for itself, such as gradient residuals, fits as many processes.
        if before == layout:
            self.strategy.load_local(checkpoint)
        return progress

    def wait(self) -> None:
        """Wait until all processes have written the present checkpoint, or raise why not."""
        if self.pending is not None:
            self.pending.result()
            self.notify_if_written()
            self.pending = None
        self.strategy.barrier()

    def _write(self, partial: Path, progress: TrainProgress, written: Future[Any]) -> None:
        """Commit the checkpoint; rank 0's future is done when all processes have written."""
        with one_line_errors(f"checkpoint {partial} cannot be written"):
            written.result()
        if self.strategy.is_main:
            commit(partial, progress)
            rotate(self.folder, self.settings.keep)
