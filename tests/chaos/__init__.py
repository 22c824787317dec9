"""Tests under faults: killed engines, broken files and connections, hostile requests."""
