"""A vote of all ranks beside the training: shall they write a checkpoint, or stop? It goes over few connections."""

from __future__ import annotations

import contextlib
import enum
import queue
import secrets
import signal
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch.distributed as dist

from energynn.launchers import AFTER_A_LOSS
from energynn.measure.samples import Events, Silence
from energynn.train.addresses import own_address
from energynn.train.distributed import Interrupted, LostRank, World

BRANCHES = 16  # connections of a rank to those below it; 256 ranks are two levels below rank 0
TOKEN_B, TOKEN_S = 16, 5.0  # by which a rank shows that it is one, as soon as it is connected


class Request(enum.IntEnum):
    """What a rank wants of all ranks; the greatest of all requests counts."""

    NOTHING = 0
    CHECKPOINT = 1
    STOP = 2  # after a checkpoint


class StopVote:
    """Whether the ranks shall write a checkpoint, or stop: the same answer on every rank at the same step.

    A rank is asked by SIGTERM or SIGUSR1, and by the silence of its host's sampler; all of them by a file ``stop`` in
    the folder. Rank 0's clock asks for the regular checkpoints, and a silence that begins for one more. Each step
    starts a vote of all ranks beside the training (``Votes``), and reads the result of the step before, so that nobody
    waits.
    """

    LOOK_S = 1.0  # between two looks for the file, and at the sampler

    def __init__(self, world: World, folder: Path, setup_s: float, timeout_s: float):
        """The ranks are waited for up to ``setup_s``, from the first vote on up to ``timeout_s``."""
        self.world, self.file, self.silence = world, Path(folder) / "stop", Silence(Path(folder))
        self.votes = Votes(world.store, world.rank, world.size, setup_s, timeout_s)
        self.votes.results.put(Request.NOTHING)  # of the step before the first
        self.asked, self.noticed, self.looked = False, "", 0.0
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._ask)

    def _ask(self, _number: int, _frame) -> None:
        self.asked = True

    def __call__(self, checkpoint_is_due: bool) -> Request:
        """Call once per step on every rank."""
        if time.monotonic() - self.looked > self.LOOK_S:
            self.looked = time.monotonic()
            self._look()
        answer, vote = self._answer(), Request.NOTHING
        if self.asked:
            vote = Request.STOP
        elif self.world.rank == 0 and checkpoint_is_due and answer == Request.NOTHING:
            vote = Request.CHECKPOINT
        elif self.silence.notice() and not self.noticed:
            vote = Request.CHECKPOINT
        self.noticed = self.silence.notice()
        self.votes.cast(vote)
        return answer

    def _answer(self) -> Request:
        """What all ranks said in the step before."""
        try:
            return Request(self.votes.result())
        except OSError as error:
            raise LostRank(f"another rank is lost ({error}); {AFTER_A_LOSS}") from error

    def _look(self) -> None:
        if self.world.rank == 0 and self.file.exists():
            self.asked = True
        if not self.asked and (silent := self.silence()):
            Events(self.file.parent, self.world.rank).mark("stop_asked", reason=silent)
            self.asked = True

    def during(self, batches: Iterable, votes: int) -> Iterator:
        """The batches of an evaluation, with a vote after each of the first ``votes``, as many on every rank.

        Raises Interrupted if the ranks shall stop: an evaluation can take longer than a run is given to stop.
        """
        for number, batch in enumerate(batches):
            yield batch
            if number < votes and self(checkpoint_is_due=False) == Request.STOP:
                raise Interrupted("during an evaluation")

    def close(self) -> None:
        """Wait for the last vote, so that none is under way when the ranks part."""
        self._answer()
        self.votes.close()


class Votes:
    """The greatest of one number from 0 to 255 of each rank, again and again, while the ranks do other things.

    A mesh of all ranks has connections by the square of their number; in this tree each rank but the first has one to
    the rank above it. A thread of each rank waits for those below, sends the greatest number up, and what comes back
    down. The ranks find each other through ``store``, which all of them have.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, setup_s: float, timeout_s: float):
        """Connect; ranks are waited for up to ``setup_s``, and ``timeout_s`` from the first vote on."""
        self.timeout_s, self.below, self.above = timeout_s, [], None
        self.mine: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self.results: queue.SimpleQueue[int | OSError] = queue.SimpleQueue()
        count = max(0, min(size - 1 - BRANCHES * rank, BRANCHES))
        if count:
            address, token = own_address(), secrets.token_bytes(TOKEN_B)
            with socket.create_server((address, 0), backlog=count) as server:
                store.set(f"votes-of-{rank}", f"{address} {server.getsockname()[1]} {token.hex()}")
                if rank:
                    self._climb(store, rank, setup_s)
                server.settimeout(setup_s)
                while len(self.below) < count:
                    connection = server.accept()[0]
                    connection.settimeout(TOKEN_S)
                    with contextlib.suppress(OSError):  # nobody else votes
                        self.below += [connection] if _received(connection, TOKEN_B) == token else []
        elif rank:
            self._climb(store, rank, setup_s)
        for connection in self._connections():
            connection.settimeout(timeout_s)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=self._serve, name="energynn-votes", daemon=True).start()

    def cast(self, number: int) -> None:
        """Begin a vote; every rank begins as many."""
        self.mine.put(number)

    def result(self) -> int:
        """The greatest number of the oldest vote that has not been read. Raises OSError where a rank is lost."""
        result = self.results.get()
        if isinstance(result, OSError):
            self.results.put(result)
            raise result
        return result

    def close(self) -> None:
        """Let the connections go; every vote that was begun must have been read."""
        self.mine.put(None)

    def _climb(self, store: dist.Store, rank: int, setup_s: float) -> None:
        address, port, token = store.get(f"votes-of-{(rank - 1) // BRANCHES}").decode().split()
        self.above = socket.create_connection((address, int(port)), setup_s)
        self.above.sendall(bytes.fromhex(token))

    def _connections(self) -> list[socket.socket]:
        return [*self.below, self.above] if self.above else self.below

    def _serve(self) -> None:
        try:
            while (greatest := self.mine.get()) is not None:
                greatest = max([greatest, *(_received(connection, 1)[0] for connection in self.below)])
                if self.above:
                    self.above.sendall(bytes([greatest]))
                    greatest = _received(self.above, 1)[0]
                for connection in self.below:
                    connection.sendall(bytes([greatest]))
                self.results.put(greatest)
        except OSError as error:
            self.results.put(error)
        for connection in self._connections():  # those who wait for us hear at once that we have gone
            connection.close()


def _received(connection: socket.socket, length_B: int) -> bytes:
    """Exactly so many bytes. Raises OSError where the other side ends, or says nothing for too long."""
    data = b""
    while len(data) < length_B:
        try:
            part = connection.recv(length_B - len(data))
        except TimeoutError:
            raise TimeoutError(f"{connection.getpeername()[0]} was silent for {connection.gettimeout():g} s") from None
        if not part:
            raise ConnectionResetError("its connection was closed")
        data += part
    return data
