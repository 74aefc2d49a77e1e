"""L-MAP in a training loop you already have: R(θ) of ``eq:lmap-loss``, to be added to any loss.

The loss is your loss + λR, with λ = 1/(2εN).

:class:`LMAP` is a module that returns the output and R, for every loop (DDP, autocast,
``torch.compile``, BatchNorm as the authors have it). :class:`LaplacianPenalty` is a term for the
simplest loops.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fsmap.errors import InputError
from fsmap.functional import Forward
from fsmap.linalg import points
from fsmap.linalg.metric import Metric
from fsmap.objective import batchnorm as bn
from fsmap.objective.compiling import never_compiled, not_itself_compiled
from fsmap.objective.following import watched
from fsmap.objective.px import EvalDistribution
from fsmap.objective.regularizer import Regularizer
from fsmap.objective.selection import Layers
from fsmap.types import Inputs


class LMAP(nn.Module):
    r"""A model that also returns R(θ): ``out, R = lm(x)``; add λR to any loss.

    Args:
        module: The model.
        px: Evaluation distribution: one of :mod:`fsmap.px`, a tensor of points, or a callable ``(n,
            generator) -> x``.
        num_points: S, fresh points a step.
        estimator: See :func:`fsmap.trace`. ``jvp`` falls back to ``fd_central``, with a warning,
            where the model has no forward mode.
        beta: Step of the differences.
        batchnorm: ``joint`` (one pass over B+S points serves the loss and R, and R is the mean over
            all of them, as in the authors' code; it is *not* plain training as λ → 0, because the
            statistics differ), ``frozen`` or ``batch`` (R on a pass of its own). In ``joint`` and
            ``frozen`` R has a share in the loss's graph: one ``backward``, of loss + λR.
        every: Evaluate R on every k-th optimiser step only, k times as strong; 0 otherwise.
        metric: g, see :mod:`fsmap.metric`.
        seed: ψ is a function of (seed, step, parameter name).
        probes: ψ per step.
        last_layer: Name of the linear layer that makes the output: its block of the trace is then
            exact, at no cost.
        layers: R over these parameters only: names of layers or parameters, patterns such as
            ``"block.*"``, or a function of a parameter's name. None: all that are trainable.
        outputs: R over so many entries of the last output dimension, another random sample on each
            step, scaled so that R is unbiased; for large vocabularies.
        forward: ``forward(module, x)`` when the module's signature is unusual.

    In ``eval()`` or under ``no_grad`` it returns the model's output and ``None``. Steps are counted
    by forward passes, or, after :meth:`attach`, by the optimiser's steps (gradient accumulation:
    the same ψ over all micro-batches), or by you: ``lm.step = n``.

    Example:
        >>> import torch, fsmap
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3))
        >>> lm = fsmap.LMAP(model, fsmap.px.Normal(shape=(2,)), num_points=16)
        >>> out, R = lm(torch.zeros(4, 2))
        >>> out.shape, bool(R > 0)
        (torch.Size([4, 3]), True)
        >>> lm.eval()(torch.zeros(4, 2))[1] is None
        True
    """

    def __init__(
        self,
        module: nn.Module,
        px: EvalDistribution,
        *,
        num_points: int,
        estimator: str = "jvp",
        beta: float = 1e-3,
        batchnorm: str = "joint",
        every: int = 1,
        metric: Metric | Tensor | None = None,
        seed: int = 0,
        probes: int = 1,
        last_layer: str | None = None,
        layers: Layers | None = None,
        outputs: int | None = None,
        forward: Forward | None = None,
    ) -> None:
        """Wrap a model; see the class."""
        super().__init__()
        bn.check_mode(batchnorm, bn.MODES)
        if batchnorm == "frozen":
            bn.check_running(module)
        self.module = module
        self.batchnorm = batchnorm
        self.regularizer = Regularizer(
            module,
            px,
            num_points=num_points,
            estimator=estimator,
            beta=beta,
            every=every,
            metric=metric,
            seed=seed,
            probes=probes,
            last_layer=last_layer,
            layers=layers,
            outputs=outputs,
            forward=forward,
        )

    @not_itself_compiled
    def forward(
        self, x: Inputs, reg_strength: float | Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The model's output and R.

        Args:
            x: Training points.
            reg_strength: λ. Given, the second value is λR; a plain 0 costs nothing and, outside
                ``joint``, changes nothing.

        Returns:
            Output, and R (λR); R is None in ``eval()`` and under ``no_grad``.
        """
        reg = self.regularizer
        if not (self.training and torch.is_grad_enabled()):
            return self._plain(x), None
        wanted = reg.active and not _is_zero(reg_strength)
        if self.batchnorm == "joint":
            out, value = self._joint(x, wanted)
        else:
            with watched(self.module, wanted and self.batchnorm == "frozen") as seen:
                out = self._plain(x)
            value = reg.separate(self.batchnorm, seen) if wanted else _zero(out)
        reg.passed()
        return out, value if reg_strength is None else reg_strength * value

    def attach(self, optimizer: torch.optim.Optimizer) -> LMAP:
        """Count this optimiser's steps instead of forward passes.

        Args:
            optimizer: The optimiser that updates the model.

        Returns:
            self.
        """
        self.regularizer.attach(optimizer)
        return self

    @property
    def step(self) -> int:
        """Number of the current step. Set it before a pass to count steps yourself."""
        return self.regularizer.step

    @step.setter
    def step(self, step: int) -> None:
        self.regularizer.set_step(step)

    def get_extra_state(self) -> Tensor:
        """The step, so that a resumed run draws what an uninterrupted one would."""
        return torch.tensor(self.regularizer.step)

    def set_extra_state(self, state: Tensor) -> None:
        """Restore the step."""
        self.regularizer.step = int(state)

    def extra_repr(self) -> str:
        """Settings, for ``print``."""
        r = self.regularizer
        return (
            f"{r.px!r}, num_points={r.num_points}, estimator={r.estimator!r}, "
            f"batchnorm={self.batchnorm!r}, every={r.every}"
        )

    def _plain(self, x: Inputs) -> Tensor:
        return self.regularizer.f.plain(x)

    @not_itself_compiled
    def _joint(self, x: Inputs, wanted: bool) -> tuple[Tensor, Tensor]:
        reg = self.regularizer
        both = self._both(x)
        if wanted:
            value, out, state = reg.value(reg.params(), both)
            bn.write_back(reg.module, state.buffers)
        else:
            out = self._plain(both)
            value = _zero(out)
        return out[: points.count(x)], value

    @never_compiled
    def _both(self, x: Inputs) -> Inputs:
        reg = self.regularizer
        evaluation = reg.sample(reg.params())
        reg.look(x, evaluation)
        return _joined(x, evaluation)


class LaplacianPenalty:
    """R(θ) as a term: ``loss = criterion(model(x), y) + lam * penalty()``.

    Takes the arguments of :class:`LMAP`, except that ``batchnorm`` is ``frozen`` (what ``auto``
    means) or ``batch``: a term that does not see the training batch cannot normalise with it. Under
    DDP use :class:`LMAP`: a pass that bypasses the wrapper is not synchronised unless it is in the
    same ``backward`` as one through it. Under ``no_grad`` it returns R as a number to look at.
    """

    def __init__(
        self,
        module: nn.Module,
        px: EvalDistribution,
        *,
        num_points: int,
        estimator: str = "jvp",
        batchnorm: str = "auto",
        every: int = 1,
        beta: float = 1e-3,
        metric: Metric | Tensor | None = None,
        seed: int = 0,
        probes: int = 1,
        last_layer: str | None = None,
        layers: Layers | None = None,
        outputs: int | None = None,
        forward: Forward | None = None,
    ) -> None:
        """See :class:`LMAP`."""
        bn.check_mode(batchnorm, ("auto", "frozen", "batch"), "For 'joint' use fsmap.LMAP.")
        if batchnorm == "frozen":
            bn.check_running(module)
        self.batchnorm = bn.deployed(module) if batchnorm == "auto" else batchnorm
        self.regularizer = Regularizer(
            module,
            px,
            num_points=num_points,
            estimator=estimator,
            beta=beta,
            every=every,
            metric=metric,
            seed=seed,
            probes=probes,
            last_layer=last_layer,
            layers=layers,
            outputs=outputs,
            forward=forward,
        )

    def __call__(self, reg_strength: float | Tensor | None = None) -> Tensor:
        """R, or λR if ``reg_strength`` is given; a plain 0 makes no pass."""
        reg = self.regularizer
        like = next(iter(reg.params().values()))
        wanted = reg.active and not _is_zero(reg_strength)
        value = reg.separate(self.batchnorm) if wanted else _zero(like)
        if torch.is_grad_enabled():
            reg.passed()
        return value if reg_strength is None else reg_strength * value

    def attach(self, optimizer: torch.optim.Optimizer) -> LaplacianPenalty:
        """Count this optimiser's steps instead of calls."""
        self.regularizer.attach(optimizer)
        return self

    @property
    def step(self) -> int:
        """Number of the current step. Set it before a call to count steps yourself."""
        return self.regularizer.step

    @step.setter
    def step(self, step: int) -> None:
        self.regularizer.set_step(step)

    def state_dict(self) -> dict[str, int]:
        """The step; the model's own state is the model's."""
        return {"step": self.regularizer.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore the step."""
        self.regularizer.step = int(state["step"])


def _joined(x: Inputs, evaluation: Inputs) -> Inputs:
    try:
        return points.concat(x, evaluation)
    except (RuntimeError, ValueError) as error:
        first = str(error).splitlines()[0]
        message = (
            "p_X draws points that do not fit the training batch, so they cannot form one joint "
            f"batch: {first}"
        )
        raise InputError(message) from error


def _is_zero(strength: float | Tensor | None) -> bool:
    return isinstance(strength, int | float) and strength == 0


@never_compiled
def _zero(like: Tensor) -> Tensor:
    return torch.zeros(
        (), device=like.device, dtype=torch.float32 if like.dtype.itemsize < 4 else like.dtype
    )
