"""Payloads to bytes and back."""

from isgq.wire.format import pack, pack_message, unpack, unpack_message
from isgq.wire.template import Template

__all__ = ["Template", "pack", "pack_message", "unpack", "unpack_message"]
