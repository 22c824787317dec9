"""What a client is told when something goes wrong: one Problem, said in each API's own way.

A message never carries what an exception of ours did not mean to say: no traceback, address or path. What went wrong
inside is for the log, under the same request id.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from bloomery.errors import (
    BloomeryError,
    InvalidRequest,
    PromptTooLong,
    RequestFailed,
    TemplateError,
)

_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{6,}")


class Tgi(NamedTuple):
    """How TGI words it."""

    kind: str
    status: int | None = None  # None: as everywhere
    prefix: str = ""


PLAIN = Tgi("validation")  # no words of TGI's own
VALIDATION = Tgi("validation", 422, "Input validation error: ")
TEMPLATE = Tgi("template_error", 422, "Template error: ")
GENERATION = Tgi("generation", 424, "Request failed during generation: ")


@dataclass(frozen=True)
class Problem:
    status: int
    message: str
    code: str | None = None
    param: str | None = None
    tgi: Tgi = PLAIN
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        if self.status == 429:
            return "rate_limit_error"
        return "invalid_request_error" if self.status < 500 else "server_error"


class Refusal(BloomeryError):
    """A request that is answered with a status of its own, whatever the API."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        tgi: str = "validation",
        **headers: str,
    ):
        super().__init__(message)
        said = {name.replace("_", "-"): value for name, value in headers.items()}
        self.problem = Problem(status, message, code, tgi=Tgi(tgi), headers=said)


class Malformed(Refusal):
    """A body that is not JSON, or none at all."""

    def __init__(self, message: str):
        super().__init__(400, message, "invalid_json")


class ClientGone(Exception):
    """Nobody is left to answer."""


class Stalled(ClientGone):
    """The client is there, but has stopped reading."""


class Late(Refusal):
    def __init__(self) -> None:
        super().__init__(
            504,
            "the request's time is up before its answer was complete",
            "deadline_exceeded",
            "timeout",
        )


def overloaded(seconds: int) -> Refusal:
    return Refusal(429, "Model is overloaded", "overloaded", "overloaded", retry_after=str(seconds))


def unavailable(message: str, seconds: int, **headers: str) -> Refusal:
    return Refusal(503, message, "unavailable", "healthcheck", retry_after=str(seconds), **headers)


def problem(error: BaseException) -> Problem:
    match error:
        case Refusal():
            return error.problem
        case PromptTooLong():
            return Problem(400, str(error), "context_length_exceeded", error.field, VALIDATION)
        case TemplateError():
            return Problem(400, _ADDRESS.sub("...", str(error)), None, error.field, TEMPLATE)
        case InvalidRequest():
            return Problem(400, str(error), None, error.field, VALIDATION)
        case RequestFailed():
            return Problem(
                500, "the model failed on this request", "generation_failed", tgi=GENERATION
            )
    return Problem(
        500, "something went wrong inside the server", "internal_error", tgi=Tgi("internal")
    )


# ---- in each API's words ---------------------------------------------------------------------------

Dialect = Callable[[Problem, str], tuple[int, Any]]  # problem, request id -> status, body


def openai(problem: Problem, request_id: str) -> tuple[int, Any]:
    said = {
        "message": problem.message,
        "type": problem.kind,
        "param": problem.param,
        "code": problem.code,
    }
    return problem.status, {"error": said}


def tgi(problem: Problem, request_id: str) -> tuple[int, Any]:
    words = problem.tgi
    return words.status or problem.status, {
        "error": words.prefix + problem.message,
        "error_type": words.kind,
    }


_ANTHROPIC = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def anthropic(problem: Problem, request_id: str) -> tuple[int, Any]:
    kind = _ANTHROPIC.get(problem.status, "invalid_request_error")
    said = {"type": kind, "message": problem.message}
    return problem.status, {"type": "error", "error": said, "request_id": request_id}


def dialect_of(path: str) -> Dialect:
    """Whose words to use where no route is found."""
    if path.startswith("/v1/messages"):
        return anthropic
    return openai if path.startswith("/v1/") else tgi
