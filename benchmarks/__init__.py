"""Time, peak memory and error of what fsmap computes, beside what one would write today."""
