"""A `train` split that is read in its own order, and its first samples."""

from __future__ import annotations

from collections.abc import Sized
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from torch.utils.data import Dataset

from compress.common.errors import PipelineInvalid, StageFailed
from compress.common.process import derive_seed, reseed, seeded
from compress.data.fingerprint import hash_of_state
from compress.data.own_generators import own_generators, seed_generators, states_restored

if TYPE_CHECKING:
    from collections.abc import Iterator

FIRST_SAMPLES = 512
"""Samples of a stream that are held in memory, for whatever needs them by index."""


class Stream(Dataset[Any]):
    """An iterable dataset; by index it gives its first samples, which stay in memory."""

    def __init__(self, source: Any) -> None:
        self.source = source
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
            once = StreamReader(self, seed=0).first_samples(1)
            self._first = StreamReader(self, seed=0).first_samples(FIRST_SAMPLES)
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

    def __init__(self, stream: Stream, seed: int, pass_length: int | None = None) -> None:
        """Take the number of samples in a pass; None to count them in the first one."""
        self.source: Any = stream.source
        self.seed, self.pass_length = seed, pass_length
        self.generators = own_generators(self.source)
        self.iterator: Iterator[Any] | None = None
        self.pass_number = self.next_index = 0

    def __getitem__(self, index: int) -> Any:
        number = index // self.pass_length if self.pass_length else 0
        if self.iterator is None or index < self.next_index or number > self.pass_number:
            self._begin_pass(number)
        try:
            # The samples between are those of other ranks, or were trained on before a resume.
            while self.next_index <= index:
                sample = self._next_sample()
        except StopIteration:
            samples = self.next_index - self.pass_number * (self.pass_length or 0)
            if not samples or self.pass_length:
                raise StageFailed(
                    f"split 'train' is a stream that ended after {samples} samples in pass "
                    f"{self.pass_number + 1}, expected {self.pass_length or 'at least one'}; give "
                    "as many in each pass, and the same __len__, or none and steps_per_epoch"
                ) from None
            self.pass_length = samples
            return self[index]
        return sample

    def first_samples(self, count: int) -> list[Any]:
        """Return the first samples of the first pass, leaving all generators as they were."""
        samples: list[Any] = []
        with seeded(self.seed, "cpu"), states_restored(self.generators), suppress(StopIteration):
            self._begin_pass(0)
            while len(samples) < count:
                samples.append(self._next_sample())
        return samples

    def _begin_pass(self, number: int) -> None:
        self.pass_number, self.next_index = number, number * (self.pass_length or 0)
        self._seed_generators()
        if hasattr(self.source, "set_epoch"):
            self.source.set_epoch(number)
        self.iterator = iter(self.source)

    def _next_sample(self) -> Any:
        self._seed_generators()
        sample = next(self.iterator)  # type: ignore[arg-type]  # _begin_pass has made it
        self.next_index += 1
        return sample

    def _seed_generators(self) -> None:
        """Seed by the next sample's number, so that a pass read again draws the same."""
        seed = derive_seed(self.seed, self.next_index)
        reseed(seed, "cpu")
        seed_generators(self.generators, seed)
