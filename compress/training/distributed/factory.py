"""The strategy that the settings name."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from compress.training.config.parallel import Parallel
    from compress.training.distributed.base import Strategy


def create_strategy(parallel: Parallel) -> Strategy:
    """Create the strategy that the settings name; the process group must have been joined."""
    # Imported only when used: FSDP's module and the mesh's load large parts of torch.
    if parallel.is_mesh:
        from compress.training.distributed.device_mesh import DeviceMeshStrategy

        return DeviceMeshStrategy(parallel)
    if parallel.sharding_mode is not None:
        from compress.training.distributed.fsdp import FSDPStrategy

        return FSDPStrategy(parallel)
    if parallel.strategy == "deepspeed":
        from compress.training.distributed.deepspeed import DeepSpeedStrategy

        return DeepSpeedStrategy(parallel)
    from compress.training.distributed.ddp import DDPStrategy, Zero1Strategy

    return Zero1Strategy(parallel) if parallel.strategy == "zero1" else DDPStrategy(parallel)
