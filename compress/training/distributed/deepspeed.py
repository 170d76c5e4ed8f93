"""DeepSpeed's engine: ZeRO stages 0 to 3, with optimizer state in main memory on request.

The engine owns the reduction of gradients, clipping and the step; the loop stays the one of every
strategy. What it knows is kept in its own format within our checkpoints, for as many processes as
wrote it; it is read as a pickle, from the training's own folder only.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from compress.common.errors import StageFailed, first_line
from compress.training.distributed.ddp import DDPStrategy
from compress.training.optim.compile import compile_
from compress.training.optim.optimizer import build_optimizer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torch import nn

    from compress.data.splits import Batch
    from compress.training.checkpoint.metadata import Tensors
    from compress.training.config.parallel import Parallel
    from compress.training.config.training import Training

FOLDER = "deepspeed"
TAG = "engine"


class DeepSpeed(DDPStrategy):
    """Every rank drives an engine, which holds its part of the training.

    After Rajbhandari et al., "ZeRO" (2019), and Ren et al., "ZeRO-Offload" (2021).
    """

    engine: Any

    def wrap(
        self, module: nn.Module, training: Training, example: Callable[[], Batch]
    ) -> nn.Module:
        """Give the module to an engine, and return that; with stage 3 the module changes."""
        compile_(module, training)
        device = next(module.parameters()).device.type
        os.environ.setdefault("DS_ACCELERATOR", device)  # read once, at DeepSpeed's first import
        import deepspeed

        self.engine, *_ = deepspeed.initialize(
            model=module,
            optimizer=build_optimizer(module, training),
            config=configuration(self.parallel, training, self.ranks),
            dist_init_required=False,
        )
        wrapped: nn.Module = self.engine
        return wrapped

    def optimizer(self, module: nn.Module, training: Training) -> torch.optim.Optimizer:
        """Return what steps the engine, and shows the groups of the optimizer within."""
        return EngineOptimizer(self.engine)

    @contextmanager
    def micro_step(self, wrapped: nn.Module, last: bool) -> Iterator[None]:
        """Tell the engine whether a part of a step is its last, after which it reduces."""
        self.engine.set_gradient_accumulation_boundary(last)
        yield

    def backward(self, wrapped: nn.Module, loss: torch.Tensor) -> None:
        """Compute gradients by the engine, which would else miss them (stage 0)."""
        self.engine.backward(loss)

    def clip_(self, module: nn.Module, largest: float) -> None:
        """Do nothing: the engine clips in its step, where the gradients of all shards are known."""

    def model_tensors(self, module: nn.Module) -> Tensors:
        """Gather copies of the module's weights and buffers."""
        with self._gathered(module):
            return {n: t.detach().cpu().clone() for n, t in module.state_dict().items()}

    def load_model_(self, module: nn.Module, tensors: Tensors) -> None:
        """Do nothing: the engine takes up its own weights, with the optimizer's state."""

    def optimizer_tensors(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> Tensors:
        """Return nothing: the engine keeps it, see :meth:`remember`."""
        return {}

    def load_optimizer_(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, checkpoint: Path
    ) -> None:
        """Have the engine read what it wrote into a checkpoint, weights and all.

        Raises:
            StageFailed: it is not there, or was written by another number of processes.
        """
        why = "it has no part of DeepSpeed's"
        try:
            found, _ = self.engine.load_checkpoint(str(checkpoint / FOLDER), tag=TAG)
        except (AssertionError, RuntimeError, OSError, KeyError) as error:
            found, why = None, first_line(error)
        if found is None:
            raise StageFailed(
                f"checkpoint {checkpoint} cannot be taken up by strategy: deepspeed with "
                f"{self.ranks} processes ({why}); go on as it was begun, or remove "
                f"{checkpoint.parent} to train anew"
            )

    def sent_bytes(self, steps: int) -> int | None:
        """Return None: the engine does not count."""
        return None

    def save_local(self, checkpoint: Path) -> None:
        """Have the engine write its part of a checkpoint."""
        self.engine.save_checkpoint(str(checkpoint / FOLDER), tag=TAG, save_latest=False)

    def _gathered(self, module: nn.Module) -> AbstractContextManager[None]:
        if self.parallel.zero_stage < 3:
            return nullcontext()
        import deepspeed

        gathered: AbstractContextManager[None] = deepspeed.zero.GatheredParameters(
            list(module.parameters())
        )
        return gathered


class EngineOptimizer(torch.optim.Optimizer):
    """An engine's step in the place of an optimizer's."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of the optimizer within, whose learning rate is set."""
        groups: list[dict[str, Any]] = self.engine.optimizer.param_groups
        return groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: the engine forgets gradients in its step."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Have the engine clip and step."""
        self.engine.step()


def configuration(parallel: Parallel, training: Training, ranks: int) -> dict[str, Any]:
    """Return DeepSpeed's own settings for ours."""
    zero: dict[str, Any] = {"stage": parallel.zero_stage}
    if parallel.cpu_offload:
        zero["offload_optimizer"] = {"device": "cpu"}
        if parallel.zero_stage == 3:
            zero["offload_param"] = {"device": "cpu"}
    config: dict[str, Any] = {
        # Parts of a step are counted by the loop, which names the last; the engine divides by none.
        "train_micro_batch_size_per_gpu": training.batch_size // ranks,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": training.clip_norm or 0.0,
        "zero_optimization": zero,
        # The optimizer is torch's, so that every one of its names works, and none is compiled.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2**31,
    }
    if training.precision == "bf16":
        config["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
    return config
