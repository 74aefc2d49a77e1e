"""fsmap in other frameworks. Each module needs its own extra."""
