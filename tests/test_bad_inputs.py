"""Bad inputs by name: each is a typed error (API) or one message and exit code 2 (command line).

A line of a table is a call or a command, then the word that the message must have. Nothing is
silent, nothing is a traceback, and a refused command writes no file.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fsmap
from fsmap.cli import main
from fsmap.data import synthetic, uci
from fsmap.errors import FsmapError
from fsmap.tables.sklearn import LMAPClassifier, LMAPRegressor

CALLS = """
functional(Net)                                                 | Module
functional(torch.tanh)                                          | Module
functional(nn.Tanh())                                           | trainable
functional(net, last_layer="head")                              | head
functional(net, forward=3)                                      | forward
log_det(f, p, x, jitter=-1.0)                                   | jitter
log_det(f, p, x, jitter=nan)                                    | jitter
log_det(f, p, x, jitter=inf)                                    | jitter
log_det(f, p, x, jitter=None)                                   | jitter
log_det(f, p, x, jitter="small")                                | jitter
log_det(f, p, x, jitter=torch.ones(2))                          | jitter
log_det(f, p, x, jitter=0.0)                                    | jitter
log_det(f, p, x, jitter=1.0, method="lu")                       | method
log_det(f, p, x, jitter=1.0, method=None)                       | method
log_det(f, p, x, jitter=1.0, method="slq", probes=0)            | probes
log_det(f, p, x, jitter=1.0, method="slq", probes=2.5)          | integer
log_det(f, p, x, jitter=1.0, method="slq", probes=torch.ones(3, 4)) | probes
log_det(f, p, x[:0], jitter=1.0)                                | point
log_det(f, p, None, jitter=1.0)                                 | tensor
log_det(f, p, "points", jitter=1.0)                             | tensor
log_det(f, p, x * nan, jitter=1.0)                              | NaN
log_det(f, {}, x, jitter=1.0)                                   | param
log_det(f, list(p.values()), x, jitter=1.0)                     | dict
log_det(f, {"a": 1.0}, x, jitter=1.0)                           | params
log_det(f, p, x, jitter=1.0, metric=torch.ones(3))              | metric
log_det(f, p, x, jitter=1.0, metric=-torch.eye(3))              | metric
log_det(f, p, x, jitter=1.0, metric="fisher")                   | metric
log_det(f, p, x, jitter=1.0, metric=metric.SoftmaxFisher)       | SoftmaxFisher
log_det(lambda p, x: 0 * x.sum(), p, x, jitter=1.0)             | point
log_det(lambda p, x: None, p, x, jitter=1.0)                    | tensor
trace(f, p, x, method="sampled")                                | sampled
trace(f, p, x, method=None)                                     | None
trace(f, p, x, method="fd", beta=0.0)                           | beta
trace(f, p, x, method="fd", beta=nan)                           | beta
trace(f, p, x, method="jvp", probes=0)                          | probes
trace(f, p, x, method="jvp", probes=1.5)                        | probes
trace(f, p, x, method="jvp", generator=0)                       | generator
trace(f, p, x, method="jvp", probes=torch.ones(2, 51))          | stacked
trace(f, p, x, method="vjp", probes=torch.ones(2, 7))           | vjp
trace(f, p, x, method="vjp", probes={})                         | dict
trace(f, {n: nan * t for n, t in p.items()}, x, method="fd")    | NaN
trace(f, p, torch.ones(6, 9), method="jvp")                     | Linear
trace(f, p, (x, x[:3]), method="exact")                         | dimension
trace(f, p, x.long().bool, method="exact")                      | tensor
LMAP(Net, px, num_points=4)                                     | Module
LMAP(torch.tanh, px, num_points=4)                              | Module
LMAP(LaplacianPenalty(net, px, num_points=4), px, num_points=4) | Module
LMAP(nn.Linear(2, 2, dtype=torch.complex64), px, num_points=4)  | complex
LMAP(nn.Tanh(), px, num_points=4)                               | trainable
LMAP(net, None, num_points=4)                                   | None
LMAP(net, "normal", num_points=4)                               | normal
LMAP(net, px, num_points=0)                                     | num_points
LMAP(net, px, num_points=-3)                                    | num_points
LMAP(net, px, num_points=2.5)                                   | num_points
LMAP(net, px, num_points=4, estimator="exakt")                  | estimator
LMAP(net, px, num_points=4, beta=-1e-3)                         | beta
LMAP(net, px, num_points=4, batchnorm="eval")                   | batchnorm
LMAP(net, px, num_points=4, every=0)                            | every
LMAP(net, px, num_points=4, probes=0)                           | probes
LMAP(net, px, num_points=4, seed=0.5)                           | seed
LMAP(net, px, num_points=4, last_layer="nothing")               | nothing
LMAP(net, px, num_points=4, layers=["nothing"])                 | nothing
LMAP(net, px, num_points=4, outputs=0)                          | outputs
LMAP(net, px, num_points=4)(x[:0])                              | point
LMAP(net, px, num_points=4)("x")                                | tensor
LMAP(net, px, num_points=4)(x.to(torch.uint8))                  | uint8
LMAP(net, torch.ones(9, 2).byte(), num_points=4)(x)             | uint8
LMAP(net, torch.ones(9, 5), num_points=4)(x)                    | shape
LMAP(net, px, num_points=4)(x, scale=torch.ones(6, 1))          | scale
freeze(LMAP(net, px, num_points=4))(x)                          | trainable
LMAP(net, px, num_points=4).attach(scheduler)                   | Optimizer
LMAP(net, px, num_points=4).attach(None)                        | Optimizer
LMAP(net, px, num_points=4).attach(optimizer(Net()))            | parameter
LaplacianPenalty(net, px, num_points=4, batchnorm="joint")      | joint
LaplacianPenalty(net, px, num_points=0)                         | num_points
LaplacianPenalty(Net, px, num_points=4)                         | Module
LaplacianPenalty(net, px, num_points=4).attach(scheduler)       | Optimizer
InPlacePenalty(net, px, num_points=4, batchnorm="joint")        | joint
InPlacePenalty(Net, px, num_points=4)                           | Module
InPlacePenalty(net, px, num_points=4, estimator="exact")        | estimator
LogTrace(-0.1)                                                  | nats
LogTrace(nan)                                                   | nats
LogTrace(inf)                                                   | nats
LogTrace(None)                                                  | nats
LogTrace("strong")                                              | nats
LogTrace("0.1")                                                 | nats
LogTrace()(None)                                                | None
LogTrace()(torch.ones(3))                                       | shape
LogTrace().attach(scheduler)                                    | Optimizer
suggest_strength(net, px, loss=nan)                             | loss
suggest_strength(net, px, loss=-1.0)                            | loss
suggest_strength(net, px, loss=1.0, share=0.0)                  | share
suggest_strength(net, px, loss=1.0, num_points=0)               | num_points
suggest_strength(net, px, loss=1.0, draws=0)                    | draws
suggest_strength(net, loss=1.0)                                 | px
suggest_strength(Net, px, loss=1.0)                             | Module
estimate_cost(net, x)                                           | LMAP
estimate_cost(LMAP(net, px, num_points=4), x, repeats=0)        | repeats
fs_map(noise, prior, px, num_points=0, jitter=1.0, num_data=6)  | num_points
train(fs_map(noise, prior, px, num_points=4, jitter=-1.0, num_data=6)) | jitter
fs_map(noise, prior, px, num_points=4, jitter=1.0, num_data=0)  | num_data
fs_map(noise, prior, px, num_points=4, jitter=1.0, num_data=6, method="x") | method
l_map(noise, prior, px, num_points=4, num_data=6)               | reg_strength
l_map(noise, prior, px, num_points=4, num_data=6, reg_strength=-1.0) | reg_strength
l_map(noise, prior, px, num_points=4, num_data=6, reg_strength=nan) | reg_strength
l_map(noise, prior, px, num_points=4, num_data=6, reg_strength=1.0, jitter=1.0) | reg_strength
l_map(noise, prior, px, num_points=4, num_data=6, reg_nats=-1.0) | reg_nats
l_map(noise, prior, px, num_points=4, num_data=6, jitter=1.0, r0=1.0) | r0
l_map(noise, prior, px, num_points=4, num_data=6, reg_nats=0.1, r0=0.0) | positive
l_map(noise, prior, px, num_points=4, num_data=6, jitter=-1.0)  | positive
l_map(noise, prior, px, num_points=4, num_data=6, jitter=1.0, estimator="x") | estimator
l_map(noise, prior, px, num_points=4, num_data=6, jitter=1.0, every=0) | every
ps_map(noise, prior, num_data=-1)                               | num_data
ps_map(noise, prior, num_data=nan)                              | num_data
train(ps_map("gaussian", prior, num_data=6))                    | likelihood
train(ps_map(noise, 3.0, num_data=6))                           | prior
train(ps_map(Gaussian(0.0), prior, num_data=6))                 | std
train(ps_map(Gaussian(nan), prior, num_data=6))                 | std
train(ps_map(noise, Normal(0.0), num_data=6))                   | std
train(ps_map(noise, Normal(nan), num_data=6))                   | std
fit(objective, f, p, (x, y), steps=-1)                          | steps
fit(objective, f, p, (x, y), steps=2.5)                         | steps
fit(objective, f, p, (x, y), steps=True)                        | steps
fit(objective, f, p, (x, y), steps="3")                         | steps
fit(objective, f, p, (x, y), steps=2, seed="a")                 | seed
fit(objective, f, p, (x, y), steps=2, seed=None)                | seed
fit(objective, f, p, (x, y), steps=2, batch_size=2.5)           | batch_size
fit(objective, f, p, (x, y), steps=2, log_every=1.5)            | log_every
fit(objective, f, p, (x, y), steps=2, checkpoint_every=nan)     | checkpoint_every
fit(objective, f, p, (x, y), steps=2, batch_size=0)             | batch_size
fit(objective, f, p, (x, y), steps=2, batch_size=7)             | batch_size
fit(objective, f, p, (x, y), steps=2, clip=-1.0)                | clip
fit(objective, f, p, (x, y), steps=2, validate_every=0)         | validate_every
fit(objective, f, p, (x, y), steps=2, patience=3)               | patience
fit(objective, f, p, (x, y), steps=2, resume=True)              | checkpoint
fit(objective, f, p, (x, y[:3]), steps=2)                       | 3
fit(objective, f, p, x, steps=2)                                | data
fit(objective, f, {}, (x, y), steps=2)                          | param
fit(objective, f, p, (x * nan, y), steps=2)                     | NaN
fit(objective, f, p, (x, y), steps=2, optimizer="adam")         | optimizer
fit(objective, f, p, (x, y), steps=2, log_every=0)              | log_every
fit("ps-map", f, p, (x, y), steps=2)                            | objective
fit_population(lambda lr: objective, Grid(lr=[]), f, (x, y), steps=2) | lr
fit_population(lambda lr: objective, Grid(lr=[1.0]), f, (x, y), steps=-2) | steps
fit_population(lambda lr: objective, Grid(lr=[1.0]), f, (x, y), steps=2, init=3) | init
fit_population(lambda lr: objective, Grid(std=[1.0]), f, (x, y), steps=2) | std
Grid(lr=1.0)                                                    | lr
Grid([])                                                        | member
Grid([{"lr": 1.0}, {"std": 1.0}])                               | lr
doctor(net, x[:0])                                              | point
doctor(Net, x)                                                  | Module
doctor(net, x * nan)                                            | NaN
doctor(net, x, jitter=-1.0)                                     | jitter
doctor(net, x, num_data=0)                                      | num_data
doctor(nn.Tanh(), x)                                            | trainable
doctor(net, torch.zeros(5, 9))                                  | shape
px_.Uniform(1.0, 0.0, shape=2)                                  | low
px_.Uniform(0.0, nan, shape=2)                                  | finite
px_.Normal(std=-1.0, shape=2)                                   | std
px_.Normal(shape=-2)                                            | shape
px_.Normal(shape="2")                                           | shape
px_.Normal(shape=2).sample(0, generator)                        | n
px_.Normal(shape=2).sample(3, 0)                                | Generator
px_.Empirical(x[:0])                                            | point
px_.Empirical(None)                                             | None
px_.Empirical(x * nan)                                          | NaN
px_.Lattice(0.0, 1.0, 0)                                        | num
px_.Lattice(1.0, 0.0, 3)                                        | low
px_.Mixture([])                                                 | component
px_.Mixture([px, px], [1.0])                                    | weight
px_.Mixture([px, px], [1.0, -1.0])                              | weight
px_.Mixture([px, "train"])                                      | train
log_det(f, p, x, jitter=1.0, metric=metric.Output(torch.ones(2, 3))) | Output
log_det(f, p, x, jitter=1.0, metric=metric.Output(-torch.eye(1))) | metric
metrics.accuracy(x, torch.zeros(3).long())                      | 3
metrics.accuracy(x[:0], torch.zeros(0).long())                  | 0 values
metrics.nll(x * nan, labels)                                    | finite
metrics.nll(x, labels + 5)                                      | label
metrics.nll(x, labels - 1)                                      | label
metrics.nll(x, x)                                               | label
metrics.ece(x, labels, bins=0)                                  | bins
metrics.ece(x, labels, bins=2.5)                                | bins
metrics.ood_auroc(x, x[:0])                                     | 0 values
metrics.ood_auroc(x, torch.ones(3, 5))                          | classes
metrics.rmse(x, y)                                              | shape
metrics.rmse(x[:0], x[:0])                                      | 0 values
metrics.brier(x[:, 0], labels)                                  | logits
synthetic.regression(torch.sin, 0, generator=generator)         | num_points
synthetic.regression(torch.sin, 3, generator=generator, noise_std=-1.0) | noise_std
uci.split(table, 0, scaling="test")                             | scaling
uci.split_rows(9, 0)                                            | rows
LMAPRegressor(steps=-1).fit(x.numpy(), y.numpy())               | steps
LMAPRegressor(device="tpu").fit(x.numpy(), y.numpy())           | device
LMAPRegressor(hidden=(-3,)).fit(x.numpy(), y.numpy())           | hidden
LMAPClassifier(px="somewhere").fit(x.numpy(), labels.numpy())   | px
"""

COMMANDS = """
list nothing                                             | nothing
run                                                      | ID
run furier                                               | fourier
run fourier all                                          | all
run fourier --resume --force                             | one of them
run fourier --quick --set sizes=                         | value
run fourier --quick --set sizes                          | key=value
run fourier --quick --set lr=1e30                        | lr
run fourier --quick --set nothing=1                      | nothing
run fourier --quick --set seeds=x                        | seeds
run fourier --quick --seeds 0                            | seeds
run fourier --quick --seeds -1                           | seeds
run fourier --quick --seeds two                          | seeds
run fourier --quick --device tpu                         | device
run fourier --quick --device cuda:99                     | device
run fourier --quick --device meta                        | device
run fourier --quick --out file/runs                      | file/runs
run fourier --quick --retries 5                          | --ray
run fourier --quick --data-dir nowhere                   | nowhere
run uci-table --quick --data-dir nowhere                 | nowhere
sweep fourier --quick                                    | --set
sweep fourier --quick --set seeds                        | key=value
sweep fourier --quick --set seeds=1,big                  | big
sweep fourier --quick --set seeds=1 --set seeds=2        | twice
sweep fourier --quick --set seeds=1,2 --resume --force   | one of them
sweep fourier --quick --set sizes=                       | value
sweep fourier --quick --set lr=1e30                      | lr
sweep fourier --quick --set nothing=1,2                  | nothing
sweep furier --set seeds=1,2                             | fourier
report nowhere                                           | nowhere
report empty                                             | empty
report file                                              | file
report --out file/page empty                             | empty
fit nowhere.csv --target y                               | nowhere.csv
fit file --target y                                      | file
fit table.csv                                            | --target
fit table.csv --target z                                 | z
fit table.csv --target y --seed -1                       | seed
fit table.csv --target y --seed 9999999999999            | seed
fit table.csv --target y --seed x                        | seed
fit table.csv --target y --device tpu                    | device
fit table.csv --target y --hidden 9999999                | hidden
fit table.csv --target y --hidden -3                     | hidden
fit table.csv --target y --hidden a,b                    | hidden
fit table.csv --target y --steps -1                      | steps
fit table.csv --target y --ensemble 0                    | ensemble
fit table.csv --target y --test 1.5                      | test
fit table.csv --target y --drop z                        | z
fit table.csv --target y --drop y                        | y
fit table.csv --target y --category z                    | z
fit table.csv --target y --px uniform                    | px
fit table.csv --target y --method magic                  | method
fit table.csv --target y --out file/model.pt             | file/model.pt
fit table.csv --target y --task sorting                  | task
fit header.csv --target y                                | rows
predict nowhere.pt table.csv                             | nowhere.pt
predict file table.csv                                   | file
train --quick --seeds a                                  | seeds
train --quick --seeds 0,1,0                              | twice
train --quick --seeds 0,-1                               | seeds
train --quick --seeds 9999999999999                      | seeds
train --quick --split-seed -1                            | split-seed
train --quick --label-noise-seed -1                      | label-noise-seed
train --quick --device tpu                               | device
train --quick --device cuda:99                           | device
train --quick --method magic                             | method
train --quick --data digits                              | digits
train --quick --data no/such/folder                      | folder
train --quick --model resnet19                           | resnet19
train --quick --model raises_on_import:make              | boom
train --quick --model fine:nothing                       | nothing
train --quick --px 2*                                    | component
train --quick --px nonsense                              | nonsense
train --quick --lr -1                                    | lr
train --quick --lr inf                                   | lr
train --quick --lr fast                                  | lr
train --quick --momentum 1.5                             | momentum
train --quick --nesterov --momentum 0                    | nesterov
train --quick --warmup-epochs 3                          | warmup
train --quick --weight-decay -1                          | weight_decay
train --quick --label-smoothing 2                        | label_smoothing
train --quick --sam -1                                   | sam
train --quick --decay exponential                        | decay
train --quick --clip -1                                  | clip
train --quick --beta 0                                   | beta
train --quick --every 0                                  | every
train --quick --num-points 0                             | num_points
train --quick --batch-size 0                             | batch_size
train --quick --batch-size 9999                          | batch_size
train --quick --epochs -1                                | epochs
train --quick --width 0                                  | width
train --quick --limit 0                                  | limit
train --quick --valid -1                                 | valid
train --quick --valid 99999                              | valid
train --quick --label-noise 1.5                          | label_noise
train --quick --estimator exakt                          | estimator
train --quick --batchnorm eval                           | batchnorm
train --quick --precision fp8                            | precision
train --quick --reg-nats -1                              | reg_nats
train --quick --reg-nats 0.1 --reg-strength 0.1          | --reg-nats
train --quick --reg-strength -1e-6                       | reg_strength
train --quick --reg-strength inf                         | finite
train --quick --reg-strength nan                         | finite
train --quick --reg-strength auto                        | finite
train --quick --checkpoint-every 0                       | whole
train --quick --checkpoint-every 1.5                     | whole
train --quick --max-seconds nan                          | finite
train --quick --max-seconds -4                           | seconds
train --quick --out file/run                             | file/run
train --quick --depth 3                                  | --depth
assess nowhere                                           | nowhere
assess file                                              | file
assess nowhere --corruptions rain                        | rain
assess nowhere --severities 6                            | severities
assess nowhere --points -5                               | points
assess nowhere --limit 0                                 | limit
assess nowhere --device tpu                              | device
landscape nowhere                                        | nowhere
landscape nowhere --seed -1                              | seed
landscape nowhere --steps 4                              | steps
landscape nowhere --reach 0                              | reach
landscape nowhere --reach nan                            | reach
landscape nowhere --directions 0                         | directions
landscape nowhere --images 0                             | images
landscape nowhere nowhere                                | twice
doctor fine                                              | package.module:factory
doctor nowhere.at.all:make                               | nowhere
doctor raises_on_import:make                             | boom
doctor raises_when_called:make                           | boom
doctor fine:nothing                                      | nothing
doctor fine:number                                       | int
doctor fine:sized                                        | width
doctor fine:conv                                         | --shape
doctor fine:make?width                                   | key=value
doctor fine:make --seed -1                               | seed
doctor fine:make --seed 9999999999999                    | seed
doctor fine:make --device tpu                            | device
doctor fine:make --shape 2,x                             | --shape
doctor fine:make --shape 5                               | shape
doctor fine:make --points 0                              | points
doctor fine:make --px uniform --range 2 -2               | low
doctor fine:make --px missing.pt                         | missing.pt
doctor fine:make --px few.npy --points 9                 | --points
doctor fine:make --px file                               | file
doctor fine:make --px text.safetensors                   | text.safetensors
doctor fine:make --px number.pt                          | int
doctor fine:make --weights missing.pt                    | missing.pt
doctor fine:make --weights few.npy                       | state_dict
doctor fine:make --weights other.pt                      | other.pt
doctor fine:make --jitter -1                             | jitter
doctor fine:make --jitter nan                            | jitter
doctor fine:make --num-data 0                            | num_data
doctor fine:make --tolerance -1                          | tolerance
data get                                                 | NAME
data get bosten                                          | boston
data check bosten                                        | boston
data list bosten                                         | boston
data fetch boston                                        | fetch
fitt                                                     | fitt
"""

MODULES = {
    "raises_on_import": "raise RuntimeError('boom')",
    "raises_when_called": "def make():\n    raise KeyError('boom')",
    "fine": """
from torch import nn
def make(): return nn.Linear(2, 1)
def conv(): return nn.Conv2d(1, 2, 3)
def sized(width): return nn.Linear(width, 1)
def number(): return 3
""",
}


def rows(text: str) -> list[Any]:
    """The lines of a table as parameters of a test, each with its first column as its name."""
    found = [line.rpartition(" | ") for line in text.strip().splitlines()]
    return [pytest.param(a.strip(), b.strip(), id=a.strip()) for a, _, b in found]


class Net(nn.Module):
    """Two layers; ``scale`` is a keyword argument."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor, scale: float | Tensor = 1.0) -> Tensor:
        return scale * self.last(self.first(x).tanh())


def names() -> dict[str, Any]:
    """What the calls of the table stand on."""
    net, x = Net(), torch.randn(6, 2)
    f, p = fsmap.functional(net)
    noise, prior = fsmap.Gaussian(1.0), fsmap.Normal(1.0)

    def freeze(term: Any) -> Any:
        net.requires_grad_(False)
        return term

    def train(objective: fsmap.Objective) -> Any:
        return fsmap.fit(objective, f, p, (x, x[:, :1]), steps=2, progress=False)

    def optimizer(module: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(module.parameters(), lr=0.1)

    own = {
        "f": f,
        "p": p,
        "x": x,
        "y": torch.randn(6, 1),
        "net": net,
        "Net": Net,
        "nn": nn,
        "torch": torch,
        "synthetic": synthetic,
        "uci": uci,
        "LMAPClassifier": LMAPClassifier,
        "LMAPRegressor": LMAPRegressor,
        "noise": noise,
        "prior": prior,
        "labels": torch.tensor([0, 1, 0, 1, 0, 1]),
        "px": fsmap.px.Normal(shape=2),
        "px_": fsmap.px,
        "nan": float("nan"),
        "inf": float("inf"),
        "objective": fsmap.ps_map(noise, prior, num_data=6),
        "generator": torch.Generator().manual_seed(0),
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer(net), 1),
        "freeze": freeze,
        "train": train,
        "table": uci.Table("toy", np.ones((40, 1)), np.ones((40, 1)), ("a",), "y"),
    }
    return {name: getattr(fsmap, name) for name in fsmap.__all__} | own


@pytest.mark.usefixtures("seeded")
@pytest.mark.parametrize(("call", "word"), rows(CALLS))
def test_a_call_is_refused_by_a_typed_error(call: str, word: str) -> None:
    known = names()
    with pytest.raises(FsmapError) as refused:
        eval(call, known)
    assert word in str(refused.value)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the commands of the table name."""
    folder = tmp_path_factory.mktemp("files")
    table = "a,b,y\n" + "".join(f"{i % 7},{i % 5},{i * i % 11}.5\n" for i in range(40))
    texts = {"table.csv": table, "header.csv": "a,b,y\n", "file": "no folder, no model"}
    texts |= {"text.safetensors": "not one"} | {f"{n}.py": code for n, code in MODULES.items()}
    for name, text in texts.items():
        (folder / name).write_text(text)
    (folder / "empty").mkdir()
    np.save(folder / "few.npy", np.zeros((3, 2), dtype=np.float32))
    torch.save(3, folder / "number.pt")
    torch.save({"0.weight": torch.zeros(1)}, folder / "other.pt")
    return folder


@pytest.mark.usefixtures("seeded")
@pytest.mark.parametrize(("line", "word"), rows(COMMANDS))
def test_a_command_ends_with_one_message_and_exit_code_two(
    line: str,
    word: str,
    files: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(files)
    before = sorted(path for path in files.rglob("*") if "__pycache__" not in path.parts)
    try:
        code = main(shlex.split(line))
    except SystemExit as ended:
        code = ended.code
    said = capsys.readouterr().err
    assert code == 2, said
    assert said.startswith("fsmap: ")
    assert word in said
    assert "Traceback" not in said
    assert "\n\n" not in said
    after = sorted(path for path in files.rglob("*") if "__pycache__" not in path.parts)
    assert after == before


def test_there_are_more_than_two_hundred() -> None:
    assert len({*CALLS.strip().splitlines(), *COMMANDS.strip().splitlines()}) > 200
