"""Bad inputs by name: each is a typed error (API) or one message and exit code 2 (command line).

What stands in for ``{}`` is a case, with the word that the message must have behind ``|``. Nothing
is silent, nothing is a traceback, and a refused command writes no file.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fsmap
from fsmap import models
from fsmap.assess.shift import corrupt
from fsmap.cli import main
from fsmap.data import uci
from fsmap.errors import FsmapError
from fsmap.functional import check_points
from fsmap.images import ImageSettings
from fsmap.integrations.sklearn import LMAPClassifier, LMAPRegressor

CALLS = {
    "functional({})": """
        Net | Module; torch.tanh | Module; nn.Tanh() | trainable; net, forward=3;
        nn.Linear(2, 2).requires_grad_(False) | requires_grad; nn.LazyLinear(2) | weight
    """,
    "log_det(f, p, x, jitter=1.0, {})": """
        method="lu"; method=None; method="slq", probes=0; metric=torch.ones(3);
        metric=-torch.eye(3); metric=metric.Output(torch.ones(2, 3)) | Output;
        metric=metric.Output(-torch.eye(1)); metric="fisher"
    """,
    "metric.{}.at(torch.zeros(4, 1), torch.ones(4, 3))": """
        Weights(torch.ones(5)) | Weights; Weights(torch.ones(4, 2)) | Weights;
        Weights(nan * torch.ones(4)) | Weights; Weights(torch.linspace(-1, 2, 4)) | negative;
        Output() | exactly; Output(torch.eye(3), torch.eye(3)) | exactly;
        Output(torch.linspace(-1, 2, 3).diag()) | negative; Output(torch.eye(2)) | Output;
        Output(torch.ones(3, 3).triu()) | symmetric; Output(nan * torch.ones(3, 3)) | Output;
        Output(factor=torch.eye(2)) | factor;
        Output(factor=torch.ones(2, 3, 3)) | (4, 3, 3) here, got (2, 3, 3);
        General(torch.linspace(-1, 2, 12).diag()) | negative; General(torch.eye(5)) | General;
        General(torch.ones(12, 12).triu()) | symmetric
    """,
    "log_det(f, p, x, {})": """
        jitter=-1.0; jitter=nan; jitter=inf; jitter=None; jitter="small"; jitter=0.0
    """,
    "log_det({})": """
        f, p, x[:0], jitter=1.0 | point; f, p, None, jitter=1.0 | tensor;
        f, p, "points", jitter=1.0 | tensor; f, p, x * nan, jitter=1.0 | NaN;
        f, {}, x, jitter=1.0 | param; f, list(p.values()), x, jitter=1.0 | dict;
        lambda p, x: 0 * x.sum(), p, x, jitter=1.0 | point;
        lambda p, x: None, p, x, jitter=1.0 | tensor
    """,
    "check_points({})": """
        torch.tensor([[1.0], [nan]]) | points; torch.full((8, 2), inf) | points;
        {"a": torch.zeros(2), "b": torch.tensor([0.0, -inf])} | NaN or inf in 1 of 2;
        torch.zeros(0, 2) | shapes; torch.zeros(3, 0) | evaluation; None | got NoneType;
        torch.tensor(1.0) | dimension; (torch.zeros(2, 1), torch.zeros(3, 1)) | dimension;
        [1.0, 2.0] | tensors; {} | got dict
    """,
    "trace(f, p, x, {})": """
        method="sampled" | sampled; method=None | None; method="fd", beta=0.0;
        method="fd", beta=nan; method="jvp", probes=0; method="jvp", probes=1.5;
        method="jvp", generator=0; method="fd", beta=1e-16 | lost; method="fd", beta=1e-20 | lost;
        method="fd_central", beta=1e-16 | lost; method="fd_central", beta=1e-20 | lost
    """,
    "trace(f, p, x, method='jvp', probes={})": """
        torch.zeros(2, 17) | Tensor;
        {"first.weight": psi["first.weight"]} | 'first.bias' must be [2, 4], got None;
        {**psi, "last.bias": torch.zeros(1)} | 'last.bias' must be [2, 1], got [1];
        {**psi, "first.weight": psi["first.weight"][:1]} | 'first.bias' must be [1, 4]
    """,
    "LMAP(net, px, num_points=4, {})": """
        estimator="exakt"; beta=-1e-3; beta=0.0; probes=2.5; batchnorm="eval"; every=0; probes=0;
        seed=0.5; outputs=0; estimater="jvp" | estimator;
        outputs=2, metric=metric.SoftmaxFisher() | SoftmaxFisher;
        forward="logits" | forward must be a function
    """,
    "LMAP(net, px, num_points=4).attach({})": """
        scheduler | Optimizer; None | Optimizer; optimizer(Net()) | parameter
    """,
    "LMAP(net, px, num_points=4)({})": """
        x[:0] | point; "x" | tensor; x.to(torch.uint8) | uint8; x, scale=torch.ones(6, 1);
        x, labels=torch.ones(6, 1) | out.logits; x, x | tuple; None | one argument;
        x * nan | points; x, reg_strength=torch.ones(3) | one number;
        x, reg_strength=-torch.ones(()) | at least 0
    """,
    "LMAP(net, px, num_points=4, batchnorm={})(x, scale=torch.ones(6, 1))": """
        'frozen' | scale; 'batch' | scale
    """,
    "freeze(LMAP(net, px, num_points=4, batchnorm={}))(x)": """
        'joint' | trainable; 'frozen' | trainable; 'batch' | trainable
    """,
    "freeze(LaplacianPenalty(net, px, num_points=4, batchnorm={}))()": """
        'frozen' | trainable; 'batch' | trainable
    """,
    "freeze(InPlacePenalty(net, px, num_points=4, batchnorm={})).backward()": """
        'frozen' | trainable; 'batch' | trainable
    """,
    "LMAP(net, torch.ones(9, 2).byte(), num_points=4, batchnorm={})(x)": """
        'joint' | uint8; 'frozen' | uint8; 'batch' | uint8
    """,
    "LMAP(nn.Embedding(9, 3), x, num_points=4, batchnorm={})(torch.zeros(3, 2).long())": """
        'joint' | float; 'frozen' | float; 'batch' | float
    """,
    "LMAP({})": """
        Net, px, num_points=4 | Module; torch.tanh, px, num_points=4 | Module;
        LaplacianPenalty(net, px, num_points=4), px, num_points=4 | Module;
        nn.Linear(2, 2, dtype=torch.complex64), px, num_points=4 | complex;
        LMAP(net, px, num_points=4), px, num_points=4 | contains;
        nn.BatchNorm1d(2, track_running_stats=False), px, num_points=4, batchnorm="frozen" | keep;
        nn.Tanh(), px, num_points=4 | trainable; net, None, num_points=4 | None;
        net, "normal", num_points=4 | normal; net, px, num_points=0; net, px, num_points=-3;
        net, px, num_points=2.5
    """,
    "LaplacianPenalty({})": """
        net, px, num_points=4, batchnorm="joint" | joint; net, px, num_points=0;
        Net, px, num_points=4 | Module; net, px, num_points=4, beta=0.0;
        net, px, num_points=4, probes=2.5; net, px, num_points=4, every=0
    """,
    "InPlacePenalty({})": """
        net, px, num_points=4, batchnorm="joint" | joint; Net, px, num_points=4 | Module;
        net, px, num_points=4, estimator="exact"; net, px, num_points=4, beta=0.0;
        net, px, num_points=4, probes=2.5; net, px, num_points=0;
        FSDP1(net), px, num_points=4 | (FSDP1) keeps flat parameters that cannot be moved by name;
        FSDP1(net), px, num_points=4 | Use torch.distributed.fsdp.fully_shard (FSDP2)
    """,
    "LogTrace({})": """
        -0.1 | 0.01 to 0.1; nan | nats; inf | nats; None | nats; "strong" | nats; "0.1" | nats;
        True | nats
    """,
    "suggest_strength(LaplacianPenalty(net, px, num_points=4), {})": """
        loss=nan; loss=-1.0; loss=0.0; loss=inf; loss=1.0, draws=0
    """,
    "suggest_strength(LaplacianPenalty(net, px, num_points=4, forward={}), loss=1.0)": """
        lambda m, x: 0 * m(x) | R is 0 at this p_X, so no λ can be suggested
    """,
    "l_map(noise, prior, px, num_points=4, num_data=6, {})": """
        reg_strength=-1.0; reg_strength=nan; reg_strength=1.0, jitter=1.0 | reg_strength;
        reg_nats=-1.0; jitter=1.0, estimator="x"; jitter=1.0, every=0;
        jitter=1.0, every=2.5; jitter=1.0, probes=1.5;
        reg_nats=True; reg_nats="0.05"
    """,
    "fs_map(noise, prior, {}, num_data=6).check(f, p, Batch(x, y))": """
        px_.Normal(shape=3), num_points=4, jitter=1.0 | shape; x, num_points=5, jitter=0.0 | jitter
    """,
    "train(ps_map({}, num_data=6))": """
        "gaussian", prior | likelihood; noise, 3.0 | prior; Gaussian(0.0), prior | std;
        Gaussian(nan), prior | std; noise, Normal(0.0) | std;
        noise, Normal(nan) | std; prior, noise | Normal
    """,
    "Gaussian({}).check(x, x)": """
        0.0 | std; -1.0 | std; nan | std; inf | std; torch.tensor([1.0, 0.0]) | std;
        torch.ones(3) | output; torch.ones(1, 2) | number
    """,
    "Categorical().check({})": """
        torch.zeros(3, 3), torch.tensor([-1, 1, 2]) | labels;
        torch.zeros(3, 3), torch.tensor([0, 1, 3]) | labels; x, labels.bool() | labels;
        x[:1], torch.tensor([[0.6, 0.6]]) | probability; x, labels.float() | probabilities;
        x[:1], torch.tensor([[-0.5, 1.5]]) | probability; x[:1], torch.zeros(1, 2) | probability;
        x[:0], labels[:0] | empty; x[:, 0], labels | Bernoulli; x[:, :1], labels | K >= 2;
        x, labels[:, None] | integer; torch.zeros(6, 5, 2), labels | expected
    """,
    "Normal({}).check(p)": """
        {"gain": 1.0} | std; 1.0, {"gain": torch.zeros(())} | mean;
        -2.0 | first.weight; {**same, "first.bias": 0.0} | finite;
        {**same, "first.weight": torch.ones(5)} | first.weight;
        {**same, "first.weight": torch.ones(2, 3)} | first.weight;
        {**same, "first.weight": torch.ones(1, 4, 2)} | first.weight;
        {**same, "first.weight": torch.ones(5, 4, 2)} | first.weight;
        1.0, {**p, "first.bias": torch.ones(2)} | shape;
        1.0, {**p, "first.bias": torch.full((4,), nan)} | holds
    """,
    "Reparametrized(Normal(1.0), {}).check(p)": """
        {"gain": torch.asinh} | inverse; torch.log | parameters;
        lambda t: t * t.square().sum() | elementwise;
        lambda t: t.mT if t.dim() == 2 else t | parameter
    """,
    "{}.check(dict())": """
        Normal(1.0) | trainable; Reparametrized(Normal(1.0), torch.asinh) | trainable
    """,
    "Reparametrized(Normal(1.0), {}).check({'w': torch.zeros(2)})": """
        lambda t: 0 * t.abs().sqrt() | Jacobian
    """,
    "fit(objective, f, p, (x, y), steps=2, {})": """
        seed="a"; seed=None; batch_size=2.5; log_every=1.5; checkpoint_every=nan; batch_size=0;
        batch_size=7; clip=-1.0; validate_every=0; resume=True | checkpoint;
        optimizer="adam"; log_every=0; on=(x, y) | needs both: on;
        on=(x, y), by=lambda out, y: torch.ones(2) | shape [2];
         schedul=cosine() | schedule; by="rmse", on=(x, y) | rmse
    """,
    "fit(objective, f, p, (x, y), {})": """
        steps=-1; steps=2.5; steps=True; steps="3"
    """,
    "fit(objective, {}, steps=2)": """
        f, p, (x, y[:3]) | 3; f, p, x | data; f, {}, (x, y) | param; f, p, (x * nan, y) | NaN;
        f, p, (x, y.tolist()) | got list; f, p, (x, y * nan) | y has NaN or inf;
         net, p, (x, y) | functional
    """,
    "doctor(net, x, {})": """
        jitter=-1.0; num_data=0
    """,
    "doctor({})": """
        net, x[:0] | point; Net, x | Module; net, x * nan | NaN
    """,
    "models.MLP({})": """
        [3] | [3]; [3, 0, 1] | [3, 0, 1]; [2, 1], "tahn" | 'tanh'; [2, 1], init="he" | he
    """,
    "Grid({})": """
        lr=1.0; [] | member; [{"lr": 1.0}, {"std": 1.0}] | lr; [{"a": 1.0}], b=[1.0] | axes;
        a=[] | at least one value; a="relu" | list of values; a=[1.0, 1.0] | none twice;
        a=["relu", "tanh"] | finite numbers only; a=[True] | holds True; a=[inf] | holds inf;
        seed=[0.5] | 0.5 in member 0
    """,
    "adam({})": """
        0.0 | lr; -1.0 | lr; inf | lr; nan | lr
    """,
    "px_.Normal({})": """
        std=-1.0, shape=2 | std; shape=-2; shape="2"
    """,
    "px_.Mixture({})": """
        [] | component; [px, px], [1.0] | weight; [px, px], [1.0, -1.0] | weight;
        [px, "train"] | train; {px: 0.8} | components; [x, x], [0, 0] | weights;
        [x, x], [1, nan] | component; [x, x], [[1, 1]] | component; [x, x], [1, 1, 1] | component
    """,
    "px_.as_px({})": """
        None | distribution; 3.0 | distribution; "train" | distribution; Net | distribution;
        net | distribution; torch.distributions.Normal(0.0, 1.0) | distribution;
        [1.0, 2.0] | distribution; lambda n: torch.zeros(n, 2) | generator
    """,
    "px_.as_px({}).sample(40, generator)": """
        lambda n, g: torch.zeros(n + 1, 2) | returned; lambda n, g: torch.zeros(()) | returned;
        lambda n, g: {"a": torch.zeros(n), "b": torch.zeros(1)} | returned;
        lambda n, g: None | returned; lambda n, g: np.zeros((n, 2)) | ndarray;
        px_.Mixture([x, px_.Normal(shape=3)]) | together; px_.Mixture([x, {"a": x}]) | together
    """,
    "px_.{}": """
        Uniform(1.0, 0.0, shape=2) | low; Uniform(0.0, nan, shape=2) | finite;
        Normal(shape=2).sample(0, generator) | n; Normal(shape=2).sample(3, 0) | Generator;
        Empirical(x[:0]) | point; Empirical(None) | None; Empirical(x * nan) | NaN;
        Empirical(np.array([inf])) | points; Empirical(x[0, 0]) | dimension; Empirical({}) | tensor;
        Lattice(0.0, 1.0, 0) | num; Lattice(1.0, 0.0, 3) | low; Uniform(1, 1) | below;
        Uniform([0, 3], [1, 2]) | below; Uniform([0, 0], [1, 1, 1]) | shapes;
        Normal(inf) | finite; Normal(0.0, [1.0, 0.0]) | finite;
        Normal([0.0, 0.0], 1.0, shape=(3,)) | points; Lattice([0, 0], [1, 1], 1) | dimensions;
        Lattice([0, 0], [1, 1], [3, 3, 3]) | dimensions; Lattice([0] * 8, [1] * 8, 40) | points
    """,
    "metrics.{}": """
        ece(x, labels, bins=0) | bins; ece(x, labels, bins=2.5) | bins;
        ood_auroc(x, x[:0]) | 0 values; rmse(x, y) | shape; rmse(x[:0], x[:0]) | 0 values
    """,
    "LMAPRegressor({}).fit(x.numpy(), y[:, 0].numpy())": """
        steps=-1; device="tpu"; hidden=(-3,); steps=0; ensemble=0; method="fs-map"; px="grid";
        steps=1, reg_strength=-1; reg_strength=0.1, reg_nats=0.1 | give one of them;
        steps=1, reg_strength="auto", reg_nats=-1 | finite number;
        steps=1, reg_strength="auto", reg_nats=True | finite number
    """,
    "ImageSettings({})": """
        method="fs-map"; epochs=0; momentum=1.0; clip=0.0; epochs=2, warmup_epochs=2; reg_nats=nan
    """,
    "corrupt(torch.zeros(2, 1, 4, 4), {})": """
        "rain", 1 | unknown corruption 'rain'; "contrast", 6 | severity; "contrast", 1 | bytes
    """,
    "{}": """
        objective.check(f, p, Batch(x, y[:3])) | points;
        objective.check(f, p, Batch(x * nan, y)) | points;
        noise.check(y, nan * y) | infinite; Bernoulli().check(y, nan * y) | infinite;
        noise.check(y[:0], y[:0]) | empty; Bernoulli().check(y[:0], y[:0]) | empty;
        noise.check(y.long(), y) | outputs; Bernoulli().check(y.long(), y) | outputs;
        Bernoulli().check(torch.ones(2), torch.tensor([-1.0, 1.0])) | values; Grid() | axes;
        cosine(warmup=-1) | warmup;
        trace(f, p, (x, x[:3]), method="exact") | dimension;
        torch.vmap(lambda e: log_det(f, p, x, jitter=e, method="slq"))(torch.ones(2)) | cannot;
        net.last.bias.data.fill_(nan).sum() and doctor(net, x) | NaN;
        setattr(net, "lock", (point for point in x)) or doctor(net, x) | copied;
        trace(f, p, x.long().bool, method="exact") | tensor;
        LMAP(net, torch.ones(9, 5), num_points=4)(x) | shape;
        LMAP(net, lambda n, g: torch.full((n, 2), nan), num_points=4)(x) | points;
        InPlacePenalty(net, lambda n, g: x[:n] * nan, num_points=4).backward() | points;
        InPlacePenalty(nn.Linear(2, 2).bfloat16(), px, num_points=4).backward() | computes;
        LaplacianPenalty(net, px, num_points=4).attach(scheduler) | Optimizer;
        LogTrace()(None) | None; LogTrace()(torch.ones(()), every=0) | every;
        LogTrace()(torch.ones(3)) | shape; LogTrace()(3.0) | float;
        LogTrace()((x, x[0, 0])) | tuple; LMAP(net, (x, x), num_points=4)(x) | Labels;
        LMAP(net, px, num_points=4, batchnorm="joint")({"x": x}) | a dict of;
        LogTrace().attach(scheduler) | Optimizer; suggest_strength(net, loss=1.0) | LMAP;
        LaplacianPenalty(net, px, num_points=4)(x) | one number;
        LMAP(net, x[:, :1], num_points=4, batchnorm="frozen", outputs=1)(x) | shape;
        net.add_module("lm", LMAP(net, px, num_points=4)) or net.lm(x) | the network;
        net.add_module("lm", LMAP(net, px, num_points=4)) or net.eval() | holds;
        setattr(LMAP(net, px, num_points=4), "step", 1.5) | whole; estimate_cost(net, x) | LMAP;
        estimate_cost(LMAP(net, px, num_points=4), x, repeats=0);
        fs_map(noise, prior, px, num_points=4, jitter=-1.0, num_data=6) | jitter;
        fit_population(objective, Grid(lr=[1.0]), f, (x, y), steps=2) | build;
        fs_map(noise, prior, px, num_points=4, jitter=1.0, num_data=0) | num_data;
        fs_map(noise, prior, px, num_points=4, jitter=1.0, num_data=6, method="x") | method;
        l_map(noise, prior, px, num_points=4, num_data=6) | reg_strength;
        ps_map(noise, prior, num_data=-1) | num_data;
        ps_map(noise, prior, num_data=nan) | num_data;
        fit("ps-map", f, p, (x, y), steps=2) | objective;
        fit_population(lambda lr: objective, Grid(lr=[]), f, (x, y), steps=2) | lr;
        fit_population(lambda lr: objective, Grid(lr=[1.0]), f, (x, y), steps=-2);
        fit_population(lambda lr: objective, Grid(lr=[1.0]), f, (x, y), steps=2, init=3);
        fit_population(lambda lr: objective, Grid(std=[1.0]), f, (x, y), steps=2) | std;
        uci.split(table, 0, scaling="test") | scaling; uci.split_rows(9, 0) | rows;
        LMAPClassifier(px="somewhere").fit(x.numpy(), labels.numpy()) | px;
        fs_map(noise, prior, px, num_points=0, jitter=1.0, num_data=6) | num_points
    """,
}

COMMANDS = {
    "run fourier --quick {}": """
        --set sizes= | value; --set sizes | key=value; --set lr=1e30 | lr;
        --set nothing=1 | Known: num_frequencies; --set seed=3 | Did you mean 'seeds'?;
        --set seeds=x | whole number; --set sizes=4,0 | at least 1; --set prior_std=nan | finite;
        --set prior_std=-1 | at least 0; --seeds 0; --seeds -1; --seeds two;
        --device tpu; --device cuda:99; --device meta; --out file/runs | file/runs;
        --data-dir nowhere | nowhere
    """,
    "run {}": """
        furier | fourier; fourier all | all; fourier --resume --force | one of them;
        uci-table --quick --data-dir nowhere | nowhere;
        theory-metric --seeds 3 | theory-metric has no seeds;
        image-table --set generated=maybe | true or false; image-table --set datasets=mnist | mnist;
        image-table --set rows=ps-map@wd-x | wd-x; image-table --set rows=ps-map@lr-1 | lambda;
        image-table --set precision=foo | foo;
        label-noise --set levels=0,1.5 | 1.5; shift --set rows=othr | other;
        shift --set corruptions=fogg | fogg; shift --set severities=1,9 | 9;
        landscape --set steps=4 | odd; landscape --set reach=0 | positive;
        fsmap-at-scale --set probes=3 | 8, 16
    """,
    "report {}": """
        nowhere | nowhere; empty | empty; file | file; --out file/page empty | empty
    """,
    "fit table.csv --target y {}": """
        --seed -1; --seed 9999999999999; --seed x; --device tpu; --hidden 9999999; --hidden -3;
        --hidden a,b; --steps -1; --ensemble 0; --test 1.5; --drop z | z; --drop y | y;
        --category z | z; --out m.html | page; --px uniform; --method magic; --task sorting;
        --out file/model.pt | file/model.pt
    """,
    "fit {}": """
        nowhere.csv --target y | nowhere.csv; file --target y | file; table.csv | --target;
        table.csv --target z | z; header.csv --target y | rows; short.csv --target y | 20
    """,
    "train --quick {}": """
        --seeds a; --seeds 0,1,0 | twice; --seeds 0,-1; --seeds 9999999999999; --split-seed -1;
        --label-noise-seed -1; --device tpu; --device cuda:99; --method magic;
        --data digits | digits; --data no/such/folder | folder; --model resnet19 | resnet19;
        --model raises_on_import:make | boom; --model fine:nothing | nothing; --px 2* | component;
        --px nonsense | nonsense; --lr -1; --lr inf; --lr fast; --momentum 1.5;
        --nesterov --momentum 0 | nesterov; --warmup-epochs 3 | warmup; --weight-decay -1;
        --label-smoothing 2; --sam -1; --decay exponential; --clip -1; --beta 0; --every 0;
        --num-points 0; --batch-size 0; --batch-size 9999; --epochs -1; --width 0; --limit 0;
        --valid -1; --valid 99999; --label-noise 1.5; --estimator exakt; --batchnorm eval;
        --precision fp8; --reg-nats -1; --reg-nats 0.1 --reg-strength 0.1 | --reg-nats;
        --reg-strength -1e-6; --reg-strength inf | finite; --reg-strength nan | finite;
        --reg-strength auto | finite; --checkpoint-every 0 | whole; --checkpoint-every 1.5 | whole;
        --max-seconds nan | finite; --max-seconds -4 | seconds; --out file/run | file/run;
        --depth 3
    """,
    "assess nowhere {}": """
        --corruptions rain | rain; --severities 6; --points -5; --limit 0; --device tpu
    """,
    "landscape nowhere {}": """
        --seed -1; --steps 4; --reach 0; --reach nan; --directions 0; --images 0;
        nowhere | twice
    """,
    "doctor fine:make {}": """
        --seed -1; --seed 9999999999999; --device tpu; --shape 2,x; --shape 5; --points 0;
        --px uniform --range 2 -2 | low; --px missing.pt | missing.pt;
        --px few.npy --points 9; --px file | file;
        --px text.safetensors | text.safetensors; --px number.pt | int;
        --weights missing.pt | missing.pt; --weights few.npy | state_dict;
        --weights other.pt | other.pt; --jitter -1; --jitter nan; --num-data 0; --tolerance -1
    """,
    "doctor {}": """
        fine | package.module:factory; nowhere.at.all:make | nowhere; raises_on_import:make | boom;
        raises_when_called:make | boom; fine:nothing | nothing; fine:number | int;
        fine:sized | width; fine:conv | --shape; fine:make?width | key=value;
        fine:none | NoneType
    """,
    "data {}": """
        get | NAME; get bosten | boston; check bosten | boston; list bosten | boston;
        fetch boston | fetch
    """,
    "{}": """
        list nothing | nothing; run | ID;
        predict nowhere.pt table.csv | nowhere.pt;
        predict file table.csv | file; assess nowhere | nowhere; assess file | file;
        landscape nowhere | nowhere; fitt | fitt
    """,
}

MODULES = {
    "raises_on_import": "raise RuntimeError('boom')",
    "raises_when_called": "def make():\n    raise KeyError('boom')",
    "fine": """
from torch import nn
def make(): return nn.Linear(2, 1)
def conv(): return nn.Conv2d(1, 2, 3)
def sized(width): return nn.Linear(width, 1)
def number(): return 3
def none(): return None
""",
}


def cases(table: dict[str, str], keyword: str) -> list[Any]:
    """Parameters of a test; a case without a word has the name of its last argument for it."""
    found = []
    for template, items in table.items():
        for item in " ".join(items.split()).split("; "):
            case, _, word = item.partition(" | ")
            whole = template.replace("{}", case)
            found.append(pytest.param(whole, word or re.findall(keyword, case)[-1], id=whole))
    return found


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
        **{"f": f, "p": p, "x": x, "y": torch.randn(6, 1), "net": net, "Net": Net},
        **{"nn": nn, "np": np, "torch": torch, "uci": uci, "px_": fsmap.px, "models": models},
        **{"corrupt": corrupt, "check_points": check_points, "same": dict.fromkeys(p, 1.0)},
        **{"LMAPClassifier": LMAPClassifier, "LMAPRegressor": LMAPRegressor},
        **{"noise": noise, "prior": prior, "nan": float("nan"), "inf": float("inf")},
        "ImageSettings": ImageSettings,
        "psi": {name: torch.zeros(2, *q.shape) for name, q in p.items()},
        "labels": torch.tensor([0, 1, 0, 1, 0, 1]),
        "px": fsmap.px.Normal(shape=2),
        "objective": fsmap.ps_map(noise, prior, num_data=6),
        "generator": torch.Generator().manual_seed(0),
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer(net), 1),
        "FSDP1": type("FullyShardedDataParallel", (nn.Sequential,), {}),  # known by its name
        "freeze": freeze,
        "train": train,
        "table": uci.Table("toy", np.ones((40, 1)), np.ones((40, 1))),
    }
    return {name: getattr(fsmap, name) for name in fsmap.__all__} | own


@pytest.mark.usefixtures("seeded")
@pytest.mark.parametrize(("call", "word"), cases(CALLS, r"(\w+)=[^=]"))
def test_a_call_is_refused_by_a_typed_error(call, word):
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
    texts |= {"text.safetensors": "not one", "short.csv": table[:30]}
    texts |= {f"{n}.py": code for n, code in MODULES.items()}
    for name, text in texts.items():
        (folder / name).write_text(text)
    (folder / "empty").mkdir()
    np.save(folder / "few.npy", np.zeros((3, 2), dtype=np.float32))
    torch.save(3, folder / "number.pt")
    torch.save({"0.weight": torch.zeros(1)}, folder / "other.pt")
    return folder


@pytest.mark.usefixtures("seeded")
@pytest.mark.parametrize(("line", "word"), cases(COMMANDS, "--([a-z-]+)"))
def test_a_command_ends_with_one_message_and_exit_code_two(line, word, files, monkeypatch, capsys):
    monkeypatch.chdir(files)
    before = sorted(path for path in files.rglob("*") if "__pycache__" not in path.parts)
    try:
        code = main(shlex.split(line))
    except SystemExit as ended:
        code = ended.code
    said = capsys.readouterr().err
    assert code == 2, said
    assert said.startswith("fsmap: ")
    assert word.replace("-", "_") in said.replace("-", "_")
    assert "Traceback" not in said
    assert "\n\n" not in said
    assert sorted(path for path in files.rglob("*") if "__pycache__" not in path.parts) == before
