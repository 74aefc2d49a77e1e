"""Learn the most likely function of a model instead of its most likely parameters.

Training with a loss and weight decay is MAP estimation over parameters (PS-MAP). fsmap maximizes
the posterior density of the *function* instead (FS-MAP), exactly on small models and by a
first-order regularizer on large ones (L-MAP), as in "Should We Learn Most Likely Functions or
Parameters?" (Qiu, Rudner, Kapoor, Wilson, NeurIPS 2023, arXiv 2311.15990).
"""

from fsmap.functional import functional
from fsmap.linalg import metric
from fsmap.linalg.logdet import log_det
from fsmap.linalg.trace import trace
from fsmap.types import Estimate

__version__ = "0.1.0"

__all__ = [
    "__version__",
    "functional", "Estimate",  # a module as a function
    "log_det", "trace", "metric",  # numbers of its Jacobian
]
