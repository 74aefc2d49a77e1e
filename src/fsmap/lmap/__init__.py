"""R(θ) of L-MAP on a live module, for any training loop."""
