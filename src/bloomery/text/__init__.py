"""Text and token ids: tokenizers, detokenization and chat templates. No torch, no HTTP."""
