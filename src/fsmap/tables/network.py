r"""Networks for a table: an ensemble for every configuration, all trained as one computation.

The loss per row is the squared error of standardized targets (mean over outputs) or the
cross-entropy, $+ \tfrac w2 \|\theta\|^2 + \lambda R$. With ``ensemble`` F the rows are split into F
folds; member k of a configuration is not trained on fold k. The outputs of all members on their own
folds are held-out predictions of every row: they decide when to stop, which configuration and
method are used, and how wide intervals are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from numbers import Integral, Real
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from fsmap.errors import DivergedError, InputError
from fsmap.functional import as_device, check_derivatives
from fsmap.linalg.estimators import Jvp, evaluate
from fsmap.linalg.jacobian import Site
from fsmap.lmap.module import MEMORY
from fsmap.models.mlp import MLP
from fsmap.objective.geometry import SHARE as FLOOR
from fsmap.progress import progress as progress_bar
from fsmap.px import Empirical, EvalDistribution, Normal, as_px
from fsmap.types import ModelFn, Params

AUTO, LINEAR = "auto", "linear"
METHODS = (LINEAR, "ps-map", "l-map")
LEARNING_RATE = 1e-2  # Adam's at the start, falling along a cosine
NUM_POINTS = 32  # S
MOST_UNITS = 100_000  # of a hidden layer
STRENGTHS = ((1e-4, 1e-3), (1e-3, 1e-2))
"""The automatic (w, share): λR before training is that share of the loss of a constant."""
LARGE = (20_000, 1_000)  # rows and columns beyond which only the first of them is tried
EVERY = 2  # R is evaluated on every k-th step, k times as strong
LINEAR_DECAYS = (1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5)
VALIDATIONS, PATIENCE = 50, 15  # validations; training stops after 15 without a new best
MOST_HELD = 1_500  # rows of a fold that are validated on
SHARE = 0.15  # of the rows that a single network holds out
BINS, MOST_BINNED = 8, 100  # intervals that a column is cut into; columns beyond which none is
CODE_SCALE = 0.3  # of the numbers of these intervals, beside standardized columns
PREDICT_ROWS = 65_536


class Config(NamedTuple):
    """The hyper-parameters that a search varies."""

    method: str
    weight_decay: float  # w
    reg_strength: float = 0.0  # λ


class TableNet(nn.Module):
    r"""An MLP of standardized columns and of a piecewise linear code of each.

    Column d adds the numbers clip((x_d − e_t)/(e_{t+1} − e_t), 0, 1) − ½ for the intervals between
    its quantiles e, so that the first layer can bend at them (Gorishniy et al., 2022). ``edges``
    holds these, ``[D, T + 1]`` and ascending; T = 0 adds nothing. ``sizes`` are inputs, hidden
    layers, outputs.
    """

    edges: Tensor

    def __init__(self, sizes: Sequence[int], edges: Tensor, generator: torch.Generator) -> None:
        super().__init__()
        self.register_buffer("edges", edges)
        first = sizes[0] + edges.shape[0] * (edges.shape[1] - 1)
        self.mlp = MLP([first, *sizes[1:]], "silu", generator=generator)
        self.sizes = tuple(sizes)

    def forward(self, x: Tensor) -> Tensor:
        """``[N, D]`` to ``[N, K]``."""
        low, high = self.edges[:, :-1], self.edges[:, 1:]
        code = ((x[..., None] - low) / (high - low)).clamp(0, 1) - 0.5  # [N, D, T]
        x = torch.cat([x, CODE_SCALE * code.flatten(-2)], dim=-1)
        return self.mlp(x)  # type: ignore[no-any-return]


class Members(nn.Module):
    """Networks of one architecture; the output is the average of theirs.

    With ``labels`` probabilities are averaged (the output is their logarithm), not outputs.
    """

    def __init__(self, members: Sequence[nn.Module], *, labels: bool) -> None:
        super().__init__()
        self.members, self.labels = nn.ModuleList(members), labels

    def forward(self, x: Tensor) -> Tensor:
        """``[N, D]`` to ``[N, K]``, one pass for all members."""
        params, _ = stack_module_state(list(self.members))
        out = _apply(self.members[0], params, x)  # [M, N, K]
        if not self.labels:
            return out.mean(0)
        return out.log_softmax(-1).logsumexp(0) - math.log(len(out))

    def outputs(self, x: Tensor) -> Tensor:
        """The average in float64, without a graph; DivergedError if it is not finite."""
        with torch.no_grad():
            out = torch.cat([self(part.double()) for part in x.split(PREDICT_ROWS)])
        right = torch.isfinite(out)
        if not bool(right.all()):
            row = int((~right).any(1).nonzero()[0]) + 1
            raise DivergedError(
                f"the prediction for row {row} is not finite: its numbers may be too large."
            )
        return out


class Learned(NamedTuple):
    """The best configuration of one method, trained."""

    config: Config
    module: Members  # float64, on the CPU, in eval()
    loss: float  # RMSE (standardized) or log loss of held-out rows
    step: int  # steps taken when the module was best
    out: Tensor  # [N, K]  of each row by members that had not seen it; nan if there are none
    search: list[dict[str, Any]]  # a line for each configuration


@dataclass(kw_only=True, eq=False, repr=False)
class Options:
    """Options of the networks, described in :class:`fsmap.integrations.sklearn.LMAPRegressor`."""

    method: str = AUTO
    ensemble: int = 4
    hidden: int | Sequence[int] | str = AUTO
    weight_decay: float | str = AUTO
    reg_strength: float | str = AUTO
    reg_nats: float | None = None
    px: Any = "normal"
    steps: Any = None
    device: str = "cpu"

    def check(self) -> None:
        """Raise InputError for a value that cannot be used."""
        if self.method not in (AUTO, *METHODS):
            _refuse(f"method must be one of auto, {', '.join(METHODS)}, got {self.method!r}")
        for name in ("ensemble", "steps"):
            count: Any = getattr(self, name)
            if count is not None and (not isinstance(count, Integral) or int(count) < 1):
                _refuse(f"{name} must be an integer of at least 1, got {count!r}")
        if not all(isinstance(n, int) and 1 <= n <= MOST_UNITS for n in self.units(0)):
            _refuse(f"hidden layers have 1 to {MOST_UNITS:,} units each, got {self.hidden!r}")
        for name, usual in (("weight_decay", AUTO), ("reg_strength", AUTO), ("reg_nats", None)):
            value = getattr(self, name)
            automatic = isinstance(value, str | None) and value == usual
            number = isinstance(value, Real) and not isinstance(value, bool)
            if not automatic and not (number and 0 <= float(value) < math.inf):
                _refuse(f"{name} must be {usual!r} or a finite number >= 0, got {value!r}")
        if self.reg_nats is not None and self.reg_strength != AUTO:
            _refuse("reg_strength and reg_nats both set the strength: give one of them")
        if self.reg_nats is not None and self.method not in (AUTO, "l-map"):
            _refuse(f"reg_nats is a strength of l-map, got method={self.method!r}")

    def units(self, num_data: int) -> tuple[int, ...]:
        """Hidden layers for N rows.

        Examples:
            >>> Options().units(400), Options(hidden=32).units(400)
            ((64, 64, 64), (32,))
        """
        if isinstance(self.hidden, str) and self.hidden == AUTO:
            return (64 if num_data < 2_000 else 128,) * 3
        return tuple(np.atleast_1d(self.hidden).tolist())


def _refuse(message: str) -> None:
    raise InputError(message)


@torch.enable_grad()
def learn(
    x: Tensor, y: Tensor, options: Options, *, seed: int, progress: bool
) -> dict[str, Learned]:
    """Train a method, or all that ``"auto"`` chooses among; returns what was learned by method.

    ``x`` is standardized, ``[N, D]``; ``y`` too, ``[N, 1]``, or integer labels ``[N]``.
    """
    options.check()
    check_derivatives("training")
    folds = assign_folds(y, options.ensemble, seed)
    wanted = METHODS if options.method == AUTO else (options.method,)
    found = {}
    if LINEAR in wanted:
        decay = options.weight_decay
        given = LINEAR_DECAYS if decay == AUTO else (float(decay),)
        found[LINEAR] = learn_linear(x, y, folds, given)
    if kinds := [kind for kind in wanted if kind != LINEAR]:
        run = _Run(x, y, folds, options, seed)
        found |= run.train(run.configs(kinds), progress)
    return found


def best(found: dict[str, Learned]) -> str:
    """The method with the lowest held-out loss."""
    return min(found, key=lambda m: (not math.isfinite(found[m].loss), found[m].loss))


def assign_folds(y: Tensor, ensemble: int, seed: int, share: float = SHARE) -> Tensor:
    """The member that holds out each row, ``[N]``, by class; one alone holds out a ``share``."""
    num_rows = len(y)
    order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(seed))
    if not y.is_floating_point():
        order = order[y[order].sort(stable=True).indices]
    place = torch.empty(num_rows, dtype=torch.long)  # every class is split evenly
    place[order] = torch.arange(num_rows)
    if ensemble > 1:
        return place % ensemble
    count = max(1, round(share * num_rows))
    held = (place * count) // num_rows < ((place + 1) * count) // num_rows
    return torch.where(held, 0, -1)  # -1: by no member


def row_losses(out: Tensor, y: Tensor) -> Tensor:
    """Squared error or log loss of each row: ``[..., N, K]`` to ``[..., N]``."""
    if y.is_floating_point():
        return (out - y).square().mean(-1)
    return -out.log_softmax(-1).gather(-1, y.expand(out.shape[:-1])[..., None])[..., 0]


def mean_loss(out: Tensor, y: Tensor) -> Tensor:
    """Log loss, or root mean squared error: ``[..., n, K]`` to ``[...]``."""
    mean = row_losses(out, y).mean(-1)
    return mean.sqrt() if y.is_floating_point() else mean


def _apply(module: nn.Module, params: Any, x: Tensor) -> Tensor:
    """Members at the same points ``[N, D]``, or at points of their own ``[M, N, D]``."""
    call: ModelFn = partial(functional_call, module)
    return vmap(call, in_dims=(0, None if x.dim() == 2 else 0))(params, x)


class _Run:
    """Training of all configurations at once: C configurations times F members."""

    def __init__(self, x: Tensor, y: Tensor, folds: Tensor, options: Options, seed: int) -> None:
        device, self.labels = as_device(options.device), not y.is_floating_point()
        num_data = int(len(y) - (folds == 0).sum())
        outputs = int(y.max()) + 1 if self.labels else y.shape[1]
        self.sizes = [x.shape[1], *options.units(num_data), outputs]
        usual = 700 * (num_data / 1_000) ** 0.3
        self.steps = options.steps or round(min(max(500, usual), 1_500))
        self.batch = min(max(2 ** round(math.log2(max(num_data, 8) / 8)), 32), 256)
        self.edges = quantile_edges(x)
        self.x, self.y = x.float().to(device), (y if self.labels else y.float()).to(device)
        self.px, self.options = _points(options.px, self.x), options
        self.net = self.make(0)
        self.F, self.seed = options.ensemble, seed
        self.generator = torch.Generator().manual_seed(seed)  # of points and ψ
        self.shuffle = torch.Generator().manual_seed(seed)
        members = [folds == k for k in range(self.F)]
        self.held = [_subsample(rows.nonzero()[:, 0], MOST_HELD).to(device) for rows in members]
        self.train_rows = [(~rows).nonzero()[:, 0].to(device) for rows in members]

    def make(self, seed: int) -> TableNet:
        """A network in float32."""
        generator = torch.Generator().manual_seed(seed)
        return TableNet(self.sizes, self.edges, generator).float().to(self.x.device)

    def configs(self, kinds: list[str]) -> list[Config]:
        found, strength, decay = [], self.options.reg_strength, self.options.weight_decay
        large = len(self.x) > LARGE[0] or self.x.shape[1] > LARGE[1]
        for kind in kinds:
            penalized = kind == "l-map" and self.options.reg_nats is None  # by λR
            unit = self._unit_strength() if penalized and strength == AUTO else 0.0
            for usual, share in STRENGTHS[:1] if large else STRENGTHS:
                w = usual if decay == AUTO else float(decay)
                lam = float(f"{share * unit:.1e}") if strength == AUTO else float(strength)
                found.append(Config(kind, w, lam if penalized else 0.0))
        return list(dict.fromkeys(found))

    def _unit_strength(self) -> float:
        """The λ at which λR before training is the loss of a constant."""
        params, _ = stack_module_state([self.make(self.seed + k) for k in range(self.F)])
        with torch.no_grad():
            found = [self._laplacian(params) for _ in range(8)]
        loss = math.log(self.sizes[-1]) if self.labels else 1.0
        return max(loss, 0.1) / max(float(torch.stack(found).mean()), 1e-12)

    def _laplacian(self, params: Any) -> Tensor:
        """R of each member at S points of p_X, with one probe ψ each: ``[M]``."""
        drawn: Any = self.px.sample(NUM_POINTS, self.generator)
        points = drawn.to(self.x)
        psi = {n: torch.randn(p.shape, generator=self.generator).to(p) for n, p in params.items()}
        call = partial(functional_call, self.net)

        def one(own: Params, probe: Params) -> Tensor:
            probes = {n: t[None] for n, t in probe.items()}
            return evaluate(Jvp(), Site(call, own, points), probes).value[0]

        return vmap(one)(params, psi)

    def train(self, configs: list[Config], progress: bool) -> dict[str, Learned]:
        """Train, keep the best parameters of each configuration, and choose one for each method."""
        C, F = len(configs), self.F
        params, _ = stack_module_state([self.make(self.seed + m % F) for m in range(C * F)])
        optimizer = torch.optim.Adam(params.values(), lr=LEARNING_RATE, fused=True)
        per_config = [[c.weight_decay, c.reg_strength] for c in configs]
        decay, strength = torch.tensor(per_config).repeat_interleave(F, 0).to(self.x).T
        nats = self.options.reg_nats or 0.0
        of_lmap = [m for m in range(C * F) if configs[m // F].method == "l-map"]  # side by side
        active = slice(of_lmap[0], of_lmap[-1] + 1) if of_lmap else slice(0, 0)
        regularized = bool(of_lmap) and (nats > 0 or bool(strength.any()))
        mean = first = torch.zeros_like(strength[active])  # running mean of R, and at the start
        tracks = [_Track() for _ in configs]
        every = max(1, self.steps // VALIDATIONS)
        with progress_bar(self.steps, f"fit {C * F} networks", silent=not progress) as bar:
            for step, rows in enumerate(self._batches(C), start=1):
                for group in optimizer.param_groups:
                    angle = math.pi * (step - 1) / self.steps
                    group["lr"] = LEARNING_RATE * 0.5 * (1 + math.cos(angle))
                losses = row_losses(_apply(self.net, params, self.x[rows]), self.y[rows])
                squares = torch.stack([p.square().flatten(1).sum(1) for p in params.values()])
                loss = losses.mean(1).sum() + (decay / 2 * squares.sum(0)).sum()
                if regularized and step % EVERY == 0:
                    R = self._laplacian({n: p[active] for n, p in params.items()})
                    drawn = step // EVERY
                    mean = mean + (R.detach() - mean) / min(drawn, MEMORY)
                    first = mean if drawn <= MEMORY else first
                    # the gradient of c·log(1 + R/R₀) is c·∇R/(R̄ + R₀), see LogTrace
                    weights = strength[active] + nats / (mean + FLOOR * first)
                    loss = loss + EVERY * (weights * R).sum()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                bar.advance(1)
                if step % every == 0 or step == self.steps:
                    self._validate(params, tracks, step)
                    if all(step - track.step >= PATIENCE * every for track in tracks):
                        break
        if nats and regularized:  # the λ that c amounts to at the end
            lam = float((nats / (mean + FLOOR * first)).mean())
            configs = [c._replace(reg_strength=lam * (c.method == "l-map")) for c in configs]
        return self._chosen(configs, tracks)

    def _batches(self, C: int) -> Iterator[Tensor]:
        """Rows of every member, ``[CF, B]`` a step; member k of all configurations has the same."""
        fewest = min(len(rows) for rows in self.train_rows)
        size, at, order = min(self.batch, fewest), fewest, torch.empty(0)
        for _ in range(self.steps):
            if at + size > fewest:
                shuffled = [
                    rows[torch.randperm(len(rows), generator=self.shuffle).to(rows)[:fewest]]
                    for rows in self.train_rows
                ]
                order, at = torch.stack(shuffled), 0
            yield order[:, at : at + size].repeat(C, 1)
            at += size

    def _validate(self, params: Any, tracks: list[_Track], step: int) -> None:
        """Measure every configuration on the rows that its members hold out."""
        own = [{n: t.detach()[k :: self.F] for n, t in params.items()} for k in range(self.F)]
        parts = [_apply(self.net, p, self.x[rows]) for p, rows in zip(own, self.held, strict=True)]
        out, rows = torch.cat(parts, dim=1), torch.cat(self.held)
        values = mean_loss(out, self.y[rows]).tolist()
        for c, (track, value) in enumerate(zip(tracks, values, strict=True)):
            if value < track.value:
                track.value, track.step = value, step
                of_c = slice(c * self.F, (c + 1) * self.F)
                track.params = {n: p.detach()[of_c].clone() for n, p in params.items()}
                track.out = out.new_full((len(self.x), out.shape[-1]), torch.nan).double()
                track.out[rows] = out[c].double()

    def _chosen(self, configs: list[Config], tracks: list[_Track]) -> dict[str, Learned]:
        found = {}
        for method in dict.fromkeys(c.method for c in configs):
            lines = [(c, t) for c, t in zip(configs, tracks, strict=True) if c.method == method]
            config, track = min(lines, key=lambda line: line[1].value)
            if track.out is None:
                raise DivergedError(f"no configuration of {method} stayed finite")
            members = []
            for k in range(self.F):
                net = self.make(0).cpu()
                net.load_state_dict({n: p[k].cpu() for n, p in track.params.items()}, strict=False)
                members.append(net.double())
            module = Members(members, labels=self.labels).eval()
            search = [{**c._asdict(), "value": t.value, "step": t.step} for c, t in lines]
            out = track.out.cpu()
            found[method] = Learned(config, module, track.value, track.step, out, search)
        return found


def _subsample(rows: Tensor, most: int) -> Tensor:
    """At most ``most`` of the rows, evenly spread."""
    return rows[torch.linspace(0, len(rows) - 1, min(len(rows), most)).long()]


@dataclass
class _Track:
    """The best of one configuration so far."""

    value: float = math.inf
    step: int = 0
    params: dict[str, Tensor] = field(default_factory=dict)
    out: Tensor | None = None


def learn_linear(x: Tensor, y: Tensor, folds: Tensor, decays: Sequence[float]) -> Learned:
    """A linear model, trained to its minimum; the weight decay is chosen by held-out rows."""
    labels = not y.is_floating_point()
    outputs = int(y.max()) + 1 if labels else y.shape[1]
    x, y, back = x.double(), y if labels else y.double(), None
    if x.shape[1] > len(x):  # coordinates in the rows' span: no rotation changes the weight decay
        squares, u = torch.linalg.eigh(x @ x.T)
        root = squares.clamp_min(1e-10 * float(squares.max())).sqrt()
        back = x.T @ (u / root)  # [D, N]
        x = u * root
    rows = torch.cat([x, torch.ones(len(x), 1, dtype=torch.float64)], dim=1)
    solve = _solve_classification if labels else _solve_regression
    theta = torch.zeros(rows.shape[1], outputs, dtype=torch.float64)  # where a solver starts
    tried = []
    for decay in decays:
        out = torch.full((len(x), outputs), torch.nan, dtype=torch.float64)
        for k in range(int(folds.max()) + 1):
            held = folds == k
            theta = solve(rows[~held], y[~held], decay, theta)
            out[held] = rows[held] @ theta
        tried.append((float(mean_loss(out[folds >= 0], y[folds >= 0])), decay, out))
    value, chosen, out = min(reversed(tried), key=lambda line: line[0])
    theta = solve(rows, y, chosen, theta)
    slope = theta[:-1] if back is None else back @ theta[:-1]
    no_code = torch.zeros(len(slope), 1)
    net = TableNet([len(slope), outputs], no_code, torch.Generator()).double().eval()
    net.mlp.load_state_dict({"layers.0.weight": slope.T, "layers.0.bias": theta[-1]})
    search = [{**Config(LINEAR, w)._asdict(), "value": v, "step": 1} for v, w, _ in tried]
    module = Members([net], labels=labels).eval()
    return Learned(Config(LINEAR, chosen), module, value, 1, out, search)


def _solve_regression(rows: Tensor, y: Tensor, decay: float, start: Tensor) -> Tensor:
    """Mean of ‖y − Aθ‖²/K + w/2 ‖θ‖², with a free intercept: one linear system."""
    scaled = rows * (2 / (len(rows) * y.shape[1]))
    normal = scaled.T @ rows
    normal.diagonal()[:-1].add_(decay)
    normal.diagonal().add_(1e-12)
    found: Tensor = torch.linalg.solve(normal, scaled.T @ y)
    return found


def _solve_classification(rows: Tensor, y: Tensor, decay: float, start: Tensor) -> Tensor:
    """Mean cross-entropy + w/2 ‖θ‖², by L-BFGS."""
    theta = start.clone().requires_grad_()
    stop: Any = {"max_iter": 200, "tolerance_grad": 1e-6, "tolerance_change": 0.0}
    optimizer = torch.optim.LBFGS([theta], line_search_fn="strong_wolfe", **stop)

    def loss() -> Tensor:
        optimizer.zero_grad()
        total = row_losses(rows @ theta, y).mean() + decay / 2 * theta.square().sum()
        total.backward()
        return total

    optimizer.step(loss)
    return theta.detach()


def quantile_edges(x: Tensor) -> Tensor:
    """Quantiles of each column, ``[D, T + 1]``; equal ones are moved apart."""
    if x.shape[1] > MOST_BINNED:
        return torch.zeros(x.shape[1], 1)
    levels, some = np.linspace(0, 1, BINS + 1), _subsample(x, 10_000).double().numpy()
    edges = torch.from_numpy(np.quantile(some, levels, axis=0, method="inverted_cdf")).T
    for k in range(1, BINS + 1):
        edges[:, k] = torch.maximum(edges[:, k], edges[:, k - 1] + 1e-2)
    return edges.float().contiguous()


def _points(px: Any, x: Tensor) -> EvalDistribution:
    if not isinstance(px, str):
        return as_px(px)
    if px == "normal":
        return Normal(shape=(x.shape[1],))
    if px == "train":
        return Empirical(x.cpu())
    raise InputError(f"px must be 'normal', 'train' or a distribution of fsmap.px, got {px!r}")
