import pytest

from compress.pruning.recovery.recovery import name_before


@pytest.mark.parametrize(
    ("name", "before"),
    [
        ("layers.0.conv.weight", "layers.0.conv.weight"),
        ("layers.1.conv.weight", "layers.2.conv.weight"),
        ("head.weight", "head.weight"),
        ("layers_1.1.weight", "layers_1.1.weight"),
        ("outer.1.inner.1.weight", "outer.2.inner.3.weight"),
    ],
)
def test_a_name_is_the_one_before_blocks_were_removed(name: str, before: str) -> None:
    kept = {"layers": (0, 2, 3), "outer": (0, 2), "outer.2.inner": (0, 3)}
    assert name_before(name, kept) == before


def test_the_model_itself_may_be_the_container() -> None:
    assert name_before("1.weight", {"": (0, 4)}) == "4.weight"
