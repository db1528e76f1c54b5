"""The compile-artifact manifest: what an engine compiled, from which configuration, on which ranks."""
