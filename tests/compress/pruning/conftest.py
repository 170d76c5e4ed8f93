"""Fixtures of all pruning tests."""

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from compress.artifacts.eager_model import EagerModel
from compress.common.forward import run_in_eval
from compress.profiling import quantiles
from compress.pruning import channel_pruner, sensitivity_analysis

RELOAD = """
import json, sys, torch
torch.set_num_threads({threads})
sys.path.insert(0, {root!r})
from compress.artifacts.eager_model import EagerModel
from compress.common.forward import run_in_eval
model = EagerModel.from_directory({path!r})
outputs = run_in_eval(model.load(), model.signature.example(seed=7))
print(json.dumps([x.tolist() for x in outputs]))
"""


@pytest.fixture(scope="session", autouse=True)
def few_calls() -> Iterator[None]:
    """Measure a pruned model with the fewest calls: half a second is as long as most tests take."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (channel_pruner, sensitivity_analysis):
            patch.setattr(module, "MEASURED_SECONDS", 0.0)
        yield


@pytest.fixture(autouse=True)
def few_calls_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accept latencies of so few calls; only here, as other packages' tests check their doubt."""
    monkeypatch.setattr(quantiles, "WIDEST", math.inf)


@pytest.fixture
def assert_reloads_identically(fresh_torch: Callable[[str], str]) -> Callable[[EagerModel], None]:
    """Return a check that an artifact gives bit-identical outputs in another process."""

    def check(model: EagerModel) -> None:
        threads, root = torch.get_num_threads(), str(Path.cwd())
        code = RELOAD.format(threads=threads, root=root, path=str(model.path))
        reloaded = json.loads(fresh_torch(code))
        outputs = run_in_eval(model.load(), model.signature.example(seed=7))
        assert reloaded == [x.tolist() for x in outputs]

    return check
