"""ATen graphs to StableHLO and HLO, by way of JAX.

`operators` says what there is without importing JAX; `export` does the work. Each group of
operators has a module, each operator a small function in it.
"""
