"""Images as uint8 tensors: reading, splitting, label noise, augmentation, evaluation sets."""
