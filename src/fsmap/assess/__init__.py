"""Measurements of trained models: calibration, shift, flatness, distance to the model average."""
