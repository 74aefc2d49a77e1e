"""A fast gradient for populations of perceptrons on a GPU: the same objective, written out."""
