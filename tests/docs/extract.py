#!/usr/bin/env python3
"""Turns the ```cpp blocks of README.md and docs/*.md into C++ that the build compiles.

  extract.py ROOT OUT     writes OUT/fragments.cpp, OUT/<page>_<n>.cpp per program, OUT/programs.txt

A block with `int main(` is a program, whose main calls run_main: it is built as it stands, in a file of its own. Every other block is a fragment.
All fragments go into fragments.cpp, since one more file that includes torch takes ten seconds: a namespace per page, which
begins with tests/docs/context/<page>.h (names that the page's fragments use without declaring them), and a function per
fragment. #include lines move to the top, LOCKSTEP_RPC_ lines before the function. #line makes the compiler's complaints
name the page.

A comment before the block, which no reader of the page sees, changes that:

  <!-- cpp: declarations -->     the fragment stands in the namespace, not in a function
  <!-- cpp: run -n 2 -->         the program is run as a test: lockstep run -n 2 -- program
  <!-- cpp: skip, why -->        not compiled
"""

import re
import sys
from pathlib import Path

MARK = re.compile(r"<!-- cpp: (.+) -->")
BEFORE = re.compile(r"\s*(#include\b|LOCKSTEP_RPC_\w+\()")


class Mistake(Exception):
    pass


class Block:
    def __init__(self, page, line, mark):
        self.page, self.line, self.mark, self.lines = page, line, mark, []

    @property
    def place(self):
        return f"{self.page}:{self.line}"

    def is_program(self):
        return any(re.match(r"int main\(", text) for text in self.lines)

    def kind(self):
        mark = self.mark or ""
        if re.fullmatch(r"skip, .+", mark):
            return "skip"
        if self.is_program() and (not mark or re.fullmatch(r"run( -n \d+)", mark)):
            return "program"
        if not self.is_program() and mark in ("", "declarations"):
            return mark or "statements"
        raise Mistake(f"{self.place}: '<!-- cpp: {mark} -->' does not fit this block")


def blocks_of(page, text):
    found, block, mark = [], None, None
    for number, line in enumerate(text.splitlines(), 1):
        if block is not None:
            if line.startswith("```"):
                found.append(block)
                block = None
            else:
                block.lines.append(line)
        elif line.rstrip() == "```cpp":
            block, mark = Block(page, number + 1, mark), None
        elif MARK.fullmatch(line.strip()):
            mark = MARK.fullmatch(line.strip())[1]
        elif mark is not None and line.strip():
            raise Mistake(f"{page}:{number}: '<!-- cpp: {mark} -->' stands before no ```cpp block")
    if block is not None:
        raise Mistake(f"{block.place}: the block has no end")
    return found


def pages_of(root):
    return [root / "README.md", *sorted((root / "docs").glob("*.md"))]


def fragment_text(block, number, kind):
    """The fragment as a function, or as it is; and the includes it wants."""
    includes, before, body = [], [], []
    for offset, line in enumerate(block.lines):
        match = BEFORE.match(line)
        target = body if not match else includes if match[1] == "#include" else before
        target.append(f'#line {block.line + offset} "{block.page}"\n{line}' if target is not body else line)
        if target is not body:
            body.append("")  # keeps the line numbers
    body = "\n".join(body)
    head = "\n".join(before)
    here = f'#line {block.line} "{block.page}"\n'
    if kind == "declarations":
        return f"{head}\n{here}{body}\n", includes
    return f"{head}\nvoid fragment_{number}() {{\n{here}{body}\n}}\n", includes


def write_if_changed(path, text):
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def extract(root, out):
    includes, spaces, programs, pages, counts = [], [], [], [], {"statements": 0, "declarations": 0, "program": 0, "skip": 0}
    for page in pages_of(root):
        name = page.relative_to(root).as_posix()
        stem = re.sub(r"\W", "_", page.stem.lower())
        parts, number = [], 0
        for block in blocks_of(name, page.read_text()):
            number += 1
            kind = block.kind()
            counts[kind] += 1
            if kind == "program" and "run_main(" not in "\n".join(block.lines):
                raise Mistake(f"{block.place}: an exception that leaves main is SIGABRT; main should be run_main's")
            if kind == "program":
                program = f"{stem}_{number}"
                text = f'#line {block.line} "{name}"\n' + "\n".join(block.lines) + "\n"
                write_if_changed(out / f"{program}.cpp", text)
                programs.append((program, (block.mark or "").removeprefix("run -n ")))
            elif kind != "skip":
                text, wanted = fragment_text(block, number, kind)
                parts.append(text)
                includes += wanted
        pages.append(name)
        context = root / "tests/docs/context" / f"{page.stem.lower()}.h"
        if parts:
            head = f'#include "tests/docs/context/{context.name}"\n' if context.exists() else ""
            spaces.append(f"namespace page_{stem} {{\n{head}{''.join(parts)}}}  // namespace page_{stem}\n")
        elif context.exists():
            raise Mistake(f"{context.name}: {name} has no fragments")
    text = "\n".join(['// Made by tests/docs/extract.py.', '#include "tests/docs/context.h"', *includes, *spaces])
    write_if_changed(out / "fragments.cpp", text)
    write_if_changed(out / "programs.txt", "".join(f"{name}={ranks}\n" for name, ranks in programs))
    write_if_changed(out / "pages.txt", "".join(f"{name}\n" for name in pages))
    return counts


def main():
    root, out = Path(sys.argv[1]).resolve(), Path(sys.argv[2])
    out.mkdir(parents=True, exist_ok=True)
    try:
        counts = extract(root, out)
    except Mistake as mistake:
        sys.exit(str(mistake))
    fragments = counts["statements"] + counts["declarations"]
    print(f"docs: {fragments} fragments, {counts['program']} programs, {counts['skip']} not compiled")


if __name__ == "__main__":
    main()
