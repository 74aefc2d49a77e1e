"""Which slices of which parameters make a hidden unit, and which read it: found by watching one pass of the module."""
