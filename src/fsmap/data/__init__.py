"""Data: drawn, tabular, images."""
