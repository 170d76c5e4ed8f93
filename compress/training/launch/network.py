"""Which of this machine's addresses and network interfaces the other machines reach it by."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

SIOCGIFADDR = 0x8915  # linux/sockios.h
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def own_address(endpoint: str, hosts: bool) -> str:
    """Return the address by which the other nodes of a rendezvous reach this one.

    The host's name often means 127.0.1.1 to itself (Debian), so that asking for it will not do.

    Args:
        endpoint: the rendezvous, ``host:port``.
        hosts: whether this machine is the endpoint.

    Raises:
        OSError: the endpoint's name is not known here.
    """
    host, _, port = endpoint.rpartition(":")
    host = host.strip("[]")
    if hosts:
        return host
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, int(port), type=socket.SOCK_DGRAM
    )[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # a datagram socket: the route is looked up, and nothing is sent
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """Return the network interface that has an IPv4 address, where one has."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(asked.fileno(), SIOCGIFADDR, request)
            except OSError:
                continue  # an interface without an address
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None


@contextmanager
def interface_named(address: str) -> Iterator[None]:
    """Name this machine's interface to gloo and NCCL for a block, unless the user has.

    Gloo would else listen on what the host's own name means.
    """
    try:
        name = interface_of(socket.gethostbyname(address))
    except OSError:
        name = None
    missing = [key for key in INTERFACES if name and key not in os.environ]
    os.environ.update({key: str(name) for key in missing})
    try:
        yield
    finally:
        for key in missing:
            os.environ.pop(key, None)
