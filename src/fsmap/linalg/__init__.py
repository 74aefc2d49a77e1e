"""Numbers of the Jacobian: log-determinants and traces. Nothing of priors, data or training."""
