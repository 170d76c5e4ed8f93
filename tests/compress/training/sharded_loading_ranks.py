"""One of two processes that load sharded models without ever having them whole: FOLDER."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from compress.artifacts.eager_model import EagerModel
from compress.training.config.parallel import Parallel
from compress.training.config.training import Training
from compress.training.distributed.fsdp import FSDPStrategy

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
SETTINGS = {
    "full": {"wrap": ["LSTM", "BatchNorm1d"]},
    "whole": {},
    "none": {"sharding": "no_shard", "wrap": 10},
    "hybrid": {"sharding": "hybrid_shard", "shard_processes": 2, "wrap": 10},
    "offload": {"cpu_offload": True, "wrap": 10},
}


def loaded(folder: Path, name: str, source: str) -> dict:
    parallel = Parallel(strategy="fsdp", processes=2, **SETTINGS[name])
    strategy, training = FSDPStrategy(parallel), Training(epochs=1, parallel=parallel)
    module = strategy.load(EagerModel.from_directory(folder / source), "cpu")
    on_meta = [p.is_meta for p in module.parameters()]
    strategy.wrap(module, training, lambda: None)
    optimizer = strategy.optimizer(module, training)
    found = {
        "on_meta": on_meta,
        "state": get_model_state_dict(module, options=WHOLE),
        "buffers": {n: b.clone() for n, b in module.named_buffers()},
        "parameters": sum(len(group["params"]) for group in optimizer.param_groups),
        "local_bytes": sum(p.to_local().nbytes for p in module.parameters()),
    }
    if source == "source":
        found["tied"] = module.head.weight is module.embedding.weight
        found["answer"] = module(torch.arange(6.0).reshape(2, 3)).detach()
    return found


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {name: loaded(folder, name, "source") for name in SETTINGS}
    found["needs values"] = loaded(folder, "whole", "scaled")
    torch.save(found, folder / f"rank-{dist.get_rank()}.pt")
    dist.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
