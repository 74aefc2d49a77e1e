"""Time, peak memory and error of fsmap, and of the same computation without it."""
