#!/usr/bin/env python3
"""What a reader meets: arrows, files and lines per folder, and the largest classes. docs/design.md keeps the tables.

  tree_stats.py              this tree
  tree_stats.py --root DIR   another one, as of `git worktree add DIR <commit>`

Tests and what only tests include (*_test.cpp, *_testing.h, engine_contract*, test_*) are counted apart. A class's methods and members
are counted in its header, by the shape of its declarations: close enough to compare two versions of one tree.
"""

import argparse
import re
from pathlib import Path

import check_layers

TEST = re.compile(r"(_test|_testing|_process_test)$|^(engine_contract|fake_|test_|perturbed)")
CLASS = re.compile(r"^(?:class|struct) (\w+)(?: final)?(?: : [^{]*)?\s*\{", re.M)
N_LARGEST = 5


def is_test(path):
    return bool(TEST.search(path.stem))


def count_lines(paths):
    return sum(len(path.read_text(errors="replace").splitlines()) for path in paths)


def body_of(text, start):
    """From the opening brace at `start` to its closing one."""
    depth = 0
    for i in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return text[start + 1:i]
    return text[start + 1:]


def declarations(body):
    """The statements of a class body, without comments, nested braces and access labels."""
    body = re.sub(r"//[^\n]*", "", body)
    while True:
        flat = re.sub(r"\{[^{}]*\}", ";", body)
        if flat == body:
            break
        body = flat
    body = re.sub(r"\b(public|private|protected):", ";", body)
    return [" ".join(s.split()) for s in body.split(";") if s.strip()]


def size_of_class(body):
    methods = members = 0
    for statement in declarations(body):
        if re.match(r"(class|struct|enum|using|friend|static_assert|template <[^>]*> (class|struct))\b", statement):
            continue
        if re.search(r"\w_(\s*=.*|\[.*\])?$", statement) and not re.search(r"\w\(", statement.split("=")[0]):
            members += 1
        elif "(" in statement and "= delete" not in statement:
            methods += 1
    return methods, members


def classes(path):
    text = path.read_text(errors="replace")
    for match in CLASS.finditer(text):
        yield (match.group(1), *size_of_class(body_of(text, match.end() - 1)))


def folder_row(tree, name):
    folder = tree.root / "lockstep" / name if name != "lockstep" else tree.root / "lockstep"
    every = [p for p in (folder.rglob("*") if name != "lockstep" else folder.glob("*"))
             if p.suffix in check_layers.SUFFIXES and p.is_file()]
    code = [p for p in every if not is_test(p)]
    public = [p for p in code if p.suffix in check_layers.HEADER_SUFFIXES and p.parent == folder]
    arrows = tree.libraries[name].depends()
    return (f"{name}/" if name != "lockstep" else "lockstep.h", len(code), count_lines(code), len(public),
            len(every) - len(code), ", ".join(sorted(tree.reduced(arrows), key=tree.position)))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent)
    tree = check_layers.Tree(parser.parse_args().root)
    rows = [folder_row(tree, name) for name in reversed(tree.order) if name in tree.libraries]
    print("| folder | files | lines | public headers | test files | arrows |\n|---|--:|--:|--:|--:|---|")
    for row in rows:
        print("| " + " | ".join(str(cell) for cell in row) + " |")
    n_arrows = sum(len(tree.libraries[name].depends()) for name in tree.libraries)
    n_drawn = sum(len(row[5].split(", ")) for row in rows if row[5])
    print(f"\n{len(rows)} folders, {n_drawn} arrows drawn ({n_arrows} declared), {sum(r[1] for r in rows)} files, "
          f"{sum(r[2] for r in rows):,} lines, {sum(r[4] for r in rows)} test files")
    largest = sorted(((methods + members, name, methods, members, path.relative_to(tree.root))
                      for path in tree.files("lockstep") if path.suffix == ".h" and not is_test(path)
                      for name, methods, members in classes(path)), reverse=True)[:N_LARGEST]
    print("\nlargest classes: " + "; ".join(
        f"`{name}` ({path}): {methods} methods, {members} members" for _, name, methods, members, path in largest))


if __name__ == "__main__":
    main()
