"""Bytes and files: the pinned arena, the I/O engine, and the store."""
