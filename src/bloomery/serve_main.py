"""The entry point of `bloomery serve`. It does what must happen before the slow imports.

The port is bound first, so that a port in use is reported at once and clients wait instead of being
refused. Importing torch is a long part of the start-up. The engine process begins with that before
this process has imported the HTTP server (serve.py), so both imports run side by side.
"""

from __future__ import annotations

import contextlib
import errno
import socket

from bloomery.config import (
    MAX_PORT,
    EngineConfig,
    ServerConfig,
    resolve_device,
    use_cache_directory,
)
from bloomery.errors import ConfigError
from bloomery.ipc import build_engine_command, spawn_child
from bloomery.logs import resolve_log_format

BACKLOG = 2048  # connections that wait until they are accepted
NUM_TRIED_PORTS = 20  # for a suggestion when a port is in use


def prestart_engine_and_serve(config: EngineConfig, server_config: ServerConfig) -> int:
    """Bind the port, start the engine process if possible, then serve; return the exit status."""
    use_cache_directory(config.cache_dir)
    num_ranks = config.tensor_parallel_size * config.pipeline_parallel_size
    is_single_worker = num_ranks * server_config.replicas == 1 and config.executor == "auto"
    with contextlib.ExitStack() as cleanup:
        listeners = open_listeners(server_config.host, server_config.port)
        for listener in listeners:
            cleanup.enter_context(listener)
        prestarted = None
        device = resolve_device(config.device)
        if is_single_worker and device in ("cpu", "cuda"):
            log_format = resolve_log_format(server_config.log_format)
            command = build_engine_command(log_format, device, server_config.log_level)
            prestarted = spawn_child(command)
            # serve() may not take it over, or may have ended it already.
            cleanup.callback(prestarted.kill)
        from bloomery.serve import serve

        return serve(config, server_config, listeners, prestarted)


def open_listeners(host: str, port: int) -> list[socket.socket]:
    """Listen on all addresses of `host`."""
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise ConfigError(f"host {host!r} is not a known address: {error.strerror}") from None
    listeners: list[socket.socket] = []
    for family, address in dict.fromkeys((entry[0], entry[4]) for entry in addresses):
        try:
            listeners.append(_listen(family, address))
        except OSError as error:
            if error.errno in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL) and len(addresses) > 1:
                continue  # a name may have an IPv6 address on a machine without IPv6
            for listener in listeners:
                listener.close()
            raise _listen_error(error, host, port) from None
    if not listeners:
        raise ConfigError(f"host {host!r} is not an address of this machine")
    return listeners


def _listen(family: socket.AddressFamily, address: tuple[object, ...]) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def _listen_error(error: OSError, host: str, port: int) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        free_port = _find_free_port(host, port)
        suggestion = f"--port {free_port}" if free_port else "--port"
        return ConfigError(
            f"port {port} of {host} is in use by another program; choose another with {suggestion}"
        )
    if error.errno == errno.EACCES:
        return ConfigError(
            f"port {port} may not be used by this user; choose one above 1023 with --port"
        )
    return ConfigError(f"cannot listen on {host}, port {port}: {error.strerror}")


def _find_free_port(host: str, port: int) -> int | None:
    """A free port above `port`, for the suggestion in an error."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for candidate in range(port + 1, min(port + NUM_TRIED_PORTS, MAX_PORT) + 1):
        with contextlib.suppress(OSError):
            _listen(family, (host, candidate)).close()
            return candidate
    return None
