"""The objective and its terms: likelihood, prior, evaluation distribution, geometry."""
