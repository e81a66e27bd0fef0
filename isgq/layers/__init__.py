"""Capture of factors and reconstruction of gradients, one adapter per module type."""
