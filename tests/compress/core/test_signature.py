import pytest
import torch
from pydantic import ValidationError

from compress.core.signature import Signature, TensorSpec


def test_examples_have_the_asked_batch_and_dtypes() -> None:
    signature = Signature(
        inputs=(
            TensorSpec(name="ids", shape=("batch", "tokens"), dtype="int64"),
            TensorSpec(name="scale", shape=("batch", 2)),
        )
    )
    ids, scale = signature.example(batch=3, seed=1)
    assert ids.shape == (3, 8)
    assert ids.dtype == torch.int64
    assert scale.shape == (3, 2)
    assert torch.equal(ids, signature.example(batch=3, seed=1)[0])
    assert signature.dynamic_axes == ("batch", "tokens")


def test_inferred_from_tensors() -> None:
    signature = Signature.of((torch.zeros(5, 2), torch.zeros(5, dtype=torch.int64)))
    assert [s.shape for s in signature.inputs] == [("batch", 2), ("batch",)]
    assert signature.inputs[1].dtype == "int64"


def test_names_must_differ() -> None:
    with pytest.raises(ValidationError, match="found twice"):
        Signature(inputs=(TensorSpec(name="output", shape=(1,)),))


@pytest.mark.parametrize("shape", [("batch", 0), ("batch", -1), ("two words",)])
def test_a_wrong_dimension_is_refused(shape: tuple) -> None:
    with pytest.raises(ValidationError):
        TensorSpec(name="x", shape=shape)
