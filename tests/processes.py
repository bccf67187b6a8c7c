"""Other processes: code in a fresh interpreter, and a script on two ranks."""

import os
import subprocess
import sys
from pathlib import Path

import torch.distributed as dist

TESTS = Path(__file__).parent


def in_another_process(code, *args):
    """What the code prints; it has `sys`, `torch`, `st`, and these arguments as `sys.argv[1:]`."""
    command = [sys.executable, "-c", f"import sys, torch, scopetrace as st\n{code}", *map(str, args)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def on_two_ranks(folder, script, *args):
    """What the script prints on both ranks. It calls `join_ranks`, and `leave_ranks` at its end.

    Unlike torchrun this needs no process more.
    """
    env = os.environ | {"STORE": f"file://{folder}/store", "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    command, started = [sys.executable, TESTS / script, *args], []
    try:
        for rank in range(2):
            files = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            started.append(subprocess.Popen(command, env=env | {"RANK": str(rank)}, cwd=TESTS.parent, **files))
        ended = [process.communicate(timeout=300) for process in started]
    finally:
        for process in started:
            process.kill()
    assert all(process.returncode == 0 for process in started), "\n".join(err[-3000:] for _, err in ended)
    return "".join(out for out, _ in ended)


def join_ranks():
    """In a script: the process group, as `on_two_ranks` or torchrun describes it."""
    store = os.environ.get("STORE", "env://")
    dist.init_process_group("gloo", store, rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))


def leave_ranks():
    """In a script, at its end. Python does not unload torch, which may abort where a thread of gloo still runs."""
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
