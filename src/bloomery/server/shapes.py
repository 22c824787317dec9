"""Shapes of the routes' responses, in a short notation, for the OpenAPI document.

A dict is an object. Its keys are required unless they end in "?", and one key may name several
fields of the same shape, separated by spaces. A list of one is an array. A tuple is a choice. A
string names a JSON type, and "?" behind it allows null. The routes write the responses themselves;
a test validates every golden response against its shape.
"""

from __future__ import annotations

from typing import Any

Shape = Any

LOGPROB: Shape = {"token": "string", "logprob": "number", "bytes": ["integer"]}
CHAT_LOGPROBS: Shape = (
    {"content": [{**LOGPROB, "top_logprobs": [LOGPROB]}], "refusal": "null"},
    "null",
)
TEXT_LOGPROBS: Shape = (
    {
        "tokens": ["string"],
        "token_logprobs": ["number?"],
        "top_logprobs": (["object?"], "null"),
        "text_offset": ["integer"],
    },
    "null",
)
PROMPT_LOGPROBS: Shape = ["object?"]
USAGE: Shape = {
    "prompt_tokens completion_tokens total_tokens": "integer",
    "prompt_tokens_details": {"cached_tokens": "integer"},
    "completion_tokens_details?": {"reasoning_tokens": "integer"},
}
COMPLETION_HEAD: Shape = {
    "id object": "string",
    "created": "integer",
    "model system_fingerprint": "string",
}
TGI_TOKEN: Shape = {"id": "integer", "text": "string", "logprob": "number", "special": "boolean"}
TGI_SEQUENCE: Shape = {
    "finish_reason": "string",
    "generated_tokens": "integer",
    "seed": "integer?",
    "prefill": [{"id": "integer", "text": "string", "logprob": "number?"}],
    "tokens": [TGI_TOKEN],
    "top_tokens?": [[TGI_TOKEN]],
}
TGI_GENERATION: Shape = {
    "generated_text": "string",
    "details?": {
        **TGI_SEQUENCE,
        "best_of_sequences?": [{"generated_text": "string", **TGI_SEQUENCE}],
    },
}
TOKEN_OFFSETS: Shape = [{"id": "integer", "text": "string", "start stop": "integer"}]
CHAT_TOKEN_OFFSETS: Shape = {"tokenize_response": TOKEN_OFFSETS, "templated_text": "string"}
FUNCTION_CALL: Shape = {"name arguments": "string"}
CHAT_CHOICE: Shape = {
    "index": "integer",
    "message": {
        "role": "string",
        "content refusal": "string?",
        "reasoning_content?": "string",
        "tool_calls?": [{"id type": "string", "function": FUNCTION_CALL}],
        "function_call?": FUNCTION_CALL,
    },
    "logprobs": CHAT_LOGPROBS,
    "finish_reason": "string",
    "token_ids?": ["integer"],
}
CHAT_COMPLETION: Shape = {
    **COMPLETION_HEAD,
    "choices": [CHAT_CHOICE],
    "usage": USAGE,
    "prompt_logprobs?": PROMPT_LOGPROBS,
    "prompt_token_ids?": ["integer"],
}
STORED_LIST: Shape = {
    "object": "string",
    "data": ["object"],
    "first_id last_id": "string?",
    "has_more": "boolean",
}
DELETED_OBJECT: Shape = {"id object": "string", "deleted": "boolean"}
CONVERSATION: Shape = {"id object": "string", "created_at": "integer", "metadata": "object"}
TEXT_CHOICE: Shape = {
    "index": "integer",
    "text": "string",
    "logprobs": TEXT_LOGPROBS,
    "finish_reason": "string",
    "token_ids? prompt_token_ids?": ["integer"],
    "prompt_logprobs?": PROMPT_LOGPROBS,
}
TEXT_COMPLETION: Shape = {**COMPLETION_HEAD, "choices": [TEXT_CHOICE], "usage": USAGE}
INVOCATION: Shape = ([TGI_GENERATION], CHAT_COMPLETION, TEXT_COMPLETION)
OPENAI_RESPONSE: Shape = {
    "id object": "string",
    "created_at": "integer",
    "status model": "string",
    "output": [
        {
            "type id status": "string",
            "role? name? call_id? arguments? input? namespace?": "string",
            "content?": ["object"],
        }
    ],
    "usage": (
        {
            "input_tokens output_tokens total_tokens": "integer",
            "input_tokens_details": {"cached_tokens cache_write_tokens": "integer"},
            "output_tokens_details": {"reasoning_tokens": "integer"},
        },
        "null",
    ),
    "previous_response_id": "string?",
    "incomplete_details": ({"reason": "string"}, "null"),
}
ANTHROPIC_MESSAGE: Shape = {
    "id type role model": "string",
    "content": [
        {
            "type": "string",
            "text? thinking? signature? id? name?": "string",
            "input?": "object",
        }
    ],
    "stop_reason": "string",
    "stop_sequence": "string?",
    "usage": {
        "input_tokens output_tokens": "integer",
        "cache_read_input_tokens cache_creation_input_tokens": "integer",
    },
}
EMBEDDINGS: Shape = {
    "object": "string",
    "data": [{"object": "string", "index": "integer", "embedding": (["number"], "string")}],
    "model": "string",
    "usage": {"prompt_tokens total_tokens": "integer"},
}
MODEL: Shape = {
    "id object": "string",
    "created": "integer",
    "owned_by root": "string",
    "parent?": "string",
    "max_model_len": "integer?",
}
ADAPTER: Shape = {
    "status lora_name lora_path": "string",
    "rank targets bytes": "integer",
}
ADAPTER_LIST: Shape = [
    {
        "id": "integer",
        "name path": "string",
        "scale": "number",
        "rank": "integer?",
        "slots": ["integer"],
    }
]
MODEL_LIST: Shape = {"object": "string", "data": [MODEL]}
TOKEN_LIST: Shape = {
    "count max_model_len": "integer",
    "tokens": ["integer"],
    "token_strs": (["string"], "null"),
}
SERVER_INFO: Shape = {
    "model_id": "string",
    "max_concurrent_requests": "integer",
    "max_total_tokens": "integer?",
    "version": "string",
    "has_chat_template demo text_part_only": "boolean",
    "sampling_defaults": "object",
    "recommended_model": "object?",
}
READINESS: Shape = {"state model": "string", "progress": "number?", "detail": "string"}


def to_json_schema(shape: Shape) -> dict[str, Any]:
    """The shape as JSON Schema."""
    if isinstance(shape, dict):
        fields = {name: inner for names, inner in shape.items() for name in names.split()}
        properties = {
            name.removesuffix("?"): to_json_schema(inner) for name, inner in fields.items()
        }
        return {
            "type": "object",
            "properties": properties,
            "required": [name for name in fields if not name.endswith("?")],
        }
    if isinstance(shape, list):
        return {"type": "array", "items": to_json_schema(shape[0])}
    if isinstance(shape, tuple):
        return {"anyOf": [to_json_schema(inner) for inner in shape]}
    if shape.endswith("?"):
        return {"type": [shape[:-1], "null"]}
    return {"type": shape}
