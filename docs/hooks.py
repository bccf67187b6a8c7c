"""The site has the files outside of docs/ that pages link to: CONTRIBUTING.md, the examples, results of benchmarks.

Links are written as they lead in the repository, `../examples/giants.py`, which on the site is `examples/giants.py`.
"""

import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""Pages of the repository's root, and what they are on the site."""
OUTSIDE = re.compile(r"(?<=\]\()((?:\.\./)+)(examples/|benchmarks/|(?:CONTRIBUTING|CHANGELOG)\.md)")
INSIDE = re.compile(r"(?<=\]\()docs/")


def on_files(files, config):
    """Add the files outside of docs/."""
    for name, place in PAGES.items():
        files.append(File.generated(config, place, content=INSIDE.sub("", (ROOT / name).read_text())))
    for path in [*ROOT.glob("examples/*.*"), *ROOT.glob("benchmarks/results/*.txt")]:
        files.append(File.generated(config, str(path.relative_to(ROOT)), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown, page, config, files):
    """Let links to these files lead to their place on the site."""
    depth = page.file.src_uri.count("/")

    def inside(match):
        up, target = match.groups()
        return "../" * (up.count("../") - 1) + PAGES.get(target, target)

    assert all(up.count("../") == depth + 1 for up, _ in OUTSIDE.findall(markdown)), page.file.src_uri
    return OUTSIDE.sub(inside, markdown)
