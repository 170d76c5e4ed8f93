from enum import Enum

from torch import nn

from compress.pruning.dependency.module_attributes import AttributeReads


def test_a_module_keeps_the_name_of_its_class_while_it_is_recorded() -> None:
    # transformers finds by it which outputs of a model can be recorded.
    module, reads = nn.Linear(2, 2), AttributeReads()
    with reads.recording(module):
        assert str(type(module)) == str(nn.Linear)
        assert module.in_features == 2
    assert (id(module), "in_features") in reads
    assert (id(module), "out_features") not in reads


class Pooling(Enum):
    MEAN = "mean"


def test_a_member_of_an_enumeration_is_no_configuration() -> None:
    # As timm's layers have them: no other class can be given to it.
    module, reads = nn.Linear(2, 2), AttributeReads()
    module.pooling = Pooling.MEAN
    with reads.recording(module):
        assert module.pooling is Pooling.MEAN
    assert type(Pooling.MEAN) is Pooling
