"""OpenAI's conversation objects: items that several responses share, kept by the server.

A response that names a conversation reads its items and adds its own. Conversations are kept in
memory, bounded in number and size, and are gone when the server stops.
"""

from __future__ import annotations

import time
from typing import Any
from uuid import uuid4

from starlette.types import ASGIApp

from bloomery.errors import InvalidRequest
from bloomery.server.conversations import StoredConversation
from bloomery.server.errors import HttpError, format_openai_error
from bloomery.server.limits import check_labels
from bloomery.server.routes.response_items import read_input_items
from bloomery.server.routes.stored_chats import format_list, read_query
from bloomery.server.schema import RequestBody
from bloomery.server.service import HttpCall, Route
from bloomery.server.shapes import CONVERSATION, DELETED_OBJECT, STORED_LIST

MAX_ADDED_ITEMS = 20  # of one request, as with OpenAI


class NewConversationBody(RequestBody, kw_only=True):
    items: list[Any] | None = None
    metadata: dict[str, str] | None = None


class ConversationMetadataBody(RequestBody, kw_only=True):
    metadata: dict[str, str] | None


class NewItemsBody(RequestBody, kw_only=True):
    items: list[Any]


# ---- conversations -------------------------------------------------------------------------


async def create_conversation(call: HttpCall) -> ASGIApp:
    """Create a conversation, empty or with items."""
    body = await call.read_body(NewConversationBody)
    check_labels(None, body.metadata, call.service.limits)
    conversation = {
        "id": f"conv_{uuid4().hex}",
        "object": "conversation",
        "created_at": int(time.time()),
        "metadata": body.metadata or {},
    }
    stored = StoredConversation(conversation, read_new_items(body.items or []))
    store_conversation(call, stored)
    return call.json_response(conversation)


async def read_conversation(call: HttpCall) -> ASGIApp:
    """A conversation, without its items."""
    return call.json_response(find_conversation(call, call.path_parameter).conversation)


async def change_conversation(call: HttpCall) -> ASGIApp:
    """Replace the metadata of a conversation."""
    body = await call.read_body(ConversationMetadataBody)
    check_labels(None, body.metadata, call.service.limits)
    stored = find_conversation(call, call.path_parameter)
    stored.conversation["metadata"] = body.metadata or {}
    store_conversation(call, stored)
    return call.json_response(stored.conversation)


async def delete_conversation(call: HttpCall) -> ASGIApp:
    """Delete a conversation and its items."""
    conversation_id = find_conversation(call, call.path_parameter).conversation["id"]
    call.service.stored_conversations.delete((call.tenant, conversation_id))
    deleted = {"id": conversation_id, "object": "conversation.deleted", "deleted": True}
    return call.json_response(deleted)


def find_conversation(call: HttpCall, conversation_id: str) -> StoredConversation:
    stored = call.service.stored_conversations.get((call.tenant, conversation_id))
    if stored is None:
        message = f"the conversation {conversation_id[:64]!r} is not, or no longer, stored here"
        raise HttpError(404, message, "not_found")
    return stored


def store_conversation(call: HttpCall, stored: StoredConversation) -> None:
    """Keep a conversation, or count its size again after a change."""
    key = (call.tenant, stored.conversation["id"])
    call.service.stored_conversations.put(key, stored)


# ---- items ---------------------------------------------------------------------------------


async def add_items(call: HttpCall) -> ASGIApp:
    """Add items to the end of a conversation."""
    body = await call.read_body(NewItemsBody)
    stored = find_conversation(call, call.path_parameter)
    items = read_new_items(body.items)
    stored.items.extend(items)
    store_conversation(call, stored)
    return call.json_response(format_list(items, {}))


async def list_items(call: HttpCall) -> ASGIApp:
    """The items of a conversation, the newest first unless order=asc."""
    stored = find_conversation(call, call.path_parameter)
    return call.json_response(format_list(stored.items, {"order": "desc", **read_query(call)}))


async def read_item(call: HttpCall) -> ASGIApp:
    """One item of a conversation."""
    stored = find_conversation(call, call.path_parameter)
    return call.json_response(stored.items[find_item(call, stored)])


async def delete_item(call: HttpCall) -> ASGIApp:
    """Delete one item of a conversation."""
    stored = find_conversation(call, call.path_parameter)
    del stored.items[find_item(call, stored)]
    store_conversation(call, stored)
    return call.json_response(stored.conversation)


def find_item(call: HttpCall, stored: StoredConversation) -> int:
    """The index of the item that the path names."""
    item_id = call.path_parameters[1]
    for index, item in enumerate(stored.items):
        if item["id"] == item_id:
            return index
    raise HttpError(404, f"the conversation has no item {item_id[:64]!r}", "not_found")


def read_new_items(entries: list[Any]) -> list[dict[str, Any]]:
    """Items of a request, as they are stored."""
    if len(entries) > MAX_ADDED_ITEMS:
        message = f"items has {len(entries)} entries: add at most {MAX_ADDED_ITEMS} at a time"
        raise InvalidRequest(message, "items")
    return [{"status": "completed", **item} for item in read_input_items(entries, "items")]


CONVERSATIONS_PATH = "/v1/conversations"
CONVERSATION_PATH = "/v1/conversations/{conversation_id}"
ITEMS_PATH = f"{CONVERSATION_PATH}/items"
ITEM_PATH = f"{ITEMS_PATH}/{{item_id}}"
ROUTES = (
    Route(
        CONVERSATIONS_PATH,
        create_conversation,
        format_openai_error,
        NewConversationBody,
        response_shape=CONVERSATION,
    ),
    Route(CONVERSATION_PATH, read_conversation, format_openai_error, response_shape=CONVERSATION),
    Route(
        CONVERSATION_PATH,
        change_conversation,
        format_openai_error,
        ConversationMetadataBody,
        response_shape=CONVERSATION,
    ),
    Route(
        CONVERSATION_PATH,
        delete_conversation,
        format_openai_error,
        response_shape=DELETED_OBJECT,
        verb="DELETE",
    ),
    Route(ITEMS_PATH, add_items, format_openai_error, NewItemsBody, response_shape=STORED_LIST),
    Route(ITEMS_PATH, list_items, format_openai_error, response_shape=STORED_LIST),
    Route(ITEM_PATH, read_item, format_openai_error),
    Route(ITEM_PATH, delete_item, format_openai_error, response_shape=CONVERSATION, verb="DELETE"),
)
