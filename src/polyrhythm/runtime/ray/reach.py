"""Whether a Ray cluster answers at an address, in seconds and without Ray, whose own attempts may wait for minutes."""

from __future__ import annotations

import socket

from polyrhythm.errors import StartError

#: Seconds until a cluster's port must answer.
_REACH_S = 5.0
#: What begins a connection of HTTP/2, which gRPC uses: the preface and an empty frame of settings.
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
#: The kind of HTTP/2's frames of settings, which are a server's first, and of TLS's alerts.
_SETTINGS, _ALERT = b"\x04", b"\x15"
LOCAL = "local"


def check_reachable(address: str) -> None:
    """StartError unless a server of gRPC, as a cluster's head is, answers at HOST:PORT within 5 s: with a frame of
    settings or, where it wants TLS, with an alert or nothing. `local` and `auto` are not looked for."""
    host, _, port = address.rpartition(":")
    if not host:
        return
    try:
        with socket.create_connection((host, int(port)), _REACH_S) as connection:
            connection.settimeout(_REACH_S)
            connection.sendall(_HELLO)
            answer = connection.recv(9)
    except TimeoutError as error:
        raise _refusal(address, f"no cluster answers there within {_REACH_S:g} s") from error
    except ConnectionResetError:
        return
    except (OSError, OverflowError, UnicodeError) as error:
        raise _refusal(address, f"no cluster answers there ({error})") from error
    if answer.startswith(b"HTTP"):
        raise _refusal(address, "a web server answers there, which is no head node (perhaps Ray's dashboard)")
    if answer and answer[3:4] != _SETTINGS and answer[:1] != _ALERT:
        raise _refusal(address, f"what answers there is no head node (it says {answer!r})")


def _refusal(address: str, problem: str) -> StartError:
    return StartError(
        f"ray.address = {address}: {problem}; start one with `ray start --head` and name the address that it prints, "
        f"or set ray.address to {LOCAL} for one on this machine"
    )
