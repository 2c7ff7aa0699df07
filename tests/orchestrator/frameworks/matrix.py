"""The table of ``docs/frameworks/README.md``: ``python -m tests.orchestrator.frameworks.matrix`` prints it."""

from orchestrator.frameworks.catalog import formats, recipe
from orchestrator.frameworks.spelling import is_at_or_below
from tests.orchestrator.frameworks.all_fields import all_paths, handled, parts


def rows():
    """Fields of a candidate one by one; of a workload by the part that recipes treat as one. Custom programs have no
    fields here: their overlay exports them."""
    whole = {"loader.tuning", "precision.loss_scale", "workload.data", "workload.model.llama"}
    other = {"workload.model.resnet", "workload.model.linear", "workload.model.kind", "workload.model.script", "own"}
    other |= {"workload.model.python", "workload.model.huggingface"}
    found = [path for path in sorted(all_paths()) if not any(is_at_or_below(path, part) for part in whole | other)]
    return sorted([*found, *whole, "workload.model.resnet", "workload.model.linear"])


def mark(name, row):
    """``yes`` where the format has a setting for it."""
    spoken_for = handled(recipe(name))
    related = [names for path, names in spoken_for.items() if is_at_or_below(path, row) or is_at_or_below(row, path)]
    assert related, f"{name} does not speak for {row}"
    is_other_model = row in parts() and row.startswith("workload.model") and row != "workload.model.llama"
    if is_other_model and name != "torchrun":
        return "note"
    return "yes" if any(related) else "note"


def table():
    """Fields with the same marks share a row; fields that most formats have a setting for come first."""
    fields = {}
    for row in rows():
        fields.setdefault(tuple(mark(name, row) for name in formats()), []).append(f"`{row}`")
    head = ["field", *formats()]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for marks in sorted(fields, key=lambda marks: (-marks.count("yes"), fields[marks])):
        lines.append(f"| {', '.join(fields[marks])} | {' | '.join(marks)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(), end="")
