// Small charts as SVG: axes, points with titles, lines. Points may be links.

import { h, s } from "./dom.js";

// As wide as a narrow window, so that text stays legible.
const W = Math.max(320, Math.min(560, window.innerWidth - 24)), H = 250, LEFT = 62, RIGHT = 14, TOP = 22, BOTTOM = 34;

const short = value => {
  const size = Math.abs(value);
  if (size >= 1e6) return `${+(value / 1e6).toPrecision(3)}M`;
  if (size >= 1e4) return `${+(value / 1e3).toPrecision(3)}k`;
  return size >= 1000 ? Math.round(value).toLocaleString("en") : `${+value.toPrecision(3)}`;
};

// Three to six round numbers from low to high.
const ticks = (low, high) => {
  if (!(high > low)) return [low];
  const raw = (high - low) / 4, base = 10 ** Math.floor(Math.log10(raw));
  const step = base * [1, 2, 2.5, 5, 10].find(one => one * base >= raw);
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-9; at += step) found.push(+at.toPrecision(12));
  return found;
};

const range = (values, { zero = false, whole = false } = {}) => {
  const finite = values.filter(Number.isFinite);
  let low = zero ? 0 : Math.min(...finite), high = Math.max(...finite);
  if (whole) return [low - 0.5, high + 0.5];
  const pad = (high - low || Math.abs(high) || 1) * 0.06;
  return [zero ? 0 : low - pad, high + pad];
};

// A frame with axes; x and y map values to places.
const frame = (label, xs, ys, { x: xLabel, y: yLabel, whole = false, zero = false, tick = short }) => {
  const [x0, x1] = range(xs, { whole }), [y0, y1] = range(ys, { zero });
  const x = v => LEFT + (v - x0) / (x1 - x0) * (W - LEFT - RIGHT), y = v => H - BOTTOM - (v - y0) / (y1 - y0) * (H - TOP - BOTTOM);
  const across = ticks(x0, x1).filter(v => !whole || Number.isInteger(v));
  const svg = s("svg", { class: "chart", viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": label },
    ticks(y0, y1).map(v => [s("line", { class: "axis", x1: LEFT, x2: W - RIGHT, y1: y(v), y2: y(v) }),
      s("text", { x: LEFT - 6, y: y(v) + 4, "text-anchor": "end" }, tick(v))]),
    across.map(v => s("text", { x: x(v), y: H - BOTTOM + 15, "text-anchor": "middle" }, tick === short ? short(v) : whole ? v : tick(v))),
    s("text", { x: W - RIGHT, y: H - 4, "text-anchor": "end" }, xLabel),
    s("text", { x: 4, y: 9 }, yLabel));
  return { svg, x, y, x0, x1, y0, y1 };
};

const line = (points, color, css = "line") => s("polyline", { class: css, stroke: `var(--${color})`,
  points: points.map(([x, y]) => `${x.toFixed(1)},${y.toFixed(1)}`).join(" ") });

const point = (x, y, color, title, href, r = 4.5) => {
  const marks = [s("title", {}, title), s("circle", { class: "hit", cx: x, cy: y, r: 11 }), s("circle", { class: "point", cx: x, cy: y, r, fill: `var(--${color})` })];
  return href ? s("a", { href, tabindex: -1 }, marks) : s("g", {}, marks);
};

const whisker = (x, low, high, color) => s("line", { class: "whisker", x1: x, x2: x, y1: low, y2: high, stroke: `var(--${color})` });

const figure = (svg, ...caption) => h("figure", {}, svg, h("figcaption", {}, caption));
export const key = (color, text) => h("span", { class: "key", "--of": `var(--${color})` }, text);

// Speeds over trials with their intervals, the best so far, the baseline. points: [{x, y, low, high, title, href, color}]
export const speeds = (points, { unit, baseline, legend }) => {
  const ys = points.flatMap(one => [one.low, one.high]).concat(baseline ?? []);
  const on = frame(`${unit} of every trial measured`, points.map(one => one.x), ys, { x: "trial", y: unit, whole: true, zero: true });
  let best = -Infinity;
  const steps = points.flatMap(one => {
    const before = best;
    best = Math.max(best, one.y);
    return [...(Number.isFinite(before) ? [[on.x(one.x), on.y(before)]] : []), [on.x(one.x), on.y(best)]];
  });
  if (baseline != null) on.svg.append(line([[LEFT, on.y(baseline)], [W - RIGHT, on.y(baseline)]], "grey"));
  if (steps.length > 1) on.svg.append(line(steps, "green"));
  for (const one of points) on.svg.append(whisker(on.x(one.x), on.y(one.low), on.y(one.high), one.color), point(on.x(one.x), on.y(one.y), one.color, one.title, one.href));
  return figure(on.svg, legend, key("green", "fastest so far"), baseline != null && key("grey", "baseline"));
};

// Measured over predicted, both in seconds; on the line they agree.
export const scatter = (points, { tick, legend }) => {
  const all = points.flatMap(one => [one.x, one.y]);
  const on = frame("Measured over predicted step time", all, all, { x: "predicted", y: "measured", tick });
  on.svg.append(line([[on.x(on.x0), on.y(on.x0)], [on.x(on.x1), on.y(on.x1)]], "grey"));
  for (const one of points) on.svg.append(point(on.x(one.x), on.y(one.y), one.color, one.title, one.href));
  return figure(on.svg, legend, key("grey", "as predicted"));
};

// One value per step.
export const curve = (points, { label, x, tick, color = "blue", caption = "", title }) => {
  const on = frame(label, points.map(one => one[0]), points.map(one => one[1]), { x, y: label, whole: true, tick });
  on.svg.append(line(points.map(([a, b]) => [on.x(a), on.y(b)]), color));
  if (points.length <= 120) for (const [a, b] of points) on.svg.append(point(on.x(a), on.y(b), color, title(a, b), null, 3));
  return figure(on.svg, caption);
};

// A row per finalist: its interval over all rounds, each round as a dot, the baseline at 1.
export const intervals = finalists => {
  const row = 34, height = TOP + BOTTOM + row * finalists.length;
  const known = finalists.flatMap(one => [one.low, one.high, one.value, ...one.rounds.map(round => round[1])]).filter(v => v != null);
  const [x0, x1] = range([...known, 1]);
  const x = v => LEFT + (v - x0) / (x1 - x0) * (W - LEFT - RIGHT);
  const svg = s("svg", { class: "chart", viewBox: `0 0 ${W} ${height}`, role: "img", "aria-label": "Speed-up over the baseline; the table below has the same data" },
    ticks(x0, x1).map(v => [s("line", { class: "axis", x1: x(v), x2: x(v), y1: TOP, y2: height - BOTTOM }),
      s("text", { x: x(v), y: height - BOTTOM + 15, "text-anchor": "middle" }, `${+v.toFixed(2)}x`)]),
    s("line", { class: "line", x1: x(1), x2: x(1), y1: TOP, y2: height - BOTTOM, stroke: "var(--dim)" }),
    s("text", { x: W - RIGHT, y: height - 4, "text-anchor": "end" }, "speed-up over the baseline"));
  finalists.forEach((one, i) => {
    const y = TOP + row * (i + 0.5), color = { winner: "green", faster: "green", slower: "vermilion" }[one.outcome] ?? "blue";
    svg.append(s("text", { x: LEFT - 8, y: y + 4, "text-anchor": "end" }, one.id));
    if (one.low != null && one.high != null) svg.append(s("line", { class: "line", x1: x(one.low), x2: x(one.high), y1: y, y2: y, stroke: `var(--${color})`, "stroke-width": 3 }));
    for (const [round, value] of one.rounds) svg.append(point(x(value), y - 9, "grey", `${one.id}, round ${round}: ${value.toFixed(3)}x`, null, 2.5));
    if (one.value != null) svg.append(point(x(one.value), y, color, `${one.id}: ${one.title}`, null, 5));
  });
  return figure(svg, "Line: 95% CI over all rounds. Dots: rounds.");
};
