"""Who may come in: API keys, and for a server on the loopback the Host a browser was led to.

Decided on the raw path of the connection and an exact table of routes, before anything of the request is looked at.
What is not in the table as open needs a key.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from hashlib import sha256
from ipaddress import ip_address

from starlette.datastructures import Headers

from bloomery.server.errors import Refusal


class Keys:
    def __init__(self, keys: Sequence[str]):
        self.digests = [sha256(key.encode()).digest() for key in keys]

    def check(self, headers: Headers) -> str:
        """A name for the key given, under which its prefixes are cached; empty where there is but one tenant.

        Every key is compared, in constant time, and by digest, so that neither length nor position shows.
        """
        if not self.digests:
            return ""
        given = [_bearer(value) for value in headers.getlist("authorization")]
        others = headers.getlist("x-api-key")
        if len(given) > 1 or len(others) > 1:
            raise _refusal("more than one key was sent: send one")
        digests = [sha256(key.encode()).digest() for key in (*given, *others) if key]
        matches = [
            own for own in self.digests for other in digests if hmac.compare_digest(own, other)
        ]
        if not matches:
            raise _refusal("the API key is not one of ours" if digests else "an API key is needed")
        return matches[0].hex()[:16] if len(self.digests) > 1 else ""


def _bearer(value: str) -> str:
    scheme, _, key = value.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _refusal(message: str) -> Refusal:
    advice = f"{message}. Send it as Authorization: Bearer KEY or x-api-key: KEY"
    return Refusal(401, advice, "invalid_api_key", "authentication", www_authenticate="Bearer")


class Hosts:
    """On the loopback only local names are answered, or a page elsewhere could have its own name lead here."""

    def __init__(self, bound: str, more: Sequence[str] = ()):
        self.any = not is_loopback(bound)
        self.names = {"localhost", bound.lower(), *(name.lower() for name in more)}

    def check(self, headers: Headers) -> None:
        given = headers.getlist("host")
        if len(given) > 1:
            raise Refusal(
                400, "more than one Host was sent: send one", "wrong_host", connection="close"
            )
        host = given[0].lower() if given else ""
        if host.startswith("["):
            name, _, port = host[1:].partition("]")
            port = port.removeprefix(":")
        else:
            name, _, port = host.partition(":")
        if self.any or (
            (not port or port.isdecimal()) and (name in self.names or is_loopback(name))
        ):
            return
        raise Refusal(
            421, "this server answers to local names only, such as localhost", "wrong_host"
        )


def is_loopback(host: str) -> bool:
    if host.startswith("/") or host.lower() == "localhost":  # a Unix socket, or the name
        return True
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
