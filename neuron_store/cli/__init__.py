"""The command `neuron-store`."""
