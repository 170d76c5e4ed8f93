"""An export from the store is held against its source again where the data is another one."""

import logging
from pathlib import Path

import pytest

from compress.common.errors import StageFailed
from compress.pipelines import Pipeline

NETS = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

class Branching(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        # Of tiny, large or mixed numbers, which are asked of every export, none go the other way.
        return -y if 90 < x.min() and x.max() < 110 else y

def net():
    return Branching(4, 3)

def data(shift=0.0):
    x = torch.randn(240, 4, generator=torch.Generator().manual_seed(0)) + shift
    rows = TensorDataset(x, torch.arange(240) % 3)
    return {"train": rows, "val": rows}
"""

FILE = """\
version: 1
model:
  factory: nets:net
  inputs: [{name: x, shape: [batch, 4]}]
data: {factory: "nets:data", arguments: {shift: 0.0}}
stages:
  - {stage: export_torchscript}
"""


COMPARED = "on 128 samples of `val` answers differ"


class Branching:
    """A folder with a model whose traced file knows one of two branches, and its runs."""

    def __init__(self, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
        self.folder, self.caplog = folder, caplog
        (folder / "nets.py").write_text(NETS)

    def run(self, shift: float) -> tuple[bool, bool]:
        """Return whether the export was cached, and whether it was compared with its source."""
        file = self.folder / "p.yaml"
        file.write_text(FILE.replace("shift: 0.0", f"shift: {shift}"))
        self.caplog.clear()
        with self.caplog.at_level(logging.INFO):
            report = Pipeline.from_yaml(file).run(self.folder / "out")
        return report.stages[0].cached, COMPARED in self.caplog.text


@pytest.fixture
def branching(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Branching:
    return Branching(tmp_path, caplog)


pytestmark = pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")


@pytest.mark.slow
def test_other_data_is_compared_once_without_exporting_again(branching: Branching) -> None:
    assert branching.run(0.0) == (False, True)
    assert branching.run(0.0) == (True, False), "it was compared when it was made"
    assert branching.run(0.5) == (True, True)
    assert branching.run(0.5) == (True, False)
    assert branching.run(0.0) == (True, False), "what was compared before is known"


def test_an_export_that_other_data_proves_wrong_fails_the_run_and_is_not_published(
    branching: Branching,
) -> None:
    branching.run(0.0)
    published = branching.folder / "out" / "artifacts" / "export_torchscript"
    assert published.exists()
    for _ in range(2):  # a failure is never remembered as a proof
        with pytest.raises(StageFailed, match=r"^export_torchscript: on 128 samples of `val` the"):
            branching.run(100.0)
        assert not published.exists()
    branching.run(0.0)
    assert published.exists()
