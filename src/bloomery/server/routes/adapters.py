"""Loading, unloading and listing LoRA adapters: vLLM's routes and llama.cpp's list."""

from __future__ import annotations

from typing import Any

from starlette.types import ASGIApp

from bloomery.server.errors import format_openai_error
from bloomery.server.schema import RequestBody
from bloomery.server.service import HttpCall, Route
from bloomery.server.shapes import ADAPTER, ADAPTER_LIST


class LoadAdapterBody(RequestBody, kw_only=True):
    lora_name: str
    lora_path: str
    load_inplace: bool | None = None


class UnloadAdapterBody(RequestBody, kw_only=True):
    lora_name: str
    lora_int_id: int | None = None


async def load_lora_adapter(call: HttpCall) -> ASGIApp:
    """Load a LoRA adapter, which requests then name as their model. With load_inplace it replaces
    the adapter of that name."""
    body = await call.read_body(LoadAdapterBody)
    adapters = call.service.adapters
    adapter = await adapters.load(body.lora_name, body.lora_path, bool(body.load_inplace))
    info = adapters.infos[adapter.name]
    return call.json_response(
        {
            "status": "success",
            "lora_name": adapter.name,
            "lora_path": adapter.source,
            "rank": info.rank,
            "targets": info.num_targets,
            "bytes": info.num_bytes,
        }
    )


async def unload_lora_adapter(call: HttpCall) -> ASGIApp:
    """Unload a LoRA adapter. Requests that use it run to their end."""
    body = await call.read_body(UnloadAdapterBody)
    adapter = call.service.adapters.unload(body.lora_name)
    return call.json_response({"status": "success", "lora_name": adapter.name})


async def lora_adapters(call: HttpCall) -> ASGIApp:
    """The LoRA adapters, with the ids of llama.cpp's lora field and the device slots they are in.
    No adapter is applied unless a request asks for it, so their scale is 0."""
    adapters = call.service.adapters
    entries: list[dict[str, Any]] = []
    for number, adapter in enumerate(adapters.adapters):
        info = adapters.infos.get(adapter.name)
        entries.append(
            {
                "id": number,
                "name": adapter.name,
                "path": adapter.source,
                "scale": 0.0,
                "rank": info and info.rank,
                "slots": adapters.slots_of(adapter),
            }
        )
    return call.json_response(entries)


ROUTES = (
    Route(
        "/v1/load_lora_adapter",
        load_lora_adapter,
        format_openai_error,
        LoadAdapterBody,
        response_shape=ADAPTER,
    ),
    Route(
        "/v1/unload_lora_adapter",
        unload_lora_adapter,
        format_openai_error,
        UnloadAdapterBody,
        response_shape={"status": "string", "lora_name": "string"},
    ),
    Route("/lora-adapters", lora_adapters, format_openai_error, response_shape=ADAPTER_LIST),
)
