"""The leaf of the package: errors, keys, payloads, the codec protocols and their registry."""
