"""The green lists of watermarked requests, exactly as TGI computes them on a CPU.

A token's green list is a prefix of torch.randperm from a CPU generator seeded by a prime times the
token before it, whatever device the logits are on. TGI on a GPU uses that GPU's generator, whose
lists differ. A permutation is sequential work, so the host computes it, on several threads, while
the device computes the logits. Lists are cached: text repeats its tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

TGI_PRIME = 15485863
MAX_CACHED_LISTS = 8192
NUM_THREADS = 8


class GreenLists:
    """Computes and caches green lists as bit sets."""

    def __init__(self, vocab_size: int, pack_token_bits: Callable[[np.ndarray, int], np.ndarray]):
        self.vocab_size = vocab_size
        self.pack_token_bits = pack_token_bits
        self.cache: OrderedDict[tuple[int, float], np.ndarray] = OrderedDict()
        self.threads: ThreadPoolExecutor | None = None  # started by the first lists

    def find(self, keys: Sequence[tuple[int, float]]) -> np.ndarray:
        """Return the lists [keys, words] int32 for (token before, gamma) pairs."""
        missing = [key for key in dict.fromkeys(keys) if key not in self.cache]
        if len(missing) == 1:
            self.cache[missing[0]] = self._compute(missing[0])
        elif missing:
            if self.threads is None:
                self.threads = ThreadPoolExecutor(NUM_THREADS, "watermark")
            self.cache.update(zip(missing, self.threads.map(self._compute, missing)))
        for key in keys:
            self.cache.move_to_end(key)
        lists = np.stack([self.cache[key] for key in keys])
        while len(self.cache) > MAX_CACHED_LISTS:
            self.cache.popitem(last=False)
        return lists

    def _compute(self, key: tuple[int, float]) -> np.ndarray:
        previous_token, gamma = key
        generator = torch.Generator().manual_seed(TGI_PRIME * previous_token)
        permutation = torch.randperm(self.vocab_size, generator=generator).numpy()
        return self.pack_token_bits(permutation[: int(self.vocab_size * gamma)], self.vocab_size)
