"""The green list of a watermark on the device, exactly as TGI computes it on a CPU.

The green list of a token is the beginning of a random permutation of all tokens: that of
torch.randperm, from a CPU generator whose seed is a prime times the token before. (TGI on a GPU
uses that GPU's generator, whose permutations differ.) torch shuffles the tokens: for i = 0, 1, 2,
and so on it swaps the token at position i with the one at i + (random word % (n - i)), where the
random words are those of a Mersenne Twister. That is a chain of dependent steps, but the tokens
that end up behind the green ones can be found at the same time:

- `draw_swaps` computes the random words, 624 at a time, and stores for each position the last step
  that swapped it with an earlier position.
- The token that ends at a position behind the green ones came from the position of that step. What
  was there came from an earlier position in the same way, and so on. Where no step has touched the
  position, the token is the one that was there at first. `follow_swaps` follows these chains, which
  are short: two steps in the mean.

This file must not know requests or watermarks' strengths.
"""

from __future__ import annotations

import torch

from bloomery.kernels.launch import jit, tl

TGI_PRIME = 15485863
STATE_WORDS = 624  # of a Mersenne Twister


def find_green_list(previous_token: int, num_green: int, vocab_size: int) -> torch.Tensor:
    """Return the green tokens [num_green] after a token: the slow reference."""
    generator = torch.Generator().manual_seed(TGI_PRIME * previous_token)
    return torch.randperm(vocab_size, generator=generator)[:num_green]


@jit
def draw_swaps(
    previous_token,
    num_green,
    vocab_size,
    swaps,  # [vocab]
    TGI_PRIME: tl.constexpr = TGI_PRIME,
    STATE_WORDS: tl.constexpr = STATE_WORDS,
):
    """Store the last step that swapped each position with an earlier one; -1 if none did.

    Only the first `num_green` steps count.
    """
    WIDTH: tl.constexpr = 1024
    lane = tl.arange(0, WIDTH)
    for start in range(0, vocab_size, WIDTH):
        tl.store(swaps + start + lane, -1, mask=start + lane < vocab_size)
    tl.debug_barrier()
    word = previous_token.to(tl.uint32) * TGI_PRIME
    state = tl.where(lane == 0, word, tl.zeros([WIDTH], tl.uint32))
    for j in range(1, STATE_WORDS):
        word = (word ^ (word >> 30)) * 1812433253 + j
        state = tl.where(lane == j, word, state)
    num_steps = tl.minimum(num_green, vocab_size - 1)
    for first in range(0, num_steps, STATE_WORDS):
        state = advance_twister(state, lane)
        step = first + lane
        valid = (lane < STATE_WORDS) & (step < num_steps)
        num_left = tl.where(valid, vocab_size - step, 1).to(tl.uint32)
        offset = (temper_words(state) % num_left).to(tl.int32)
        tl.atomic_max(swaps + step + offset, step, mask=valid & (offset != 0), sem="relaxed")


@jit
def advance_twister(state, lane):
    """Compute the next 624 words of the generator's state; each needs words 397 further on.

    The first 227 words need old ones only. The next 227 need these, and the others need those. The
    last word also needs the first new one.
    """
    words = tl.gather(state, tl.minimum(lane + 397, 1023), 0)
    following = tl.gather(state, tl.minimum(lane + 1, 1023), 0)
    twisted = twist_words(state, following)
    words ^= twisted
    back = tl.maximum(lane - 227, 0)
    earlier = tl.gather(words, tl.where(lane == 623, 0, back), 0)
    twisted = tl.where(lane == 623, twist_words(state, earlier), twisted)
    words = tl.where(lane < 227, words, earlier ^ twisted)
    return tl.where(lane < 454, words, tl.gather(words, back, 0) ^ twisted)


@jit
def twist_words(words, following):
    """Mix the highest bit of each word with the other bits of the next."""
    mixed = (words & 0x80000000) | (following & 0x7FFFFFFF)
    odd = (following & 1) != 0
    return (mixed >> 1) ^ tl.where(odd, tl.full(words.shape, 0x9908B0DF, tl.uint32), 0)


@jit
def temper_words(words):
    """Turn words of the state into random words."""
    words = words ^ (words >> 11)
    words = words ^ ((words << 7) & 0x9D2C5680)
    words = words ^ ((words << 15) & 0xEFC60000)
    return words ^ (words >> 18)


@jit
def follow_swaps(swaps, positions, valid):
    """Return the tokens that the shuffle leaves at positions behind the green ones."""
    tokens = positions
    step = tl.load(swaps + positions, mask=valid, other=-1, cache_modifier=".cg")
    while tl.max(step, 0) >= 0:
        moved = step >= 0
        tokens = tl.where(moved, step, tokens)
        step = tl.load(swaps + tokens, mask=moved, other=-1, cache_modifier=".cg")
    return tokens
