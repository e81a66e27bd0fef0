"""isgq."""
