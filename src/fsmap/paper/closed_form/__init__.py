"""Models with a closed form: figures and statements of the paper."""
