"""One of several processes that divide models which none of them ever has whole in its memory:
ROOT, then by name as JSON the source and the settings of parallelism."""

import json
import os
import sys
import weakref
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers_here import batch

from compress.artifacts.eager_model import EagerModel
from compress.data.batch import Batch
from compress.training.config.training import Training
from compress.training.distributed.base import process_group
from compress.training.distributed.fsdp import local
from compress.training.launch.worker import create_strategy


class AllocatedBytes(TorchDispatchMode):
    """Counts the bytes of tensors in memory, without those that are mapped from a file."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.peak, self.seen = 0, 0, weakref.WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(results):
            if type(tensor) in (torch.Tensor, torch.nn.Parameter) and not tensor.is_meta:
                storage = tensor.untyped_storage()
                if storage not in self.seen and not is_mapped(storage.data_ptr()):
                    self.seen.add(storage)
                    self.now += storage.nbytes()
                    weakref.finalize(storage, self.free, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return results

    def free(self, size: int) -> None:
        self.now -= size


def is_mapped(address: int) -> bool:
    """Whether an address is that of a mapped model file."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, *_, path = line.split()
        start, end = (int(x, 16) for x in span.split("-"))
        if start <= address < end:
            return path.endswith(".safetensors")
    return False


def divide(source: Path, parallel: dict) -> dict[str, object]:
    parallel = {**parallel, "processes": dist.get_world_size()}
    training = Training(epochs=1, batch_size=16, parallel=parallel)
    strategy = create_strategy(training.parallel)
    with AllocatedBytes() as allocated:
        module = strategy.load(EagerModel.from_directory(source), "cpu")
        on_meta = all(weight.is_meta for weight in module.parameters())
        strategy.wrap(module, training, lambda: Batch((batch(4, seed=2)[0],), None))
    return {
        "on_meta": on_meta,
        "held": sum(local(weight).nbytes for weight in module.parameters()),
        "peak": allocated.peak,
    }


def main(root: Path, cases: dict[str, tuple[str, dict]]) -> None:
    torch.set_num_threads(1)
    with process_group("cpu"):
        found = {
            name: divide(root / source, parallel) for name, (source, parallel) in cases.items()
        }
        (root / f"divided-{dist.get_rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    sys.path.insert(0, os.fspath(Path(__file__).parent))
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
