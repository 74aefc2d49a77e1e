"""Facades: fsmap inside other people's frameworks. Each needs its own extra."""
