"""R(θ) of L-MAP on a live module, for any training loop: one pure function behind every way in."""
