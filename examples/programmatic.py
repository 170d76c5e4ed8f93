"""From Python: a module in memory becomes a pruned ONNX file, checked for parity.

Run it anywhere: python examples/programmatic.py [FOLDER]
"""

import sys
import tempfile
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from compress import Context, EagerModel, MaxDrop, Parity, PruneChannels, Splits, Train, Training
from compress.export import ExportOnnx


def classifier() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def digits() -> Splits:
    images, labels = load_digits(return_X_y=True)
    everything = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
    train, val = torch.utils.data.random_split(
        everything, [1400, 397], generator=torch.Generator().manual_seed(0)
    )
    return Splits({"train": train, "val": val})


def main(out: Path) -> None:
    torch.manual_seed(0)
    module, data = classifier(), digits()

    source = EagerModel.from_module(
        module, example_inputs=(torch.zeros(1, 64),), factory="programmatic:classifier"
    )
    trained = Train(epochs=10)(source, Context(root=out / "trained", data=data))
    slim = PruneChannels(ratio=0.5, finetune=Training(epochs=3), gates=(MaxDrop(points=3),))(
        trained, Context(root=out / "slim", data=data)
    )
    onnx = ExportOnnx(gates=(Parity(atol=1e-4),))(slim, Context(root=out / "onnx", data=data))

    accuracy = Context(root=out, data=data).score(onnx)
    print(f"{onnx.payload_path}: {onnx.payload_bytes} bytes, accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.mkdtemp()))
