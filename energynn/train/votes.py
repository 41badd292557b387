"""A vote of all ranks beside the training: the greatest of their numbers, over a tree of few connections."""

from __future__ import annotations

import contextlib
import queue
import secrets
import socket
import threading
from typing import Protocol

from energynn.measure.clocks import own_address

BRANCHES = 16  # connections of a rank to those below it; 256 ranks are two levels below rank 0
TOKEN_B, TOKEN_S = 16, 5.0  # by which a rank shows that it is one, as soon as it is connected


class Store(Protocol):
    """What torch's stores can do: ``get`` waits until another rank has set the key."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...


class Votes:
    """The greatest of one number from 0 to 255 of each rank, again and again, while the ranks do other things.

    A mesh of all ranks has connections by the square of their number; in this tree each rank but the first has one to
    the rank above it. A thread of each rank waits for those below, sends the greatest number up, and what comes back
    down. The ranks find each other through ``store``, which all of them have.
    """

    def __init__(self, store: Store, rank: int, size: int, setup_s: float, timeout_s: float):
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

    def _climb(self, store: Store, rank: int, setup_s: float) -> None:
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
