"""Payloads to bytes and back."""
