"""What an import costs beside that of torch: `python -m benchmarks.imports`. It prints, and judges nothing."""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile

IMPORTS = {
    "import torch": "import torch",
    "import scopetrace": "import torch, scopetrace",
    "scopetrace.trace": "import torch, scopetrace; scopetrace.trace",
    "scopetrace --help": "import runpy; runpy.run_module('scopetrace', run_name='__main__')",
}


def seconds(code: str, cache: str) -> float:
    """Of the imports of a new process, by `-X importtime`, which leaves out the start of the interpreter."""
    command = [sys.executable, "-X", "importtime", "-c", f"import sys; sys.argv[1:] = ['--help']\n{code}"]
    env = {**os.environ, "PYTHONPYCACHEPREFIX": cache}
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    lines = subprocess.run(command, capture_output=True, text=True, env=env, check=True).stderr.splitlines()
    cells = [line.removeprefix("import time:").split("|") for line in lines if line.startswith("import time:")]
    return sum(int(own) for own, *_ in cells[1:]) / 1e6


def main() -> None:
    """Print the median of each, and its ratio to torch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    runs = parser.parse_args().runs
    with tempfile.TemporaryDirectory() as cache:
        for code in IMPORTS.values():
            seconds(code, cache)  # compiles the files
        times: dict[str, list[float]] = {name: [] for name in IMPORTS}
        for _ in range(runs):  # in turns, as a machine may be faster at one time than at another
            for name, code in IMPORTS.items():
                times[name].append(seconds(code, cache))
    torch_seconds = statistics.median(times["import torch"])
    for name, measured in times.items():
        print(f"{name:20} {statistics.median(measured):6.2f} s  {statistics.median(measured) / torch_seconds:5.2f} x")


if __name__ == "__main__":
    main()
