"""What the garbage collector looks at while a stage runs."""

import gc
import weakref

import pytest

from compress.common.process import gc_frozen


class Link:
    """Something that holds itself."""

    def __init__(self) -> None:
        self.itself = self


def test_what_a_block_leaves_in_circles_is_gone_at_its_end() -> None:
    with gc_frozen():
        left = weakref.ref(Link())
        assert left() is not None
    assert left() is None


@pytest.mark.slow
def test_what_was_there_is_looked_at_again_after_a_failure() -> None:
    earlier = weakref.ref(Link())
    with pytest.raises(ValueError, match="broken"), gc_frozen():
        gc.collect()
        assert earlier() is not None
        raise ValueError("broken")
    gc.collect()
    assert earlier() is None
