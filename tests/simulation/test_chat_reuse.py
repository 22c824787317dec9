"""A simulated Qwen3.6-35B-A3B reuses most of what chats repeat. The long form is a benchmark."""

from __future__ import annotations

import pytest

from benchmarks.chat_trace import ChatTrace, serve_chats


@pytest.mark.parametrize("removes_reasoning", [False, True])
def test_chats_reuse_states_and_positions(removes_reasoning: bool) -> None:
    trace = ChatTrace(7, 8, removes_reasoning)
    plenty = serve_chats(trace, 8e9)
    scarce = serve_chats(trace, 0.5e9)
    assert plenty.reused > 0.97 * trace.reusable
    assert 0.5 * trace.reusable < scarce.reused < plenty.reused
    assert max(scarce.checkpoint_bytes) < 0.5e9
    assert plenty.preemptions == 0
