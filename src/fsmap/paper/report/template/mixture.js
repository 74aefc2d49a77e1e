"use strict";
// Figs. 1 and 5 in closed form: f(x) = (exp(θ_L) φ_L(x) + exp(θ_R) φ_R(x))/√2 with bumps φ(x) = exp(−(x − c)²/w).
(() => {
  const bump = (m, x) => m.centers.map((c) => m.scale * Math.exp(-((x - c) ** 2) / m.width));
  // Sums over the data that the likelihood needs: Σ φφᵀ and Σ φy.
  const moments = (m) => {
    const found = { ll: 0, lr: 0, rr: 0, l: 0, r: 0 };
    m.x.forEach((x, i) => {
      const [a, b] = bump(m, x);
      found.ll += a * a; found.lr += a * b; found.rr += b * b; found.l += a * m.y[i]; found.r += b * m.y[i];
    });
    return found;
  };
  // log p(θ|D) + const; weight 1 subtracts ½ log det 𝒥 = θ_L + θ_R + const: log p(f_θ|D).
  const logDensity = (m, s, left, right, weight) => {
    const a = Math.exp(left), b = Math.exp(right);
    const misfit = a * a * s.ll + 2 * a * b * s.lr + b * b * s.rr - 2 * (a * s.l + b * s.r);
    return -misfit / (2 * m.sigma ** 2) - (left * left + right * right) / (2 * m.alpha ** 2) - weight * (left + right);
  };
  // Its maximum by Newton steps with backtracking, from θ = 0.
  const solve = (m, weight, s = moments(m)) => {
    let t = [0, 0], best = logDensity(m, s, ...t, weight);
    const noise = m.sigma ** 2, prior = m.alpha ** 2;
    for (let step = 0; step < 500; step++) {
      const a = Math.exp(t[0]), b = Math.exp(t[1]), ra = a * s.ll + b * s.lr - s.l, rb = a * s.lr + b * s.rr - s.r;
      const g = [-a * ra / noise - t[0] / prior - weight, -b * rb / noise - t[1] / prior - weight];
      const h = [Math.max((a * a * s.ll + a * ra) / noise, a * a * s.ll / noise / 2) + 1 / prior, a * b * s.lr / noise, Math.max((b * b * s.rr + b * rb) / noise, b * b * s.rr / noise / 2) + 1 / prior];
      const det = h[0] * h[2] - h[1] * h[1];
      let move = det > 0 ? [(h[2] * g[0] - h[1] * g[1]) / det, (h[0] * g[1] - h[1] * g[0]) / det] : g;
      const size = Math.hypot(...move);
      if (size > 1) move = move.map((d) => d / size);
      let next = t, value = best;
      for (let share = 1; share > 1e-12; share /= 2) {
        next = [t[0] + share * move[0], t[1] + share * move[1]];
        value = logDensity(m, s, ...next, weight);
        if (value >= best) break;
      }
      if (!(value >= best)) break;
      t = next; best = value;
      if (Math.hypot(...g) < 1e-10) break;
    }
    return t;
  };
  const range = (low, high, count) => Array.from({ length: count }, (_, i) => low + (high - low) * i / (count - 1));
  // Points of one parameter with trapezoidal weights: from the prior's lower end to where the likelihood (or E[exp θ]) ends, and closely around a peak.
  const nodes = (m, weight, peak, square, cross, [wide, near]) => {
    const low = -weight * m.alpha ** 2 - 9 * m.alpha, wall = Math.log(Math.max(cross, 0) / square + 40 * m.sigma / Math.sqrt(square));
    const high = Math.min(m.alpha ** 2 + 9 * m.alpha, wall), reach = Math.min(12 * m.sigma / Math.sqrt(square) / Math.exp(peak), 9 * m.alpha);
    const at = [...range(low, high, wide), ...range(Math.max(low, peak - reach), Math.min(high, peak + reach), near)].sort((a, b) => a - b);
    return at.map((x, i) => [x, ((at[i + 1] ?? x) - (at[i - 1] ?? x)) / 2]);
  };
  const support = (m, weight, s = moments(m)) => nodes(m, weight, solve(m, weight, s)[1], s.rr, s.r, [1000, 300]);
  // Density along θ_R with θ_L fixed, of area 1 over all θ_R.
  const density = (m, weight, left, grid, s = moments(m)) => {
    const log = (right) => logDensity(m, s, left, right, weight), all = support(m, weight, s).map(([x, w]) => [log(x), w]);
    const top = Math.max(...all.map(([value]) => value)), sum = all.reduce((total, [value, w]) => total + w * Math.exp(value - top), 0);
    return grid.map((right) => Math.exp(log(right) - top) / sum);
  };
  // The model average: E[exp θ] by the trapezoidal rule in both parameters.
  const average = (m, s = moments(m)) => {
    const peak = solve(m, 0, s), top = logDensity(m, s, ...peak, 0), rights = nodes(m, 0, peak[1], s.rr, s.r, [1000, 300]);
    let total = 0, a = 0, b = 0;
    for (const [l, width] of nodes(m, 0, peak[0], s.ll, s.l, [200, 120])) {
      for (const [r, height] of rights) {
        const w = width * height * Math.exp(logDensity(m, s, l, r, 0) - top);
        total += w; a += w * Math.exp(l); b += w * Math.exp(r);
      }
    }
    return [a / total, b / total];
  };
  window.fsmap.mixture = { solve, density, average };

  const figure = document.querySelector(".mixture");
  if (!figure) return;
  const { chart, number } = window.fsmap;
  const start = JSON.parse(figure.querySelector("script.start").textContent), m = structuredClone(start);
  const xs = range(-1, 1, 201);
  const frame = () => ({ label: `α = ${m.alpha}, σ = ${m.sigma}`, curves: [] });
  const left = { xlabel: "θ_R", ylabel: "density", xlim: [-6.5, 2], ylim: [0, 0.8], frames: [frame()] };
  const right = { xlabel: "x", ylabel: "f(x)", xlim: [-1, 1], ylim: [-0.4, 1.4], frames: [frame()], drag: (k, x, y) => {
    m.x[k] = Math.min(Math.max(x, -1), 1);
    m.y[k] = Math.min(Math.max(y, -0.4), 1.4);
    update();
  } };
  const draw = [chart(figure.querySelector(".density"), left), chart(figure.querySelector(".function"), right)];
  const at = (heights) => xs.map((x) => bump(m, x).reduce((sum, phi, i) => sum + phi * heights[i], 0));
  const update = () => {
    const s = moments(m), ps = solve(m, 0, s), fs = solve(m, 1, s), mean = average(m, s);
    const curve = (name, x, y, method, style) => ({ name, x, y, method, style });
    left.frames[0] = frame();
    const thetas = [0, 1].map((weight) => support(m, weight, s).map(([x]) => x)), densities = thetas.map((x, weight) => density(m, weight, ps[0], x, s));
    const peaks = densities.map((values) => Math.max(...values)), seen = thetas.flatMap((x, k) => x.filter((_, i) => densities[k][i] > peaks[k] / 100));
    left.xlim = [Math.min(-6.5, ...seen), Math.max(2, ...seen)]; // both peaks are inside
    left.ylim = [0, 0.8 * 2 ** Math.ceil(Math.log2(1.1 * Math.max(...peaks) / 0.8))];
    const inside = (x, value) => value.filter((_, i) => x[i] >= left.xlim[0] && x[i] <= left.xlim[1]);
    left.frames[0].curves = [["PS-MAP, p(θ|D)", "ps-map", "dashed"], ["FS-MAP, p(f|D)", "fs-map", "line"]].map(([name, method, style], k) => curve(name, inside(thetas[k], thetas[k]), inside(thetas[k], densities[k]), method, style));
    right.frames[0] = frame();
    right.frames[0].curves = [curve("PS-MAP", xs, at(ps.map(Math.exp)), "ps-map", "dashed"), curve("FS-MAP", xs, at(fs.map(Math.exp)), "fs-map", "line"), curve("model average", xs, at(mean), "bma", "dotted"), curve("data", m.x, m.y, null, "points")];
    draw.forEach((show) => show(0));
    const top = Math.max(...at(mean));
    const nearer = ["PS-MAP", "FS-MAP"][[ps, fs].map((t) => Math.hypot(...t.map((value, i) => Math.exp(value) - mean[i]))).map((gap, i, all) => [gap, i, all]).sort((p, q) => p[0] - q[0])[0][1]];
    figure.querySelector(".note").textContent = `θ_R: PS-MAP ${number(ps[1])}, FS-MAP ${number(fs[1])}. Nearer to the model average: ${nearer}.${top > 1.4 ? ` The model average reaches ${number(top)}, above this plot.` : ""}`;
    for (const name of ["alpha", "sigma"]) {
      const input = figure.querySelector(`#live-${name}`);
      input.value = m[name];
      input.parentElement.querySelector("output").textContent = number(m[name]);
    }
  };
  for (const name of ["alpha", "sigma"]) figure.querySelector(`#live-${name}`).addEventListener("input", (event) => { m[name] = Number(event.target.value); update(); });
  figure.querySelector(".reset").addEventListener("click", () => { Object.assign(m, structuredClone(start)); update(); });
  update();
})();
