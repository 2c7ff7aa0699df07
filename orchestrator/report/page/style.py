"""Style and script of the page. Plain CSS and a few lines of JavaScript: the page loads nothing."""

from __future__ import annotations

from orchestrator.report.plots.style import PALETTE


def _variables(theme: int) -> str:
    return "; ".join(f"--{name}: {colors[theme]}" for name, colors in PALETTE.items())


STYLE = f"""
:root {{ color-scheme: light dark; {_variables(0)};
  --soft: #f5f6f8; --good: #1a7f37; --bad: #c5221f; --bar: #0072b226 }}
@media (prefers-color-scheme: dark) {{ :root {{ {_variables(1)};
  --soft: #1f2227; --good: #4cc38a; --bad: #ff7b72; --bar: #56b4e940 }} }}
"""
STYLE += """
* { box-sizing: border-box }
body { font: 14px/1.5 system-ui, sans-serif; margin: 0 auto; padding: 20px 24px 60px; max-width: 1080px;
  background: var(--paper); color: var(--ink) }
h1 { font-size: 15px; font-weight: 600; margin: 0 } h2 { font-size: 17px; margin: 40px 0 8px } p { margin: 4px 0 }
h3 { font-size: 14px; margin: 18px 0 4px }
.dim { color: var(--dim) } .good { color: var(--good) } .bad { color: var(--bad) }
.num { text-align: right; font-variant-numeric: tabular-nums }
.verdict { border-left: 5px solid var(--line); background: var(--soft); padding: 14px 18px; margin: 14px 0;
  border-radius: 0 6px 6px 0 }
.verdict.confirmed { border-color: var(--good) } .verdict.unconfirmed { border-color: var(--yellow) }
.verdict b { font-size: 19px; line-height: 1.35; display: block }
nav { font-size: 13px; margin: 10px 0 } nav a { margin-right: 14px } a { color: var(--blue) }
.scroll { overflow-x: auto }
table { border-collapse: collapse } th, td { padding: 4px 14px 4px 0; text-align: left; vertical-align: top }
th { border-bottom: 1px solid var(--line); font-weight: 600; white-space: nowrap; font-size: 13px }
.wide { width: 100% } .sortable th { cursor: pointer }
.sortable th[aria-sort]::after { content: " ↓"; color: var(--dim) }
.sortable th[aria-sort=ascending]::after { content: " ↑" }
tbody tr { border-bottom: 1px solid color-mix(in srgb, var(--line) 45%, transparent) }
td.keep { white-space: nowrap } tr.best td { font-weight: 600 }
code { font: 12.5px ui-monospace, monospace } pre { font: 12px/1.45 ui-monospace, monospace; background: var(--soft);
  padding: 10px 12px; overflow-x: auto; border-radius: 6px; margin: 6px 0 }
.bar { background: linear-gradient(90deg, var(--bar) var(--share), transparent 0) no-repeat; padding-left: 6px }
figure { margin: 18px 0 26px; overflow-x: auto }
figure svg { width: 100%; max-width: 900px; height: auto; display: block }
details { margin: 6px 0 } summary { cursor: pointer }
"""

SCRIPT = """
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => head.addEventListener("click", () => {
    const up = head.getAttribute("aria-sort") === "descending";
    heads.forEach(other => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const key = row => row.cells[column] && row.cells[column].dataset.v || "";
    const rows = [...table.tBodies[0].rows].sort((a, b) => {
      const [x, y] = [key(a), key(b)];
      if (x === "" || y === "") return (x === "") - (y === "");
      const order = isNaN(x) || isNaN(y) ? x.localeCompare(y) : x - y;
      return up ? order : -order;
    });
    table.tBodies[0].append(...rows);
  }));
}
"""
