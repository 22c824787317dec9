"""The requests whose responses the golden files hold. A test fails for a route without one."""

from __future__ import annotations

from typing import Any

IRON_INPUTS = {"inputs": "The iron"}
SYSTEM_AND_QUESTION = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is slag?"},
    ]
}
QUESTION_IN_PARTS = {
    "messages": [
        {
            "role": "user",
            "content": [{"type": "text", "text": "What is "}, {"type": "text", "text": "slag?"}],
        }
    ]
}
SLAG_QUESTION = {"messages": [{"role": "user", "content": "What is slag?"}], "max_tokens": 8}

# name -> (method, path, body, headers)
CASES: dict[str, tuple[str, str, Any, dict[str, str]]] = {
    # TGI
    "generate": ("POST", "/generate", {**IRON_INPUTS, "parameters": {"max_new_tokens": 6}}, {}),
    "generate_details": (
        "POST",
        "/generate",
        {
            **IRON_INPUTS,
            "parameters": {
                "max_new_tokens": 4,
                "details": True,
                "decoder_input_details": True,
                "top_n_tokens": 2,
                "return_full_text": True,
            },
        },
        {},
    ),
    "generate_sampled": (
        "POST",
        "/generate",
        {
            **IRON_INPUTS,
            "parameters": {"max_new_tokens": 5, "temperature": 0.7, "seed": 42, "details": True},
        },
        {},
    ),
    "generate_stop": (
        "POST",
        "/generate",
        {**IRON_INPUTS, "parameters": {"max_new_tokens": 40, "stop": ["bellows"], "details": True}},
        {},
    ),
    "generate_to_the_end": (
        "POST",
        "/generate",
        {"inputs": "Iron ore", "parameters": {"details": True}},
        {},
    ),
    "generate_best_of": (
        "POST",
        "/generate",
        {
            **IRON_INPUTS,
            "parameters": {"max_new_tokens": 1, "best_of": 2, "do_sample": True, "details": True},
        },
        {},
    ),
    "generate_refused": ("POST", "/generate", {**IRON_INPUTS, "parameters": {"top_p": 1.0}}, {}),
    "generate_stream": (
        "POST",
        "/generate_stream",
        {**IRON_INPUTS, "parameters": {"max_new_tokens": 4, "details": True, "top_n_tokens": 1}},
        {},
    ),
    "generate_stream_plain": (
        "POST",
        "/generate_stream",
        {**IRON_INPUTS, "parameters": {"max_new_tokens": 3, "return_full_text": True}},
        {},
    ),
    "root": (
        "POST",
        "/",
        {**IRON_INPUTS, "parameters": {"max_new_tokens": 4}, "stream": False},
        {},
    ),
    "root_stream": (
        "POST",
        "/",
        {**IRON_INPUTS, "parameters": {"max_new_tokens": 2}, "stream": True},
        {},
    ),
    "invocations_text": (
        "POST",
        "/invocations",
        {**IRON_INPUTS, "parameters": {"max_new_tokens": 4}},
        {},
    ),
    "invocations_chat": (
        "POST",
        "/invocations",
        {**SYSTEM_AND_QUESTION, "max_tokens": 4, "temperature": 0},
        {},
    ),
    "invocations_completion": (
        "POST",
        "/invocations",
        {"prompt": "The iron", "max_tokens": 4, "temperature": 0},
        {},
    ),
    "vertex": (
        "POST",
        "/vertex",
        {
            "instances": [
                {**IRON_INPUTS, "parameters": {"max_new_tokens": 4, "seed": 1}},
                {**SYSTEM_AND_QUESTION, "max_tokens": 4, "temperature": 0},
            ]
        },
        {},
    ),
    "tokenize_tgi": ("POST", "/tokenize", {"inputs": "Grüße, iron 🔥"}, {}),
    "tokenize_tgi_truncated": (
        "POST",
        "/tokenize",
        {"inputs": "The iron bloom", "parameters": {"truncate": 2}},
        {},
    ),
    "tokenize_vllm": ("POST", "/tokenize", {"prompt": "The iron", "return_token_strs": True}, {}),
    "tokenize_vllm_chat": (
        "POST",
        "/tokenize",
        {**SYSTEM_AND_QUESTION, "add_generation_prompt": False},
        {},
    ),
    "tokenize_llama_cpp": ("POST", "/tokenize", {"content": "The iron"}, {}),
    "chat_tokenize": ("POST", "/chat_tokenize", SYSTEM_AND_QUESTION, {}),
    "detokenize": ("POST", "/detokenize", {"tokens": [295, 359, 2]}, {}),
    "tokenizer_info": ("GET", "/tokenizer_info", None, {}),
    "info": ("GET", "/info", None, {}),
    # OpenAI
    "chat": (
        "POST",
        "/v1/chat/completions",
        {**SYSTEM_AND_QUESTION, "model": "speaker", "max_tokens": 8, "temperature": 0},
        {},
    ),
    "chat_parts": (
        "POST",
        "/v1/chat/completions",
        {**QUESTION_IN_PARTS, "max_completion_tokens": 4, "temperature": 0},
        {},
    ),
    "chat_everything": (
        "POST",
        "/v1/chat/completions",
        {
            **SYSTEM_AND_QUESTION,
            "max_tokens": 3,
            "n": 2,
            "seed": 9,
            "logprobs": True,
            "top_logprobs": 2,
            "return_token_ids": True,
            "prompt_logprobs": 1,
            "top_k": 40,
            "min_p": 0.05,
            "repetition_penalty": 1.1,
            "min_tokens": 2,
            "logit_bias": {"300": -5},
            "user": "me",
            "metadata": {"a": "b"},
        },
        {},
    ),
    "chat_continued": (
        "POST",
        "/v1/chat/completions",
        {
            "messages": [
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": "The iron"},
            ],
            "continue_final_message": True,
            "max_tokens": 4,
            "temperature": 0,
        },
        {},
    ),
    "chat_stream": (
        "POST",
        "/v1/chat/completions",
        {**SYSTEM_AND_QUESTION, "max_tokens": 4, "temperature": 0, "stream": True},
        {},
    ),
    "chat_stream_everything": (
        "POST",
        "/v1/chat/completions",
        {
            **SYSTEM_AND_QUESTION,
            "max_tokens": 2,
            "n": 2,
            "seed": 9,
            "stream": True,
            "logprobs": True,
            "top_logprobs": 1,
            "return_token_ids": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        },
        {},
    ),
    "chat_refused": (
        "POST",
        "/v1/chat/completions",
        {**SYSTEM_AND_QUESTION, "tools": [{"type": "function", "function": {"name": "f"}}]},
        {},
    ),
    "stored_chats": ("GET", "/v1/chat/completions", None, {}),
    "stored_chat_unknown": ("GET", "/v1/chat/completions/chatcmpl-unknown", None, {}),
    "stored_chat_change_unknown": (
        "POST",
        "/v1/chat/completions/chatcmpl-unknown",
        {"metadata": {"a": "b"}},
        {},
    ),
    "stored_chat_delete_unknown": ("DELETE", "/v1/chat/completions/chatcmpl-unknown", None, {}),
    "stored_chat_messages_unknown": (
        "GET",
        "/v1/chat/completions/chatcmpl-unknown/messages",
        None,
        {},
    ),
    "conversation": (
        "POST",
        "/v1/conversations",
        {"items": [{"role": "user", "content": "The iron"}], "metadata": {"a": "b"}},
        {},
    ),
    "conversation_unknown": ("GET", "/v1/conversations/conv_unknown", None, {}),
    "conversation_change_unknown": (
        "POST",
        "/v1/conversations/conv_unknown",
        {"metadata": {"a": "b"}},
        {},
    ),
    "conversation_delete_unknown": ("DELETE", "/v1/conversations/conv_unknown", None, {}),
    "conversation_items_unknown": ("GET", "/v1/conversations/conv_unknown/items", None, {}),
    "conversation_add_unknown": (
        "POST",
        "/v1/conversations/conv_unknown/items",
        {"items": [{"role": "user", "content": "The iron"}]},
        {},
    ),
    "conversation_item_unknown": ("GET", "/v1/conversations/conv_unknown/items/msg", None, {}),
    "conversation_item_delete_unknown": (
        "DELETE",
        "/v1/conversations/conv_unknown/items/msg",
        None,
        {},
    ),
    "completion": ("POST", "/v1/completions", {"prompt": "The iron", "temperature": 0}, {}),
    "completion_batch": (
        "POST",
        "/v1/completions",
        {"prompt": ["The iron", "The slag"], "n": 2, "max_tokens": 3, "seed": 1},
        {},
    ),
    "completion_best_of": (
        "POST",
        "/v1/completions",
        {"prompt": [295, 359], "n": 1, "best_of": 3, "max_tokens": 3, "seed": 1},
        {},
    ),
    "completion_scores": (
        "POST",
        "/v1/completions",
        {"prompt": [[295, 359, 280]], "max_tokens": 0, "echo": True, "logprobs": 1},
        {},
    ),
    "completion_echo": (
        "POST",
        "/v1/completions",
        {
            "prompt": [295, 359, 405],
            "max_tokens": 2,
            "echo": True,
            "logprobs": 2,
            "temperature": 0,
            "return_token_ids": True,
            "prompt_logprobs": 0,
        },
        {},
    ),
    "completion_stop": (
        "POST",
        "/v1/completions",
        {"prompt": "The iron", "max_tokens": 40, "temperature": 0, "stop": ["bellows"]},
        {},
    ),
    "completion_stream": (
        "POST",
        "/v1/completions",
        {
            "prompt": "The iron",
            "max_tokens": 3,
            "temperature": 0,
            "stream": True,
            "echo": True,
            "logprobs": 1,
        },
        {},
    ),
    "responses": (
        "POST",
        "/v1/responses",
        {
            "input": "What is slag?",
            "instructions": "Be brief.",
            "max_output_tokens": 8,
            "temperature": 0,
        },
        {},
    ),
    "responses_items": (
        "POST",
        "/v1/responses",
        {
            "input": [
                {"role": "developer", "content": "Be brief."},
                {
                    "type": "message",
                    "role": "user",
                    "content": [{"type": "input_text", "text": "hi"}],
                },
            ],
            "max_output_tokens": 3,
            "temperature": 0,
            "store": False,
        },
        {},
    ),
    "responses_stream": (
        "POST",
        "/v1/responses",
        {"input": "What is slag?", "max_output_tokens": 3, "temperature": 0, "stream": True},
        {},
    ),
    "responses_logprobs": (
        "POST",
        "/v1/responses",
        {
            "input": "What is slag?",
            "max_output_tokens": 2,
            "temperature": 0,
            "include": ["message.output_text.logprobs"],
            "top_logprobs": 1,
        },
        {},
    ),
    "responses_background": (
        "POST",
        "/v1/responses",
        {
            "input": "What is slag?",
            "max_output_tokens": 2,
            "temperature": 0,
            "background": True,
            "stream": True,
        },
        {},
    ),
    "responses_input_tokens": (
        "POST",
        "/v1/responses/input_tokens",
        {"input": "What is slag?", "instructions": "Be brief."},
        {},
    ),
    "responses_unknown": ("GET", "/v1/responses/resp_unknown", None, {}),
    "responses_delete_unknown": ("DELETE", "/v1/responses/resp_unknown", None, {}),
    "responses_cancel_unknown": ("POST", "/v1/responses/resp_unknown/cancel", None, {}),
    "responses_items_unknown": ("GET", "/v1/responses/resp_unknown/input_items", None, {}),
    "embeddings": ("POST", "/v1/embeddings", {"input": "The iron"}, {}),
    "embeddings_shortened": (
        "POST",
        "/v1/embeddings",
        {"input": "The iron", "dimensions": 2},
        {},
    ),
    "embeddings_several": (
        "POST",
        "/v1/embeddings",
        {
            "input": [[295, 359], [295]],
            "pooling": "last",
            "encoding_format": "base64",
            "model": "speaker",
        },
        {},
    ),
    "embeddings_refused": ("POST", "/v1/embeddings", {"input": "The iron", "dimensions": 5}, {}),
    # LoRA adapters
    "lora_models": ("GET", "/v1/models", None, {}),
    "lora_chat": (
        "POST",
        "/v1/chat/completions",
        {**SLAG_QUESTION, "model": "speaker:smith", "temperature": 0},
        {},
    ),
    "lora_generate": (
        "POST",
        "/generate",
        {**IRON_INPUTS, "parameters": {"max_new_tokens": 6, "adapter_id": "poet"}},
        {},
    ),
    "lora_unknown": ("POST", "/v1/completions", {"prompt": "a", "model": "miner"}, {}),
    "lora_list": ("GET", "/lora-adapters", None, {}),
    "lora_load": (
        "POST",
        "/v1/load_lora_adapter",
        {"lora_name": "miner", "lora_path": "/lora/miner"},
        {},
    ),
    "lora_unload": ("POST", "/v1/unload_lora_adapter", {"lora_name": "smith"}, {}),
    "models": ("GET", "/v1/models", None, {}),
    "model": ("GET", "/v1/models/org/speaker-1", None, {}),
    # Anthropic
    "messages": (
        "POST",
        "/v1/messages",
        {**SLAG_QUESTION, "system": "Be brief.", "temperature": 0},
        {},
    ),
    "messages_blocks": (
        "POST",
        "/v1/messages?beta=true",
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "hi"}]},
                {"role": "assistant", "content": "The"},
            ],
            "system": [
                {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}
            ],
            "max_tokens": 32000,
            "temperature": 0,
            "stop_sequences": ["e"],
            "thinking": {"type": "adaptive"},
        },
        {},
    ),
    "messages_stream": (
        "POST",
        "/v1/messages",
        {**SLAG_QUESTION, "max_tokens": 3, "temperature": 0, "stream": True},
        {},
    ),
    "messages_refused": ("POST", "/v1/messages", {"messages": SLAG_QUESTION["messages"]}, {}),
    "count_tokens": (
        "POST",
        "/v1/messages/count_tokens",
        {"messages": SLAG_QUESTION["messages"], "system": "Be brief."},
        {},
    ),
    # Ollama
    "ollama_chat": (
        "POST",
        "/api/chat",
        {
            "model": "speaker:latest",
            "messages": SLAG_QUESTION["messages"],
            "options": {"num_predict": 3, "temperature": 0, "num_ctx": 4096},
            "keep_alive": "5m",
        },
        {},
    ),
    "ollama_chat_whole": (
        "POST",
        "/api/chat",
        {
            "messages": SLAG_QUESTION["messages"],
            "options": {"num_predict": 3, "temperature": 0},
            "stream": False,
        },
        {},
    ),
    "ollama_generate": (
        "POST",
        "/api/generate",
        {
            "model": "speaker",
            "prompt": "What is slag?",
            "system": "Be brief.",
            "options": {"num_predict": 3, "temperature": 0},
        },
        {},
    ),
    "ollama_generate_raw": (
        "POST",
        "/api/generate",
        {
            "prompt": "The iron",
            "raw": True,
            "context": [295, 359],
            "options": {"num_predict": 3, "temperature": 0},
            "stream": False,
        },
        {},
    ),
    "ollama_refused": (
        "POST",
        "/api/chat",
        {"messages": SLAG_QUESTION["messages"], "options": {"temperature": -1}},
        {},
    ),
    "ollama_embed": ("POST", "/api/embed", {"input": ["The iron"], "dimensions": 3}, {}),
    "ollama_tags": ("GET", "/api/tags", None, {}),
    "ollama_ps": ("GET", "/api/ps", None, {}),
    "ollama_show": ("POST", "/api/show", {"model": "speaker"}, {}),
    "ollama_version": ("GET", "/api/version", None, {}),
    # the server's own routes
    "health": ("GET", "/health", None, {}),
    "ping": ("GET", "/ping", None, {}),
    "root_health": ("GET", "/", None, {}),
    "ready": ("GET", "/ready", None, {}),
    "live": ("GET", "/live", None, {}),
    "version": ("GET", "/version", None, {}),
    "stats": ("GET", "/stats", None, {}),
    "metrics": ("GET", "/metrics", None, {}),
    "openapi": ("GET", "/openapi.json", None, {}),
    "openapi_tgi": ("GET", "/api-doc/openapi.json", None, {}),
    "unknown_route": ("GET", "/v2/health", None, {}),
}
# Tested in routes/test_page.py, and the history in test_history.py: its length varies with time.
PAGES = {"/docs", "/assets/{file}", "/stats/history"}
