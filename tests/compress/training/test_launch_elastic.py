"""Runs whose machines leave and come: how many take part, and how they find each other again."""

import threading
import time

import pytest
from pydantic import ValidationError
from torch.distributed import TCPStore

from compress.common.errors import PipelineInvalid, StageFailed
from compress.training.config.parallel import Parallel
from compress.training.config.training import Training
from compress.training.launch import rank_group
from compress.training.launch import rank_group as heartbeat
from compress.training.launch.rank_group import RankGroup, need_group


def training(batch_size: int = 64, **parallel) -> Training:
    settings = {"nodes": 4, "min_nodes": 1, "processes": 2, **parallel}
    return Training(epochs=1, batch_size=batch_size, parallel=settings)


def test_as_many_machines_train_as_the_batch_divides_over():
    settings = training()
    assert settings.for_nodes(4) is settings
    taking_part = [settings.for_nodes(started).parallel.nodes for started in (1, 2, 3, 5)]
    assert taking_part == [1, 2, 2, 4]
    fewer = settings.for_nodes(3)
    assert fewer.batch_size == 64 and fewer.parallel.processes == 2
    assert fewer.parallel.layout == "4 processes, ddp"
    assert training(batch_size=48).for_nodes(3).parallel.nodes == 3
    with pytest.raises(PipelineInvalid, match="3 machines were started, and batch_size 64"):
        training(min_nodes=3).for_nodes(3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"nodes": 2, "min_nodes": 3}, "fewer machines than nodes: 2, found 3"),
        ({"nodes": 2, "min_nodes": 1, "strategy": "deepspeed"}, "min_nodes does not go with"),
    ],
)
def test_elastic_sizes_that_cannot_be_are_refused(settings, message):
    with pytest.raises(ValidationError, match=message):
        Parallel(**settings)


def test_the_group_must_have_the_fewest_machines(monkeypatch):
    elastic = Parallel(nodes=4, min_nodes=2)
    with pytest.raises(PipelineInvalid, match=r"started alone; .* torchrun --nnodes 2:4 "):
        need_group(elastic)
    need_group(Parallel(nodes=4, min_nodes=1))
    monkeypatch.setattr(rank_group, "_joined", [group_of(0, 3, None)])
    need_group(elastic)
    with pytest.raises(PipelineInvalid, match="3 machines with 1 processes each were started"):
        need_group(Parallel(nodes=4))


def group_of(rank: int, size: int, store) -> RankGroup:
    numbers = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    environment = {name: str(number) for name, number in numbers.items()}
    return RankGroup({**environment, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}, store)


@pytest.fixture
def meet():
    """Return what has two ranks meet at a store, each in a thread."""

    def meet(server: TCPStore) -> list[RankGroup]:
        stores = [server, TCPStore("127.0.0.1", server.port, is_master=False)]
        groups = [group_of(rank, 2, store) for rank, store in enumerate(stores)]
        threads = [threading.Thread(target=group._meet) for group in groups]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return groups

    return meet


def test_processes_meet_at_a_store_that_others_have_used_before(meet):
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    before = meet(server)
    before[0].store.set("request/1", '{"command": "leave", "exit_code": 7}')
    first, second = meet(server)  # where rank 1 finds the introduction and request of another
    exit_codes: list[int] = []
    serves = threading.Thread(target=lambda: exit_codes.append(second.serve(lambda _: "")))
    serves.start()
    first.request("compare")
    first.leave(3)
    serves.join(60)
    assert exit_codes == [3]


def test_a_process_that_waits_ends_when_rank_0_is_not_heard_of(monkeypatch):
    monkeypatch.setattr(heartbeat, "SECONDS_BETWEEN_BEATS", 0.05)
    monkeypatch.setattr(heartbeat, "SECONDS_TO_BE_LOST", 0.5)
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    waiting = group_of(1, 2, TCPStore("127.0.0.1", server.port, is_master=False))
    server.set("alive/0", "41")
    waiting._heartbeat.start()
    with pytest.raises(StageFailed, match="rank 0 has sent no heartbeat for "):
        waiting.serve(lambda _: "")


def test_a_process_that_waits_takes_little_of_a_core():
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    waiting = group_of(1, 2, TCPStore("127.0.0.1", server.port, is_master=False))
    waiting._heartbeat.start()
    serves = threading.Thread(target=waiting.serve, args=(lambda _: "",), daemon=True)
    before = time.process_time()
    serves.start()
    time.sleep(1)
    # A process that asked the store without a pause would take a whole second.
    assert time.process_time() - before < 0.5
    server.set("request/1", '{"command": "leave", "exit_code": 0}')
    serves.join(60)
    assert not serves.is_alive()
