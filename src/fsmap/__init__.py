"""Learn the most likely function of a model instead of its most likely parameters.

Training with a loss and weight decay is MAP estimation over parameters (PS-MAP). fsmap maximizes
the posterior density of the *function* instead (FS-MAP), exactly on small models and by a
first-order regularizer on large ones (L-MAP), as in "Should We Learn Most Likely Functions or
Parameters?" (Qiu, Rudner, Kapoor, Wilson, NeurIPS 2023, arXiv 2311.15990).
"""

from fsmap import metrics, px
from fsmap.doctor.doctor import doctor
from fsmap.functional import functional
from fsmap.linalg import metric
from fsmap.linalg.estimators import trace
from fsmap.linalg.logdet import log_det
from fsmap.linalg.metric import Whitening
from fsmap.lmap.batchnorm import fresh_statistics
from fsmap.lmap.inplace import InPlacePenalty
from fsmap.lmap.measure import estimate_cost, suggest_strength
from fsmap.lmap.module import LMAP, LaplacianPenalty, LogTrace
from fsmap.objective.objective import (
    Bernoulli,
    Categorical,
    Flat,
    Gaussian,
    Normal,
    Objective,
    Reparametrized,
    fs_map,
    l_map,
    ps_map,
)
from fsmap.px import Stream
from fsmap.train.fit import fit
from fsmap.train.loop import adam, cosine, sgd
from fsmap.train.population import Grid, fit_population
from fsmap.train.select import select
from fsmap.types import Batch, Estimate

__version__ = "0.1.0"

# fmt: off
__all__ = [
    "__version__",
    "functional", "Batch", "Estimate",  # a module as a function
    "LMAP", "LaplacianPenalty", "InPlacePenalty",  # for a training loop you already have
    "ps_map", "fs_map", "l_map", "Objective",  # the paper's objectives
    "Gaussian", "Categorical", "Bernoulli",  # likelihoods
    "Normal", "Flat", "Reparametrized",  # priors
    "fit", "fit_population", "Grid", "select",  # train
    "adam", "sgd", "cosine",  # optimizers and a schedule for fit
    "LogTrace", "suggest_strength",  # how strong
    "fresh_statistics",  # BatchNorm statistics of the weights as they are
    "estimate_cost",  # what R adds to a step
    "px", "metric", "Stream", "Whitening",  # evaluation points, metrics, and parts of your own ones
    "log_det", "trace",  # numbers of the Jacobian
    "metrics",  # numbers of predictions
    "doctor",  # whether and why the Jacobian is singular
]
# fmt: on
