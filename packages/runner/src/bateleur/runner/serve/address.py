"""Where the server listens. Nothing here takes long to import, so that an address is taken before a model is read."""

from __future__ import annotations

import socket

from bateleur.runner.serve.config import ServeConfig


def bind(config: ServeConfig) -> socket.socket:
    """The socket to listen on, bound before anything that takes long. OSError, naming the address, if it can't be."""
    if config.uds is not None:
        place, where = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), str(config.uds)
    else:
        family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
        place, where = socket.socket(family, socket.SOCK_STREAM), f"{config.host}:{config.port}"
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        place.bind(where if config.uds is not None else (config.host, config.port))
    except OSError as error:
        place.close()
        raise OSError(error.errno, error.strerror, where) from error
    return place


def address_of(place: socket.socket, config: ServeConfig) -> str:
    """Where clients find it."""
    if config.uds is not None:
        return f"unix:{config.uds}"
    host, port = place.getsockname()[:2]
    scheme = "http" if config.ssl_certfile is None else "https"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
