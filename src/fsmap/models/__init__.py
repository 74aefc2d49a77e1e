"""Models of the experiments: basis functions, perceptrons, residual networks."""

from fsmap.models.mlp import MLP

__all__ = ["MLP"]
