// What the server sends: parts of the page, each time those that have changed. A window that nobody sees listens to nothing.

import { at, say } from "./dom.js";

// Calls changed(parts, names of those that changed) after every message.
export const follow = (url, changed) => {
  const parts = {};
  let source = null;
  const open = () => {
    source = new EventSource(url);
    source.addEventListener("open", () => say(at("stream"), "What changes appears by itself."));
    source.addEventListener("error", () => say(at("stream"), "Not connected; trying again. Is tune-cluster ui still running?"));
    source.addEventListener("patch", event => {
      const patch = JSON.parse(event.data), names = Object.keys(patch);
      for (const name of names) {
        if (patch[name] === null) delete parts[name];
        else parts[name] = patch[name];
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
