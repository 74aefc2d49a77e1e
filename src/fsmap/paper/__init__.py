"""Experiments: every figure and table of the paper, and ours."""
