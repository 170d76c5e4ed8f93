"""Memory of the trainer: `python benchmarks/memory.py`.

Prints the peak of loading a transformer of 151 million parameters onto two ranks of FSDP, whole on
each rank and without weights first.
"""

import os
import tempfile
from pathlib import Path

import torch.multiprocessing as mp
from torch import nn

from compress.artifacts.eager_model import EagerModel
from compress.artifacts.recipe import Recipe
from compress.common.signature import Signature, TensorSpec
from compress.profiling.rss import memory_kib, reset_peak
from compress.training.config.parallel import Parallel
from compress.training.config.training import Training
from compress.training.distributed.base import process_group
from compress.training.distributed.fsdp import FSDPStrategy

HERE = Path(__file__).parent
WIDTH, DEPTH = 1024, 12
MEBIBYTE = 2**20


def transformer() -> nn.Module:
    """Return a tiny-config transformer; artifacts name it as their factory."""
    layers = [
        nn.TransformerEncoderLayer(WIDTH, 16, 4 * WIDTH, dropout=0.0, batch_first=True)
        for _ in range(DEPTH)
    ]
    return nn.Sequential(*layers)


def load_rank(rank: int, model: str, group: str, whole: bool, out) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": group}
    parallel = Parallel(strategy="fsdp", processes=2, wrap=("TransformerEncoderLayer",))
    artifact = EagerModel.from_directory(model)
    transformer_once = artifact.skeleton()  # what importing takes is not counted
    del transformer_once
    with process_group("cpu"):
        strategy = FSDPStrategy(parallel)
        strategy.barrier()
        reset_peak()
        before = memory_kib("VmRSS")
        module = artifact.load() if whole else strategy.load(artifact, "cpu")
        strategy.wrap(module, Training(epochs=1, parallel=parallel), lambda: None)
        out.put(("whole" if whole else "parts", (memory_kib("VmHWM") - before) / 1024))
        strategy.barrier()


def free_port() -> int:
    import socket

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def loading() -> None:
    out = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        recipe = Recipe(factory="memory:transformer")
        signature = Signature(inputs=(TensorSpec(name="x", shape=("batch", 8, WIDTH)),))
        state = transformer().state_dict()
        EagerModel.create(Path(folder) / "model", recipe, state, signature, folder=HERE)
        weights = sum(t.nbytes for t in state.values()) / MEBIBYTE
        del state
        for whole in (True, False):
            mp.spawn(load_rank, (f"{folder}/model", str(free_port()), whole, out), nprocs=2)
    peaks = [out.get() for _ in range(4)]
    print(f"peak of loading {weights:.0f} MiB of weights onto 2 ranks, beyond the process itself")
    for way in ("whole", "parts"):
        found = [peak for name, peak in peaks if name == way]
        each = ", ".join(f"{peak:.0f} MiB" for peak in found)
        print(f"  {way:24} {max(found) / weights:5.2f} of the weights a rank  ({each})")


if __name__ == "__main__":
    loading()
