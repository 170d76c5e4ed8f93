"""What a user would bring: a small classifier with dropout, and data of several kinds."""

import os
import resource
import signal
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset, get_worker_info


class Classifier(nn.Module):
    def __init__(self, dropout: float, classes: int, spare_head: bool) -> None:
        super().__init__()
        self.hidden = nn.Linear(4, 16)
        self.norm = nn.BatchNorm1d(16)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(16, classes)
        if spare_head:
            self.spare = nn.Linear(16, 2)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.head(self.dropout(self.norm(self.hidden(features)).relu()))


def classifier(
    dropout: float = 0.3, classes: int = 3, spare_head: bool = False, frozen: bool = False
) -> nn.Module:
    return Classifier(dropout, classes, spare_head).requires_grad_(not frozen)


class Magnitudes(Classifier):
    """Reads the root of squares, which has no gradient at 0, as magnitudes of a spectrum."""

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.head(torch.sqrt((0 * self.hidden(features)) ** 2))


def magnitudes() -> nn.Module:
    return Magnitudes(0.0, 3, False)


class Leaving(Classifier):
    """Calls its head in its first training steps alone, in rank 1."""

    calls = 0

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        if self.calls > 12 and self.training and os.environ.get("RANK") == "1":
            return self.hidden(features)[:, :3]
        return super().forward(features)


def leaving() -> nn.Module:
    return Leaving(dropout=0.3, classes=3, spare_head=False)


def plain() -> nn.Module:
    """Return a network whose answer for a sample does not depend on the batch around it."""
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))


class FourRows(nn.Linear):
    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return super().forward(features.view(4, 4))


def four_rows() -> nn.Module:
    """Return a network that takes batches of four alone."""
    return FourRows(4, 3)


def tensors(samples: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 4, generator=generator)
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()


def blobs(train: int = 96, labelled: bool = True, scale: float = 1.0) -> dict[str, Dataset]:
    x, y = tensors(train, seed=0)
    return {
        "train": TensorDataset(x * scale, y) if labelled else TensorDataset(x),
        "val": TensorDataset(*tensors(48, seed=1)),
    }


class Behaving(Dataset):
    """Samples that do something before they are returned."""

    def __init__(self, behaviour: str, trace: str) -> None:
        self.x, self.y = tensors(64, seed=0)
        self.behaviour = behaviour
        self.trace = Path(trace)
        self.readings = 0

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.behaviour == "slow":
            time.sleep(0.01)
        elif self.behaviour == "raise" and index == 7:
            raise ValueError("sample 7 cannot be read\nsecond line")
        elif self.behaviour == "raise in a rank" and index == 7 and "RANK" in os.environ:
            raise ValueError("sample 7 cannot be read here\nsecond line")
        elif self.behaviour == "exit in a rank" and index == 7 and "RANK" in os.environ:
            raise SystemExit(0)
        elif self.behaviour == "die in a rank" and index == 7 and "RANK" in os.environ:
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.behaviour.startswith("die once") and index == 7 and "RANK" in os.environ:
            self.readings += 1
            if self.readings == 3 and not self.trace.exists():
                self.trace.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        elif self.behaviour == "note":
            with self.trace.open("a") as stream:
                stream.write(f"{index}\n")
        elif self.behaviour == "die in a worker" and index == 7 and get_worker_info():
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.behaviour == "raise in a worker" and index == 7 and get_worker_info():
            raise ValueError("sample 7 cannot be read there\nsecond line")
        elif self.behaviour.startswith("no more room") and "RANK" in os.environ:
            self.readings += 1
            if self.readings > 70:
                resource.setrlimit(resource.RLIMIT_FSIZE, (3000, resource.RLIM_INFINITY))
        elif self.behaviour == "noise":
            return self.x[index] + torch.randn(4), self.y[index]
        return self.x[index], self.y[index]


def numbers(train: int = 96) -> dict[str, Dataset]:
    """Return samples with three numbers each to predict; a third of the batches are 0 or 1."""
    pairs = {"train": tensors(train, seed=0)[0], "val": tensors(37, seed=1)[0]}
    wanted = {name: torch.stack([x[:, 0], 2 - x[:, 1], x.sum(1)], 1) for name, x in pairs.items()}
    wanted["train"][: train // 3] = (wanted["train"][: train // 3] > 0).float()
    return {name: TensorDataset(x, wanted[name]) for name, x in pairs.items()}


def behaving(behaviour: str, trace: str = "") -> dict[str, Dataset]:
    return {"train": Behaving(behaviour, trace), "val": TensorDataset(*tensors(48, seed=1))}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Blocks(nn.Module):
    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.stem = nn.Linear(4, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 3)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        x = self.stem(features)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def blocks(depth: int = 3, width: int = 8) -> nn.Module:
    return Blocks(depth, width)


def uneven(train: int = 48, val: int = 37) -> dict[str, Dataset]:
    return {
        "train": TensorDataset(*tensors(train, seed=0)),
        "val": TensorDataset(*tensors(val, seed=1)),
    }


def ignored() -> dict[str, Dataset]:
    """Return samples of which two in five have no label, drawn by chance."""
    splits = uneven()
    for split in splits.values():
        x, y = split.tensors
        y[x[:, 2] > 0.25] = -100
    return splits


def even() -> dict[str, Dataset]:
    """Return samples that batches of 16 divide."""
    return uneven(val=32)


def odd() -> dict[str, Dataset]:
    """Return 21 samples, which make one step of 16, and one for one rank alone to judge by."""
    return uneven(train=21, val=1)


def few() -> dict[str, Dataset]:
    """Return fewer samples than most batches have."""
    return uneven(train=11, val=3)


class Difference(nn.Module):
    """Answers by the first input less the second."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, plus: torch.Tensor, minus: torch.Tensor) -> torch.Tensor:
        return torch.stack([minus - plus, plus - minus], 1) * self.scale


class Mappings(Dataset):
    """Samples whose entries are in another order than the model's inputs."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        plus, minus = torch.tensor(float(index)), torch.tensor(15.5)
        return {"minus": minus, "plus": plus, "labels": torch.tensor(int(plus > minus))}


def mappings() -> dict[str, Dataset]:
    return {"train": Mappings(), "val": Mappings()}


class Normalized(nn.Module):
    """Has normalization layers of several kinds and, as position embeddings are, a float buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(4, 16)
        self.batch_norm = nn.BatchNorm1d(16)
        self.register_buffer("offset", torch.linspace(-1, 1, 16))
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)
        self.group_norm = nn.GroupNorm(2, 16)
        self.plain_norm = nn.BatchNorm1d(16, momentum=None, affine=False)
        self.head = nn.Linear(16, 3)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        x = self.batch_norm(self.hidden(features)).relu()
        x = self.down(self.up(x + self.offset).relu())
        return self.head(self.plain_norm(self.group_norm(x).relu()))


def normalized() -> nn.Module:
    return Normalized()


class Images(nn.Module):
    """Convolutions, with a buffer that says whether the second one's input has channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 6, 3)
        self.head = nn.Linear(6, 3)
        self.register_buffer("has_channels_last", torch.zeros(()))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.first(image).relu()
        self.has_channels_last.fill_(x.is_contiguous(memory_format=torch.channels_last))
        return self.head(self.second(x).relu().mean((2, 3)))


def images() -> dict[str, Dataset]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(48, 3, 6, 6, generator=generator)
    data = TensorDataset(x, x[:, :, 0, 0].argmax(1))
    return {"train": data, "val": data}


def halving(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LambdaLR:
    """Halve the learning rate four times in a training."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 ** (5 * step // steps))


def by_metric(optimizer: torch.optim.Optimizer, steps: int) -> object:
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)


def no_scheduler(optimizer: torch.optim.Optimizer, steps: int) -> float:
    return 0.1


def failing(optimizer: torch.optim.Optimizer) -> None:
    """Take one argument, where two are passed."""
