"""Build the sdist and the wheel of the current commit: ``python .ci/dist.py FOLDER``.

The same commit gives the same bytes, on any day and from any clone, with the same setuptools. The wheel is built from
the sdist, so the sdist is complete.
"""

from __future__ import annotations

import gzip
import io
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    target = Path(sys.argv[1]).resolve()
    target.mkdir(parents=True, exist_ok=True)
    os.umask(0o022)
    epoch = os.environ.setdefault("SOURCE_DATE_EPOCH", git("log", "-1", "--format=%ct").decode().strip())
    with tempfile.TemporaryDirectory() as scratch:
        source, unpacked = Path(scratch) / "source", Path(scratch) / "unpacked"
        extract(git("archive", "HEAD"), source)
        sdist = target / build("sdist", source, target)
        make_reproducible(sdist, int(epoch))
        extract(sdist.read_bytes(), unpacked)
        (folder,) = unpacked.iterdir()
        build("wheel", folder, target)


def git(*arguments: str) -> bytes:
    return subprocess.run(["git", "-C", ROOT, *arguments], check=True, capture_output=True).stdout


def extract(content: bytes, folder: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        archive.extractall(folder, filter="data")


def build(kind: str, source: Path, target: Path) -> str:
    """Call the build backend in a process of its own; return the name of the file."""
    code = f"import sys; from setuptools import build_meta; print('\\n' + build_meta.build_{kind}(sys.argv[1]))"
    command = [sys.executable, "-c", code, target]
    return subprocess.run(command, cwd=source, check=True, stdout=subprocess.PIPE, text=True).stdout.split("\n")[-2]


def make_reproducible(path: Path, epoch: int) -> None:
    """Replace what setuptools takes from the machine and the moment: order, owners, modes and times."""
    plain = io.BytesIO()
    with tarfile.open(path) as made, tarfile.open(fileobj=plain, mode="w") as written:
        for member in sorted(made.getmembers(), key=lambda member: member.name):
            content = made.extractfile(member) if member.isfile() else None
            member.uid = member.gid = 0
            member.uname = member.gname = ""
            member.mtime = epoch
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            member.pax_headers = {}
            written.addfile(member, content)
    path.write_bytes(gzip.compress(plain.getvalue(), mtime=epoch))


if __name__ == "__main__":
    main()
