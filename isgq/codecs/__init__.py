"""The compressors, each a registered dataclass."""
