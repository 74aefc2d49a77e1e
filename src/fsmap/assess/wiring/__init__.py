"""Which slices of parameters make a hidden unit, and which read it: seen in one pass."""
