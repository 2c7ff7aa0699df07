// One trial: its document is read again after changes; its log is followed while it is running.

import { curve } from "./chart.js";
import { h } from "./dom.js";
import { at, follow, meta, put, putHtml, read, say } from "./page.js";

const sweep = meta("sweep"), number = Number(meta("trial"));
const api = `/api/sweeps/${sweep}/trials/${number}`;
const ms = seconds => seconds >= 1 ? `${+seconds.toPrecision(4)} s` : `${+(seconds * 1000).toPrecision(4)} ms`;
let live = null, shown = null, isVirtual = false;

const heading = doc => {
  say(at("phase"), doc.state);
  at("phase").className = `phase ${doc.class}`;
  say(at("name"), doc.name);
  say(at("status"), doc.status);
  document.title = doc.title;
};

const curves = () => {
  const { step_times: times = [], losses = [] } = shown?.curves ?? {};
  const points = times.length ? times.map((v, i) => [i + 1, v]) : live?.points ?? [];
  put("steps", points.length > 1 && curve(points, { label: "step time", x: times.length ? "measured step" : live.phase, tick: ms,
    title: (step, seconds) => `step ${step}: ${ms(seconds)}`, caption: times.length ? "The slowest rank of every measured step." : "Sampled while it is running; some steps are missing." }));
  put("loss", losses.length > 1 && curve(losses.map((v, i) => [i + 1, v]), { label: "loss", x: "step, from the first of the warm-up on", color: "orange",
    title: (step, loss) => `step ${step}: ${loss.toPrecision(6)}`, caption: "Mean over the global batch." }));
};

// The log of one rank of one attempt.
const log = { attempt: null, rank: 0, end: -1, timer: null };
const view = h("pre", { class: "log", tabindex: 0, "aria-label": "Log" }), facts = h("p", { class: "dim" });
const stay = h("input", { type: "checkbox", checked: true, id: "follow" });
const choose = (id, label, onchange) => [h("label", { for: id }, label), h("select", { id, onchange })];
const bar = h("div", { class: "row" }, choose("attempt", "attempt", () => open(Number(at("attempt").value), 0)),
  choose("rank", "rank", () => open(log.attempt, Number(at("rank").value))), h("label", {}, stay, " follow"));

const tail = async () => {
  clearTimeout(log.timer);
  const { attempt, rank } = log;
  let found;
  try {
    found = await read(`${api}/log?attempt=${attempt}&rank=${rank}${log.end >= 0 ? `&after=${log.end}` : ""}`);
  } catch {
    log.timer = setTimeout(tail, 3000);
    return;
  }
  if (attempt !== log.attempt || rank !== log.rank) return;
  if (found.error) { say(facts, found.error); view.hidden = true; return; }
  view.hidden = false;
  if (log.end < 0) view.replaceChildren();
  const list = log.end < 0 && !found.is_here ? found.kept : found.lines;
  if (list.length) view.append(`${list.join("\n")}\n`);
  while (view.childNodes.length > 400) view.firstChild.remove();
  say(facts, [`rank ${found.rank} on ${found.node}`, found.is_root_cause && "failed first", !found.is_whole && log.end < 0 && "the last lines",
    `${found.is_here ? "" : "not on this host, in "}${found.path}`].filter(Boolean).join(", "));
  view.hidden = !found.is_here && view.textContent === "";
  log.end = found.end;
  if (stay.checked && list.length) view.scrollTop = view.scrollHeight;
  if (!found.is_over || found.lines.length) log.timer = setTimeout(tail, document.hidden ? 5000 : 1000);
};

const open = (attempt, rank) => {
  Object.assign(log, { attempt, rank, end: -1 });
  const ranks = shown.attempts[attempt][2];
  if (at("rank").options.length !== ranks) at("rank").replaceChildren(...Array.from({ length: ranks }, (_, i) => h("option", { value: i }, `${i}`)));
  at("rank").value = rank;
  tail();
};

const logs = doc => {
  const last = doc.attempts.length - 1;
  if (isVirtual || last < 0) return put("logs", isVirtual && last >= 0 && h("p", { class: "dim" }, "The cluster is simulated: its trials have no logs."));
  if (!view.isConnected) put("logs", bar, facts, view);
  const select = at("attempt");
  if (select.options.length === doc.attempts.length) return;
  select.replaceChildren(...doc.attempts.map(([attempt, state]) => h("option", { value: attempt }, `${attempt} (${state})`)));
  select.value = last;
  open(last, 0);
};

const load = async () => {
  const doc = await read(api);
  if (doc.error) { say(at("trouble"), doc.error); return; }
  shown = doc;
  heading(doc);
  for (const [name, html] of Object.entries(doc.html)) putHtml(name, html);
  curves();
  logs(doc);
};

let status = null;
follow(`/api/sweeps/${sweep}/events`, (parts, names) => {
  isVirtual = parts.head?.is_virtual ?? false;
  if (names.includes(`steps/${number}`)) { live = parts[`steps/${number}`] ?? live; if (shown) curves(); }
  const part = parts[`trial/${number}`] ?? parts[`check/${number}`];
  const now = part && [part.status, parts.intervals?.length].join();
  if (shown === null || now !== status) load();
  status = now;
});
