"""Models of the experiments: perceptrons, residual networks."""

from fsmap.models.mlp import MLP

__all__ = ["MLP"]
