"""What may go wrong, in the reader's words; each with the HTTP status it becomes.

A message says what was wrong, where, and what to do. Nothing here names an internal address or path
that a client could use; file paths appear only in errors a person at the terminal sees.
"""

from __future__ import annotations


class BloomeryError(Exception):
    """Everything we raise on purpose."""

    status = 500


class InvalidRequest(BloomeryError):
    """The request itself is wrong; sending it again will not help. `field` names the culprit."""

    status = 400

    def __init__(self, message: str, field: str | None = None):
        super().__init__(message)
        self.field = field


class PromptTooLong(InvalidRequest):
    """The prompt does not fit the context."""


class ConfigError(BloomeryError):
    """A flag, a variable or an argument that cannot be honoured."""


class ModelNotFound(BloomeryError):
    """No such folder, file or Hub id."""

    status = 404


class UnsupportedModel(BloomeryError):
    """An architecture or a configuration value we do not know. Never guessed, always named."""


class CheckpointError(BloomeryError):
    """A weight file that is truncated, swapped, incomplete or of a kind we refuse to read."""


class TemplateError(InvalidRequest):
    """The chat template refused the messages, or the model has none."""


class TokenizerError(BloomeryError):
    """The tokenizer files are missing, unreadable or of a kind we do not know."""


class RequestFailed(BloomeryError):
    """This one request could not be finished; others are unharmed."""
