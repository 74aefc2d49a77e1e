"""Numbers of the Jacobian: log-determinants, traces, spectra. Knows nothing of priors, data sets or training."""
