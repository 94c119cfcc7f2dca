#!/usr/bin/env python3
"""Checks what the pages point to: links, anchors, `make` targets and paths in code. Needs no build.

Pages are *.md in the root and under docs/. Their C++ is compiled by tests/docs.
"""

import re

import complaints

LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`\n]+)`")
MAKE = re.compile(r"(?:^|[\s;&(])make ([a-z]+)\b")
PATH = re.compile(r"(?:^|\s|\./)((?:tools|\.ci|examples|docs|tests)/[\w./-]*\w)")


def anchors_of(text):
    """Anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.S | re.M), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def code_of(text):
    """(line number, code) of fenced lines and of `code` in the text; C++ is left to the compiler."""
    fence = None
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("```"):
            fence = line[3:].strip() if fence is None else None
        elif fence is None:
            yield from ((number, code) for code in CODE.findall(line))
        elif fence in ("", "bash", "sh", "console"):
            yield number, line


class Pages:
    def __init__(self, root):
        self.root = root
        self.complaints = []
        self.counts = {"links": 0, "commands": 0}
        makefile = root / "Makefile"
        self.targets = set(re.findall(r"^([a-z]+):", makefile.read_text(), re.M)) if makefile.exists() else set()
        for page in [*sorted(root.glob("*.md")), *sorted((root / "docs").rglob("*.md"))]:
            self.check_links(page)
            self.check_code(page)

    def complain(self, page, number, text):
        self.complaints.append(f"{page.relative_to(self.root)}:{number}: {text}")

    def check_links(self, page):
        for number, line in enumerate(page.read_text().splitlines(), 1):
            for link in LINK.findall(CODE.sub("", line)):
                if re.match(r"[a-z]+:", link):
                    continue
                self.counts["links"] += 1
                name, _, anchor = link.partition("#")
                target = page if not name else page.parent / name
                if not target.exists():
                    self.complain(page, number, f"({link}) points to nothing")
                elif anchor and target.suffix == ".md" and anchor not in anchors_of(target.read_text()):
                    self.complain(page, number, f"({link}): the page has no such heading")

    def check_code(self, page):
        for number, code in code_of(page.read_text()):
            for target in MAKE.findall(code):
                self.counts["commands"] += 1
                if target not in self.targets:
                    self.complain(page, number, f"`make {target}`: the Makefile has no such target")
            for path in PATH.findall(code):
                self.counts["commands"] += 1
                if not (self.root / path).exists() and not list(self.root.glob(path + ".*")):
                    self.complain(page, number, f"`{path}` does not exist")


def main():
    pages = Pages(complaints.parser(__doc__).parse_args().root)
    complaints.finish("docs", pages.complaints,
                      f"{pages.counts['links']} links, {pages.counts['commands']} commands and paths, all there")


if __name__ == "__main__":
    main()
