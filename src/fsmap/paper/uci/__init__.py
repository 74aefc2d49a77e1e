"""UCI regression: tables of the paper."""
