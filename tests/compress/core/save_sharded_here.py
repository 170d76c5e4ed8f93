"""One of two processes that save an FSDP2 model and its optimizer: RANK FOLDER."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def save(rank: int, folder: Path) -> None:
    torch.manual_seed(7)
    module = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
    if rank == 0:
        torch.save(module.state_dict(), folder / "whole.pt")
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(module[0], mesh=mesh)
    fully_shard(module, mesh=mesh)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.0)
    module(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    model, optim = get_state_dict(module, optimizer)
    state = {"model": model, "optim": optim, "step": 1}
    dcp.save({"app": state}, checkpoint_id=folder / "nested")
    dcp.save(model, checkpoint_id=folder / "flat")


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=2)
    save(rank, folder)
    dist.barrier()
    # torch 2.13's exit after FSDP2 on gloo aborts now and then ("terminate called without an active
    # exception", about one time in six); all is written here.
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
