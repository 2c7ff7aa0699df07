// One sweep: updates each part of the page when the server reports a change.

import { buttons, notice } from "./actions.js";
import { intervals, scatter, speeds } from "./chart.js";
import { at, follow, liveRows, meta, put, say } from "./page.js";

const sweep = meta("sweep");
const trials = liveRows("table", "trial/"), checks = liveRows("checks", "check/");
const ms = seconds => seconds >= 0.9995 ? `${+seconds.toPrecision(3)} s` : `${+(seconds * 1000).toPrecision(3)} ms`;

const heading = head => {
  say(at("phase"), head.phase);
  at("phase").className = `phase ${head.class}`;
  say(at("hardware"), head.hardware && `on ${head.hardware}`);
  say(at("status"), head.status);
  document.title = `${head.mark ? `${head.mark} ` : ""}${head.sweep}: ${head.phase}`;
  buttons(head);
};

const charts = parts => {
  const href = x => `/sweeps/${sweep}/trials/${x}`;
  const points = Object.keys(parts).filter(name => name.startsWith("trial/")).map(name => parts[name].point).filter(Boolean)
    .map(one => ({ ...one, href: href(one.x) })).sort((a, b) => a.x - b.x);
  put("history", points.length > 1 && speeds(points,
    { unit: parts.unit, baseline: points.find(one => one.x === 0)?.y, legend: "Each point is a trial, and its line is the 95% CI." }));
  const both = points.filter(one => one.predicted_s).map(one => ({ ...one, x: one.predicted_s, y: one.step_s, title: one.off }));
  put("predictions", both.length > 1 && scatter(both,
    { tick: ms, legend: "Trials above the line are slower than was predicted when they were proposed." }));
};

// Time of the latest notice; null until the first message, whose notice is from before the page was opened.
let noticedAt = null;
const notify = found => {
  if (found && noticedAt !== null && found.at_s > noticedAt) notice(found.text, found.is_bad);
  noticedAt = Math.max(noticedAt ?? 0, found?.at_s ?? 0);
};

follow(`/api/sweeps/${sweep}/events`, (parts, names) => {
  if (names.includes("head")) heading(parts.head);
  notify(parts.notice);
  if (names.includes("intervals")) put("intervals", parts.intervals?.some(one => one.rounds.length) && intervals(parts.intervals));
  checks(parts, names);
  if (trials(parts, names)) charts(parts);
});
