// What all live pages share: parts from the server, put in their places. Fragments come rendered, with all text escaped;
// nothing here makes markup of text.

import { sortable, sortRows } from "./sort.js";

export const at = id => document.getElementById(id);
export const meta = name => document.querySelector(`meta[name="${name}"]`)?.content ?? "";

// Writes text only where it differs, so that what is read out is read out once.
export const say = (element, text) => { if (element.textContent !== text) element.textContent = text; };

// Shows a section where one of its parts holds something.
const showSection = place => {
  const section = place.closest("[data-section]");
  if (section) section.hidden = [...section.querySelectorAll("div[data-part]")].every(part => part.childNodes.length === 0);
};

// Puts content in the place of a part; what was opened there stays open.
export const put = (name, ...content) => {
  const place = document.querySelector(`[data-part="${name}"]`);
  if (!place) return;
  const opened = [...place.querySelectorAll("details")].map(details => details.open);
  place.replaceChildren(...content.filter(Boolean));
  place.querySelectorAll("details").forEach((details, i) => { details.open = opened[i] ?? false; });
  showSection(place);
};

const parsed = html => {
  const template = document.createElement("template");
  template.innerHTML = html;
  return template.content;
};

export const putHtml = (name, html) => put(name, html ? parsed(html) : null);

// A table whose rows arrive and change one by one, sorted by its headings.
export const liveRows = (place, prefix) => {
  const lines = new Map();
  const table = () => document.querySelector(`[data-part="${place}"] table`);

  // The frame is new: it gets the buttons and all rows.
  const frame = () => {
    if (!table()) return;
    sortable(table());
    table().tBodies[0].append(...lines.values());
    sortRows(table());
  };

  const change = (name, part) => {
    const known = lines.get(name), line = parsed(part.row).firstElementChild;
    const focused = known?.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
    if (known && known.dataset.state !== line.dataset.state) line.classList.add("fresh");
    if (known) known.replaceWith(line);
    else table()?.tBodies[0].append(line);
    lines.set(name, line);
    if (focused) line.querySelector(`a[href="${focused}"]`)?.focus();
  };

  // Applies changes; returns whether there were any.
  return (parts, names) => {
    const changed = names.filter(name => name.startsWith(prefix));
    for (const name of changed) {
      if (name in parts) change(name, parts[name]);
      else { lines.get(name)?.remove(); lines.delete(name); }
    }
    if (names.includes(`html/${place}`)) frame();
    else if (changed.length && table()) sortRows(table());
    return changed.length > 0;
  };
};

// Calls changed(parts, names of those that changed) after every message. Hidden windows do not listen.
export const follow = (url, changed) => {
  const parts = {};
  let source = null;
  const open = () => {
    source = new EventSource(url);
    source.addEventListener("open", () => say(at("stream"), "Updates automatically."));
    source.addEventListener("error", () => say(at("stream"), "Not connected, retrying. Is tune-cluster ui still running?"));
    source.addEventListener("patch", event => {
      const patch = JSON.parse(event.data), names = Object.keys(patch);
      for (const name of names) {
        if (patch[name] === null) delete parts[name];
        else parts[name] = patch[name];
        if (name.startsWith("html/")) putHtml(name.slice(5), patch[name]);
      }
      if (names.includes("head")) {
        say(at("watermark"), parts.head.watermark);
        at("watermark").hidden = !parts.head.watermark;
      }
      if (names.includes("trouble")) say(at("trouble"), parts.trouble);
      changed(parts, names);
    });
  };
  const close = () => { source?.close(); source = null; };
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) close();
    else if (source === null) open();
  });
  window.addEventListener("pagehide", close);
  window.addEventListener("pageshow", event => { if (event.persisted && source === null) open(); });
  if (!document.hidden) open();
};

export const read = async url => {
  const answer = await fetch(url, { headers: { Accept: "application/json" } });
  return answer.json();
};

document.addEventListener("click", async event => {
  const button = event.target.closest("[data-copy]");
  if (!button) return;
  await navigator.clipboard?.writeText(button.dataset.copy);
  button.textContent = "copied";
});
