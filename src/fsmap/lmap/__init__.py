"""L-MAP in a training loop: the strength of R."""
