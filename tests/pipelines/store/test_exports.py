"""Exports of the uncompressed model in a store: found again, and nothing is left of failed ones."""

from pathlib import Path

import pytest
import torch

from compress.artifacts.eager_model import EagerModel
from compress.common.errors import StageFailed
from compress.common.signature import Signature, TensorSpec
from compress.pipelines.store.local import Store, StoredExports

SIGNATURE = Signature(inputs=(TensorSpec(name="x", shape=("batch", 4)),))


def written(path: Path) -> EagerModel:
    source = EagerModel.from_module(torch.nn.Linear(4, 2), signature=SIGNATURE)
    return source.derive(path, source.load())


def test_an_export_that_fails_leaves_no_folder_and_a_later_one_is_found_again(
    tmp_path: Path,
) -> None:
    def fail_midway(path: Path) -> EagerModel:
        with EagerModel.atomic_write(path, SIGNATURE):
            raise StageFailed("no such operator")

    for fail in (fail_midway, lambda path: (_ for _ in ()).throw(StageFailed("no such operator"))):
        with pytest.raises(StageFailed, match="no such operator"):
            StoredExports(Store(tmp_path), {}).get_or_write("onnx", fail)
        assert not [*tmp_path.iterdir()]
    exported = StoredExports(Store(tmp_path), {}).get_or_write("onnx", written)
    again = StoredExports(Store(tmp_path), {}).get_or_write("onnx", fail_midway)
    assert again.digest == exported.digest
    # A quick run compares fewer samples: neither takes the other's.
    with pytest.raises(StageFailed, match="no such operator"):
        StoredExports(Store(tmp_path), {"judge": "quick"}).get_or_write("onnx", fail_midway)
