"""The folder of a run's temporary files, which is removed at its end."""

import pytest

from compress.common.requirements import COMPILER

COMPILE_TWICE = """
import os, tempfile, torch
from compress.pipelines.system.temp_files import temporary_files
os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.abspath("cache")
x = torch.arange(64.0)
with temporary_files():
    folder = tempfile.gettempdir()
    torch.compile(lambda x: x.exp() + 1)(x)
assert not os.path.exists(folder)
torch.compiler.reset()
assert torch.equal(torch.compile(lambda x: x.relu() * 3)(x), x * 3)
assert not os.path.exists(folder)
"""


@pytest.mark.soak
@pytest.mark.skipif(COMPILER.missing(), reason="needs a C++ compiler")
def test_torch_compiles_after_a_run_that_was_the_first_to_compile(fresh_process) -> None:
    assert fresh_process(COMPILE_TWICE) == ""
