"""Training: one pure loss, and the loops around it."""
