"""Votes of many ranks over a tree: the greatest counts on all, over few connections, and a lost rank is heard of."""

import socket
import threading

import pytest
from torch.distributed import HashStore

from energynn.train import votes
from energynn.train.distributed import LostRank, World
from energynn.train.votes import Request, StopVote, Votes


@pytest.fixture
def tree():
    """A function that makes the votes of so many ranks, each connected in a thread of its own."""
    made = {}

    def make(size, timeout_s=20.0):
        store = HashStore()

        def join(rank):
            made[rank] = Votes(store, rank, size, 20.0, timeout_s)

        threads = [threading.Thread(target=join, args=(rank,)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        return [made[rank] for rank in range(size)]

    yield make
    for one in made.values():
        one.close()


@pytest.mark.parametrize("size", [1, 2, 40])
def test_the_greatest_number_counts_on_every_rank_whoever_says_it(tree, size):
    ranks = tree(size)
    for loud in range(size):
        for rank, one in enumerate(ranks):
            one.cast(2 if rank == loud else rank % 2)
        assert [one.result() for one in ranks] == [2] * size
    for one in ranks:
        one.cast(0)
        one.cast(1)
    assert [(one.result(), one.result()) for one in ranks] == [(0, 1)] * size


def test_connections_are_as_many_as_ranks_not_by_their_square(tree):
    ranks = tree(256)
    ends = [len(one.below) + bool(one.above) for one in ranks]
    assert sum(ends) == 2 * 255 and max(ends) == votes.BRANCHES + 1


def test_a_lost_rank_is_heard_of_by_all(tree):
    ranks = tree(40)
    ranks[20].above.shutdown(socket.SHUT_RDWR)  # below rank 1
    for one in ranks:
        one.cast(0)
    for one in ranks:
        with pytest.raises(OSError, match="closed|reset|Broken pipe"):
            one.result()
    with pytest.raises(OSError):  # again, and at once
        ranks[0].result()


def test_a_silent_rank_is_not_waited_for_for_ever(tree):
    first, _silent = tree(2, timeout_s=0.3)
    first.cast(0)
    with pytest.raises(TimeoutError, match="was silent for 0.3 s"):
        first.result()


def test_nobody_else_votes(monkeypatch):
    """Another program that connects, and says something or nothing, takes no rank's place."""
    monkeypatch.setattr(votes, "TOKEN_S", 0.2)
    store, made, strangers = HashStore(), {}, []
    waiting = threading.Thread(target=lambda: made.update({0: Votes(store, 0, 2, 20.0, 20.0)}))
    waiting.start()
    address, port, _token = store.get("votes-of-0").decode().split()
    for words in (b"GET / HTTP/1.1\r\n", b""):
        strangers.append(socket.create_connection((address, int(port))))
        strangers[-1].sendall(words)
    made[1] = Votes(store, 1, 2, 20.0, 20.0)
    waiting.join(20)
    made[0].cast(1), made[1].cast(0)
    assert made[0].result() == made[1].result() == 1


def test_a_stop_vote_reads_the_step_before_and_names_a_lost_rank(tmp_path, monkeypatch):
    def lose():
        raise ConnectionResetError("its connection was closed")

    stop = StopVote(World(0, 1, 0, None, "a", HashStore()), tmp_path, 10.0, 10.0)
    assert stop(False) == stop(True) == Request.NOTHING  # what is asked in a step is heard in the next one
    assert stop(False) == Request.CHECKPOINT
    monkeypatch.setattr(stop.votes, "result", lose)
    with pytest.raises(LostRank, match="another rank is lost .its connection was closed.; its own last lines"):
        stop(False)


def test_a_checkpoint_that_is_due_is_asked_for_once(tmp_path):
    """It stays due until it is written, which is in the step that hears of it."""
    stop = StopVote(World(0, 1, 0, None, "a", HashStore()), tmp_path, 10.0, 10.0)
    heard = [stop(True), stop(True), stop(False), stop(False)]
    assert heard == [Request.NOTHING, Request.CHECKPOINT, Request.NOTHING, Request.NOTHING]
    stop.close()
