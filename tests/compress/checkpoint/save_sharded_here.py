"""One of two processes that save an FSDP2 model and its optimizer: FOLDER."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def save(folder: Path) -> None:
    torch.manual_seed(7)
    module = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
    if dist.get_rank() == 0:
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


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    save(folder)
    dist.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
