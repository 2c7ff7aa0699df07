// All sweeps of a home, those at work first.

import { at, h, say } from "./dom.js";
import { follow } from "./stream.js";
import { liveTable } from "./table.js";

const numbers = new Map();
const number = name => numbers.get(name) ?? numbers.set(name, numbers.size).get(name);
const text = key => ({ key, label: key, value: row => row[key], cell: row => row[key] ?? "", down: false });

const sweeps = liveTable("All sweeps", [
  { key: "name", label: "sweep", css: "keep", value: row => row.name, cell: row => [row.phase === "unreadable" ? row.name : h("a", { href: `/sweeps/${row.name}` }, row.name), row.mark && h("small", { class: "bad" }, row.mark)], down: false },
  { key: "phase", label: "state", value: row => row.order * 1e12 - (row.began ?? 0), cell: row => [row.phase, row.reason && h("small", {}, row.reason)], down: false },
  { ...text("headline"), label: "result" },
  { ...text("done"), label: "trials done", css: "num" },
  { key: "running", label: "running", css: "num", value: row => row.running, cell: row => row.running ? `${row.running}` : "" },
  { ...text("cost"), label: "device time", css: "num" },
  { ...text("hardware"), label: "on" },
  { key: "age", label: "begun before", css: "num", value: row => row.began, cell: row => row.age ?? "" },
], { sort: "phase", down: false, rowClass: row => row.phase === "running" ? "running" : "" });

at("sweeps").append(sweeps.element);

follow("/api/events", (parts, names) => {
  const changed = names.filter(name => name.startsWith("sweep/"));
  sweeps.update(changed.filter(name => name in parts).map(name => ({ ...parts[name], number: number(name), status: parts[name].phase })),
    changed.filter(name => !(name in parts)).map(number));
  say(at("status"), sweeps.size() ? "" : "There is no sweep here yet.");
});
