"""The compile-artifact manifest: what an engine compiled, from what, and on which ranks."""
