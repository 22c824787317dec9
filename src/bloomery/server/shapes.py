"""What the routes answer, for the API's description: one shape a kind of answer, as short as it can be written.

A dict is an object, whose keys are always there unless they end in "?"; a list of one is an array; a tuple is a choice;
a string names a type, "?" behind it allows null. The answers themselves are written by the routes; a test holds every
golden one against its shape.
"""

from __future__ import annotations

from typing import Any

Shape = Any

LOGPROB: Shape = {"token": "string", "logprob": "number", "bytes": ["integer"]}
CHAT_LOGPROBS: Shape = ({"content": [{**LOGPROB, "top_logprobs": [LOGPROB]}], "refusal": "null"}, "null")
PROMPT_LOGPROBS: Shape = ["object?"]
USAGE: Shape = {
    "prompt_tokens": "integer",
    "completion_tokens": "integer",
    "total_tokens": "integer",
    "prompt_tokens_details": {"cached_tokens": "integer"},
}
HEAD: Shape = {
    "id": "string",
    "object": "string",
    "created": "integer",
    "model": "string",
    "system_fingerprint": "string",
}
TOKEN: Shape = {"id": "integer", "text": "string", "logprob": "number", "special": "boolean"}
SEQUENCE: Shape = {
    "finish_reason": "string",
    "generated_tokens": "integer",
    "seed": "integer?",
    "prefill": [{"id": "integer", "text": "string", "logprob": "number?"}],
    "tokens": [TOKEN],
    "top_tokens?": [[TOKEN]],
}
GENERATED: Shape = {
    "generated_text": "string",
    "details?": {**SEQUENCE, "best_of_sequences?": [{"generated_text": "string", **SEQUENCE}]},
}
PIECES: Shape = [{"id": "integer", "text": "string", "start": "integer", "stop": "integer"}]
CHAT: Shape = {
    **HEAD,
    "choices": [
        {
            "index": "integer",
            "message": {"role": "string", "content": "string?", "refusal": "string?"},
            "logprobs": CHAT_LOGPROBS,
            "finish_reason": "string",
            "token_ids?": ["integer"],
        }
    ],
    "usage": USAGE,
    "prompt_logprobs?": PROMPT_LOGPROBS,
    "prompt_token_ids?": ["integer"],
}
COMPLETION: Shape = {
    **HEAD,
    "choices": [
        {
            "index": "integer",
            "text": "string",
            "logprobs": (
                {
                    "tokens": ["string"],
                    "token_logprobs": ["number?"],
                    "top_logprobs": (["object?"], "null"),
                    "text_offset": ["integer"],
                },
                "null",
            ),
            "finish_reason": "string",
            "token_ids?": ["integer"],
            "prompt_token_ids?": ["integer"],
            "prompt_logprobs?": PROMPT_LOGPROBS,
        }
    ],
    "usage": USAGE,
}
RESPONSE: Shape = {
    "id": "string",
    "object": "string",
    "created_at": "integer",
    "status": "string",
    "model": "string",
    "output": [{"type": "string", "id": "string", "status": "string", "role": "string", "content": ["object"]}],
    "usage": {"input_tokens": "integer", "output_tokens": "integer", "total_tokens": "integer"},
    "previous_response_id": "string?",
    "incomplete_details": ({"reason": "string"}, "null"),
}
MESSAGE: Shape = {
    "id": "string",
    "type": "string",
    "role": "string",
    "model": "string",
    "content": [{"type": "string", "text": "string"}],
    "stop_reason": "string",
    "stop_sequence": "string?",
    "usage": {"input_tokens": "integer", "output_tokens": "integer", "cache_read_input_tokens": "integer"},
}
EMBEDDINGS: Shape = {
    "object": "string",
    "data": [{"object": "string", "index": "integer", "embedding": (["number"], "string")}],
    "model": "string",
    "usage": {"prompt_tokens": "integer", "total_tokens": "integer"},
}
MODEL: Shape = {
    "id": "string",
    "object": "string",
    "created": "integer",
    "owned_by": "string",
    "max_model_len": "integer?",
}
MODELS: Shape = {"object": "string", "data": [MODEL]}
TOKENS: Shape = {
    "count": "integer",
    "max_model_len": "integer",
    "tokens": ["integer"],
    "token_strs": (["string"], "null"),
}
INFO: Shape = {
    "model_id": "string",
    "max_concurrent_requests": "integer",
    "max_total_tokens": "integer?",
    "version": "string",
}
READY: Shape = {"state": "string", "model": "string", "progress": "number?", "detail": "string"}


def schema(shape: Shape) -> dict[str, Any]:
    """The shape as JSON Schema."""
    if isinstance(shape, dict):
        return {
            "type": "object",
            "properties": {name.removesuffix("?"): schema(inner) for name, inner in shape.items()},
            "required": [name for name in shape if not name.endswith("?")],
        }
    if isinstance(shape, list):
        return {"type": "array", "items": schema(shape[0])}
    if isinstance(shape, tuple):
        return {"anyOf": [schema(inner) for inner in shape]}
    return {"type": [shape[:-1], "null"] if shape.endswith("?") else shape}
