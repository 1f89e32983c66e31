"""Where the server listens. Nothing here takes long to import, so that all of it is known before a model is read."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bateleur.runner.serve.config import ServeConfig


@contextmanager
def bound_socket(config: ServeConfig) -> Iterator[socket.socket]:
    """The socket to listen on, bound before anything that takes long. OSError, naming the address, if it can't be."""
    if config.uds is not None:
        _clear(config.uds)
        place, where = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), str(config.uds)
    else:
        family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
        # asyncio turns off Nagle's algorithm only where the protocol is named: else a token that comes behind the head
        # of its reply may wait 40 ms until the client acknowledges that.
        place = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        where = f"{config.host}:{config.port}"
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    with place:
        try:
            place.bind(where if config.uds is not None else (config.host, config.port))
        except OSError as error:
            raise OSError(error.errno, error.strerror, where) from error
        try:
            yield place
        finally:
            if config.uds is not None:
                config.uds.unlink(missing_ok=True)


def client_url(place: socket.socket, config: ServeConfig) -> str:
    """Where clients find it."""
    if config.uds is not None:
        return f"unix:{config.uds}"
    host, port = place.getsockname()[:2]
    scheme = "http" if config.ssl_certfile is None else "https"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def check_tls(config: ServeConfig) -> None:
    """ValueError, naming the files, if the certificate, its key or the authorities can't be read."""
    if config.ssl_certfile is None:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # No terminal is asked for a passphrase.
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password="")
        if config.ssl_ca_certs is not None:
            context.load_verify_locations(config.ssl_ca_certs)
    except OSError as error:
        names = [
            f"{name} is {str(path)!r}"
            for name in ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs")
            if (path := getattr(config, name)) is not None
        ]
        raise ValueError(
            f"{', '.join(names)}; they must be PEM files that fit, and ask for no passphrase: {error}"
        ) from error


def _clear(path: Path) -> None:
    """Remove a socket at which nobody listens any more, since its server was killed."""
    if not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
        try:
            caller.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
