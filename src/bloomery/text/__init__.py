"""Text and tokens: tokenizers, text as it is generated, chat templates. No torch, no requests, no transport."""
