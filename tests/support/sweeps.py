"""Small sweep files for tests."""

import yaml

TINY = {
    "name": "tiny",
    "workload": {
        "model": {
            "kind": "llama",
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "num_kv_heads": 2,
            "ffn_hidden_size": 64,
        },
        "seq_length": 32,
        "global_batch_size": 8,
    },
    "cluster": {"kind": "local", "devices_per_node": 2},
    "space": {"dp_replicate": [1, 2], "micro_batch_size": [1, 2, 4], "world_size": [1, 2]},
    "baseline": {"dp_replicate": 2, "micro_batch_size": 1},
    "search": {"sampler": "grid", "early_stop": "off"},  # how fast a trial is depends on the machine's load
    "measure": {"min_warmup_steps": 1, "max_warmup_steps": 2, "num_steps": 3, "max_steps": 3},
    "budget": {"max_trials": 4},
    "confirm": "off",  # proofs have separate tests
    "gate": "off",
    "tracking": {"report": False},  # pages have separate tests, too
}


def write(folder, file_name="sweep.yaml", **sections):
    """Write TINY with some sections' keys replaced; a value that is no mapping replaces the whole key."""
    content = dict(TINY)
    for key, value in sections.items():
        old = content.get(key)
        content[key] = {**old, **value} if isinstance(old, dict) and isinstance(value, dict) else value
    path = folder / file_name
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return path
