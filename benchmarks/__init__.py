"""What the codecs cost and what they lose: ``python -m benchmarks.codecs``."""
