"""Ports of loopback for servers that a test starts later."""

import socket


def free_port() -> int:
    """Return a free loopback port for a server that is started later; it stays reserved while this process lives.

    A socket that never listens holds it: the kernel then assigns it to no other program, and a server that asks for it
    by number, with SO_REUSEADDR as servers do, gets it.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    port = int(reserved.getsockname()[1])
    reserved.detach()
    return port
