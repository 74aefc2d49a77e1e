"use strict";
// Sliders: frames that are pictures are shown one at a time; frames that are curves are drawn here.
(() => {
  const { number, tell, hide, element } = window.fsmap;
  const NAMESPACE = "http://www.w3.org/2000/svg";
  const PALETTE = ["--fs-map", "--ps-map", "--l-map", "--bma", "--muted"];
  const DASHES = { dashed: "6 4", dotted: "2 3" };
  const MARGIN = { left: 52, right: 12, top: 10, bottom: 40 };

  const shape = (name, attributes, parent) => {
    const made = document.createElementNS(NAMESPACE, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (parent) parent.append(made);
    return made;
  };
  const color = (curve, index) => `var(${curve.method ? `--${curve.method}` : curve.style === "points" ? "--muted" : PALETTE[index % PALETTE.length]})`;

  // About `count` round numbers that cover an interval.
  const ticks = (low, high, count) => {
    const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= raw);
    const found = [];
    for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-9; value += step) found.push(Number(value.toPrecision(12)));
    return found;
  };
  // The same limits for all frames, so that what moves is the function and not the axes.
  const limits = (frames, key) => {
    const values = frames.flatMap((frame) => frame.curves.flatMap((curve) => curve[key])).filter((value) => typeof value === "number");
    const low = Math.min(...values), high = Math.max(...values), room = (high - low || 1) * (key === "y" ? 0.06 : 0);
    return [low - room, high + room];
  };

  // data: frames of curves with axis labels; xlim and ylim fix the axes, drag(point, x, y) makes points movable.
  const chart = (stage, data) => {
    const legend = element("div", "", stage);
    legend.className = "legend";
    const svg = shape("svg", { class: "chart", role: "img" }, stage);
    let [x0, x1] = data.xlim || limits(data.frames, "x"), [y0, y1] = data.ylim || limits(data.frames, "y"), shown = 0, scale = null;

    const path = (curve) => {
      let text = "", pen = false;
      curve.x.forEach((x, i) => {
        const y = curve.y[i];
        if (typeof x !== "number" || typeof y !== "number") { pen = false; return; }
        text += `${pen ? "L" : "M"}${scale.x(x).toFixed(1)} ${scale.y(y).toFixed(1)}`;
        pen = true;
      });
      return text;
    };
    const key = (curve, index) => {
      const item = element("span", "", legend), mark = shape("svg", { viewBox: "0 0 22 10" }, item);
      if (curve.style === "points") shape("circle", { cx: 11, cy: 5, r: 3, fill: color(curve, index) }, mark);
      else shape("path", { d: "M1 5H21", stroke: color(curve, index), "stroke-width": 2.2, "stroke-dasharray": DASHES[curve.style] || "none" }, mark);
      item.append(curve.name);
    };
    const axes = (width, height) => {
      const bottom = height - MARGIN.bottom;
      for (const value of ticks(y0, y1, 5)) {
        shape("line", { class: "gridline", x1: MARGIN.left, x2: width - MARGIN.right, y1: scale.y(value), y2: scale.y(value) }, svg);
        shape("text", { class: "tick", x: MARGIN.left - 7, y: scale.y(value) + 4, "text-anchor": "end" }, svg).textContent = number(value);
      }
      for (const value of ticks(x0, x1, width < 420 ? 4 : 7)) {
        shape("line", { class: "axis", x1: scale.x(value), x2: scale.x(value), y1: bottom, y2: bottom + 4 }, svg);
        shape("text", { class: "tick", x: scale.x(value), y: bottom + 16, "text-anchor": "middle" }, svg).textContent = number(value);
      }
      shape("line", { class: "axis", x1: MARGIN.left, x2: width - MARGIN.right, y1: bottom, y2: bottom }, svg);
      shape("text", { x: (MARGIN.left + width - MARGIN.right) / 2, y: height - 6, "text-anchor": "middle" }, svg).textContent = data.xlabel;
      const middle = (MARGIN.top + bottom) / 2;
      shape("text", { x: 12, y: middle, transform: `rotate(-90 12 ${middle})`, "text-anchor": "middle" }, svg).textContent = data.ylabel;
    };
    const draw = (index) => {
      shown = index;
      if (data.xlim) [x0, x1] = data.xlim; // may have changed since
      if (data.ylim) [y0, y1] = data.ylim;
      const width = Math.max(260, stage.clientWidth), height = Math.round(Math.min(360, Math.max(230, width * 0.52)));
      svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
      svg.setAttribute("aria-label", `${data.ylabel} over ${data.xlabel}, ${data.frames[index].label}`);
      svg.replaceChildren();
      legend.replaceChildren();
      scale = {
        x: (value) => MARGIN.left + (value - x0) / (x1 - x0 || 1) * (width - MARGIN.left - MARGIN.right),
        y: (value) => height - MARGIN.bottom - (value - y0) / (y1 - y0 || 1) * (height - MARGIN.top - MARGIN.bottom),
      };
      axes(width, height);
      data.frames[index].curves.forEach((curve, i) => {
        key(curve, i);
        if (curve.style !== "points") {
          shape("path", { class: "curve", d: path(curve), stroke: color(curve, i), "stroke-dasharray": DASHES[curve.style] || "none" }, svg);
          return;
        }
        curve.x.forEach((x, k) => {
          if (typeof curve.y[k] !== "number") return;
          const dot = shape("circle", { cx: scale.x(x), cy: scale.y(curve.y[k]), r: data.drag ? 7 : 3, fill: color(curve, i) }, svg);
          if (data.drag) handle(dot, k, x, curve.y[k]);
        });
      });
    };
    let held = null;
    const value = (event) => {
      const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse()), box = svg.viewBox.baseVal;
      const inside = (share, low, high) => low + Math.min(Math.max(share, 0), 1) * (high - low);
      return [inside((at.x - MARGIN.left) / (box.width - MARGIN.left - MARGIN.right), x0, x1), inside((box.height - MARGIN.bottom - at.y) / (box.height - MARGIN.top - MARGIN.bottom), y0, y1)];
    };
    const handle = (dot, k, x, y) => {
      for (const [key, text] of Object.entries({ class: "handle", tabindex: 0, role: "slider", "aria-label": `data point ${k + 1}`, "aria-valuenow": y, "aria-valuetext": `x ${number(x)}, y ${number(y)}` })) dot.setAttribute(key, text);
      dot.addEventListener("pointerdown", (event) => { held = k; svg.setPointerCapture(event.pointerId); event.preventDefault(); });
      dot.addEventListener("keydown", (event) => {
        const step = { ArrowUp: [0, 0.02], ArrowDown: [0, -0.02], ArrowLeft: [-0.02, 0], ArrowRight: [0.02, 0] }[event.key];
        if (!step) return;
        event.preventDefault();
        data.drag(k, x + step[0], y + step[1]);
        svg.querySelectorAll(".handle")[k].focus();
      });
    };
    svg.addEventListener("pointermove", (event) => { if (held !== null) { hide(); data.drag(held, ...value(event)); } });
    for (const name of ["pointerup", "pointercancel"]) svg.addEventListener(name, () => { held = null; });
    const cross = shape("line", { class: "cross" });
    svg.addEventListener("pointermove", (event) => {
      if (held !== null) return;
      const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
      const x = x0 + (at.x - MARGIN.left) / (svg.viewBox.baseVal.width - MARGIN.left - MARGIN.right) * (x1 - x0);
      if (x < x0 || x > x1) { hide(); cross.remove(); return; }
      for (const side of ["x1", "x2"]) cross.setAttribute(side, at.x);
      cross.setAttribute("y1", MARGIN.top);
      cross.setAttribute("y2", svg.viewBox.baseVal.height - MARGIN.bottom);
      svg.append(cross);
      const lines = data.frames[shown].curves.filter((curve) => curve.style !== "points").map((curve) => {
        let best = 0;
        curve.x.forEach((value, i) => { if (Math.abs(value - x) < Math.abs(curve.x[best] - x)) best = i; });
        return `${curve.name}: ${number(curve.y[best])}`;
      });
      tell(event, `${data.xlabel || "x"}: ${number(Number(x.toPrecision(3)))}`, "", lines);
    });
    svg.addEventListener("pointerleave", () => { hide(); cross.remove(); });
    new ResizeObserver(() => { if (stage.clientWidth) draw(shown); }).observe(stage);
    return draw;
  };

  window.fsmap.chart = chart;

  for (const slider of document.querySelectorAll(".slider")) {
    const input = slider.querySelector("input"), output = slider.querySelector("output"), note = slider.querySelector(".note");
    const labels = JSON.parse(slider.querySelector("script.labels").textContent);
    const draw = chart(slider.querySelector(".stage"), JSON.parse(slider.querySelector("script.curves").textContent));
    const show = () => {
      const index = Number(input.value);
      draw(index);
      output.textContent = labels[index][0];
      note.textContent = labels[index][1];
      input.setAttribute("aria-valuetext", labels[index][0]);
    };
    input.addEventListener("input", show);
    input.value = slider.dataset.start;
    show();
  }
})();
