"""Capture of factors and reconstruction of gradients, one adapter per module type."""

from isgq.layers.adapters import Adapter, adapter_for, register_adapter
from isgq.layers.capture import Capture, Unit, find_units

__all__ = ["Adapter", "Capture", "Unit", "adapter_for", "find_units", "register_adapter"]
