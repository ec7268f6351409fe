"""Bytes and files: the pinned arena, the engine, the store."""
