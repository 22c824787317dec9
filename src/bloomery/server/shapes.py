"""What the routes answer, for the API's description: one shape a kind of answer, as short as it can be written.

A dict is an object, whose keys are always there unless they end in "?", and a key may name several fields of one shape;
a list of one is an array; a tuple is a choice; a string names a type, "?" behind it allows null. The answers themselves
are written by the routes; a test holds every golden one against its shape.
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
}
HEAD: Shape = {"id object": "string", "created": "integer", "model system_fingerprint": "string"}
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
PIECES: Shape = [{"id": "integer", "text": "string", "start stop": "integer"}]
CHAT_PIECES: Shape = {"tokenize_response": PIECES, "templated_text": "string"}
CHAT_CHOICE: Shape = {
    "index": "integer",
    "message": {"role": "string", "content refusal": "string?"},
    "logprobs": CHAT_LOGPROBS,
    "finish_reason": "string",
    "token_ids?": ["integer"],
}
CHAT: Shape = {
    **HEAD,
    "choices": [CHAT_CHOICE],
    "usage": USAGE,
    "prompt_logprobs?": PROMPT_LOGPROBS,
    "prompt_token_ids?": ["integer"],
}
COMPLETION_CHOICE: Shape = {
    "index": "integer",
    "text": "string",
    "logprobs": TEXT_LOGPROBS,
    "finish_reason": "string",
    "token_ids? prompt_token_ids?": ["integer"],
    "prompt_logprobs?": PROMPT_LOGPROBS,
}
COMPLETION: Shape = {**HEAD, "choices": [COMPLETION_CHOICE], "usage": USAGE}
INVOCATION: Shape = ([GENERATED], CHAT, COMPLETION)
RESPONSE: Shape = {
    "id object": "string",
    "created_at": "integer",
    "status model": "string",
    "output": [{"type id status role": "string", "content": ["object"]}],
    "usage": {"input_tokens output_tokens total_tokens": "integer"},
    "previous_response_id": "string?",
    "incomplete_details": ({"reason": "string"}, "null"),
}
MESSAGE: Shape = {
    "id type role model": "string",
    "content": [{"type text": "string"}],
    "stop_reason": "string",
    "stop_sequence": "string?",
    "usage": {"input_tokens output_tokens cache_read_input_tokens": "integer"},
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
    "owned_by": "string",
    "max_model_len": "integer?",
}
MODELS: Shape = {"object": "string", "data": [MODEL]}
TOKENS: Shape = {
    "count max_model_len": "integer",
    "tokens": ["integer"],
    "token_strs": (["string"], "null"),
}
INFO: Shape = {
    "model_id": "string",
    "max_concurrent_requests": "integer",
    "max_total_tokens": "integer?",
    "version": "string",
}
READY: Shape = {"state model": "string", "progress": "number?", "detail": "string"}


def schema(shape: Shape) -> dict[str, Any]:
    """The shape as JSON Schema."""
    if isinstance(shape, dict):
        fields = {name: inner for names, inner in shape.items() for name in names.split()}
        return {
            "type": "object",
            "properties": {name.removesuffix("?"): schema(inner) for name, inner in fields.items()},
            "required": [name for name in fields if not name.endswith("?")],
        }
    if isinstance(shape, list):
        return {"type": "array", "items": schema(shape[0])}
    if isinstance(shape, tuple):
        return {"anyOf": [schema(inner) for inner in shape]}
    return {"type": [shape[:-1], "null"] if shape.endswith("?") else shape}
