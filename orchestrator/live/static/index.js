// All sweeps of a home, running ones first.

import { at, follow, liveRows, say } from "./page.js";

const rows = liveRows("table", "sweep/");

follow("/api/events", (parts, names) => {
  rows(parts, names);
  say(at("status"), Object.keys(parts).some(name => name.startsWith("sweep/")) ? "" : "No sweeps yet.");
});
