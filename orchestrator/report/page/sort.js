// Tables sortable by their headings, by mouse and keyboard: inlined in the report page, and used by the live pages. A
// cell is sorted by its data-v, else by its leading number and unit, else by its text; empty ones come last, equal ones
// by their trial's number.

const UNITS = {ns: 1e-9, us: 1e-6, ms: 1e-3, s: 1, min: 60, h: 3600, d: 86400, B: 1, KiB: 1024, MiB: 1024 ** 2,
  GiB: 1024 ** 3, TiB: 1024 ** 4};

const sortKey = cell => {
  if (!cell) return "";
  if (cell.dataset.v !== undefined) return cell.dataset.v;
  const text = cell.textContent.trim();
  const found = text.match(/^[^\w-]*(-?[\d,]*\.?\d+(?:e[+-]?\d+)?)\s*([a-zA-Z]*)/);
  return found ? String(found[1].replaceAll(",", "") * (UNITS[found[2]] ?? 1)) : text === "–" ? "" : text;
};

const compareKeys = (x, y) => x === "" || y === "" ? 0 : isNaN(x) || isNaN(y) ? x.localeCompare(y) : x - y;

// Sorts the rows by the marked heading; moves only misplaced ones.
export const sortRows = table => {
  const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
  const column = heads.findIndex(head => head.hasAttribute("aria-sort"));
  if (column < 0) return;
  const sign = heads[column].getAttribute("aria-sort") === "ascending" ? 1 : -1;
  const rows = [...body.rows].map(row => [sortKey(row.cells[column]), row]);
  const number = row => Number(row.dataset.number ?? 0);
  rows.sort(([x, a], [y, b]) => (x === "") - (y === "") || sign * compareKeys(x, y) || number(a) - number(b));
  rows.forEach(([, row], i) => { if (body.rows[i] !== row) body.insertBefore(row, body.rows[i] ?? null); });
};

// Makes buttons of the headings: the first press sorts rows with the largest first, or the smallest where the heading
// has data-rises; the next the other way round.
export const sortable = table => {
  const heads = [...table.tHead.rows[0].cells];
  for (const head of heads) {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const now = head.getAttribute("aria-sort") ?? ("rises" in head.dataset ? "descending" : "ascending");
      heads.forEach(other => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", now === "ascending" ? "descending" : "ascending");
      sortRows(table);
    });
  }
};
