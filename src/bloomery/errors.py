"""The exceptions that Bloomery raises on purpose, each with the HTTP status it becomes.

A message says what was wrong, where, and what to do. Messages that clients see must not name
internal addresses or paths; file paths appear only in errors that a person at the terminal sees.
"""

from __future__ import annotations


class BloomeryError(Exception):
    """The base of all errors that are raised on purpose."""

    status = 500


class InvalidRequest(BloomeryError):
    """The request itself is wrong, so repeating it does not help. `field` is the wrong field."""

    status = 400

    def __init__(self, message: str, field: str | None = None):
        super().__init__(message)
        self.field = field


class PromptTooLong(InvalidRequest):
    """The prompt does not fit the context."""


class NonTextInput(InvalidRequest):
    """The request has an image, or other content that is not text."""


class TemplateError(InvalidRequest):
    """The chat template refused the messages, or the model has no chat template."""


class RenderedChatTooLong(PromptTooLong, TemplateError):
    """The chat template wrote more than the context can hold."""


class ConfigError(BloomeryError):
    """A flag, an environment variable or an argument has a value that cannot be used."""


class ModelNotFound(BloomeryError):
    """There is no such folder, file or Hub id."""

    status = 404


class UnsupportedModel(BloomeryError):
    """An architecture or a configuration value is unknown. It is named and never guessed."""


class CheckpointError(BloomeryError):
    """A weight file is truncated, incomplete, inconsistent or of a kind that is not read."""


class TokenizerError(BloomeryError):
    """The tokenizer files are missing, unreadable or of an unknown kind."""


class RequestFailed(BloomeryError):
    """This request could not be finished. Other requests are not affected."""


# Why a request with a grammar ended before its output was complete. The client can mend both.
GRAMMAR_TOO_COMPLEX = (
    "the grammar has become too complex: simplify its patterns, or lower maxLength"
)
# How the error of a request begins whose LoRA adapter cannot be loaded.
UNUSABLE_ADAPTER = "cannot use the LoRA adapter"
NO_TOKEN_LEFT = "no token is left that both the grammar and the other options allow"
