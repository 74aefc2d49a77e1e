"use strict";
(() => {
  const root = document.documentElement;
  const tip = document.getElementById("tip");

  // Numbers as the tables write them: four significant digits.
  const number = (value) => {
    if (typeof value !== "number") return String(value);
    if (value !== 0 && (Math.abs(value) < 1e-4 || Math.abs(value) >= 1e6)) return value.toExponential(3).replace(/\.?0+e/, "e").replace("e+", "e").replaceAll("-", "\u2212");
    return String(Number(value.toPrecision(4))).replace("-", "\u2212");
  };

  const place = (event) => {
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    const left = Math.min(event.clientX + 14, innerWidth - box.width - 8);
    const above = event.clientY - box.height - 12;
    tip.style.left = `${Math.max(8, left)}px`;
    tip.style.top = `${above > 8 ? above : event.clientY + 18}px`;
  };
  const element = (name, text, parent) => {
    const made = document.createElement(name);
    made.textContent = text;
    parent.append(made);
    return made;
  };
  const tell = (event, title, color, lines) => {
    tip.replaceChildren();
    if (title) {
      const head = element("b", "", tip);
      if (color) element("i", "", head).style.background = color;
      head.append(title);
    }
    for (const line of lines) element("div", line, tip);
    place(event);
  };
  const hide = () => { tip.hidden = true; };
  window.fsmap = { number, tell, hide, element };

  // light and dark
  document.getElementById("theme").addEventListener("click", () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    try { localStorage.setItem("fsmap-theme", root.dataset.theme); } catch (error) { /* for this visit only */ }
  });

  // hover values: the nearest point of any line of the figure, or of one of its panels
  for (const plot of document.querySelectorAll(".plot")) {
    const data = plot.querySelector("script.hover");
    if (!data) continue;
    const series = JSON.parse(data.textContent);
    for (const svg of plot.querySelectorAll("svg")) {
      const ring = document.createElementNS("http://www.w3.org/2000/svg", "circle");
      for (const [key, value] of Object.entries({ class: "ring", r: 4.5, visibility: "hidden" })) ring.setAttribute(key, value);
      svg.append(ring);
      const clear = () => { hide(); ring.setAttribute("visibility", "hidden"); };
      const show = (event) => {
        const matrix = svg.getScreenCTM();
        if (!matrix) return;
        const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(matrix.inverse());
        let best = null, nearest = (28 / matrix.a) ** 2;
        for (const line of series) {
          for (const point of line.points) {
            const distance = (point[0] - at.x) ** 2 + (point[1] - at.y) ** 2;
            if (distance < nearest) { nearest = distance; best = { line, point }; }
          }
        }
        if (!best) { clear(); return; }
        const { line, point } = best;
        ring.setAttribute("cx", point[0]);
        ring.setAttribute("cy", point[1]);
        ring.setAttribute("visibility", "visible");
        const x = typeof point[2] === "number" ? `${line.x || "x"}: ${number(point[2])}` : point[2];
        tell(event, line.name || (typeof point[2] === "number" ? "" : point[2]), line.color, [...(line.name || typeof point[2] === "number" ? [x] : []), `${line.y || "y"}: ${number(point[3])}`]);
      };
      svg.addEventListener("pointermove", show);
      svg.addEventListener("pointerdown", show);
      svg.addEventListener("pointerleave", clear);
    }
  }
  addEventListener("scroll", hide, { passive: true });

  // what scrolls can be reached by keyboard
  const reach = () => {
    for (const box of document.querySelectorAll(".scroll")) {
      if (box.scrollWidth > box.clientWidth || box.scrollHeight > box.clientHeight) box.tabIndex = 0;
      else box.removeAttribute("tabindex");
    }
  };
  new ResizeObserver(reach).observe(document.body);

  // copy a command
  for (const button of document.querySelectorAll(".copy[data-text]")) {
    button.addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(button.dataset.text);
        button.textContent = "copied";
      } catch (error) {
        getSelection().selectAllChildren(button.previousElementSibling);
        button.textContent = "selected";
      }
      setTimeout(() => { button.textContent = "copy"; }, 1500);
    });
  }

  // on paper everything is unfolded
  addEventListener("beforeprint", () => { for (const details of document.querySelectorAll("article details")) details.open = true; });
})();
