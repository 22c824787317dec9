"""Names of prefixes: a digest for every page of a sequence, which covers all tokens up to its end.

The prefix cache finds pages by these digests. They are cryptographic, so no client can construct
two prefixes that share one. Requests share prefixes only if their digests begin with the same root.
"""

from __future__ import annotations

from array import array
from hashlib import blake2b

from bloomery.engine.sequence import Sequence

DIGEST_BYTES = 32


def root_digest(sequence: Sequence) -> bytes:
    """The digest of the empty prefix. It differs for sequences that must not share anything.

    Keys and values depend on the LoRA adapter and the version of its weights.
    """
    request = sequence.request
    salt = request.cache_salt.encode(errors="surrogatepass")
    digest = blake2b(salt, digest_size=DIGEST_BYTES, person=b"salt").digest()
    if not request.lora:
        return digest
    for text in (request.lora, sequence.adapter_version):
        data = digest + text.encode(errors="surrogatepass")
        digest = blake2b(data, digest_size=DIGEST_BYTES, person=b"lora").digest()
    return digest


def extend_digest(digest: bytes, tokens: list[int]) -> bytes:
    """The digest of a prefix that goes on with these tokens."""
    return blake2b(digest + array("I", tokens).tobytes(), digest_size=DIGEST_BYTES).digest()


def page_digests(sequence: Sequence, num_pages: int, page_size: int) -> list[bytes]:
    """Return the digests of at least the first `num_pages` pages; the sequence keeps them."""
    digests = sequence.page_digests
    digest = digests[-1] if digests else root_digest(sequence)
    for page in range(len(digests), num_pages):
        digest = extend_digest(digest, sequence.tokens[page * page_size : (page + 1) * page_size])
        digests.append(digest)
    return digests
