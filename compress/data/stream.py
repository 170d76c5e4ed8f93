"""A `train` split that is read in its own order, and its first samples."""

from __future__ import annotations

import json
from collections.abc import Sized
from copy import deepcopy
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from torch.utils.data import Dataset

from compress.common.errors import PipelineInvalid, StageFailed
from compress.common.process import derive_seed, reseed, seeded
from compress.data.fingerprint import hash_of_state
from compress.data.own_generators import own_generators, seed_generators, states_restored
from compress.data.stream_cursor import StreamCursor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from compress.data.batch import Batch

FIRST_SAMPLES = 512
"""Samples of a stream that are held in memory, for whatever needs them by index."""


class Stream(Dataset[Any]):
    """An iterable dataset; by index it gives its first samples, which stay in memory."""

    def __init__(self, source: Any) -> None:
        self.source = source
        # Shuffled streams of Hugging Face datasets (5.2) gave other samples in the pass after
        # a restored one: their passes are read again up to the sample.
        self.is_stateful = hasattr(source, "state_dict") and hasattr(source, "load_state_dict")
        self.is_stateful &= not type(source).__module__.startswith("datasets.")
        self.initial_state = deepcopy(source.state_dict()) if self.is_stateful else None
        self._first: list[Any] | None = None

    @property
    def samples(self) -> int | None:
        """The stream's own length; None where it has none."""
        try:
            return len(self.source) if isinstance(self.source, Sized) else None
        except TypeError:  # DataPipes and others have a `__len__` that raises
            return None

    @property
    def fingerprint(self) -> str | None:
        """What the dataset says identifies its content, as `fingerprint` or `_fingerprint`."""
        names = ("fingerprint", "_fingerprint")
        known = (getattr(self.source, name, None) for name in names)
        return next((value for value in known if isinstance(value, str)), None)

    def read_first(self) -> list[Any]:
        """Read the first samples; raise PipelineInvalid if a second pass begins with another."""
        if self._first is None:
            once = list(islice(StreamReader(self, seed=0), 1))
            self._first = list(islice(StreamReader(self, seed=0), FIRST_SAMPLES))
            if list(map(hash_of_state, once)) != list(map(hash_of_state, self._first[:1])):
                raise PipelineInvalid(
                    "a second pass over this stream begins with another sample than the first; let "
                    "__iter__ begin anew each time, and shuffle by a seed, so that training can "
                    "resume"
                )
        return self._first

    def __len__(self) -> int:
        """Return how many samples are held."""
        return len(self.read_first())

    def __getitem__(self, index: int) -> Any:
        return self.read_first()[index]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_first": None}


class StreamReader(Dataset[Any]):
    """Reads a stream by the sample's number over all passes; going forward is cheap."""

    def __init__(
        self,
        stream: Stream,
        seed: int,
        start: StreamCursor | None = None,
        pass_length: int | None = None,
    ) -> None:
        """Begin at a cursor; with ``pass_length`` each pass has exactly so many samples."""
        self.stream, self.seed, self.pass_length = stream, seed, pass_length
        self.start = self.cursor = start or StreamCursor()
        self.iterator: Iterator[Any] | None = None
        # A dataset with a state restores its generators itself.
        self.generators = [] if stream.is_stateful else own_generators(stream.source)

    def __getitem__(self, index: int) -> Any:
        if index < self.cursor.index or self.iterator is None:
            self._open(self.start if index >= self.start.index else StreamCursor())
        # The samples between are those of other ranks.
        while self.cursor.index <= index:
            sample = self._next()
        return sample

    def __iter__(self) -> Iterator[Any]:
        """Yield the samples of the first pass."""
        with seeded(self.seed, "cpu"), states_restored(self.generators):
            self._open(StreamCursor())
            while not self.cursor.passes:
                try:
                    sample = self._next(goes_on=False)
                except StopIteration:
                    return
                yield sample

    def position(self) -> StreamCursor:
        """Return the cursor with the dataset's state, if that is plain JSON."""
        if not self.stream.is_stateful:
            return self.cursor
        state = self.stream.source.state_dict()
        try:
            is_plain = json.loads(json.dumps(state)) == state
        except (TypeError, ValueError):
            is_plain = False
        return self.cursor.model_copy(update={"state": deepcopy(state)} if is_plain else {})

    def _open(self, cursor: StreamCursor) -> None:
        """Begin the cursor's pass, and go to its sample."""
        source: Any = self.stream.source
        if hasattr(source, "set_epoch"):
            source.set_epoch(cursor.passes)
        offset = 0
        if self.stream.is_stateful:
            known = cursor.state is not None
            source.load_state_dict(deepcopy(cursor.state if known else self.stream.initial_state))
            offset = cursor.offset if known else 0
        self.iterator = iter(source)
        self.cursor = StreamCursor(
            index=cursor.index - cursor.offset + offset, passes=cursor.passes, offset=offset
        )
        while self.cursor.offset < cursor.offset:
            self._next()

    def _next(self, *, goes_on: bool = True) -> Any:
        """Read the next sample with its own seed; at the end of a pass begin the next one."""
        at = self.cursor
        if goes_on and at.offset == self.pass_length:
            self._open(StreamCursor(index=at.index, passes=at.passes + 1))
            return self._next()
        seed = derive_seed(self.seed, at.index)
        reseed(seed, "cpu")
        seed_generators(self.generators, seed)
        try:
            sample = next(self.iterator)  # type: ignore[arg-type]  # _open has made it
        except StopIteration:
            if not goes_on:
                raise
            if not at.offset or self.pass_length is not None:
                expected = "at least one" if self.pass_length is None else str(self.pass_length)
                raise StageFailed(
                    f"split 'train' is a stream that ended after {at.offset} samples in pass "
                    f"{at.passes + 1}, expected {expected}; give it the right __len__, or set "
                    "steps_per_epoch"
                ) from None
            self._open(StreamCursor(index=at.index, passes=at.passes + 1))
            return self._next()
        self.cursor = StreamCursor(index=at.index + 1, passes=at.passes, offset=at.offset + 1)
        return sample


class CollateWithCursor:
    """Makes batches that know where the stream stands after them."""

    def __init__(self, reader: StreamReader, collate_fn: Callable[[list[Any]], Batch]) -> None:
        self.reader, self.collate_fn = reader, collate_fn

    def __call__(self, samples: list[Any]) -> Batch:
        """Make a batch."""
        return replace(self.collate_fn(samples), cursor=self.reader.position())
