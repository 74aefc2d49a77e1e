"""What a trained model is like: calibration, shift, flatness, distance to the model average."""
