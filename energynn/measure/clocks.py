"""The clocks of several hosts on one: each host's sampler asks one of them, the reference, what time it has.

Monotonic clocks start at boot, so those of two hosts have nothing in common. The samplers find each other through the
run's folder, without MPI and without the ranks, so that it works under any launcher.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

FILE = "clock.json"
ROUND_TRIPS = 20
REPLY_S = 0.1  # no network inside of a machine takes as long; a datagram without an answer by then is lost
ADDRESS_OF_INTERFACE = 0x8915  # SIOCGIFADDR of Linux
REQUEST = struct.Struct("!16sq")  # the reference's token, the asking host's monotonic ns
REPLY = struct.Struct("!16sqq")  # the request, the reference's monotonic ns


class Clock:
    """One host's clock among those of a run: the first host to come is the reference and answers the others.

    They talk over UDP: one datagram each way has no connection to set up, keep or wait for, one blocking thread
    serves every host, and a loss costs one round trip of many. A datagram without the token in clock.json, which only
    readers of the run's folder know, gets no answer. No error of files or network leaves this class: a host whose
    clock cannot be measured is still to be sampled.
    """

    def __init__(self, run_dir: Path, host: str, monotonic_ns: Callable[[], int] = time.monotonic_ns):
        """Become the reference or leave it to the one that is there; ``monotonic_ns`` is another clock for tests."""
        self.path, self.host, self.monotonic_ns = run_dir / FILE, host, monotonic_ns
        self.token = secrets.token_bytes(16)
        self.exchanged = self.closing = False
        self.reference: dict | None = None  # as read once: a file system that stands still must not stop the samples
        self.thread: threading.Thread | None = None
        with contextlib.suppress(OSError):
            self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            self.socket.bind(("", 0))
            self._claim()
            # Read the file: over NFS a claim can succeed and still be reported as failed.
            if self._is_reference(self._read()):
                self.thread = threading.Thread(target=self._answer, name="energynn-clock", daemon=True)
                self.thread.start()
            else:
                self.socket.close()

    def measure(self, patience_s: float = 2.0) -> dict | None:
        """How far this host's monotonic clock is from the reference's, in ns: ``offset_ns`` = reference - own.

        The offset is that of the shortest of 20 round trips (``method`` exchange). It is wrong by half of this trip at
        most, which is ``uncertainty_ns``. If the reference does not answer within ``patience_s``, the offset is the
        difference of the wall clocks, as good as the hosts' NTP (``uncertainty_ns`` None). Returns None if an exchange
        has succeeded before, because that one is better, and if clock.json cannot be read.
        """
        reference = self._read()
        if reference is None:
            return None
        if self._is_reference(reference):
            return self._result(reference, 0, 0, "reference")
        try:
            round_trip_ns, offset_ns = self._exchange(reference, patience_s)
        except (OSError, ValueError, TypeError, OverflowError):  # silence, or no address and port at all
            if self.exchanged:
                return None
            offset_ns = self._wall_minus_monotonic_ns() - reference["wall_minus_monotonic_ns"]
            return self._result(reference, offset_ns, None, "wall clock")
        self.exchanged = True
        return self._result(reference, offset_ns, (round_trip_ns + 1) // 2, "exchange")

    def close(self) -> None:
        """Stop answering; the end of the process does it too."""
        self.closing = True
        if self.thread:
            with contextlib.suppress(OSError):  # closing a socket does not wake who waits for it; a datagram does
                self.socket.sendto(b"", ("127.0.0.1", self.socket.getsockname()[1]))
                self.thread.join(REPLY_S)
            self.socket.close()

    def _claim(self) -> None:
        """Write clock.json whole or not at all; the first one stays."""
        temporary = self.path.with_name(f".{FILE}.{self.host}.{os.getpid()}")
        try:
            claim = {
                "host": self.host,
                "address": own_address(),
                "port": self.socket.getsockname()[1],
                "token": self.token.hex(),
                "wall_minus_monotonic_ns": self._wall_minus_monotonic_ns(),
            }
            temporary.write_text(json.dumps(claim) + "\n")
            with contextlib.suppress(FileExistsError):
                os.link(temporary, self.path)
        finally:
            temporary.unlink(missing_ok=True)

    def _read(self) -> dict | None:
        """What clock.json says of the reference; None if it cannot be read."""
        if self.reference:
            return self.reference
        kinds = {"host": str, "address": str, "port": int, "token": str, "wall_minus_monotonic_ns": int}
        with contextlib.suppress(OSError, ValueError):
            claim = json.loads(self.path.read_text())
            if isinstance(claim, dict) and all(isinstance(claim.get(name), kind) for name, kind in kinds.items()):
                self.reference = claim
                return claim
        return None

    def _is_reference(self, claim: dict | None) -> bool:
        return claim is not None and claim["token"] == self.token.hex()

    def _answer(self) -> None:
        while not self.closing:
            with contextlib.suppress(OSError):  # Linux reports here that an earlier answer could not be delivered
                request, sender = self.socket.recvfrom(REPLY.size)
                if len(request) == REQUEST.size and request.startswith(self.token):
                    self.socket.sendto(request + self.monotonic_ns().to_bytes(8, signed=True), sender)

    def _exchange(self, reference: dict, patience_s: float) -> tuple[int, int]:
        """Shortest round trip and the offset it gives, both in ns; OSError or ValueError if no reply came."""
        token = bytes.fromhex(reference["token"])
        trips = []
        deadline = time.monotonic() + patience_s
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as connection:
            connection.connect((reference["address"], reference["port"]))  # so that a refusal is heard at once
            for _ in range(ROUND_TRIPS):
                connection.settimeout(min(REPLY_S, max(1e-3, deadline - time.monotonic())))
                connection.send(REQUEST.pack(token, self.monotonic_ns()))
                with contextlib.suppress(TimeoutError, struct.error):
                    # The reply carries the time of its request: one that comes late is a long trip, never a wrong one.
                    _, sent_ns, reference_ns = REPLY.unpack(connection.recv(REPLY.size))
                    received_ns = self.monotonic_ns()
                    trips.append((received_ns - sent_ns, reference_ns - (sent_ns + received_ns) // 2))
                if time.monotonic() > deadline:
                    break
        return min(trips)

    def _result(self, reference: dict, offset_ns: int, uncertainty_ns: int | None, method: str) -> dict:
        return {
            "host": self.host,
            "reference": reference["host"],
            "offset_ns": offset_ns,
            "uncertainty_ns": uncertainty_ns,
            "method": method,
        }

    def _wall_minus_monotonic_ns(self) -> int:
        return time.time_ns() - self.monotonic_ns()


def align(monotonic_ns: np.ndarray | int, measurements: list[dict]) -> np.ndarray | int:
    """Instants of a host's monotonic clock in ns as the reference's monotonic clock shows them.

    ``measurements`` are results of ``Clock.measure``, each with ``t``, the host's own monotonic ns when it was made:
    between them the offset drifts linearly, outside of them it is constant. Wall clocks count only where there is no
    exchange. Raises ValueError if there is no measurement.
    """
    measurements = [m for m in measurements if m["method"] != "wall clock"] or measurements
    if not measurements:
        raise ValueError("the clock of this host was never measured; its times cannot be aligned")
    first, *_ = measurements = sorted(measurements, key=lambda measurement: measurement["t"])
    # float64 holds whole ns up to 104 days: enough for the length of a run, not for an uptime or an offset.
    drift_ns = np.interp(
        np.asarray(monotonic_ns, dtype=np.int64) - first["t"],
        [m["t"] - first["t"] for m in measurements],
        [m["offset_ns"] - first["offset_ns"] for m in measurements],
    )
    aligned_ns = monotonic_ns + first["offset_ns"] + np.rint(drift_ns).astype(np.int64)
    return aligned_ns if isinstance(monotonic_ns, np.ndarray) else int(aligned_ns)


def on_own(reference_ns: int, measurements: list[dict]) -> int:
    """An instant of the reference's monotonic clock in ns as the host's own shows it; see ``align``."""
    nearly_ns = reference_ns - align(0, measurements)
    return nearly_ns - (align(nearly_ns, measurements) - reference_ns)


def address_for_ranks(alone: bool) -> str:
    """An address of rank 0, whose host this is, for the other ranks; the loopback if they are all here."""
    return "127.0.0.1" if alone else os.environ.get("MASTER_ADDR") or own_address()


def own_address() -> str:
    """An address of this host under which other hosts reach it; the loopback where there is no network.

    It is that of the interface which is named for gloo or NCCL, where one is.
    """
    for interface in _named_interfaces():
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            name = struct.pack("256s", interface.encode())
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), ADDRESS_OF_INTERFACE, name)[20:24])
    with contextlib.suppress(OSError):  # the host's own name need not resolve
        address = socket.gethostbyname(socket.gethostname())
        if not address.startswith("127."):
            return address
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing; asks which address a packet to outside would carry
        return probe.getsockname()[0]
    return "127.0.0.1"


def _named_interfaces() -> list[str]:
    """Interfaces of this host that are named: NCCL takes beginnings, too, and "=" before whole names."""
    here = [name for _, name in socket.if_nameindex()]
    of_gloo, of_nccl = (os.environ.get(f"{library}_SOCKET_IFNAME", "") for library in ("GLOO", "NCCL"))
    whole = [*of_gloo.split(","), *of_nccl.removeprefix("=").split(",")]
    beginnings = () if of_nccl.startswith(("=", "^")) else tuple(filter(None, of_nccl.split(",")))
    return [*(name for name in whole if name in here), *(name for name in here if name.startswith(beginnings))]
