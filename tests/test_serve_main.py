"""The port is bound before anything is loaded, and the errors say what to do."""

from __future__ import annotations

import socket

import pytest

from bloomery.errors import ConfigError
from bloomery.serve_main import open_listeners
from tests.chaos.http import free_port


def test_a_client_can_connect_before_the_server_accepts() -> None:
    port = free_port()
    listeners = open_listeners("127.0.0.1", port)
    with socket.create_connection(("127.0.0.1", port), timeout=5):
        pass
    for listener in listeners:
        listener.close()


def test_a_port_in_use_is_one_sentence_with_a_free_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} of 127.0.0.1 is in use") as raised:
            open_listeners("127.0.0.1", port)
    suggested = int(str(raised.value).rpartition("--port ")[2])
    assert suggested > port
    for listener in open_listeners("127.0.0.1", suggested):
        listener.close()


@pytest.mark.parametrize("host", ["no-such-host.invalid", "192.0.2.1"])
def test_an_address_of_another_machine_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match=host):
        open_listeners(host, free_port())
