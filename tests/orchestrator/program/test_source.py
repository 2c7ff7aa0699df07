"""The source of a training program: what belongs to it, and when it counts as changed."""

import subprocess

from orchestrator.program.user_program import source_tree


def program(folder):
    (folder / "pkg").mkdir(parents=True)
    (folder / "train.py").write_text("print(1)\n")
    (folder / "pkg" / "model.py").write_text("x = 1\n")
    (folder / "run.yaml").write_text("lr: 1\n")
    (folder / "data.bin").write_bytes(b"\0" * 100)
    (folder / ".hidden").mkdir()
    (folder / ".hidden" / "a.py").write_text("")
    (folder / "venv").mkdir()
    (folder / "venv" / "pyvenv.cfg").write_text("")
    exported = folder / "train" / "inside" / "hook" / "tune_cluster_hook"
    exported.mkdir(parents=True)
    (exported / "steps.py").write_text("")  # an export with the hook
    (folder / "venv" / "lib.py").write_text("")
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "train.py").write_text("")
    return folder


def test_source_files_count_and_data_does_not(tmp_path):
    folder = program(tmp_path / "a")
    tree = source_tree(folder, (folder / "run.yaml",))
    assert sorted(tree.files) == ["pkg/model.py", "run.yaml", "train.py"]
    assert "run.yaml" not in source_tree(folder).files
    assert tree.is_whole


def test_equal_programs_are_equal_wherever_they_lie(tmp_path):
    one, other = source_tree(program(tmp_path / "a")), source_tree(program(tmp_path / "b"))
    assert one.sha256 == other.sha256
    (tmp_path / "b" / "data.bin").write_bytes(b"other")
    assert source_tree(tmp_path / "b").sha256 == one.sha256
    (tmp_path / "b" / "train.py").write_text("print(2)\n")
    changed = source_tree(tmp_path / "b")
    assert changed.sha256 != one.sha256
    assert changed.changed(one.files) == ("train.py",)


def test_configuration_from_elsewhere_belongs_to_it(tmp_path):
    folder, file = program(tmp_path / "a"), tmp_path / "ds.json"
    file.write_text("{}")
    before = source_tree(folder, (file,))
    file.write_text('{"a": 1}')
    assert source_tree(folder, (file,)).changed(before.files) == (str(file),)


def test_programs_on_another_host_have_no_source(tmp_path):
    assert source_tree(tmp_path / "nowhere") is None


def test_the_commit_is_marked_if_files_changed_since(tmp_path):
    folder = program(tmp_path / "a")
    git = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b"]
    assert source_tree(folder).commit == ""
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "train.py"], check=True)
    subprocess.run([*git, "commit", "-qm", "first"], check=True)
    commit = source_tree(folder).commit
    assert len(commit) == 40
    (folder / "train.py").write_text("print(3)\n")
    assert source_tree(folder).commit == f"{commit}+"
