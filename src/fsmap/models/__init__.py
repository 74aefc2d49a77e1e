"""Models of the experiments: basis functions, perceptrons, residual networks."""
