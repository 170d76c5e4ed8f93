"""One of two processes that save tensors, sharded by rows and by columns: FOLDER and names."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

SHAPE = (4099, 4096)  # 64 MiB and three rows, so that the shards are uneven


def whole(seed: int, shape: tuple[int, ...] = SHAPE) -> torch.Tensor:
    return torch.empty(shape).normal_(generator=torch.Generator().manual_seed(seed))


SHAPES = {"warm-up": (5, 3), "large": SHAPE}


def main(folder: Path, *names: str) -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    for name in names:
        tensors = [whole(seed, SHAPES[name]) for seed in range(3)]
        state = {
            "rows": distribute_tensor(tensors[0], mesh, [Shard(0)]),
            "columns": distribute_tensor(tensors[1], mesh, [Shard(1)]),
            "here": tensors[2].t().half(),
        }
        dcp.save({"model": state}, checkpoint_id=folder / name)
    dist.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
