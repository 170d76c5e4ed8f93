import pytest
import torch
from pydantic import ValidationError

from compress.common.errors import ArtifactInvalid
from compress.common.signature import Signature, TensorSpec
from compress.profiling.batch_dependence import seeded_rows


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
    signature = Signature.from_examples((torch.zeros(5, 2), torch.zeros(5, dtype=torch.int64)))
    assert [s.shape for s in signature.inputs] == [("batch", 2), ("batch",)]
    assert signature.inputs[1].dtype == "int64"


def test_names_must_differ() -> None:
    with pytest.raises(ValidationError, match="found twice"):
        Signature(inputs=(TensorSpec(name="output", shape=(1,)),))


@pytest.mark.parametrize("shape", [("batch", 0), ("batch", -1), ("two words",)])
def test_a_wrong_dimension_is_refused(shape: tuple) -> None:
    with pytest.raises(ValidationError):
        TensorSpec(name="x", shape=shape)


@pytest.mark.parametrize("shape", [("batch", 10**12), ("batch", *(10**18,) * 20)])
def test_inputs_of_terabytes_are_refused_before_they_are_made(shape: tuple) -> None:
    signature = Signature(inputs=(TensorSpec(name="x", shape=shape),))
    for make in (signature.example, lambda: seeded_rows(signature, 1)):
        with pytest.raises(ArtifactInvalid, match=r"x of \[.* GiB, expected at most half of this"):
            make()
