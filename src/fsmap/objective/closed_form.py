r"""Basis models and closed forms of their log-determinant (section 3.3).

A basis model is $f_\theta(x) = s \sum_i \sigma(\theta_i)\varphi_i(x)$ with fixed features
$\varphi_i$, so $\mathcal{J} = D \Phi D$ with $D = \mathrm{diag}\,\sigma'(\theta)$ and
$\Phi = s^2\, E_{p_X}[\varphi\varphi^\top]$.

A form takes ``log_slope`` $= \log|\sigma'(\theta)|$, ``[..., P]``, to
$\log\det(D \Phi D + \epsilon I)$, ``[...]``: leading dimensions are members of a batch (seeds,
sizes, jitters), all of them one computation. Each form says which $\Phi$ and $\epsilon$ it is
for: :class:`Invertible`, :class:`Diagonal`, :class:`Dual` and :class:`FourierLattice`.

With $\Phi$ invertible and $\epsilon = 0$ the value depends on $p_X$ by a constant only: the image
of a basis model is flat (appendix B.3).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from fsmap.errors import SingularGeometryError
from fsmap.objective.objective import Gaussian, NoGeometry, Objective, Prior, tensor_like
from fsmap.px import Stream
from fsmap.types import Batch, Draws, ModelFn, Params


class Squash(NamedTuple):
    r"""An increasing function $\sigma$ and the logarithm of its derivative."""

    value: Callable[[Tensor], Tensor]  # σ(θ), element by element
    log_slope: Callable[[Tensor], Tensor]  # log σ'(θ), finite wherever the true value is

    def on_rows(self, params: Params, rows: Tensor) -> Tensor:
        """The model as a function of rows of its design matrix, ``[N, P]`` to ``[N]``."""
        return rows @ self.value(params["theta"])

    def objective(
        self, noise_std: float | Tensor, prior: Prior, form: Form | None, num_data: int | Tensor
    ) -> Objective:
        """FS-MAP with the log-determinant in closed form; PS-MAP without a form."""
        geometry = NoGeometry() if form is None else LogDetBasis(form, self.log_slope)
        return Objective(Gaussian(noise_std), prior, geometry, num_data)  # type: ignore[arg-type]

    def log_density(self, objective: Objective, theta: Tensor, rows: Batch) -> Tensor:
        """The sum of the terms of an objective in nats, ``[P]`` to ``[]``."""
        parts = objective.parts(self.on_rows, {"theta": theta}, rows, Draws())
        return torch.stack(list(parts.values())).sum()


def log_sech_squared(theta: Tensor) -> Tensor:
    r"""$\log \tanh'(\theta) = \log \mathrm{sech}^2\theta$, exact in the tails."""
    return 2 * math.log(2) - 2 * torch.logaddexp(theta, -theta)


TANH = Squash(torch.tanh, log_sech_squared)
EXP = Squash(torch.exp, lambda theta: theta)
IDENTITY = Squash(lambda theta: theta, torch.zeros_like)


class BasisModel(nn.Module):
    r"""$f_\theta(x) = s \sum_i \sigma(\theta_i)\,\varphi_i(x)$ with features given by a subclass.

    In float64. As in the authors' code parameters start at zero and $s = 1/\sqrt P$, unless a
    ``scale`` is given.
    """

    def __init__(self, num_features: int, squash: Squash, scale: float | None = None) -> None:
        super().__init__()
        self.squash = squash
        self.scale = 1 / math.sqrt(num_features) if scale is None else scale
        self.theta = nn.Parameter(torch.zeros(num_features, dtype=torch.float64))  # [P]

    def phi(self, x: Tensor) -> Tensor:
        r"""The features $\varphi_i(x)$ without the factor $s$, ``[S]`` to ``[S, P]``."""
        raise NotImplementedError

    def design(self, x: Tensor) -> Tensor:
        r"""$s\,\varphi_i(x)$, ``[S, P]``: the function is ``design(x) @ squash(theta)``."""
        return self.scale * self.phi(x.reshape(-1))

    def forward(self, x: Tensor) -> Tensor:
        """The function at ``x``, ``[S]`` or ``[S, 1]``, in the shape of ``x``."""
        return (self.design(x) @ self.squash.value(self.theta)).reshape(x.shape)

    def gram(self, x: Tensor) -> Tensor:
        r"""$\Phi$ for $p_X$ = the empirical distribution of the points, ``[P, P]``."""
        design = self.design(x)
        return design.mT @ design / len(design)

    def factor(self, x: Tensor) -> Tensor:
        r"""F with $F^\top F = \Phi$, ``[min(S, P), P]``: it keeps small eigenvalues of $\Phi$."""
        design = self.design(x)
        rows: Tensor = design / math.sqrt(len(design))
        return rows if len(rows) <= rows.shape[-1] else torch.linalg.qr(rows, mode="r").R


class FourierBasis(BasisModel):
    r"""$\{\cos(i\pi x), \sin(i\pi x)\}$, $i = 1 \ldots n$: P = 2n, cosines first."""

    frequencies: Tensor

    def __init__(self, num_frequencies: int, scale: float | None = None) -> None:
        super().__init__(2 * num_frequencies, TANH, scale)
        frequencies = math.pi * torch.arange(1, num_frequencies + 1, dtype=torch.float64)
        self.register_buffer("frequencies", frequencies)  # [n]

    def phi(self, x: Tensor) -> Tensor:
        """Cosines, then sines, ``[S, P]``."""
        angles = x[:, None] * self.frequencies  # [S, n]
        return torch.cat([angles.cos(), angles.sin()], dim=-1)

    def uniform_gram(self) -> Tensor:
        r"""$\Phi = s^2 I/2$ for $p_X = \mathrm{Uniform}(-1, 1)$: the features are orthogonal."""
        return self.scale**2 / 2 * torch.eye(len(self.theta)).to(self.frequencies)

    def lattice(self, num_points: int, jitter: float | Tensor) -> FourierLattice:
        """The closed form for p_X = ``linspace(-1, 1, num_points)``, at least two points."""
        num, around = len(self.frequencies), num_points - 1
        classes: dict[tuple[bool, int], list[int]] = {}
        for parameter in range(2 * num):
            frequency = parameter % num + 1
            alias = min(frequency % around, -frequency % around)
            classes.setdefault((parameter < num, alias), []).append(parameter)
        longest = max(map(len, classes.values()))
        members = [c + [2 * num] * (longest - len(c)) for c in classes.values()]
        cosine = torch.tensor([is_cosine for is_cosine, _ in classes])
        aliases = torch.tensor([alias for _, alias in classes])
        ends = (aliases == 0) | (2 * aliases == around)  # of the spectrum
        power = torch.where(ends, cosine.double(), 0.5)  # mean square over the n points
        kappa = around / num_points * self.scale**2 * power
        repeat = torch.tensor(self.scale**2 / num_points, dtype=torch.float64)
        return FourierLattice(torch.tensor(members), kappa.log(), cosine, repeat.log(), jitter)


class BumpBasis(BasisModel):
    r"""Gaussian bumps $\varphi_i(x) = \exp(-(x - c_i)^2 / w)$."""

    centers: Tensor

    def __init__(self, centers: Sequence[float], width: float, squash: Squash = EXP) -> None:
        super().__init__(len(centers), squash)
        self.width = width
        self.register_buffer("centers", torch.tensor(centers, dtype=torch.float64))  # [P]

    def phi(self, x: Tensor) -> Tensor:
        """The bumps, ``[S, P]``."""
        return torch.exp(-(x[:, None] - self.centers).square() / self.width)

    def uniform_gram(self) -> Tensor:
        r"""$\Phi$ for $p_X = \mathrm{Uniform}(-1, 1)$, in closed form (error functions)."""
        # a product of two bumps is a bump of half the width at the middle of their centers
        c, w = self.centers, self.width
        middle, apart, root = (c[:, None] + c) / 2, c[:, None] - c, math.sqrt(w / 2)  # [P, P]
        area = torch.erf((1 - middle) / root) + torch.erf((1 + middle) / root)
        mean = math.sqrt(math.pi * w / 2) / 4 * area
        return self.scale**2 * (torch.exp(-apart.square() / (2 * w)) * mean)


class Form(Protocol):
    """A way to compute the log-determinant."""

    def value(self, log_slope: Tensor) -> Tensor:
        r"""$\log\det$, ``[..., P]`` to ``[...]``."""


class Invertible(NamedTuple):
    r"""Invertible $\Phi$, $\epsilon = 0$: $2\sum_i \log\sigma'(\theta_i) + \log\det\Phi$."""

    log_det_gram: Tensor  # []

    @classmethod
    def from_gram(cls, gram: Tensor) -> Invertible:
        r"""From $\Phi$; SingularGeometryError if an eigenvalue is lost in rounding."""
        eigenvalues = torch.linalg.eigvalsh(gram)  # ascending
        floor = len(gram) * torch.finfo(gram.dtype).eps * eigenvalues[-1]
        rank = int((eigenvalues > floor).sum())
        if rank < len(gram):
            raise SingularGeometryError(
                f"Φ has {rank} of {len(gram)} eigenvalues above rounding ({floor:.1e}): it needs "
                "a jitter (Theorem 1) or more evaluation points. Use Dual(factor, jitter)."
            )
        return cls(eigenvalues.log().sum())

    def value(self, log_slope: Tensor) -> Tensor:
        r"""$\log\det\mathcal{J}$."""
        return 2 * log_slope.sum(-1) + self.log_det_gram


class Diagonal(NamedTuple):
    r"""Orthogonal features: $\sum_i \log(\sigma'(\theta_i)^2\,\Phi_{ii} + \epsilon)$."""

    diagonal: Tensor  # [P]
    jitter: float | Tensor  # ε ≥ 0; a tensor broadcasts against the members

    def value(self, log_slope: Tensor) -> Tensor:
        r"""$\log\det(\mathcal{J} + \epsilon I)$."""
        log_jitter = tensor_like(self.jitter, log_slope).log()[..., None]  # [..., 1]
        return torch.logaddexp(2 * log_slope + self.diagonal.log(), log_jitter).sum(-1)


class Dual(NamedTuple):
    r"""$P\log\epsilon + \log\det(I + F D^2 F^\top/\epsilon)$ for $\Phi = F^\top F$ of any rank.

    The weights $\sigma'^2/\epsilon$ easily span sixty orders of magnitude. Neither $\Phi$ nor the
    sum $F D^2 F^\top$ is formed, since both would lose small weights in the rounding errors of
    large ones: a QR decomposition of the rows $\sigma'_i F_{\cdot i}/\sqrt\epsilon$, the longest
    first, and of $I$ below them keeps every row to its own relative accuracy.
    """

    factor: Tensor  # [r, P]  F (``BasisModel.factor``)
    jitter: float | Tensor  # ε > 0; a tensor broadcasts against the members

    def value(self, log_slope: Tensor) -> Tensor:
        r"""$\log\det(\mathcal{J} + \epsilon I)$."""
        log_jitter = tensor_like(self.jitter, log_slope).log()  # [...]
        half_log_weight = log_slope - 0.5 * log_jitter[..., None]  # [..., P]  log(σ'/√ε)
        graded = _GradedLogDet.apply(half_log_weight, self.factor)  # type: ignore[no-untyped-call]
        log_det: Tensor = graded[0]
        return log_slope.shape[-1] * log_jitter + log_det


class _GradedLogDet(torch.autograd.Function):
    """log det(I + F diag(w²) Fᵀ) and its derivative 2 hᵢ, hᵢ the leverage of row i, in [0, 1]."""

    generate_vmap_rule = True

    @staticmethod
    def forward(log_weight: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
        rows = log_weight.exp()[..., None] * factor.mT  # [..., P, r]
        order = rows.norm(dim=-1).argsort(dim=-1, descending=True)
        graded = torch.take_along_dim(rows, order[..., None], dim=-2)
        identity = torch.eye(rows.shape[-1], dtype=rows.dtype, device=rows.device)
        below = identity.expand(*rows.shape[:-2], -1, -1)
        upper = torch.linalg.qr(torch.cat([graded, below], dim=-2), mode="r").R  # [..., r, r]
        log_det = 2 * upper.diagonal(dim1=-2, dim2=-1).abs().log().sum(-1)
        solved = torch.linalg.solve_triangular(upper, rows, upper=True, left=False)
        return log_det, solved.square().sum(-1)  # [...], [..., P]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(output[1])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None]:
        (leverage,) = ctx.saved_tensors
        return 2 * grad[..., None] * leverage, None


class LogDetBasis(NamedTuple):
    r"""``LogDet`` of a ``BasisModel`` in closed form: nothing is drawn, no Jacobian is taken."""

    form: Form
    log_slope: Callable[[Tensor], Tensor]  # θ ↦ log |σ'(θ)| (``model.squash.log_slope``)

    def draw(self, f: ModelFn, params: Params, stream: Stream) -> Draws:
        """Nothing."""
        return Draws()

    def value(self, f: ModelFn, params: Params, draws: Draws) -> Tensor:
        """Nats."""
        return -0.5 * self.form.value(self.log_slope(params["theta"]))


class FourierLattice(NamedTuple):
    r"""The form for ``FourierBasis`` and M equidistant points (``FourierBasis.lattice``).

    On M equidistant points of $[-1, 1]$, both ends included, there are $n = M - 1$ different points
    of the period. Frequencies $i \equiv \pm c \pmod n$ take the same values there up to a sign:
    they are *aliases*, and form one class. On the n points different classes are orthogonal, so
    $\Phi$ is block diagonal with blocks of rank one; the point x = 1, which repeats x = -1, adds
    one more rank-one matrix. Hence, with $S_c = \sum_{i \in c} \sigma'(\theta_i)^2$,

    $$\det(\mathcal{J} + \epsilon I) = \Big[\prod_c \epsilon^{|c|-1} (\epsilon + \kappa_c S_c)\Big]
      \Big[1 + \frac{s^2}{M} \sum_{c \,\in\, \cos} \frac{S_c}{\epsilon + \kappa_c S_c}\Big].$$

    All terms are positive and are added in log space: no rounding error, whatever $\epsilon$ is.
    """

    members: Tensor  # [C, m]  parameters of each class, padded with P
    log_kappa: Tensor  # [C]  −∞ for sines that vanish on the lattice
    cosine: Tensor  # [C]  whether the class is one of cosines
    log_repeat: Tensor  # []  log(s²/M), the weight of the repeated end point
    jitter: float | Tensor  # ε; a tensor broadcasts against the members of a batch

    @property
    def rank(self) -> int:
        r"""Rank of $\Phi$: the number of classes that do not vanish on the lattice."""
        return int((self.log_kappa > -math.inf).sum())

    def value(self, log_slope: Tensor) -> Tensor:
        r"""$\log\det(\mathcal{J} + \epsilon I)$."""
        log_jitter = tensor_like(self.jitter, log_slope).log()[..., None]  # [..., 1]
        nothing = log_slope.new_full((*log_slope.shape[:-1], 1), -math.inf)
        padded = torch.cat([2 * log_slope, nothing], dim=-1)  # [..., P + 1]
        log_s = padded[..., self.members].logsumexp(-1)  # [..., C]
        block = torch.logaddexp(log_jitter, self.log_kappa + log_s)  # [..., C]
        repeat = (log_s - block)[..., self.cosine].logsumexp(-1) + self.log_repeat  # [...]
        spare = log_slope.shape[-1] - len(self.members)  # Σ (|c| − 1)
        jitters = spare * log_jitter[..., 0] if spare else 0.0
        return jitters + block.sum(-1) + nn.functional.softplus(repeat)
