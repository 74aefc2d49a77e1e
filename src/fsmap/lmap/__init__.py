"""R(θ) of L-MAP for a module in any training loop."""
