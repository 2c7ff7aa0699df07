"""Address, token and environment of a Ray connection. Does not import Ray."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

from cluster.base import ClusterError

CONNECT_TIMEOUT_S = 5.0


def require_listener(address: str) -> None:
    """Raise ClusterError at once where nothing listens at ``address``; Ray itself would try for a minute."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ClusterError(f"cluster address {address!r} is not of the form host:port, nor 'auto'")
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise ClusterError(
            f"nothing answers at {address} ({error}); start the head with `ray start --head`, or correct the address"
        ) from None


def fresh_token(folder: Path) -> dict[str, str]:
    """Environment for authentication with a new token, kept in ``folder``; empty if the user has turned that off."""
    if os.environ.get("RAY_AUTH_MODE", "").lower() == "disabled":
        return {}
    path = folder / "token"
    path.touch(mode=0o600)
    path.write_text(secrets.token_hex(32), encoding="ascii")
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(path), "RAY_AUTH_TOKEN": ""}  # which would come first


@contextlib.contextmanager
def environment(changes: Mapping[str, str]) -> Iterator[None]:
    """Set the environment variables ``changes`` while inside."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def last_line(error: Exception) -> str:
    """The last line of the error's message, which names the cause where Ray repeats a traceback of another process."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()


def first_line(error: Exception) -> str:
    """The first line of the error's message; its type's name where it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
