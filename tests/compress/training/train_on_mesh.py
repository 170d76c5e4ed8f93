"""What the ranks of one process group see of a mesh: ROOT, then by name as JSON the source and
the settings of parallelism. Each trains for some steps, and leaves what a test compares."""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from transformers_here import batch

from compress.artifacts.eager_model import EagerModel
from compress.common.errors import StageFailed
from compress.data.batch import Batch
from compress.training.config.training import Training
from compress.training.distributed.base import Strategy, process_group
from compress.training.distributed.fsdp import local
from compress.training.launch.worker import create_strategy
from compress.training.loop.train_state import TrainState
from compress.training.objectives.objective import TargetLoss

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
WHOLE = StateDictOptions(full_state_dict=True)


def train_for_some_steps(root: Path, source: str, parallel: dict) -> TrainState:
    if parallel:
        parallel = {**parallel, "processes": dist.get_world_size()}
    adamw = {"optimizer": "adamw", "learning_rate": 1e-3}
    training = Training(epochs=1, batch_size=16, parallel=parallel, **adamw)
    strategy = create_strategy(training.parallel) if parallel else Strategy()
    state = TrainState(
        strategy.load(EagerModel.from_directory(root / source), "cpu"),
        TargetLoss().prepare("cpu"),
        training,
        strategy,
        "cpu",
        lambda: Batch((batch(4, seed=2)[0],), None),
    )
    state.wrapped.train()
    torch.manual_seed(state.strategy.rng_stream)
    for step in range(3):
        tokens, words = batch(16 // state.strategy.ranks, 10 * step + state.strategy.rank)
        # Sequences of several lengths: what stages hand on has several shapes.
        state.train_step([Batch((tokens[:, : 6 - step],), words)], step)
    return state


def together(part: dict) -> dict:
    """Return what the processes know of all weights."""
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, part)
    return {name: value for one in parts for name, value in one.items()}


def copies_agree(state: TrainState) -> bool:
    """Whether weights that every process of a group over matrices holds whole are the same."""
    own = torch.cat([
        local(weight.detach()).flatten()
        for weight in state.module.parameters()
        if not isinstance(weight, DTensor) or "tensor" not in weight.device_mesh.mesh_dim_names
    ])  # fmt: skip
    group = state.strategy.mesh["tensor"].get_group()
    others = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(others, own, group=group)
    return all(torch.equal(own, other) for other in others)


def main(root: Path, cases: dict[str, tuple[str, dict]]) -> None:
    with process_group("cpu"):
        for name, (source, parallel) in cases.items():
            try:
                state = train_for_some_steps(root, source, parallel)
            except StageFailed as error:
                (root / f"{name}.{dist.get_rank()}.refused").write_text(str(error))
                continue
            module, optimizer = state.module, state.optimizer
            facts = {
                "weights": together(get_model_state_dict(module, options=WHOLE)),
                "optimizer": together(
                    get_optimizer_state_dict(module, optimizer, options=WHOLE)["state"]
                ),
                "copies_agree": copies_agree(state),
                "held": sum(local(weight).numel() for weight in module.parameters()),
            }
            if name == "tied" and dist.get_rank() == 0:
                facts["alone"] = train_for_some_steps(root, source, {}).module.state_dict()
            torch.save(facts, root / f"{name}.{dist.get_rank()}.pt")
            tensors = {
                "model": get_model_state_dict(module),
                "optimizer": get_optimizer_state_dict(module, optimizer, options=FLAT),
            }
            dcp.save(tensors, checkpoint_id=root / f"{name}-dcp")


if __name__ == "__main__":
    sys.path.insert(0, os.fspath(Path(__file__).parent))
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
