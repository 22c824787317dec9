"""Authentication: API keys, and the Host header of servers bound to the loopback interface.

Both are decided on the raw path and headers and on an exact table of routes, before anything
else of the request is read. A route that the table does not mark as public needs a key.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from hashlib import sha256
from ipaddress import ip_address

from starlette.datastructures import Headers

from bloomery.server.errors import HttpError


class ApiKeys:
    """The keys this server accepts, held as SHA-256 digests."""

    def __init__(self, keys: Sequence[str]):
        self.digests = [sha256(key.encode()).digest() for key in keys]

    def authenticate(self, headers: Headers) -> str:
        """Check the request's key and return its tenant name, which salts its prefix cache.

        The name is empty if the server has one key or none: all requests are then one tenant.
        Every key is compared by digest and in constant time, so that the time taken reveals
        neither the length of a key nor its position.
        """
        if not self.digests:
            return ""
        bearer_keys = [_bearer_key(value) for value in headers.getlist("authorization")]
        header_keys = headers.getlist("x-api-key")
        if len(bearer_keys) > 1 or len(header_keys) > 1:
            raise _authentication_error("more than one key was sent: send one")
        sent_digests = [
            sha256(key.encode()).digest() for key in (*bearer_keys, *header_keys) if key
        ]
        matches = [
            digest
            for digest in self.digests
            for sent in sent_digests
            if hmac.compare_digest(digest, sent)
        ]
        if not sent_digests:
            raise _authentication_error("an API key is needed")
        if not matches:
            raise _authentication_error("the API key is not valid")
        if len(self.digests) == 1:
            return ""
        return matches[0].hex()[:16]


def _bearer_key(value: str) -> str:
    scheme, _, key = value.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _authentication_error(message: str) -> HttpError:
    advice = f"{message}. Send it as Authorization: Bearer KEY or x-api-key: KEY"
    return HttpError(401, advice, "invalid_api_key", "authentication", www_authenticate="Bearer")


class AllowedHosts:
    """The Host header check of a server bound to the loopback interface.

    Such a server accepts local names only. Otherwise a web page could point its own domain name
    at the loopback address and use the server through the visitor's browser (DNS rebinding).
    """

    def __init__(self, bound_host: str, more_names: Sequence[str] = ()):
        self.accepts_any = not is_loopback(bound_host)
        self.names = {"localhost", bound_host.lower(), *(name.lower() for name in more_names)}

    def check(self, headers: Headers) -> None:
        """Raise an error if the request's Host header is not accepted."""
        values = headers.getlist("host")
        if len(values) > 1:
            raise HttpError(
                400, "more than one Host was sent: send one", "wrong_host", connection="close"
            )
        if self.accepts_any:
            return
        name, port = _split_host(values[0].lower() if values else "")
        valid_port = not port or port.isdecimal()
        if valid_port and (name in self.names or is_loopback(name)):
            return
        message = (
            "this server answers to local names only, such as localhost; to serve other names, "
            "start it with --allowed-hosts NAME,..."
        )
        raise HttpError(421, message, "wrong_host")


def _split_host(host: str) -> tuple[str, str]:
    """The name and port of a Host header. An IPv6 address is in brackets."""
    if host.startswith("["):
        name, _, port = host[1:].partition("]")
        return name, port.removeprefix(":")
    name, _, port = host.partition(":")
    return name, port


def is_loopback(host: str) -> bool:
    """Whether a bind address or the name in a Host header is local. So is a Unix socket's path."""
    if host.startswith("/") or host.lower() == "localhost":
        return True
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
