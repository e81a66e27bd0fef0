"""Moves bytes between ranks."""
