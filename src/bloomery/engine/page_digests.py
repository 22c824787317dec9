"""Names of prefixes: a digest for every page of a sequence, which covers all tokens up to its end.

The prefix cache finds pages by these digests. They are cryptographic, so no client can construct
two prefixes that share one. Requests share prefixes only if their digests begin with the same root.
"""

from __future__ import annotations

from array import array
from hashlib import blake2b

from bloomery.engine.sequence import Sequence
from bloomery.messages import EngineRequest

DIGEST_BYTES = 32


def root_digest(request: EngineRequest) -> bytes:
    """The digest of the empty prefix. It differs for requests that must not share anything."""
    salt = request.cache_salt.encode(errors="surrogatepass")
    return blake2b(salt, digest_size=DIGEST_BYTES, person=b"salt").digest()


def extend_digest(digest: bytes, tokens: list[int]) -> bytes:
    """The digest of a prefix that goes on with these tokens."""
    return blake2b(digest + array("I", tokens).tobytes(), digest_size=DIGEST_BYTES).digest()


def page_digests(sequence: Sequence, num_pages: int, page_size: int) -> list[bytes]:
    """Return the digests of at least the first `num_pages` pages; the sequence keeps them."""
    digests = sequence.page_digests
    digest = digests[-1] if digests else root_digest(sequence.request)
    for page in range(len(digests), num_pages):
        digest = extend_digest(digest, sequence.tokens[page * page_size : (page + 1) * page_size])
        digests.append(digest)
    return digests
