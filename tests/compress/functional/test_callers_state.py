"""What a stage called from Python leaves as it was: global state, and values that it invents."""

import logging
import os
import random
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

import compress
from compress.common.errors import ArtifactInvalid
from compress.common.signature import Signature, TensorSpec
from compress.profiling.batch_dependence import seeded_rows

X = torch.randn(32, 3, 12, 12, generator=torch.Generator().manual_seed(0))
DATA = (X, torch.arange(32) % 3)


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.drop = nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.Dropout(0.1)
        self.b, self.c = nn.Conv2d(32, 32, 3), nn.Linear(32, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        random.random()  # what a user's code may do
        np.random.rand()
        return self.c(self.b(self.drop(self.norm(self.a(x)).relu())).relu().mean((2, 3)))


class Augmented(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return X[index] + torch.rand(()) * random.random() * np.random.rand() * 1e-3, index % 3


def global_state() -> dict[str, Any]:
    descriptors = []
    for file in Path("/proc/self/fd").iterdir():
        try:
            descriptors.append(str(file.readlink()))
        except OSError:  # that of the listing itself
            continue
    return {
        "warnings": [(f[0], str(f[1]), f[2], str(f[3])) for f in warnings.filters],
        "random": random.getstate(),
        "numpy": str(np.random.get_state()),
        "torch": torch.get_rng_state().tolist(),
        "threads": torch.get_num_threads(),
        "dtype": torch.get_default_dtype(),
        "modes": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul": torch.get_float32_matmul_precision(),
        "engine": torch.backends.quantized.engine,
        "logging": (logging.root.level, logging.root.manager.disable, len(logging.root.handlers)),
        # Importing torch's Inductor names its cache folder in the environment, once.
        "environment": {k: v for k, v in os.environ.items() if not k.startswith("TORCHINDUCTOR")},
        "directory": Path.cwd(),
        "signals": [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)],
        "streams": (sys.stdout, sys.stderr, sys.excepthook),
        "descriptors": sorted(descriptors),
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "settings"),
    [
        ("train", {"epochs": 1}),
        ("distill", {"epochs": 1, "teacher": Noisy()}),
        ("prune_channels", {"ratio": 0.5, "finetune": {"epochs": 1}}),
        ("prune_weights", {"amount": 0.3}),
        ("quantize_static", {}),
        ("quantize_dynamic", {}),
        ("quantize_weights", {}),
        # It is a quantization and a training, which leave it each.
        pytest.param("quantize_aware_training", {"epochs": 1}, marks=pytest.mark.soak),
        ("convert_precision", {"dtype": "bfloat16"}),
        ("export_program", {}),
        ("export_onnx", {}),
        ("export_torchscript", {}),
        ("export_openvino", {}),
    ],
)
def test_a_stage_leaves_global_state_as_it_was(stage: str, settings: dict[str, Any]) -> None:
    # Importing ONNX Runtime opens a database of its own in the user's cache folder, once.
    pytest.importorskip("onnxruntime")
    run, model, threads = getattr(compress, stage), Noisy(), torch.get_num_threads()
    torch.set_num_threads(2)  # a stage calls models with one
    try:
        before = global_state()
        run(model, data=Augmented(), val=DATA, progress=False, **settings)
        after = global_state()
    finally:
        torch.set_num_threads(threads)
    assert {k: v for k, v in after.items() if v != before[k]} == {}


class Packed(nn.Module):
    """Refuses lengths below 1, as `pack_padded_sequence` does."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.lstm = nn.Embedding(30, 8), nn.LSTM(8, 16, batch_first=True)
        self.head = nn.Linear(16, 2)

    def forward(self, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(
            self.table(tokens), lengths, batch_first=True, enforce_sorted=False
        )
        return self.head(self.lstm(packed)[1][0][-1])


def test_integers_are_the_samples_own_or_within_them() -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, 30, (32, 12), generator=generator)
    lengths = torch.randint(1, 13, (32,), generator=generator)
    data = (tokens, lengths, torch.arange(32) % 2)
    pruned = compress.prune_weights(Packed(), data=data, amount=0.3)
    specs = pruned.signature.inputs
    assert [spec.values for spec in specs] == [(1, 29), (1, 12)]
    examples = [*pruned.signature.example(batch=64), *seeded_rows(pruned.signature, 64)]
    for example, spec in zip(examples, (*specs, *specs), strict=True):
        least, most = spec.values
        assert set(example.flatten().tolist()) <= {least, least + 1} and least + 1 <= most


def test_integers_that_are_not_described_are_0_or_1_and_take_no_room_in_a_manifest() -> None:
    spec = TensorSpec(name="ids", shape=("batch", 8), dtype="int64")
    assert set(Signature(inputs=(spec,)).example()[0].flatten().tolist()) == {0, 1}
    assert "values" not in spec.model_dump()
    one = spec.model_copy(update={"values": (7, 7)})
    assert set(Signature(inputs=(one,)).example()[0].flatten().tolist()) == {7}


def test_a_model_that_does_not_take_the_samples_is_refused_in_one_line() -> None:
    refused = r"^model\.inputs: Sequential does not take input \[2, 5\] float32: RuntimeError: .*$"
    with pytest.raises(ArtifactInvalid, match=refused) as raised:
        compress.quantize_static(nn.Sequential(nn.Linear(8, 2)), calibration=torch.randn(32, 5))
    assert "\n" not in str(raised.value)
