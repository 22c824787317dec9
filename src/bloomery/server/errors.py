"""HTTP errors: one description of each error, and its wording in each API.

A message to a client shows no internal details: no traceback, address or path. These go to the log
under the same request id.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from bloomery.engine.journal import GIVEN_UP
from bloomery.errors import (
    BloomeryError,
    InvalidRequest,
    PromptTooLong,
    RequestFailed,
    TemplateError,
)

_MEMORY_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{6,}")


class TgiWording(NamedTuple):
    """How TGI words an error: its error_type, its own status if it differs, and a prefix."""

    error_type: str
    status: int | None = None
    message_prefix: str = ""


TGI_DEFAULT = TgiWording("validation")
TGI_VALIDATION = TgiWording("validation", 422, "Input validation error: ")
TGI_TEMPLATE = TgiWording("template_error", 422, "Template error: ")
TGI_GENERATION = TgiWording("generation", 424, "Request failed during generation: ")
TGI_INTERNAL = TgiWording("internal")


@dataclass(frozen=True)
class HttpErrorInfo:
    """The public description of an error, independent of any API's wording."""

    status: int
    message: str
    code: str | None = None
    param: str | None = None
    tgi: TgiWording = TGI_DEFAULT
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def openai_type(self) -> str:
        """The error type of OpenAI's API."""
        if self.status == 429:
            return "rate_limit_error"
        if self.status < 500:
            return "invalid_request_error"
        return "server_error"


class HttpError(BloomeryError):
    """An error with an HTTP status of its own, the same in every API."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        tgi_error_type: str = "validation",
        param: str | None = None,
        **headers: str,
    ):
        super().__init__(message)
        self.info = HttpErrorInfo(
            status,
            message,
            code,
            param,
            tgi=TgiWording(tgi_error_type),
            headers={name.replace("_", "-"): value for name, value in headers.items()},
        )


class MalformedBodyError(HttpError):
    """The body is empty or is not JSON."""

    def __init__(self, message: str):
        super().__init__(400, message, "invalid_json")


class DeadlineExceeded(HttpError):
    """The deadline of the request passed."""

    def __init__(self) -> None:
        message = "the deadline passed before the answer was complete"
        super().__init__(504, message, "deadline_exceeded", "timeout")


class ClientDisconnected(Exception):
    """The client has closed its connection, so there is no response to send."""


class ClientStalled(ClientDisconnected):
    """The client is still connected but has stopped reading."""


def overloaded_error(retry_after: int) -> HttpError:
    """429 with the seconds after which a retry makes sense."""
    return HttpError(
        429, "Model is overloaded", "overloaded", "overloaded", retry_after=str(retry_after)
    )


def unavailable_error(message: str, retry_after: int, **headers: str) -> HttpError:
    """503 with the seconds after which a retry makes sense."""
    return HttpError(
        503, message, "unavailable", "healthcheck", retry_after=str(retry_after), **headers
    )


def describe_error(error: BaseException) -> HttpErrorInfo:
    """The public description of any exception."""
    match error:
        case HttpError():
            return error.info
        case PromptTooLong():
            return HttpErrorInfo(
                400, str(error), "context_length_exceeded", error.field, TGI_VALIDATION
            )
        case TemplateError():
            message = _MEMORY_ADDRESS.sub("...", str(error))
            return HttpErrorInfo(400, message, None, error.field, TGI_TEMPLATE)
        case InvalidRequest():
            return HttpErrorInfo(400, str(error), None, error.field, TGI_VALIDATION)
        case RequestFailed():
            message = "the model failed on this request; other requests are not affected"
            if str(error) == GIVEN_UP:
                message = f"{GIVEN_UP}; other requests are not affected"
            return HttpErrorInfo(500, message, "generation_failed", tgi=TGI_GENERATION)
    message = "something went wrong inside the server"
    return HttpErrorInfo(500, message, "internal_error", tgi=TGI_INTERNAL)


# ---- the wording of each API ---------------------------------------------------------------

# (error, request id) -> (status, JSON body)
ErrorFormatter = Callable[[HttpErrorInfo, str], tuple[int, Any]]


def format_openai_error(error: HttpErrorInfo, request_id: str) -> tuple[int, Any]:
    content = {
        "message": error.message,
        "type": error.openai_type,
        "param": error.param,
        "code": error.code,
    }
    return error.status, {"error": content}


def format_tgi_error(error: HttpErrorInfo, request_id: str) -> tuple[int, Any]:
    wording = error.tgi
    body = {
        "error": wording.message_prefix + error.message,
        "error_type": wording.error_type,
    }
    return wording.status or error.status, body


_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def format_anthropic_error(error: HttpErrorInfo, request_id: str) -> tuple[int, Any]:
    content = {
        "type": _ANTHROPIC_TYPES.get(error.status, "invalid_request_error"),
        "message": error.message,
    }
    return error.status, {"type": "error", "error": content, "request_id": request_id}


def format_ollama_error(error: HttpErrorInfo, request_id: str) -> tuple[int, Any]:
    return error.status, {"error": error.message}


def error_formatter_for_path(path: str) -> ErrorFormatter:
    """The wording to use for a path that has no route."""
    if path.startswith("/v1/messages"):
        return format_anthropic_error
    if path.startswith("/v1/"):
        return format_openai_error
    if path.startswith("/api/"):
        return format_ollama_error
    return format_tgi_error
