"""The pages on frameworks: their sweep files are whole, short, and have candidates."""

import re

import pytest
import yaml

from orchestrator.config.sweep import SweepSpec
from tests.orchestrator.frameworks.programs import FACTORY, LAUNCH, LOOP, NUMBERS
from tests.support import ROOT

FILES = {
    "fsdp.yaml": LAUNCH,
    "train.py": LOOP,
    "ds.json": NUMBERS.replace(": 16,", ": 64,"),
    "examples/train_full/llama3_full_sft.yaml": FACTORY,
}


@pytest.mark.parametrize("page", ["accelerate", "deepspeed", "llamafactory", "ms-swift", "transformers"])
def test_the_sweep_file_of_a_page_is_complete(page, tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    text = (ROOT / "docs" / "frameworks" / f"{page}.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    assert len(block.splitlines()) <= 20
    data = yaml.safe_load(block)
    assert data["workload"]["recipe"] == page
    data["workload"]["cwd"] = str(tmp_path)
    spec = SweepSpec.model_validate(data, context={"check_files": False})
    assert spec.name == data["name"]
