"""Formats that no rendering of a chat template shows, found by a text in the template's source.

Each entry says why it is here. An entry changes what was derived, so that everything that can be
derived still is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from msgspec.structs import replace

from bloomery.response_format.format import (
    CallFormat,
    JsonArguments,
    LiteralArguments,
    ObjectCall,
    RegionMarkers,
    ResponseFormat,
)

_THINK = RegionMarkers("<think>\n", "\n</think>\n")


def _complete_harmony(derived: ResponseFormat) -> ResponseFormat:
    """The template writes the header of a call otherwise than the model does."""
    call = CallFormat(
        JsonArguments(),
        call=RegionMarkers("to=functions.", "<|call|>"),
        head="$name<|message|>",
        after_name=(" ", "<|channel|>", "<|constrain|>"),
        parallel=False,
    )
    return replace(
        derived,
        reasoning=RegionMarkers("<|channel|>analysis<|message|>", "<|end|>"),
        content=RegionMarkers("<|channel|>final<|message|>"),
        calls=call,
        ignored=(
            "<|start|>assistant",
            "<|channel|>commentary<|message|>",
            "<|channel|>commentary",
            "<|channel|>analysis",
            "<|end|>",
            "<|return|>",
            "to=assistant",
            "<|channel|>final <|constrain|>json<|message|>",
        ),
        end=(),
    )


def _complete_kimi_k3(derived: ResponseFormat) -> ResponseFormat:
    """Regions are named between shared tokens, <|open|>x<|sep|>, so no cut is clear."""

    def region(name: str) -> RegionMarkers:
        return RegionMarkers(f"<|open|>{name}<|sep|>", f"<|close|>{name}<|sep|>")

    assert derived.calls is not None
    call = RegionMarkers('<|open|>call tool="', "<|close|>call<|sep|>")
    return replace(
        derived,
        reasoning=region("think"),
        content=region("response"),
        calls=replace(derived.calls, section=region("tools"), call=call),
        end=("<|close|>message<|sep|>", "<|end_of_msg|>"),
    )


def _complete_muse(derived: ResponseFormat) -> ResponseFormat:
    """There is a turn for each recipient: self (reasoning), user (content) or a tool."""
    return replace(
        derived,
        reasoning=RegionMarkers(" to=self<|message|>", "<|eom|>"),
        content=RegionMarkers(" to=user<|message|>"),
        ignored=("<|eom|>", "<|start|>assistant"),
    )


def _complete_lfm2(derived: ResponseFormat) -> ResponseFormat:
    """The template shows tools, and prints calls only if the content has them already."""
    calls = CallFormat(
        LiteralArguments("=", ("'", '"'), ")"),
        RegionMarkers("<|tool_call_start|>[", "]<|tool_call_end|>"),
        head="$name(",
        separator=", ",
    )
    return replace(derived, calls=calls, reasoning=derived.reasoning or _THINK)


def _complete_granite(derived: ResponseFormat) -> ResponseFormat:
    """Calls and reasoning are described to the model and never written."""
    section = RegionMarkers("<|tool_call|>[", "]")
    calls = CallFormat(ObjectCall(), section, separator=", ")
    content = RegionMarkers("<response>", "</response>")
    return replace(derived, calls=calls, reasoning=_THINK, content=content)


def _complete_firefunction(derived: ResponseFormat) -> ResponseFormat:
    """The template wants its tools in a variable of its own, as text."""
    calls = CallFormat(ObjectCall(), RegionMarkers(" functools[", "]"), separator=", ")
    return replace(derived, calls=calls)


class TableEntry(NamedTuple):
    """A format for templates whose source contains `text`."""

    text: str
    complete: Callable[[ResponseFormat], ResponseFormat]
    always: bool = False  # otherwise only where no calls were derived


TABLE = (
    TableEntry("<|channel|>analysis", _complete_harmony, always=True),
    TableEntry("<|end_of_msg|>", _complete_kimi_k3, always=True),
    TableEntry("<atem:function_calls>", _complete_muse, always=True),
    TableEntry("<|tool_list_start|>", _complete_lfm2),
    TableEntry("List of tools: ", _complete_lfm2),
    TableEntry("<response></response>", _complete_granite),
    TableEntry("<|tool_call|>", _complete_granite),
    TableEntry("functools[", _complete_firefunction),
)


def find_entry(source: str, derived: ResponseFormat) -> TableEntry | None:
    """Return the entry for a template, given what was derived from it."""
    for entry in TABLE:
        if entry.text in source and (entry.always or derived.calls is None):
            return entry
    return None
