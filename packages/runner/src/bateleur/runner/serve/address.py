"""Listening socket and TLS files. Imports are light, so that errors appear before the model is loaded."""

import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bateleur.runner.serve.config import ServeConfig


@contextmanager
def bound_socket(config: ServeConfig) -> Iterator[socket.socket]:
    """Bind the listening socket. Raises OSError with the address if that fails."""
    if config.uds is not None:
        _clear(config.uds)
        listener, where = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), str(config.uds)
    else:
        family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
        # asyncio disables Nagle's algorithm only if the protocol is given. With Nagle, the first token waits up to
        # 40 ms for the acknowledgement of the reply's head.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        where = f"{config.host}:{config.port}"
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    with listener:
        try:
            listener.bind(where if config.uds is not None else (config.host, config.port))
        except OSError as error:
            raise OSError(error.errno, error.strerror, where) from error
        try:
            yield listener
        finally:
            if config.uds is not None:
                config.uds.unlink(missing_ok=True)


def client_url(listener: socket.socket, config: ServeConfig) -> str:
    """Return the URL that clients connect to."""
    if config.uds is not None:
        return f"unix:{config.uds}"
    host, port = listener.getsockname()[:2]
    scheme = "http" if config.ssl_certfile is None else "https"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def check_tls(config: ServeConfig) -> None:
    """Raise ValueError with the file names if the certificate, its key or the CA certificates cannot be loaded."""
    if config.ssl_certfile is None:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # An empty password prevents a prompt for the passphrase.
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password="")
        if config.ssl_ca_certs is not None:
            context.load_verify_locations(config.ssl_ca_certs)
    except OSError as error:
        names = ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs")
        given = [f"{name} is {str(path)!r}" for name in names if (path := getattr(config, name)) is not None]
        rule = "they must be matching PEM files without a passphrase"
        raise ValueError(f"{', '.join(given)}; {rule}: {error}") from error


def _clear(path: Path) -> None:
    """Remove the socket file if its server no longer runs (connections are refused); else leave it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
        try:
            if path.is_socket():
                caller.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
