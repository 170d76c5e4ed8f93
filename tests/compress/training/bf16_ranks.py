"""Weights of bf16 on each of two ranks, and alone: FILE gets them after some steps as a list."""

import sys

import torch
import torch.distributed as dist

from compress.common.process import reseed
from compress.data.batch import Batch
from compress.training.config.training import Training
from compress.training.distributed.base import Strategy, process_group
from compress.training.distributed.ddp import DDPStrategy
from compress.training.loop.train_state import TrainState
from compress.training.objectives.objective import TargetLoss
from tests.compress.training.nets import blocks, tensors

STEPS = 6


def train(strategy, ranks):
    torch.manual_seed(0)
    settings = {"precision": "bf16-true", "optimizer": "adamw", "batch_size": 32}
    training = Training(epochs=1, **settings, learning_rate=1e-3)
    x, y = tensors(32, seed=0)
    batch = Batch((x,), y)
    loss = TargetLoss().prepare("cpu")
    state = TrainState(blocks(), loss, training, strategy, "cpu", lambda: batch, seed=3)
    state.wrapped.train()
    for step in range(STEPS):
        reseed(7 + strategy.rank, "cpu")  # as dropout is, differently on each rank
        share = slice(strategy.rank, None, ranks)
        state.train_step([Batch((x[share],), y[share])], step)
    return torch.cat([weight.detach().flatten() for weight in state.module.parameters()])


def main(file: str) -> None:
    with process_group("cpu"):
        parallel = Training(epochs=1).parallel
        own = train(DDPStrategy(parallel), dist.get_world_size())
        every = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(every, own)
        if dist.get_rank() == 0:
            torch.save([*every, train(Strategy(), 1)], file)


if __name__ == "__main__":
    main(sys.argv[1])
