"""What a tier is tested with: the contract, and the faults it must survive."""
