"""Parts of a benchmark that end in every way. Imports no torch, which takes longer than the parts are given."""

import subprocess

from benchmarks.gpu.parts import LEFT_OUT, NotHereError


def reports_a_row_and_sleeps(setting):
    setting.tell({"row": 1})
    subprocess.run(["sleep", "100"], check=False)


def lacks_something(setting):
    raise NotHereError("no such thing here")


def leaves_out(setting):
    setting.tell({"row": 1})
    setting.tell({"row": 2, LEFT_OUT: "no time was left"})


def breaks(setting):
    setting.tell({"row": 1})
    raise ValueError("broken")
