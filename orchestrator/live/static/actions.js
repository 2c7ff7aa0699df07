// The buttons of a sweep: each asks for confirmation, then shows the result.

import { h } from "./dom.js";
import { at, meta, say } from "./page.js";

const WORDS = {
  pause: ["Pause", "Stop now, to resume later. Running trials are killed and launched again on resume; no measurements are lost."],
  drain: ["Drain", "Let running trials finish, start no others, then pause."],
  cancel: ["Cancel", "Stop for good. Running trials are killed; measurements are kept. A cancelled sweep cannot be resumed."],
  resume: ["Resume", "Start a controller in the background on this host, or on the sweep's Ray cluster, and continue the sweep."],
  retry: ["Retry failed", "Relaunch trials that ended without a measurement. Starts a controller if none is running."],
};

const choices = retriable => h("fieldset", {}, h("legend", {}, "Which trials"), retriable.map(([kind, words, count, chosen]) =>
  h("label", {}, h("input", { type: "checkbox", name: "kind", value: kind, checked: chosen }), ` ${words} (${count})`)));

const ask = (action, head) => new Promise(done => {
  const dialog = at("ask"), [title, what] = WORDS[action];
  say(at("ask-title"), `${title}: ${head.sweep}?`);
  at("ask-body").replaceChildren(h("p", {}, what), ...(action === "retry" ? [choices(head.retriable)] : []));
  say(at("ask-yes"), title);
  at("ask-yes").classList.toggle("danger", action === "cancel");
  const kinds = () => [...at("ask-body").querySelectorAll("input:checked")].map(box => box.value);
  const check = () => { at("ask-yes").disabled = action === "retry" && kinds().length === 0; };
  at("ask-body").onchange = check;
  check();
  dialog.returnValue = "no";
  dialog.onclose = () => done(dialog.returnValue === "yes" ? { kinds: kinds() } : null);
  dialog.showModal();
  at("ask-no").focus();
});

const send = async (sweep, action, body) => {
  const answer = await fetch(`/api/sweeps/${sweep}/${action}`, {
    method: "POST",
    headers: { "Content-Type": "application/json", "X-Tune-Cluster": meta("csrf") },
    body: JSON.stringify(body),
  });
  if (answer.headers.get("Content-Type") !== "application/json") return { error: await answer.text() };
  return answer.json();
};

export const notice = (text, isBad) => {
  say(at("notice"), text);
  at("notice").className = isBad ? "bad" : "";
};

const run = async (action, head) => {
  const body = await ask(action, head);
  if (body === null) return;
  notice(`${WORDS[action][0]} …`, false);
  try {
    const { message, error } = await send(head.sweep, action, body);
    notice(message ?? error, error !== undefined);
  } catch {
    notice("The server does not respond. Is tune-cluster ui still running?", true);
  }
};

// Buttons keep their elements while the actions are unchanged, so that they keep the focus.
export const buttons = head => {
  const place = at("actions"), wanted = head.actions.join();
  place.currentHead = head;
  if (place.dataset.actions === wanted) return;
  place.dataset.actions = wanted;
  place.replaceChildren(...head.actions.map(action => h("button", {
    type: "button", class: action === "cancel" ? "danger" : "", "data-action": action,
    onclick: () => run(action, place.currentHead),
  }, WORDS[action][0])));
};
