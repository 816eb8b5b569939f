"use strict";
// Draws the charts of a report: the part of a curve that is shown, its scale, its mean, and dark mode.
(() => {
  const KINDS = { i4: Int32Array, f4: Float32Array, f8: Float64Array };
  const documents = JSON.parse(document.getElementById("charts").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const figures = [];

  function unpacked(packed) {
    const bytes = Uint8Array.from(atob(packed.data), (c) => c.charCodeAt(0));
    return new KINDS[packed.type](bytes.buffer);
  }

  function all(table) {
    return Object.fromEntries(Object.entries(table).map(([name, packed]) => [name, unpacked(packed)]));
  }

  // The index of the first member of an ascending array that is not below a value.
  function bound(values, value) {
    let low = 0, high = values.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (values[middle] < value) low = middle + 1; else high = middle;
    }
    return low;
  }

  function paint(figure) {
    const style = getComputedStyle(document.documentElement);
    const [text, grid, back] = ["--text", "--grid", "--panel"].map((name) => style.getPropertyValue(name).trim());
    figure.setv({ background_fill_color: back, border_fill_color: back, outline_line_color: grid });
    for (const axis of [...figure.below, ...figure.left]) {
      axis.setv({ axis_label_text_color: text, major_label_text_color: text, axis_line_color: grid,
        major_tick_line_color: grid, minor_tick_line_color: null });
    }
    for (const part of figure.center) if (part.type === "Grid") part.grid_line_color = grid;
    for (const part of figure.center) if (part.type === "LabelSet") part.text_color = text;
  }

  class CurveChart {
    constructor(spec, figure) {
      this.figure = figure;
      this.labels = spec.labels;
      this.axis = Object.keys(spec.labels)[0];
      this.isLog = spec.isLog;
      this.window = "0";
      this.curves = spec.curves.map((curve) => ({
        ...curve, isShown: true, x: all(curve.x), y: unpacked(curve.y), smooth: all(curve.smooth),
      }));
      let next = 0;
      for (const curve of this.curves) {
        const count = curve.isDotted ? 4 : 3;
        curve.renderers = figure.renderers.slice(next, next + count);
        next += count;
      }
      this.controls(document.getElementById(`controls-${spec.key}`));
      let isWaiting = false;
      const later = () => {
        if (isWaiting) return;
        isWaiting = true;
        requestAnimationFrame(() => { isWaiting = false; this.draw(); });
      };
      figure.x_range.properties.start.change.connect(later);
      figure.x_range.properties.end.change.connect(later);
      this.scale();
      this.reset();
    }

    controls(place) {
      const select = (label, values, change) => {
        const box = document.createElement("select");
        box.setAttribute("aria-label", label);
        for (const [value, text] of values) box.add(new Option(text, value));
        box.addEventListener("change", () => change(box.value));
        place.append(box);
      };
      const check = (text, isOn, change, color) => {
        const label = document.createElement("label"), box = document.createElement("input");
        box.type = "checkbox";
        box.checked = isOn;
        box.addEventListener("change", () => change(box.checked));
        label.append(box);
        if (color) {
          const swatch = document.createElement("span");
          swatch.className = "swatch";
          swatch.style.background = swatch.style.borderColor = color;
          label.append(swatch);
        }
        label.append(text);
        place.append(label);
      };
      for (const curve of this.curves) {
        check(curve.name, true, (isOn) => { curve.isShown = isOn; this.draw(); }, curve.color);
      }
      if (Object.keys(this.labels).length > 1) {
        const names = Object.entries(this.labels).map(([name, text]) => [name, `over ${text}`]);
        select("x axis", names, (name) => { this.axis = name; this.reset(); });
      }
      const windows = [...new Set(this.curves.flatMap((curve) => Object.keys(curve.smooth)))];
      if (windows.length) {
        const names = windows.map((window) => [window, `mean of ${window} iterations`]);
        select("smoothing", [["0", "not smoothed"], ...names], (window) => { this.window = window; this.draw(); });
      }
      check("logarithmic", this.isLog, (isOn) => { this.isLog = isOn; this.scale(); this.draw(); });
    }

    scale() {
      const [linear, log, ticker, formatter, logTicker, logFormatter] = this.figure.tags;
      this.figure.y_scale = this.isLog ? log : linear;
      this.figure.left[0].setv({ ticker: this.isLog ? logTicker : ticker,
        formatter: this.isLog ? logFormatter : formatter });
    }

    reset() {
      const ends = this.curves.flatMap((curve) => {
        const x = curve.x[this.axis];
        return x.length ? [x[0], x[x.length - 1]] : [];
      });
      const low = Math.min(...ends), high = Math.max(...ends), margin = (high - low || 1) * 0.01;
      const [start, end] = [low - margin, high + margin];
      this.figure.x_range.setv({ start, end, reset_start: start, reset_end: end });
      this.figure.below[0].axis_label = this.labels[this.axis];
      this.draw();
    }

    draw() {
      const { start, end } = this.figure.x_range;
      let low = Infinity, high = -Infinity;
      const parts = this.curves.map((curve) => {
        if (!curve.isShown) return null;
        const from = Math.max(0, bound(curve.x[this.axis], start) - 1);
        const to = bound(curve.x[this.axis], end) + 1;
        const y = curve.y.subarray(from, to);
        const mean = curve.smooth[this.window]?.subarray(from, to);
        const x = curve.x[this.axis].subarray(from, to);
        for (let i = 0; i < y.length; i++) {
          const isInside = x[i] >= start && x[i] <= end;
          if (isInside && Number.isFinite(y[i]) && (y[i] > 0 || !this.isLog)) {
            low = Math.min(low, y[i]);
            high = Math.max(high, y[i]);
          }
        }
        return { x, y, mean, iteration: curve.x.iteration.subarray(from, to) };
      });
      if (low > high) [low, high] = [this.isLog ? 0.1 : 0, 1];
      if (low === high) [low, high] = this.isLog ? [low / 2, high * 2] : [low - 0.5, high + 0.5];
      const factor = (high / low) ** 0.05, margin = (high - low) * 0.05;
      const [floor, top] = this.isLog ? [low / factor, high * factor] : [low - margin, high + margin];
      this.figure.y_range.setv({ start: floor, end: top });
      this.curves.forEach((curve, number) => this.fill(curve, parts[number], low));
    }

    fill(curve, part, low) {
      const [raw, mean, gaps] = curve.renderers.map((renderer) => renderer.data_source);
      if (part === null) {
        for (const source of [raw, mean, gaps]) source.data = { x: [], y: [], iteration: [], text: [] };
        return;
      }
      const { x, iteration } = part;
      // What a logarithmic axis has no place for is not drawn.
      const y = this.isLog ? part.y.map((value) => (value > 0 ? value : NaN)) : part.y;
      raw.data = { x, y, iteration, text: Array.from(part.y, String) };
      curve.renderers[0].glyph.line_alpha = part.mean ? 0.3 : 1;
      mean.data = part.mean ? { x, y: part.mean, iteration, text: Array.from(part.mean, String) }
        : { x: [], y: [], iteration: [], text: [] };
      const odd = [...part.y.keys()].filter((i) => !Number.isFinite(part.y[i]));
      gaps.data = { x: odd.map((i) => x[i]), y: odd.map(() => low), iteration: odd.map((i) => iteration[i]),
        text: odd.map((i) => String(part.y[i])) };
    }
  }

  async function start() {
    for (const spec of documents) {
      const views = await Bokeh.embed.embed_item(spec.item);
      const figure = views.roots[0].model;
      figures.push(figure);
      paint(figure);
      if (spec.curves) new CurveChart(spec, figure);
      for (const [text, color, isHollow] of spec.legend ?? []) {
        const entry = document.createElement("span"), swatch = document.createElement("span");
        entry.className = "entry";
        swatch.className = "swatch";
        swatch.style.background = isHollow ? "transparent" : color;
        swatch.style.borderColor = color;
        entry.append(swatch, text);
        document.getElementById(`controls-${spec.key}`).append(entry);
      }
    }
    dark.addEventListener("change", () => figures.forEach(paint));
    document.documentElement.dataset.state = "drawn";
  }

  Bokeh.set_log_level("warn");
  start();
})();
