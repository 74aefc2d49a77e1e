"""What a trained model is like: flatness, spectrum, distance to the model average."""
