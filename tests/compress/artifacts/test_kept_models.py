"""Several measurements of one artifact load its model once."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from compress.artifacts.eager_model import EagerModel
from compress.common.dependency_recorder import recording
from compress.serve.worker.loaders import as_array_function

LABELS = Path(__file__)
"""A file that user code reads while the model is loaded."""


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    loaded: list[str] = []
    load = EagerModel.load

    def counted(self: EagerModel, device: str = "cpu") -> torch.nn.Module:
        loaded.append(device)
        LABELS.read_bytes()
        return load(self, device)

    monkeypatch.setattr(EagerModel, "load", counted)
    return loaded


def test_a_kept_model_is_loaded_once_for_the_same_arguments(
    mlp: EagerModel, loads: list[str]
) -> None:
    inputs = mlp.signature.example()
    own_threads = torch.get_num_threads()
    with mlp.keep_loaded(), mlp.keep_loaded():
        answers = []
        for _ in range(3):
            with mlp.open("cpu", 1) as predict:
                answers.append(predict(*inputs)[0])
        assert len(loads) == 1
        with mlp.open("cpu", 2):
            assert len(loads) == 2
    assert all(torch.equal(answer, answers[0]) for answer in answers)
    assert torch.get_num_threads() == own_threads
    for _ in range(2):
        with mlp.open():
            pass
    assert len(loads) == 4


def test_a_model_computes_with_its_own_threads_and_leaves_the_callers(mlp: EagerModel) -> None:
    inputs, own_threads, seen = mlp.signature.example(), torch.get_num_threads(), []
    opened = mlp.open("cpu", own_threads + 1)

    def counted(module: Any, args: Any, output: Any) -> None:
        seen.append(torch.get_num_threads())

    with torch.nn.modules.module.register_module_forward_hook(counted):
        opened(*inputs)
        torch.set_num_threads(own_threads)
        opened(*inputs)
    assert set(seen) == {own_threads + 1}
    assert torch.get_num_threads() == own_threads
    opened.close()
    assert torch.get_num_threads() == own_threads


def test_a_handler_computes_with_the_threads_that_it_is_told() -> None:
    own_threads, seen = torch.get_num_threads(), []

    def module(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.get_num_threads())
        return x

    try:
        as_array_function(module, own_threads + 1)([np.zeros(1, np.float32)])
    finally:
        torch.set_num_threads(own_threads)
    assert seen == [own_threads + 1]


def test_files_read_to_load_it_count_for_each_who_uses_it(
    mlp: EagerModel, loads: list[str], tmp_path: Path
) -> None:
    found = []
    with mlp.keep_loaded():
        for _ in range(2):
            with recording() as recorded, mlp.open():
                pass
            found.append(recorded.dependencies(tmp_path).model_dump_json())
    assert len(loads) == 1
    assert found[0] == found[1]
    assert LABELS.name in found[0]
