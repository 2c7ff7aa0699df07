"""Disks of some MiB that tests can fill."""

import subprocess
from contextlib import contextmanager, suppress

import pytest


@contextmanager
def small_disk(path, mib=4):
    """A separate file system, mounted at ``path``; the test is skipped where that is not possible."""
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", str(path)]
    try:
        made = subprocess.run(mount, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount")
    if made.returncode:
        pytest.skip(f"cannot mount: {made.stderr}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", path], check=True)


def fill(disk):
    """Leave no byte free; gives the file that takes the space."""
    path = disk / "fill"
    with suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)
    return path
