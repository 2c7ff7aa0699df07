// A table whose rows come and change one by one: sorted by a heading's button, kept in that order as news arrives.

import { h } from "./dom.js";

// columns: [{key, label, css, value(row), cell(row), first: "descending"}]; rows are objects with a number.
export const liveTable = (label, columns, { sort, down = true, rowClass = () => "" }) => {
  const rows = new Map();
  const body = h("tbody");
  let by = sort, falling = down;
  const heads = columns.map(column => h("th", { scope: "col", class: column.css ?? "" },
    h("button", { type: "button", onclick: () => sortBy(column.key) }, column.label)));
  const element = h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label },
    h("table", { class: "wide sortable" }, h("caption", { class: "sr" }, `${label}; the headings sort`),
      h("thead", {}, h("tr", {}, heads)), body));

  const order = (a, b) => {
    const column = columns.find(one => one.key === by);
    const [x, y] = [column.value(a.row), column.value(b.row)];
    if (x == null || y == null || x === "" || y === "") {
      const empty = v => Number(v == null || v === "");
      return empty(x) - empty(y) || a.row.number - b.row.number;
    }
    const found = typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y));
    return (falling ? -found : found) || a.row.number - b.row.number;
  };

  const place = () => {
    heads.forEach((head, i) => {
      if (columns[i].key === by) head.setAttribute("aria-sort", falling ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    });
    const sorted = [...rows.values()].sort(order);
    sorted.forEach(({ line }, i) => { if (body.children[i] !== line) body.insertBefore(line, body.children[i] ?? null); });
  };

  const sortBy = key => {
    falling = key === by ? !falling : columns.find(column => column.key === key).down ?? true;
    by = key;
    place();
  };

  // news: rows that came or changed; gone: numbers of those that are no more.
  const update = (news, gone = []) => {
    for (const number of gone) { rows.get(number)?.line.remove(); rows.delete(number); }
    for (const row of news) {
      const known = rows.get(row.number);
      const line = known?.line ?? h("tr", { "data-number": row.number });
      const focused = line.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
      line.className = `${rowClass(row)}${known && known.row.status !== row.status ? " fresh" : ""}`;
      line.replaceChildren(...columns.map(column => {
        const cell = h("td", { class: column.css ?? "" });
        cell.append(...[column.cell(row)].flat().filter(part => part != null && part !== ""));
        return cell;
      }));
      if (focused) line.querySelector(`a[href="${focused}"]`)?.focus();
      rows.set(row.number, { row, line });
    }
    place();
  };
  return { element, update, size: () => rows.size };
};
