// Draws the charts of a report: what to draw is in #report-data, how it looks is in the style sheet.
"use strict";
(() => {
  const page = JSON.parse(document.getElementById("report-data").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const coarse = matchMedia("(pointer: coarse)");
  const narrow = matchMedia("(max-width: 40rem)");
  const SYMBOLS = {
    circle: "M0-4A4 4 0 1 1 0 4A4 4 0 1 1 0-4", square: "M-4-4H4V4H-4Z", diamond: "M0-5L5 0L0 5L-5 0Z",
    "triangle-up": "M0-5L5 4H-5Z", "triangle-down": "M0 5L5-4H-5Z", "triangle-right": "M5 0L-4 5V-5Z",
    cross: "M-1.5-5H1.5V-1.5H5V1.5H1.5V5H-1.5V1.5H-5V-1.5H-1.5Z",
    x: "M-4.5-2.5L-2.5-4.5L0-2L2.5-4.5L4.5-2.5L2 0L4.5 2.5L2.5 4.5L0 2L-2.5 4.5L-4.5 2.5L-2 0Z",
    star: "M0-5.5L1.6-1.8L5.5-1.5L2.5 1L3.4 5L0 2.8L-3.4 5L-2.5 1L-5.5-1.5L-1.6-1.8Z",
  };
  const HATCHINGS = {
    "/": "M-6 4L0-5M0 5L6-4", "\\": "M-6-4L0 5M0-5L6 4", x: "M-5-5L5 5M-5 5L5-5", "-": "M-7-2H7M-7 2H7",
    "|": "M-3-6V6M3-6V6", "+": "M-7 0H7M0-6V6", ".": "M-4-2h2M2-2h2M-1 2h2",
  };
  const DASHES = { dash: "7 4", dot: "2 3", dashdot: "7 3 2 3", longdash: "11 4", longdashdot: "11 3 2 3" };

  // Lists are kept once, in page.lists; colours are those of a light page.
  const revive = (value) => {
    if (Array.isArray(value)) return typeof value[0] === "number" ? value : value.map(revive);
    if (value && typeof value === "object") {
      if ("list" in value) return page.lists[value.list];
      return Object.fromEntries(Object.entries(value).map(([key, one]) => [key, revive(one)]));
    }
    const place = dark.matches && typeof value === "string" ? page.light.indexOf(value) : -1;
    return place < 0 ? value : page.dark[place];
  };

  const themed = (layout) => {
    const style = getComputedStyle(document.documentElement);
    const ink = (name) => style.getPropertyValue(name).trim();
    const font = { family: getComputedStyle(document.body).fontFamily, size: narrow.matches ? 12 : 13, color: ink("--ink") };
    const clear = "rgba(0,0,0,0)";
    const made = { ...layout, font, paper_bgcolor: clear, plot_bgcolor: clear, showlegend: false, autosize: true };
    made.margin = { l: 8, r: 16, t: 10, b: 8, pad: 4 };
    made.dragmode = coarse.matches ? false : "zoom";
    made.hoverlabel = { bgcolor: ink("--card"), bordercolor: ink("--line"), font, align: "left" };
    for (const name of Object.keys(made).filter((key) => /^[xy]axis/.test(key))) {
      const lines = { gridcolor: ink("--grid"), zerolinecolor: ink("--line"), linecolor: ink("--line") };
      const given = made[name];
      const title = { ...given.title, font: { size: font.size } };
      made[name] = { tickangle: 0, ...lines, ...given, title, fixedrange: coarse.matches };
      if (narrow.matches && name[0] === "x" && !given.type) made[name].nticks = 5;
    }
    return made;
  };

  const element = (name, attributes = {}, ...children) => {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children);
    return made;
  };

  const face = ({ symbol, color }) => (symbol.endsWith("-open") ? { fill: "none", stroke: color } : { fill: color });

  const swatch = (trace) => {
    const space = "http://www.w3.org/2000/svg";
    const svg = document.createElementNS(space, "svg");
    const add = (name, attributes) => {
      const made = document.createElementNS(space, name);
      for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
      svg.append(made);
    };
    for (const [key, value] of Object.entries({ width: 30, height: 12, viewBox: "-15 -6 30 12", "aria-hidden": "true" }))
      svg.setAttribute(key, value);
    const mode = trace.mode || "";
    if (trace.type === "bar") {
      add("rect", { x: -7, y: -6, width: 14, height: 12, rx: 2, fill: trace.marker.color });
      const hatching = HATCHINGS[trace.marker.pattern && trace.marker.pattern.shape];
      if (hatching) add("path", { d: hatching, stroke: trace.marker.pattern.fgcolor, "stroke-opacity": 0.7, "stroke-width": 1.5 });
    }
    if (mode.includes("lines")) {
      const dashes = DASHES[trace.line.dash] || "none";
      add("path", { d: "M-15 0H15", stroke: trace.line.color, "stroke-width": 2, "stroke-dasharray": dashes });
    }
    if (trace.marker && trace.type !== "bar" && (mode.includes("markers") || trace.legendgroup))
      add("path", { d: SYMBOLS[trace.marker.symbol] || SYMBOLS.circle, ...face(trace.marker) });
    return svg;
  };

  const unescaped = (text) => text.replace(/&lt;/g, "<").replace(/&gt;/g, ">").replace(/&amp;/g, "&");

  class Chart {
    constructor(root, chart) {
      Object.assign(this, { root, chart, place: 0, hidden: new Set() });
      this.plot = root.querySelector(".plot");
      this.details = root.querySelector("details");
      root.querySelectorAll(".switch input, .switch select").forEach((one) =>
        one.addEventListener("change", () => this.choose(Number(one.value))));
      this.details.addEventListener("toggle", () => this.fill());
      this.draw();
    }

    get view() { return this.chart.views[this.place]; }

    choose(place) {
      this.place = place;
      this.draw();
      this.fill();
    }

    draw() {
      const data = revive(this.view.data);
      for (const trace of data) trace.visible = !this.hidden.has(trace.name);
      this.root.querySelector(".note").textContent = this.view.note;
      this.root.querySelector(".legend").replaceChildren(...this.legend(data));
      const layout = themed(revive(this.view.layout));
      Plotly.react(this.plot, data, layout, { responsive: true, displayModeBar: false });
    }

    legend(data) {
      const shown = data.filter((trace) => trace.showlegend !== false);
      return shown.map((trace) => {
        const pressed = String(!this.hidden.has(trace.name));
        const button = element("button", { type: "button", "aria-pressed": pressed }, swatch(trace), unescaped(trace.name));
        button.addEventListener("click", () => this.toggle(trace.name, button));
        return element("li", {}, button);
      });
    }

    toggle(name, button) {
      this.hidden.delete(name) || this.hidden.add(name);
      const visible = !this.hidden.has(name);
      button.setAttribute("aria-pressed", String(visible));
      const places = this.plot.data.flatMap((trace, place) => (trace.name === name ? [place] : []));
      Plotly.restyle(this.plot, { visible }, places);
    }

    // The table is made when it is first looked at, and again when another view is chosen.
    fill() {
      if (!this.details.open) return;
      const { columns, parts, title, many } = this.chart;
      const skip = many ? 1 : 0; // the caption says it already
      const caption = many ? `${title}: ${this.view.label}` : title;
      const rows = parts.filter((one) => !many || one.keys[0] === this.view.label).flatMap((part) => {
        const lists = part.columns.map(revive);
        return lists[0].map((_, n) => [...part.keys.slice(skip), ...lists.map((list) => list[n])]);
      });
      const kind = (cell) => (typeof cell === "number" ? {} : { class: "text" });
      const head = element("tr", {}, ...columns.slice(skip).map((name, n) =>
        element("th", { scope: "col", ...kind(rows.length ? rows[0][n] : 0) }, name)));
      const body = element("tbody");
      for (const [first, ...others] of rows)
        body.append(element("tr", {}, element("th", { scope: "row" }, String(first)),
          ...others.map((cell) => element("td", kind(cell), String(cell)))));
      const table = element("table", {}, element("caption", {}, caption), element("thead", {}, head), body);
      this.details.querySelector(".scroll").replaceChildren(table);
    }
  }

  const charts = Object.entries(page.charts).map(([id, chart]) => new Chart(document.getElementById(id), chart));
  dark.addEventListener("change", () => charts.forEach((chart) => chart.draw()));
})();
