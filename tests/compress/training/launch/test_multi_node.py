"""Nodes that do not come, or should not: each is one clear line, and no process is left."""

import os
import socket
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from pydantic import ValidationError

from compress.artifacts.importing import import_checkpoint
from compress.artifacts.recipe import Recipe
from compress.common.errors import ArtifactInvalid, PipelineInvalid, StageFailed
from compress.common.signature import Signature, TensorSpec
from compress.core.context import Context
from compress.data.splits import DataReference
from compress.training.config.parallel import Parallel
from compress.training.config.training import Training
from compress.training.fit import fit
from compress.training.launch import heartbeat, multi_node
from compress.training.launch.heartbeat import Pulse, beating
from compress.training.launch.multi_node import (
    Meeting,
    endpoint_of,
    invitation_in,
    inviting,
    leaving_with_the_others,
    taking_part,
)
from compress.training.launch.network import interface_of, own_address
from compress.training.launch.worker_errors import read_failure
from compress.training.objectives.objective import TargetLoss

HERE = Path(__file__).parents[1]


@contextmanager
def a_port(taken):
    """Give the number of a port that somebody listens on, or nobody."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if taken:
            server.listen()
        number = server.getsockname()[1]
        if not taken:
            server.close()
        yield number


def train(root: Path, endpoint: str, samples: int = 96, batch_size: int = 16, **parallel):
    signature = Signature(inputs=(TensorSpec(name="features", shape=("batch", 4)),))
    recipe = Recipe(factory="nets:classifier")
    source = import_checkpoint(root / "source", recipe, signature, checkpoint=None, folder=HERE)
    data = DataReference("nets:blobs", {"train": samples}, HERE, 16).load()
    parallel = {"nodes": 2, "rendezvous": endpoint, "rendezvous_seconds": 2, **parallel}
    training = Training(epochs=1, batch_size=batch_size, parallel=parallel)
    return fit(source, training, TargetLoss(0.1), Context(root=root / "a", data=data), "train")


def children() -> set[str]:
    found = set()
    for task in Path("/proc/self/task").iterdir():
        found |= set((task / "children").read_text().split())
    return found


@pytest.mark.multiprocess
def test_a_node_that_never_comes_is_waited_for_until_the_deadline(tmp_path):
    before, began = children(), time.monotonic()
    expected = (
        r"^train: rendezvous 127\.0\.0\.1:\d+: 1 of 2 nodes came within 2 s "
        r"\(parallel\.rendezvous_seconds\); start `compress join`"
    )
    with a_port(taken=False) as port, pytest.raises(StageFailed, match=expected):
        train(tmp_path, f"127.0.0.1:{port}")
    assert time.monotonic() - began >= 2
    # multiprocessing's own resource tracker stays for the life of the interpreter.
    assert len(children() - before) <= 1
    assert not list((tmp_path / "a.work").rglob("invitation.json"))
    assert not list((tmp_path / "a.work").rglob("luggage.pickle"))


@pytest.mark.multiprocess
def test_a_port_that_is_taken_is_told_at_once(tmp_path):
    with a_port(taken=True) as port:
        expected = f"rendezvous 127.0.0.1:{port}: the port is taken .* set parallel.rendezvous"
        with pytest.raises(StageFailed, match=expected):
            train(tmp_path, f"127.0.0.1:{port}", rendezvous_seconds=600)


@pytest.mark.multiprocess
def test_a_rendezvous_at_another_machine_is_refused(tmp_path):
    # An address for documents (RFC 5737), which nobody has.
    with pytest.raises(StageFailed, match=r"198\.51\.100\.1:29400 cannot be reached .* must be it"):
        train(tmp_path, "198.51.100.1:29400")


def test_fewer_samples_than_ranks_of_all_nodes(tmp_path):
    expected = "3 samples for 4 processes; lower parallel.processes or parallel.nodes"
    with pytest.raises(StageFailed, match=expected):
        train(tmp_path, "127.0.0.1:29400", samples=3, processes=2)


def test_the_batch_divides_over_the_ranks_of_all_nodes():
    meeting = {"nodes": 3, "processes": 2, "rendezvous": "a:1"}
    with pytest.raises(ValidationError, match="batch_size 64 does not divide over 6 processes"):
        Training(epochs=1, parallel=meeting)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"nodes": 2}, "nodes: 2 needs rendezvous: the first node's host:port"),
        ({"nodes": 2, "rendezvous": "a:1", "strategy": "dp"}, "dp runs as one process"),
        ({"rendezvous": "head"}, "should match pattern"),
        ({"rendezvous": "head:0"}, "should match pattern"),
    ],
)
def test_settings_that_cannot_meet_are_refused(settings, words):
    with pytest.raises(ValidationError, match=words):
        Parallel(**settings)


def test_where_nodes_meet_decides_no_result():
    here = Parallel(nodes=2, rendezvous="a:1", rendezvous_seconds=5)
    there = Parallel(nodes=2, rendezvous="b:2")
    assert here.model_dump() == there.model_dump()


def test_the_rendezvous_comes_from_the_environment(monkeypatch):
    parallel = Parallel(nodes=2, rendezvous="$MEETING_POINT")
    monkeypatch.setenv("MEETING_POINT", "[fd00::1]:29400")
    assert endpoint_of(parallel) == "[fd00::1]:29400"
    for wrong in ("", "head", "$MEETING_POINT"):
        monkeypatch.setenv("MEETING_POINT", wrong)
        with pytest.raises(PipelineInvalid, match=r"is \$MEETING_POINT, and that environment"):
            endpoint_of(parallel)


def test_an_invitation_of_another_user_is_refused(tmp_path, monkeypatch):
    meeting = Meeting(run_id="a", processes=1, nodes=2)
    with inviting(tmp_path, meeting):
        assert invitation_in(tmp_path) == meeting
        other = os.getuid() + 1
        monkeypatch.setattr(os, "getuid", lambda: other)
        with pytest.raises(ArtifactInvalid, match=f"belongs to user .* this is user {other}"):
            invitation_in(tmp_path)
    assert invitation_in(tmp_path) is None


def test_one_node_too_many_is_sent_away(tmp_path, monkeypatch):
    meeting = Meeting(run_id="a", processes=1, nodes=2)
    with inviting(tmp_path, meeting):
        monkeypatch.setattr(multi_node, "this_node", lambda: "second")
        with taking_part(tmp_path, meeting):
            monkeypatch.setattr(multi_node, "this_node", lambda: "third")
            with (
                pytest.raises(StageFailed, match="one of 2 nodes, and they have come"),
                taking_part(tmp_path, meeting),
            ):
                pass
        assert multi_node.nodes_in(tmp_path) == 1


def test_a_pulse_is_heard_while_there_is_one(tmp_path, monkeypatch):
    monkeypatch.setattr(heartbeat, "SECONDS_BETWEEN_BEATS", 0.01)
    left_by_a_dead_one = tmp_path / "dead"
    left_by_a_dead_one.write_text("other 7\n")
    dead, pulse = Pulse(left_by_a_dead_one), Pulse(tmp_path / "beat")
    with beating(tmp_path / "beat"):
        deadline = time.monotonic() + 60
        while pulse.beats < 3 and time.monotonic() < deadline:
            pulse.listen()
            dead.listen()
    assert (pulse.beats, pulse.who) == (3, heartbeat.THIS_PROCESS)
    assert dead.beats == 0
    assert dead.silent_seconds >= pulse.silent_seconds
    assert not (tmp_path / "beat").exists()


class Left(Exception):
    pass


@pytest.fixture
def watched(tmp_path, monkeypatch):
    """Return what a rank of the second node does about a first one, in the rank's own thread."""
    (tmp_path / multi_node.NODES).mkdir()
    (tmp_path / multi_node.NODES / "first").write_text("its last beat")

    def leave(code):
        raise Left(code)

    def watch():
        with pytest.raises(Left):
            multi_node._watch(tmp_path, multi_node.threading.Event())
        return read_failure(tmp_path, 1, 1)

    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(os, "_exit", leave)
    return watch


def test_a_node_that_falls_silent_ends_the_others_ranks(watched, monkeypatch):
    monkeypatch.setattr(multi_node, "SECONDS_TO_SILENCE", 1.0)
    assert str(watched()) == "node first has given no sign of life for 1 s"


def test_a_failure_elsewhere_ends_ranks_that_do_not_notice(watched, tmp_path, monkeypatch):
    monkeypatch.setattr(multi_node, "SECONDS_FOR_A_FAILURE", 0.5)
    multi_node.record_failure(tmp_path, 0, ValueError("no such sample"))
    assert str(watched()) == "rank 0: ValueError: no such sample"


def test_one_node_watches_nobody(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    before = multi_node.threading.active_count()
    with leaving_with_the_others(tmp_path):
        assert multi_node.threading.active_count() == before


def test_a_node_is_reached_by_the_address_that_leads_to_the_first(monkeypatch):
    assert own_address("127.0.0.1:29400", hosts=False) == "127.0.0.1"
    assert own_address("head.example:29400", hosts=True) == "head.example"
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("198.51.100.1") is None
