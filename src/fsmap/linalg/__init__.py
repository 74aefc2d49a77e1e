"""The Jacobian of a model at evaluation points: products, traces, log-determinants."""
