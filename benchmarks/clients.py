"""Compilers and tools that read ExportedPrograms, on torch.export's program and on ours. Prints a Markdown table.

    python -m benchmarks.clients                        # all: installs them first, some gigabytes, and takes an hour
    python -m benchmarks.clients --only tvm,openvino    # some
    python -m benchmarks.clients --remove               # delete each environment after its runs

Each client has an environment of its own in `.clients`, which sees the packages of the one that runs this. The cells
are `right` where the compiled model gives what eager gives, what there is to say of a program that cannot run here, and
else the error; see `benchmarks.client_jobs`.
"""

import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig

ROOT = pathlib.Path(__file__).resolve().parent.parent
ENVIRONMENTS = ROOT / ".clients"
PACKAGES = {
    "executorch": "executorch==1.5.*",
    "executorch_edge": "executorch==1.5.*",
    "litert": "litert-torch==0.10.*",
    "openvino": "openvino==2026.4.*",
    "coremltools": "coremltools==9.*",
    "torchao": "torchao==0.18.*",
    "tvm": "apache-tvm==0.27.*",
    "iree": "iree-turbine==3.9.*",
}
MODELS = ("resnet18", "bert", "llama")


def environment(client: str) -> pathlib.Path:
    """The Python of the client's environment, made where there is none. Raises CalledProcessError."""
    folder = ENVIRONMENTS / PACKAGES[client].partition("==")[0]
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        site = next(folder.glob("lib/python3*/site-packages"))
        (site / "around.pth").write_text(sysconfig.get_path("purelib"))
        pins = [f"-c{path}" for path in (ROOT / "constraints").glob("torch-2.13*.txt")]
        subprocess.run([str(python), "-m", "pip", "install", "-q", *pins, PACKAGES[client]], check=True)
    return python


def cell(python: pathlib.Path, client: str, model: str, source: str) -> str:
    """What comes out of one run in a fresh process."""
    command = [str(python), "-m", "benchmarks.client_jobs", client, model, source]
    path = os.pathsep.join(str(p) for p in (ROOT / "src", ROOT))
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=900, env={**os.environ, "PYTHONPATH": path}
        )
    except subprocess.TimeoutExpired:
        return "no result in 15 minutes"
    lines = done.stdout.strip().splitlines()
    try:
        return str(json.loads(lines[-1]))[:100].replace("|", "/")
    except (IndexError, json.JSONDecodeError):
        return f"the process ends with {done.returncode}"


def main(argv: list[str] | None = None) -> int:
    """Print a row for each client and model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PACKAGES), help="clients, comma-separated")
    parser.add_argument("--remove", action="store_true", help="delete each environment after its runs")
    options = parser.parse_args(argv)
    unknown = [c for c in options.only.split(",") if c not in PACKAGES]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; the clients are {', '.join(PACKAGES)}")
    print("| client | model | torch.export's program | ours |\n|---|---|---|---|")
    for client in options.only.split(","):
        try:
            python = environment(client)
        except subprocess.CalledProcessError as error:
            print(f"| {PACKAGES[client]} | | cannot be installed: exit {error.returncode} | |", flush=True)
            continue
        for model in MODELS:
            theirs, ours = (cell(python, client, model, source) for source in ("export", "trace"))
            print(f"| {client} | {model} | {theirs} | {ours} |", flush=True)
        if options.remove:
            shutil.rmtree(python.parent.parent)
    return 0


if __name__ == "__main__":
    sys.exit(main())
