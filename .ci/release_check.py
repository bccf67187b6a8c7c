"""Builds wheel and sdist, installs the wheel into a new environment with torch alone, and runs what the README says.

    make release-check
    make release-check ARGS=--download-torch      # pip gets torch, as for a user: gigabytes on some machines

Data flow:
    source tree -> hatchling -> wheel and sdist -> their files and metadata
    new environment + torch, linked from the one that runs this -> pip install WHEEL -> README's program and commands
"""

import argparse
import email.parser
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[1]
ASSETS = ("diff.html", "page.html", "page.css", "page.js", "dagre.min.js", "dagre.LICENSE.txt", "diff.schema.json")
IN_WHEEL = ["scopetrace/py.typed", "scopetrace/__main__.py", *(f"scopetrace/view/assets/{name}" for name in ASSETS)]
IN_SDIST = [
    "README.md",
    "CHANGELOG.md",
    "LICENSE",
    "pyproject.toml",
    ".ci/readme_hook.py",
    "Makefile",
    "tests/test_view.py",
    "docs/index.md",
]
EXTRAS = {"onnx", "cli", "view", "zoo", "tvm", "lightning", "trainer", "transformers"}
INSTALLED = {"scopetrace", "click", "rich", "markdown-it-py", "mdurl", "pygments"}  # beside torch and what it needs


def main() -> None:
    options = argparse.ArgumentParser(description="Build, install and try a release.")
    options.add_argument("--download-torch", action="store_true", help="install torch by pip in place of linking it")
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        wheel = built(Path(folder))
        tried(wheel, Path(folder), given.download_torch)
    print(f"release-check: {wheel.name} is right")


def run(*command: str | Path, expect: int = 0, **options: object) -> str:
    """What a command prints, its errors where it is expected to fail. Exits where its code is not `expect`."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, env=environment, **options)
    if done.returncode != expect:
        raise SystemExit(f"{' '.join(map(str, command))}: code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stderr if expect else done.stdout


def require(is_right: bool, problem: str) -> None:
    """Exit with what is wrong."""
    if not is_right:
        raise SystemExit(f"release-check: {problem}")


# What is built -------------------------------------------------------------------------------------------------------


def built(folder: Path) -> Path:
    """The wheel, after its content, its metadata and the sdist were checked."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    run(*pip, "install", "--quiet", "--target", folder / "hatch", "hatchling>=1.27")
    code = "import sys; sys.path.insert(0, sys.argv.pop(1)); from hatchling.cli import hatchling; sys.exit(hatchling())"
    run(sys.executable, "-c", code, folder / "hatch", "build", "-d", folder / "dist", cwd=ROOT)
    (wheel,), (sdist,) = ((folder / "dist").glob(pattern) for pattern in ("*.whl", "*.tar.gz"))
    with zipfile.ZipFile(wheel) as archive:
        files = set(archive.namelist())
        about = next(name for name in files if name.endswith(".dist-info/METADATA"))
        check_metadata(archive.read(about).decode())
    missing = [name for name in IN_WHEEL if name not in files]
    require(not missing, f"the wheel lacks {missing}")
    require(any(name.endswith("licenses/LICENSE") for name in files), "the wheel lacks its license")
    own = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src").rglob("*.py")}
    python = {name for name in files if name.endswith(".py")}
    require(python == own, f"the wheel and the source tree have different modules: {sorted(python ^ own)}")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    missing = [name for name in [*IN_SDIST, *(f"src/{name}" for name in IN_WHEEL)] if name not in names]
    require(not missing, f"the sdist lacks {missing}")
    return wheel


def check_metadata(text: str) -> None:
    """The fields that people and package indexes read."""
    about = email.parser.Parser().parsestr(text)
    version = re.search(r'__version__ = "(.*)"', (ROOT / "src/scopetrace/__init__.py").read_text())
    require(version is not None and about["Version"] == version[1], f"the version is {about['Version']}")
    changes = (ROOT / "CHANGELOG.md").read_text()
    require(f"## [{about['Version']}] - " in changes, f"CHANGELOG.md has no version {about['Version']}")
    require(set(about.get_all("Provides-Extra", [])) == EXTRAS, f"the extras are {about.get_all('Provides-Extra')}")
    require(about["License-Expression"] == "BSD-3-Clause", "the license is missing")
    require("Typing :: Typed" in about.get_all("Classifier", []), "the classifiers are missing")
    readme = about.get_payload()
    require(readme.startswith("# scopetrace"), "the README is missing")
    broken = re.findall(r"\]\((?!https?://)[^)]*\)", readme)
    require(not broken, f"links of the README lead nowhere on a package index: {broken}")
    needs = [line for line in about.get_all("Requires-Dist", []) if "extra ==" not in line]
    require(len(needs) == 3, f"needed are {needs}, and not torch, click and rich")


# What is installed ---------------------------------------------------------------------------------------------------


def tried(wheel: Path, folder: Path, download_torch: bool) -> None:
    """Install the wheel where there is torch alone, and use it there."""
    venv.create(folder / "env", with_pip=True)
    bin_, empty = folder / "env" / "bin", folder / "empty"
    empty.mkdir()
    if not download_torch:
        (packages,) = (folder / "env" / "lib").glob("python*/site-packages")
        link_torch(packages)
    before = set(run(bin_ / "pip", "list", "--format", "freeze").splitlines())
    run(bin_ / "pip", "install", "--quiet", wheel)
    after = {
        line.partition("==")[0].lower()
        for line in {*run(bin_ / "pip", "list", "--format", "freeze").splitlines()} - before
    }
    require(download_torch or after <= INSTALLED, f"installed were {sorted(after - INSTALLED)} too")
    for block, expected in programs((ROOT / "README.md").read_text()):
        printed = run(bin_ / "python", "-c", block, cwd=empty)
        require(printed == expected, f"the README's program printed\n{printed}")
    command = bin_ / "scopetrace"
    require("Block[layers.1, layers.2] ×2" in run(command, "demo", "-o", "demo.html", cwd=empty), "the demo is wrong")
    require("<svg" in (empty / "demo.html").read_text(), "the page of the demo is wrong")
    run(command, "--version")
    (empty / "mine.py").write_text("import torch\n\ndef build():\n    return torch.nn.Linear(4, 2)\n")
    for name, *more in (["show"], ["summary"], ["order"], ["view", "-o", "mine.html"], ["diff", "mine:build"]):
        run(command, name, "mine:build", "-i", "input=1x4", *more, cwd=empty)
    said = run(command, "show", "timm:resnet18", "--depth", "2", expect=2, cwd=empty)
    require("timm is not installed: pip install timm" in said, f"without timm it says {said}")
    said = run(command, "onnx", "mine:build", "-i", "input=1x4", "-o", "mine.onnx", expect=1, cwd=empty)
    require("pip install 'scopetrace[onnx]'" in said, f"without onnx it says {said}")


def programs(readme: str) -> Iterator[tuple[str, str]]:
    """Each Python block with what it prints."""
    yield from re.findall(r"```python\n(.*?)```\n+```text\n(.*?)```", readme, re.DOTALL)


def link_torch(packages: Path) -> None:
    """Links to torch and the packages that it needs, in place of gigabytes to download."""
    todo, seen = ["torch"], set[str]()
    while todo:
        name = todo.pop()
        if name.lower() in seen:
            continue
        seen.add(name.lower())
        try:
            found = metadata.distribution(name)
        except metadata.PackageNotFoundError:  # one that this machine does not need
            continue
        for top in {file.parts[0] for file in found.files or () if file.parts[0] not in ("..", "__pycache__")}:
            link = packages / top
            if not link.exists():
                link.symlink_to(Path(str(found.locate_file(top))).resolve())
        todo += [re.split(r"[^\w.-]", need)[0] for need in found.requires or () if "extra ==" not in need]


if __name__ == "__main__":
    main()
