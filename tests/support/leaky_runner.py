"""A user's runner that lets slip what it must not: in its output, in its errors, in what it prints past Python."""

import os
import signal
import time

from trials.worker import run_rank as real_run_rank

KEY = "STORE_API_KEY"
"""A variable that training itself needs."""


def run_rank(spec, progress):
    """micro_batch_size 1: prints all it can see; 2: raises with the key in the message; 4: prints it and is killed."""
    key = os.environ[KEY]
    print("the environment is", dict(os.environ), flush=True)
    os.write(1, f"from a library: https://store/list?sig={key}&n=1\n".encode())
    match spec["candidate"]["micro_batch_size"]:
        case 2:
            try:
                raise PermissionError(f"403 for https://me:{key}@store/data")
            except PermissionError as error:
                raise RuntimeError(f"cannot log in with {key}, \x1b]0;not even\x07 twice") from error
        case 4:
            progress("starting")
            if os.environ["RANK"] == "0":
                print("last words:", repr(key), flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)
    return real_run_rank(spec, progress)
