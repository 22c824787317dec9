"""Stored chat completions: those made with `store: true` can be listed, read, changed and deleted.

They are kept in memory, bounded in number and size, and are gone when the server stops.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qs

import msgspec
from starlette.types import ASGIApp

from bloomery.errors import InvalidRequest
from bloomery.server.errors import HttpError, format_openai_error
from bloomery.server.limits import check_labels
from bloomery.server.routes.chat import ChatBody
from bloomery.server.schema import RequestBody, encode_json
from bloomery.server.service import HttpCall, Route
from bloomery.server.shapes import CHAT_COMPLETION, DELETED_OBJECT, STORED_LIST

MAX_LISTED = 100  # OpenAI's
DEFAULT_LISTED = 20


class StoredChat:
    """A chat completion, and the messages that it answers."""

    def __init__(self, completion: dict[str, Any], messages: list[dict[str, Any]]):
        self.completion = completion
        self.messages = messages

    @property
    def num_characters(self) -> int:
        return len(encode_json([self.completion, self.messages]))

    def discard(self) -> None:
        """Nothing runs on behalf of a stored chat."""


class StoredChatBody(RequestBody, kw_only=True):
    metadata: dict[str, str] | None


def store_chat(call: HttpCall, body: ChatBody, completion: dict[str, Any]) -> None:
    """Store a completion for the tenant that made it."""
    messages = []
    for index, message in enumerate(body.messages):
        fields = msgspec.to_builtins(message)
        messages.append({"id": f"{completion['id']}-{index}", "content": None, **fields})
    stored = {**completion, "object": "chat.completion", "metadata": body.metadata or {}}
    store = call.service.stored_chats
    store.put((call.tenant, completion["id"]), StoredChat(stored, messages))


# ---- handlers ------------------------------------------------------------------------------


async def list_chats(call: HttpCall) -> ASGIApp:
    """The stored chat completions, the oldest first."""
    query = read_query(call)
    model = query.get("model")
    filters = {
        name.removeprefix("metadata[").removesuffix("]"): value
        for name, value in query.items()
        if name.startswith("metadata[")
    }
    completions = [chat.completion for chat in call.service.stored_chats.entries_of(call.tenant)]
    matching = [
        completion
        for completion in completions
        if model in (None, completion["model"])
        and filters.items() <= completion["metadata"].items()
    ]
    # Reading one changes the order of the store, so they are sorted by their time.
    matching.sort(key=lambda completion: completion["created"])
    return call.json_response(format_list(matching, query))


async def read_chat(call: HttpCall) -> ASGIApp:
    """A stored chat completion."""
    return call.json_response(find_chat(call).completion)


async def change_chat(call: HttpCall) -> ASGIApp:
    """Replace the metadata of a stored chat completion."""
    body = await call.read_body(StoredChatBody)
    check_labels(None, body.metadata, call.service.limits)
    chat = find_chat(call)
    chat.completion["metadata"] = body.metadata or {}
    call.service.stored_chats.put((call.tenant, chat.completion["id"]), chat)
    return call.json_response(chat.completion)


async def delete_chat(call: HttpCall) -> ASGIApp:
    """Delete a stored chat completion."""
    completion_id = find_chat(call).completion["id"]
    call.service.stored_chats.delete((call.tenant, completion_id))
    deleted = {"id": completion_id, "object": "chat.completion.deleted", "deleted": True}
    return call.json_response(deleted)


async def list_messages(call: HttpCall) -> ASGIApp:
    """The messages that a stored chat completion answers."""
    return call.json_response(format_list(find_chat(call).messages, read_query(call)))


def find_chat(call: HttpCall) -> StoredChat:
    completion_id = call.path_parameter
    chat: StoredChat | None = call.service.stored_chats.get((call.tenant, completion_id))
    if chat is None:
        message = (
            f"the chat completion {completion_id[:64]!r} is not, or no longer, stored here; "
            f"those made with store: true are, until newer ones take their place"
        )
        raise HttpError(404, message, "not_found")
    return chat


def read_query(call: HttpCall) -> dict[str, str]:
    """The query of the URL; of a repeated name the last value."""
    text = call.scope.get("query_string", b"").decode("latin-1")
    return {name: values[-1] for name, values in parse_qs(text).items()}


def format_list(entries: list[dict[str, Any]], query: dict[str, str]) -> dict[str, Any]:
    """One page of OpenAI's lists. `after`, `limit` and `order` of the query choose it."""
    order = query.get("order", "asc")
    if order not in ("asc", "desc"):
        raise InvalidRequest("order must be asc or desc", "order")
    limit = query.get("limit", str(DEFAULT_LISTED))
    if not limit.isdecimal() or not 1 <= int(limit[:9]) <= MAX_LISTED:
        raise InvalidRequest(f"limit must be a whole number from 1 to {MAX_LISTED}", "limit")
    if order == "desc":
        entries = entries[::-1]
    after = query.get("after")
    if after is not None:
        ids = [entry["id"] for entry in entries]
        if after not in ids:
            raise InvalidRequest(f"after names {after[:64]!r}, which is not in the list", "after")
        entries = entries[ids.index(after) + 1 :]
    page = entries[: int(limit)]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(entries) > len(page),
    }


CHATS_PATH = "/v1/chat/completions"
CHAT_PATH = "/v1/chat/completions/{completion_id}"
ROUTES = (
    Route(CHATS_PATH, list_chats, format_openai_error, response_shape=STORED_LIST),
    Route(CHAT_PATH, read_chat, format_openai_error, response_shape=CHAT_COMPLETION),
    Route(
        CHAT_PATH, change_chat, format_openai_error, StoredChatBody, response_shape=CHAT_COMPLETION
    ),
    Route(
        CHAT_PATH, delete_chat, format_openai_error, response_shape=DELETED_OBJECT, verb="DELETE"
    ),
    Route(f"{CHAT_PATH}/messages", list_messages, format_openai_error, response_shape=STORED_LIST),
)
