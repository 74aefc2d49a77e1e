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

  // hover values: the nearest point of any line of the figure
  for (const plot of document.querySelectorAll(".plot")) {
    const data = plot.querySelector("script.hover");
    if (!data) continue;
    const svg = plot.querySelector("svg");
    const series = JSON.parse(data.textContent);
    const ring = document.createElementNS("http://www.w3.org/2000/svg", "circle");
    ring.setAttribute("class", "ring");
    ring.setAttribute("r", "4.5");
    ring.setAttribute("visibility", "hidden");
    svg.append(ring);
    const clear = () => { hide(); ring.setAttribute("visibility", "hidden"); };
    const look = (event) => {
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
      tell(event, line.name, line.color, [`${line.x || "x"}: ${number(point[2])}`, `${line.y || "y"}: ${number(point[3])}`]);
    };
    svg.addEventListener("pointermove", look);
    svg.addEventListener("pointerdown", look);
    svg.addEventListener("pointerleave", clear);
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
  for (const button of document.querySelectorAll(".copy")) {
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

  // contents: folded on small screens, and the current experiment marked
  const contents = document.querySelector(".contents details");
  const wide = matchMedia("(min-width: 78rem)");
  const fold = () => { contents.open = wide.matches; };
  wide.addEventListener("change", fold);
  fold();
  const links = new Map([...document.querySelectorAll(".contents a")].map((link) => [link.hash.slice(1), link]));
  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      for (const link of links.values()) link.removeAttribute("aria-current");
      const link = links.get(entry.target.id);
      if (link) link.setAttribute("aria-current", "true");
    }
  }, { rootMargin: "-10% 0px -80% 0px" });
  for (const article of document.querySelectorAll("article")) watcher.observe(article);

  // on paper everything is unfolded
  addEventListener("beforeprint", () => { for (const details of document.querySelectorAll("article details")) details.open = true; });
})();
