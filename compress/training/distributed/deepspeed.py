"""DeepSpeed: ZeRO stages 0 to 3, whose engine reduces gradients, clips and steps."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from compress.common.errors import StageFailed, first_line
from compress.training.distributed.ddp import DDPStrategy
from compress.training.optim.optimizer import build_optimizer
from compress.training.optim.transformer_blocks import compile_

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torch import nn

    from compress.data.batch import Batch
    from compress.training.checkpoint import Tensors
    from compress.training.config.parallel import Parallel
    from compress.training.config.training import Training

FOLDER = "deepspeed"
TAG = "engine"


class DeepSpeedStrategy(DDPStrategy):
    """Every rank drives a DeepSpeed engine, which holds its shards.

    After Rajbhandari et al., "ZeRO" (2019), and Ren et al., "ZeRO-Offload" (2021).
    """

    engine: Any

    def wrap(
        self, module: nn.Module, training: Training, example: Callable[[], Batch]
    ) -> nn.Module:
        """Return a DeepSpeed engine around the module; stage 3 shards the module in place."""
        compile_(module, training)
        device = next(module.parameters()).device.type
        # DeepSpeed reads this once, when it is first imported.
        os.environ.setdefault("DS_ACCELERATOR", device)
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
        """Return an optimizer whose ``step()`` is the engine's."""
        return EngineOptimizer(self.engine)

    @contextmanager
    def gradient_sync(self, wrapped: nn.Module, is_last: bool) -> Iterator[None]:
        """Mark the last micro-batch, after which the engine reduces gradients."""
        self.engine.set_gradient_accumulation_boundary(is_last)
        yield

    def backward(self, wrapped: nn.Module, loss: torch.Tensor) -> None:
        """Compute gradients by the engine, which in stage 0 would otherwise miss them."""
        self.engine.backward(loss)

    def clip_grad_norm_(self, module: nn.Module, largest: float | None) -> None:
        """Do nothing: the engine clips in its step, where it knows the norm over all shards."""

    def model_tensors(self, module: nn.Module) -> Tensors:
        """Gather copies of the module's weights and buffers."""
        gathered: AbstractContextManager[None] = nullcontext()
        if self.parallel.zero_stage == 3:
            import deepspeed

            gathered = deepspeed.zero.GatheredParameters(list(module.parameters()))
        with gathered:
            return {n: t.detach().cpu().clone() for n, t in module.state_dict().items()}

    def load_model_(self, module: nn.Module, tensors: Tensors) -> None:
        """Do nothing: the engine loads its weights together with the optimizer's state."""

    def optimizer_tensors(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> Tensors:
        """Return nothing: the engine writes its own state, see :meth:`save_local`."""
        return {}

    def load_optimizer_(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, checkpoint: Path
    ) -> None:
        """Load the engine's weights and optimizer state, written by as many processes."""
        reason = "it has no state of DeepSpeed's"
        # The engine's state is in DeepSpeed's own format, which only the same number of processes
        # can load. It is a pickle, and is read from the training's own folder only.
        try:
            loaded, _ = self.engine.load_checkpoint(str(checkpoint / FOLDER), tag=TAG)
        except (AssertionError, RuntimeError, OSError, KeyError) as error:
            loaded, reason = None, first_line(error)
        if loaded is None:
            raise StageFailed(
                f"checkpoint {checkpoint} cannot be resumed by strategy: deepspeed with "
                f"{self.ranks} processes ({reason}); resume with the settings it was written "
                f"with, or remove {checkpoint.parent} to train anew"
            )

    def save_local(self, checkpoint: Path) -> None:
        """Write the engine's shards into a checkpoint."""
        self.engine.save_checkpoint(str(checkpoint / FOLDER), tag=TAG, save_latest=False)


class EngineOptimizer(torch.optim.Optimizer):
    """An optimizer whose ``step()`` is a DeepSpeed engine's."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of the engine's optimizer, to set the learning rate."""
        groups: list[dict[str, Any]] = self.engine.optimizer.param_groups
        return groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: the engine clears gradients in its step."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Clip and step by the engine."""
        self.engine.step()


def configuration(parallel: Parallel, training: Training, ranks: int) -> dict[str, Any]:
    """Translate our settings into DeepSpeed's configuration."""
    zero: dict[str, Any] = {"stage": parallel.zero_stage}
    if parallel.cpu_offload:
        zero["offload_optimizer"] = {"device": "cpu"}
        if parallel.zero_stage == 3:
            zero["offload_param"] = {"device": "cpu"}
    more: dict[str, Any] = dict(parallel.deepspeed_config)
    zero |= more.pop("zero_optimization", {})
    config: dict[str, Any] = {
        # The training loop counts micro-batches, marks the last and weighs their losses itself.
        "train_micro_batch_size_per_gpu": training.batch_size // ranks,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": training.clip_norm or 0.0,
        "zero_optimization": zero,
        # torch.optim's own: DeepSpeed's would be compiled with a C++ compiler at the first use.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2**31,  # never: progress is reported by epoch
    }
    if training.precision == "bf16":
        config["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
    return config | more
