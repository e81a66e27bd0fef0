"""Payloads to bytes and back."""

from isgq.wire.format import pack, pack_message, unpack, unpack_message

__all__ = ["pack", "pack_message", "unpack", "unpack_message"]
