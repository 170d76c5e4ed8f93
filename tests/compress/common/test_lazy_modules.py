"""`torch` and `np` are imported at their first use, and are then the modules themselves."""

import subprocess
import sys

import pytest
import torch.nn.functional

from compress.common import lazy_modules


def test_nothing_is_imported_before_a_name_is_read() -> None:
    code = (
        "import sys\n"
        "from compress.common.lazy_modules import F, np, torch, transformers\n"
        "assert not {'numpy', 'torch', 'transformers'} & sys.modules.keys()\n"
        "assert np.float32 is sys.modules['numpy'].float32\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_names_are_the_modules_own_also_those_that_are_replaced(monkeypatch) -> None:
    assert lazy_modules.torch.Tensor is torch.Tensor
    assert lazy_modules.F.relu is torch.nn.functional.relu
    monkeypatch.setattr(torch, "compile", replaced := object())
    assert lazy_modules.torch.compile is replaced


def test_an_unknown_name_is_named_in_the_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'no_such_name'"):
        _ = lazy_modules.torch.no_such_name
