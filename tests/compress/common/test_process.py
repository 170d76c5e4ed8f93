"""What the garbage collector looks at while a stage runs."""

import weakref
from collections.abc import Callable

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


def test_what_was_there_is_looked_at_again_after_a_failure(
    fresh_process: Callable[[str], str],
) -> None:
    code = """
import gc, weakref
from compress.common.process import gc_frozen
class Link:
    def __init__(self): self.itself = self
earlier = weakref.ref(Link())
try:
    with gc_frozen():
        gc.collect()
        print(earlier() is not None)
        raise ValueError
except ValueError:
    gc.collect()
    print(earlier() is None)
"""
    assert fresh_process(code).split() == ["True", "True"]
