"""The address under which the ranks of a run meet."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct

ADDRESS_OF_INTERFACE = 0x8915  # SIOCGIFADDR of Linux


def address_for_ranks(alone: bool) -> str:
    """An address of rank 0, whose host this is, for the other ranks; the loopback if they are all here."""
    return "127.0.0.1" if alone else os.environ.get("MASTER_ADDR") or own_address()


def own_address() -> str:
    """An address of this host under which other hosts reach it; the loopback where there is no network.

    It is that of the interface which is named for gloo or NCCL, where one is.
    """
    for interface in _named_interfaces():
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe,
        ):
            name = struct.pack("256s", interface.encode())
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), ADDRESS_OF_INTERFACE, name)[20:24])
    with contextlib.suppress(OSError):  # the host's own name need not resolve
        address = socket.gethostbyname(socket.gethostname())
        if not address.startswith("127."):
            return address
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(
            ("192.0.2.1", 9)
        )  # sends nothing; asks which address a packet to outside would carry
        return probe.getsockname()[0]
    return "127.0.0.1"


def _named_interfaces() -> list[str]:
    """Interfaces of this host that are named: NCCL takes beginnings, too, and "=" before whole names."""
    here = [name for _, name in socket.if_nameindex()]
    of_gloo, of_nccl = (
        os.environ.get(f"{library}_SOCKET_IFNAME", "") for library in ("GLOO", "NCCL")
    )
    whole = [*of_gloo.split(","), *of_nccl.removeprefix("=").split(",")]
    beginnings = () if of_nccl.startswith(("=", "^")) else tuple(filter(None, of_nccl.split(",")))
    return [
        *(name for name in whole if name in here),
        *(name for name in here if name.startswith(beginnings)),
    ]
