"""The YAML of a MindFormers command of the user's own: where it is, and what its keys are called by release."""

from __future__ import annotations

from typing import Any

from orchestrator.recipes.arguments import Argument, Words, either_dash, read_text
from orchestrator.recipes.overlays.edit import Edit, EditedFile
from orchestrator.recipes.overlays.findings import ReadingDraft

SCRIPT = "run_mindformer.py"
CONFIG = Argument(name="--config")
BATCH_SIZE = either_dash("--batch_size")
MODEL = "model.model_config"
NAMES = {
    "num_layers": ("num_layers", "num_hidden_layers"),
    "hidden_size": ("hidden_size",),
    "num_heads": ("num_heads", "num_attention_heads"),
    "num_kv_heads": ("n_kv_heads", "num_key_value_heads"),
    "ffn_hidden_size": ("intermediate_size", "ffn_hidden_size"),
    "vocab_size": ("vocab_size",),
    "seq_length": ("seq_length",),
    "rope_theta": ("theta", "rope_theta"),
    "norm_eps": ("rms_norm_eps", "layernorm_epsilon"),
}
"""Keys of the model's section, of releases before 1.6 and since."""


def file_name(argv: Words) -> str | None:
    """Placeholder of the YAML among the arguments."""
    word = read_text(argv, CONFIG)
    return word[1:-1] if word and word.startswith("{") and word.endswith("}") else None


def document(edit: Edit) -> EditedFile:
    """The YAML of a command in the making; an empty one where there is none."""
    name = file_name(edit.argv)
    if name is None or name not in edit.files:
        return EditedFile(edit, "")
    edit.names[name] = f"{name}.yaml"
    return EditedFile(edit, name)


def of_model(config: EditedFile, key: str) -> Any:
    """A dimension of the model, by either of its names."""
    return next((v for name in NAMES[key] if (v := config.get(f"{MODEL}.{name}")) is not None), None)


def name_of(config: EditedFile, key: str) -> str:
    """Dotted key of a dimension as the file calls it."""
    found = [name for name in NAMES[key] if config.has(f"{MODEL}.{name}")]
    return f"{MODEL}.{(found or NAMES[key])[0]}"


def whole(config: EditedFile, found: ReadingDraft, knob: str, key: str, default: int | None = None) -> int | None:
    """A whole number of the file."""
    return found.whole(knob, key, config.get(key), default)


def is_on(config: EditedFile, key: str, *, default: bool = False) -> bool:
    value = config.get(key, default)
    return value if isinstance(value, bool) else str(value).lower() == "true"
