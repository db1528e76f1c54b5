"""Tiers of neuron_store: each is found through the entry-point group neuron_store.tiers."""
