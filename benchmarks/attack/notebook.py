"""The functions of `compress`, called with what nobody should pass: one line says what is wrong."""

import signal
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.attack.report import Section
from benchmarks.attack.trials import MOST_SECONDS
from compress.common.printable import CONTROL_CHARACTERS

X, Y = torch.randn(24, 4), torch.arange(24) % 3


class Raises(nn.Module):
    """Fails when it is called."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("\x1b[2Jno")


class Answers(nn.Linear):
    """Answers with what it was given."""

    def __init__(self, answer: Any) -> None:
        super().__init__(4, 3)
        self.answer = answer

    def forward(self, x: torch.Tensor) -> Any:
        return self.answer


class Lies(torch.utils.data.Dataset[Any]):
    """Has another length than it says, or fails at some sample."""

    def __init__(self, length: int, fails_at: int) -> None:
        self.length, self.fails_at = length, fails_at

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        if index >= self.fails_at:
            raise OSError("\x1b[2Jthe disk is gone")
        return X[index % 24], int(Y[index % 24])


def net() -> nn.Module:
    """Return a small network."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))


def circular() -> nn.Module:
    """Return a network that refers to itself outside of its modules."""
    model = net()
    model.__dict__["itself"] = [model]
    return model


def calls(folder: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield hostile calls by name."""
    import compress

    models: dict[str, Any] = {
        "None": None,
        "a text": "model.pt",
        "a number": 7,
        "a class": nn.Linear,
        "a function": lambda x: x,
        "a mapping of weights": net().state_dict(),
        "a list of modules": [net()],
        "one that raises": Raises(),
        "one that answers None": Answers(None),
        "one that answers a text": Answers("\x1b[2J"),
        "one that answers nothing": Answers(()),
        "one that answers NaN": Answers(torch.full((2, 3), float("nan"))),
        "one of complex numbers": nn.Linear(4, 3, dtype=torch.complex64),
        "one on the meta device": nn.Linear(4, 3, device="meta"),
        "one that refers to itself": circular(),
    }
    for name, model in models.items():
        yield f"model: {name}", lambda m=model: compress.quantize_dynamic(m, data=(X, Y))
        yield f"export: {name}", lambda m=model: compress.export_onnx(m, example_inputs=(X[:2],))
    datas: dict[str, Any] = {
        "None": None,
        "nothing": [],
        "Nones": [None] * 4,
        "texts": ["\x1b[2J", "b"],
        "a number": 7,
        "an endless iterator": iter(int, 1),
        "ragged rows": [(torch.ones(i + 1, 2, i + 1), 0) for i in range(4)],
        "objects": np.array([object(), None]),
        "complex numbers": (X.to(torch.complex64), Y),
        "other widths": (torch.ones(8, 5), torch.zeros(8, dtype=torch.int64)),
        "NaN": (X * float("nan"), Y),
        "labels out of range": (X, Y + 10**9),
        "negative labels": (X, Y - 50),
        "fewer labels": (X, Y[:3]),
        "no rows": (X[:0], Y[:0]),
        "a dataset of 2**62 samples": Lies(2**62, 24),
        "a dataset that fails": Lies(24, 0),
        "a dataset that fails late": Lies(24, 13),
        "a split of another name": {"\x1b[2J": (X, Y)},
        "integers of 2**62": (torch.full((24, 4), 2**62), Y),
    }
    for name, data in datas.items():
        yield f"data: {name}", lambda d=data: compress.quantize_static(net(), data=d)
        yield f"val: {name}", lambda d=data: compress.prune_channels(net(), train=(X, Y), val=d)
    settings: dict[str, dict[str, Any]] = {
        "an unknown name": {"ratio\x1b[2J": 0.5},
        "a ratio of NaN": {"ratio": float("nan")},
        "a ratio of 1e308": {"ratio": 1e308},
        "a ratio in words": {"ratio": "half"},
        "a seed below 0": {"seed": -1},
        "a seed of 2**70": {"seed": 2**70},
        "no threads": {"threads": 0},
        "a million threads": {"threads": 10**6},
        "another device": {"device": "cuda:99\x1b[2J"},
        "another task": {"task": "\x1b[2J"},
        "a metric that is a program": {"metric": "os:system"},
        "a loss that is a program": {"task_loss": "os:abort"},
        "a folder that is a file": {"out": __file__},
        "a folder below a file": {"out": f"{__file__}/x"},
        "a folder with other files": {"out": folder},
        "a name of 5,000 characters": {"out": str(folder / ("x" * 5000))},
        "a null byte": {"out": "a\0b"},
    }
    for name, given in settings.items():
        yield (
            f"settings: {name}",
            lambda g=given: compress.prune_channels(net(), data=(X, Y), **g),
        )
    for file in (folder, folder / "none" / "x.onnx", folder / "a\0b", folder / ("x" * 300), 7, ""):
        shown = repr(file)[-20:]
        yield f"file: {shown}", lambda f=file: compress.export_onnx(net(), f, data=(X, Y))


def attack_notebook(only: str, most: int | None) -> Section:
    """Make each call: it returns, or raises an error of the toolkit or of its arguments."""
    from compress.common.errors import CompressError, cause_lines

    section = Section("functions of compress")

    def late(*_: object) -> None:
        raise TimeoutError(f"took more than {MOST_SECONDS:g} s")

    before = signal.signal(signal.SIGALRM, late)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Path(folder, "a user's").write_text("kept")
        chosen = [each for each in calls(Path(folder)) if only in each[0]][:most]
        for name, call in chosen:
            failure, began = "", time.monotonic()
            signal.setitimer(signal.ITIMER_REAL, MOST_SECONDS)
            try:
                call()
            except CompressError as error:
                lines = cause_lines(error)
                if not any(lines) or any(map(CONTROL_CHARACTERS.search, lines)):
                    failure = f"says {lines}"
            except TypeError as error:
                if "argument" not in str(error):
                    failure = f"TypeError: {error}"
            except BaseException as error:  # noqa: BLE001 - whatever reaches a user
                failure = f"{type(error).__name__}: {str(error)[:160]!r}"
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            section.note("seconds", time.monotonic() - began)
            section.add(name, failure)
        section.add("a user's file", "" if Path(folder, "a user's").exists() else "was overwritten")
    signal.signal(signal.SIGALRM, before)
    return section
