from collections.abc import Iterator

import pytest
import torch

from compress.data.batch import Batch
from compress.training.loop.trainer import on_device, one_ahead, start_copy

STEPS = 20

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def batches(count: int = 4, width: int = 3) -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    return [
        Batch((torch.randn(8, width, generator=generator),), torch.full((8,), number))
        for number in range(count)
    ]


def test_on_the_cpu_batches_pass_through_as_they_are_asked_for():
    given, asked = batches(), []

    def reading() -> Iterator[Batch]:
        for batch in given:
            asked.append(batch)
            yield batch

    passed = on_device(reading(), "cpu")
    assert next(passed) is given[0] and asked == given[:1]
    assert list(passed) == given[1:]


@pytest.mark.parametrize("count", [0, 1, 4])
def test_every_batch_comes_once_in_order_with_the_next_one_on_its_way(count):
    given, events = batches(count), []

    def start(batch: Batch):
        number = int(batch.target[0])
        events.append(("start", number))
        return lambda: events.append(("ready", number)) or batch

    assert list(one_ahead(given, start)) == given
    started = [number for event, number in events if event == "start"]
    ready = [number for event, number in events if event == "ready"]
    assert started == ready == list(range(count))
    for number in ready[:-1]:
        assert events.index(("start", number + 1)) < events.index(("ready", number))


def test_an_error_of_reading_is_raised_as_it_is():
    def reading() -> Iterator[Batch]:
        yield from batches(2)
        raise KeyError("gone")

    with pytest.raises(KeyError, match="gone"):
        list(one_ahead(reading(), lambda batch: lambda: batch))


def test_stopping_early_leaves_nothing_open():
    closed = []

    def reading() -> Iterator[Batch]:
        try:
            yield from batches()
        finally:
            closed.append(True)

    passed = one_ahead(reading(), lambda batch: lambda: batch)
    next(passed)
    del passed
    assert closed == [True]


@pytest.mark.gpu
@needs_cuda
def test_copied_ahead_the_results_are_the_same():
    """Large batches and slow steps: a copy that was not waited for would show."""
    given = [Batch((b.inputs[0].pin_memory(),), b.target) for b in batches(STEPS, 250_000)]

    def results(moved: Iterator[Batch]) -> list[torch.Tensor]:
        weight = torch.ones(250_000, device="cuda")
        found = []
        for batch in moved:
            assert batch.inputs[0].is_cuda and batch.target.is_cuda
            for _ in range(20):
                weight = weight * 0.999 + batch.inputs[0].mean(0) * 0.01
            found.append(weight.clone())
        return [value.cpu() for value in found]

    plain = results(batch.to("cuda") for batch in given)
    ahead = results(on_device(iter(given), "cuda"))
    assert len(ahead) == STEPS
    assert all(torch.equal(x, y) for x, y in zip(plain, ahead, strict=True))


@pytest.mark.gpu
@needs_cuda
def test_the_copy_runs_on_a_stream_of_its_own():
    copies = torch.cuda.Stream()
    (batch,) = batches(1)
    moved = start_copy(batch, "cuda", copies)()
    assert torch.cuda.current_stream() != copies
    assert torch.equal(moved.inputs[0].cpu(), batch.inputs[0])
