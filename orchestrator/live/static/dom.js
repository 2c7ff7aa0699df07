// Elements and text. Nothing here ever reads text as markup: names, reasons and log lines stay what they are.

const SVG = "http://www.w3.org/2000/svg";

const fill = (element, attributes, children) => {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name.startsWith("--")) element.style.setProperty(name, value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children.flat(Infinity).filter(child => child != null && child !== false && child !== "" && child !== 0));
  return element;
};

export const h = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
export const s = (tag, attributes = {}, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);
export const at = id => document.getElementById(id);
export const meta = name => document.querySelector(`meta[name="${name}"]`)?.content ?? "";

// Writes text only where it differs, so that what is read out is read out once.
export const say = (element, text) => { if (element.textContent !== text) element.textContent = text; };

// Shows a section with this content, or hides it where there is none.
export const show = (id, ...children) => {
  const section = at(id), found = children.flat(Infinity).filter(Boolean);
  section.hidden = found.length === 0;
  (section.querySelector(":scope > .body") ?? section).replaceChildren(...found);
};

export const pairs = rows => h("dl", {}, rows.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));

// A table that scrolls by itself where it is too wide, with the keyboard, too.
export const table = (label, heads, rows, kind = "") => h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label },
  h("table", { class: kind }, h("caption", { class: "sr" }, label),
    h("thead", {}, h("tr", {}, heads.map(([text, css]) => h("th", { scope: "col", class: css ?? "" }, text)))),
    h("tbody", {}, rows.map(cells => h("tr", {}, cells.map(([value, css]) => h("td", { class: css ?? "" }, value)))))));

export const trialLink = (sweep, number, id) => h("a", { href: `/sweeps/${sweep}/trials/${number}` }, id);

// Commands ready to be copied.
export const commands = list => list.map(([purpose, command]) => h("p", { class: "copy" },
  h("code", {}, command), h("span", { class: "dim" }, purpose),
  h("button", { type: "button", "aria-label": `Copy: ${command}`, onclick: async event => {
    await navigator.clipboard?.writeText(command);
    event.target.textContent = "copied";
  } }, "copy")));
