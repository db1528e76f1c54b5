"""What `neuron-store demo` runs: three nodes, an S3 server, and real graphs.

Uses only what any program may use; nothing of the library knows of it.
"""
