"""Training: ``fit``, ``fit_population`` and ``select``."""
