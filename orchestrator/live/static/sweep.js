// One sweep: brings each part of the page up to date when the server tells that it has changed.

import { buttons, notice } from "./actions.js";
import { intervals, key, scatter, speeds } from "./chart.js";
import { at, commands, h, meta, pairs, say, show, table, trialLink } from "./dom.js";
import { follow } from "./stream.js";
import { liveTable } from "./table.js";

const sweep = meta("sweep");
const link = row => trialLink(sweep, row.number, row.id);
const MOODS = { running: "running", waiting: "wait", pausing: "wait", draining: "wait", cancelling: "wait",
  paused: "wait", finished: "good", failed: "bad", interrupted: "bad", cancelled: "rest" };

const state = row => [row.doing ? `${row.doing}${row.last_step ? `, ${row.last_step}` : ""}` : row.state,
  row.failure && h("small", {}, row.failure)];
const busy = row => row.busy && h("abbr", { title: row.busy, class: "bad" }, " !");
const figure = (key, label, more = {}) => ({ key, label, css: "num", value: row => row[key]?.v, cell: row => row[key]?.t ?? "", ...more });

const trials = liveTable("Trials", [
  { key: "number", label: "trial", css: "keep", value: row => row.number, cell: link, down: false },
  { key: "name", label: "configuration", value: row => row.name, cell: row => [h("code", { title: row.spelled }, row.name), row.role && h("small", {}, row.role)], down: false },
  { key: "state", label: "state", css: "state", value: row => row.doing ?? row.state, cell: state, down: false },
  figure("speed", "speed"),
  { key: "interval", label: "95 % interval", css: "num dim", value: row => row.low, cell: row => row.interval ?? "" },
  figure("versus", "speed-up"),
  figure("step_time", "step", { down: false, cell: row => [row.step_time?.t, busy(row)] }),
  { key: "spread", label: "spread", css: "num dim", value: row => row.spread && parseFloat(row.spread.slice(2)), cell: row => row.spread ?? "", down: false },
  figure("total", "all devices", { css: "num total" }),
  figure("each", "per device", { css: "num each" }),
  { key: "devices", label: "devices", css: "num", value: row => row.devices, cell: row => `${row.devices}` },
  figure("memory", "memory"),
  figure("predicted", "predicted step", { down: false }),
  figure("off", "off by"),
], { sort: "speed", rowClass: row => row.doing ? "running" : row.is_chosen ? "best" : "" });

const checks = liveTable("Checks", [
  { key: "number", label: "check", css: "keep", value: row => row.number, cell: link },
  { key: "check", label: "what", value: row => row.check, cell: row => row.check, down: false },
  { key: "state", label: "state", css: "state", value: row => row.doing ?? row.state, cell: state, down: false },
  figure("speed", "speed"),
  figure("step_time", "step", { down: false }),
], { sort: "number", rowClass: row => row.doing ? "running" : "" });

const heading = head => {
  say(at("phase"), head.phase);
  at("phase").className = `phase ${MOODS[head.phase] ?? ""}`;
  say(at("hardware"), head.hardware && `on ${head.hardware}`);
  say(at("status"), head.status);
  document.title = `${head.mark ? `${head.mark} ` : ""}${head.sweep}: ${head.phase}`;
  buttons(head);
};

const result = found => {
  const section = at("verdict");
  section.hidden = !found;
  if (!found) return;
  section.className = `verdict ${found.conclusion}`;
  const rows = found.shown.map(one => [[one.role, "dim"], [trialLink(sweep, one.number, one.id), "keep"], [h("code", {}, one.name)],
    [[h("strong", {}, one.step_time), busy(one)], "num"], [one.total, "num"], [one.each, "num"], [one.devices, "num"], [one.memory, "num dim"]]);
  section.replaceChildren(...[h("b", {}, found.headline), ...found.details.map(line => h("p", { class: "dim" }, line)),
    found.confidence && h("p", { class: "dim" }, found.confidence), found.caution && h("p", { class: "doubt" }, found.caution),
    rows.length && table("The best and the baseline", [["role"], ["trial"], ["configuration"], ["step", "num"], ["all devices", "num"], ["per device", "num"], ["devices", "num"], ["memory", "num"]], rows), found.legend && h("p", { class: "dim" }, found.legend),
    found.change.length && h("p", {}, "Changed: ", found.change.map(([knob, before, after], i) => [i ? "; " : "", h("code", {}, knob), ` ${before} → ${after}`])),
    found.why && h("p", { class: "dim" }, `tried because: ${found.why}`), h("p", { class: "dim" }, found.cost),
    ...found.promotions.map(line => h("p", {}, line))].filter(Boolean));
};

const spending = found => show("spending", found.budgets.length || found.facts.length ? h("div", { class: "tiles" },
  found.budgets.map(one => h("div", { class: "tile" }, h("b", {}, one.label), h("strong", {}, one.text),
    one.share != null && h("progress", { max: 1, value: one.share, "aria-label": `${one.label}: ${one.text}` }))),
  found.facts.map(([label, text]) => h("div", { class: "tile" }, h("b", {}, label), text))) : null);

const running = rows => show("running", rows.length ? table("Running now",
  [["trial"], ["what"], ["doing"], ["last step", "num"], ["for", "num"], ["on"]],
  rows.map(row => [[link(row), "keep"], [row.name], [row.doing, "keep"], [row.last_step, "num"], [row.for, "num"], [row.on]])) : null);

const confirmation = proof => show("confirmation", proof ? [
  proof.finalists.some(one => one.rounds.length) && intervals(proof.finalists),
  table("Finalists", [["trial"], ["configuration"], ["speed-up"], ["rounds", "num"], ["result"]],
    proof.finalists.map(one => [[link(one), "keep"], [h("code", {}, one.name)], [one.text], [`${one.rounds.length}`, "num"], [one.words]])),
  proof.running.length ? h("p", {}, `running: ${proof.running.join("; ")}`) : null,
  ...proof.gates.map(([trial, words]) => h("p", {}, `loss gate of ${trial}: ${words}`)),
  ...proof.evaluations.map(([trial, words]) => h("p", {}, `your evaluation of ${trial}: ${words}`)),
] : null);

const title = row => `${row.id} ${row.name}: ${row.speed.t} (${row.interval}), step ${row.step_time.t}${row.versus ? `, ${row.versus.t}` : ""}`;
const color = row => row.number === 0 ? "grey" : row.is_chosen ? "green" : "blue";
const ms = seconds => seconds >= 1 ? `${+seconds.toPrecision(3)} s` : `${+(seconds * 1000).toPrecision(3)} ms`;

const charts = (rows, unit) => {
  const measured = rows.filter(row => row.speed).sort((a, b) => a.number - b.number);
  const href = row => `/sweeps/${sweep}/trials/${row.number}`;
  show("history", measured.length > 1 && speeds(measured.map(row => ({ x: row.number, y: row.speed.v, low: row.low, high: row.high,
    title: title(row), href: href(row), color: color(row) })),
  { unit, baseline: rows.find(row => row.number === 0)?.speed?.v, legend: "A point is a trial, its line the 95 % interval." }));
  const both = measured.filter(row => row.predicted);
  show("predictions", both.length > 1 && scatter(both.map(row => ({ x: row.predicted.v, y: row.step_time.v, href: href(row), color: color(row),
    title: `${row.id} ${row.name}: predicted ${row.predicted.t}, measured ${row.step_time.t} (${row.off.t})` })),
  { tick: ms, legend: "Above the line a trial is slower than was predicted when it was proposed." }));
};

const next = parts => show("next", [
  ...commands(parts.commands ?? []),
  Object.keys(parts.links ?? {}).length ? h("p", {}, "In MLflow, the archive: ", Object.entries(parts.links).map(([what, url], i) =>
    [i ? " · " : "", h("a", { href: url, rel: "noreferrer", target: "_blank" }, what)])) : null,
]);

show("trials", h("p", { id: "common", class: "dim" }), trials.element, h("p", { id: "busy", class: "dim" }), h("details", { id: "signs" }));
at("trials").hidden = true;
show("checks", checks.element, h("p", { id: "more-checks", class: "dim" }));
at("checks").hidden = true;

const rowsOf = parts => Object.keys(parts).filter(name => name.startsWith("trial/")).map(name => parts[name]);

const tables = (parts, names) => {
  const changed = names.filter(name => name.startsWith("trial/"));
  if (!changed.length && !names.includes("table")) return;
  const gone = changed.filter(name => !(name in parts)).map(name => Number(name.slice(6)));
  const news = changed.filter(name => name in parts).map(name => parts[name]);
  trials.update(news.filter(row => !row.check), gone);
  checks.update(news.filter(row => row.check), gone);
  at("trials").hidden = trials.size() === 0;
  at("checks").hidden = checks.size() === 0;
  const { common, unit, legend, hidden, hidden_checks } = parts.table ?? {};
  trials.element.classList.toggle("no-each", unit?.endsWith("/p"));
  trials.element.classList.toggle("no-total", unit?.endsWith("/s"));
  say(at("common"), [`speed in ${legend}`, common && `every trial: ${common}`,
    hidden ? `${hidden} trials between are left out` : ""].filter(Boolean).join("; "));
  say(at("busy"), parts.table?.busy_note ?? "");
  const signs = parts.table?.signs ?? [];
  at("signs").hidden = signs.length === 0;
  if (names.includes("table")) at("signs").replaceChildren(h("summary", {}, "What the short names say"), pairs(signs.map(([sign, meaning]) => [h("code", {}, sign), meaning])));
  say(at("more-checks"), hidden_checks ? `${hidden_checks} earlier ones are left out` : "");
  charts(rowsOf(parts).filter(row => !row.check), unit);
};

const SHOWN = { head: heading, result, spending, running, proof: confirmation, notice: said => notice(said.text, said.is_bad) };

follow(`/api/sweeps/${sweep}/events`, (parts, names) => {
  for (const name of names) if (name in SHOWN && name in parts) SHOWN[name](parts[name]);
  for (const name of ["result", "proof"]) if (names.includes(name) && !(name in parts)) SHOWN[name](null);
  tables(parts, names);
  if (names.includes("commands") || names.includes("links")) next(parts);
});
