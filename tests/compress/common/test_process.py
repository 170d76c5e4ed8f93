"""What the garbage collector looks at while a stage runs."""

import gc
import weakref

import pytest

from compress.common.process import own_garbage_only


class Link:
    """Something that holds itself."""

    def __init__(self) -> None:
        self.itself = self


def test_what_a_block_leaves_in_circles_is_gone_at_its_end() -> None:
    with own_garbage_only():
        left = weakref.ref(Link())
        assert left() is not None
    assert left() is None


def test_what_was_frozen_stays_frozen_and_thresholds_come_back_after_a_failure() -> None:
    thresholds = gc.get_threshold()
    frozen = gc.get_freeze_count()
    gc.freeze()
    try:
        at_start = gc.get_freeze_count()
        with pytest.raises(ValueError, match="broken"), own_garbage_only():
            raise ValueError("broken")
        assert gc.get_freeze_count() > frozen
        assert gc.get_freeze_count() >= at_start * 0.99  # some are freed by count
        assert gc.get_threshold() == thresholds
    finally:
        if not frozen:
            gc.unfreeze()


def test_a_block_triggers_no_collection_of_what_was_there() -> None:
    generations: list[int] = []

    def note(phase: str, information: dict[str, int]) -> None:
        if phase == "start":
            generations.append(information["generation"])

    thresholds = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    gc.callbacks.append(note)
    try:
        with own_garbage_only():
            kept = [[number] for number in range(30 * 700)]
    finally:
        gc.callbacks.remove(note)
        gc.set_threshold(*thresholds)
    assert len(kept) == 30 * 700
    assert len(generations) > 20 and set(generations[:-1]) == {0} and generations[-1] == 1
