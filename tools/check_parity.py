#!/usr/bin/env python3
"""Checks docs/parity.md against itself and against the tests in the tree. Needs no build.

Each heading of the page says how many rows its section has; every one of them is listed once, in order:

  ## A. Key-value stores (51 rows)
  | row | behaviour | state | where | test |

state   done, better, partly, not or moot; a note may follow in parentheses. partly needs one: the clause that is missing.
where   the files; empty only where nothing was built.
test    `binary: Suite.Name, Suite.Other*; other_binary: Suite.*`, notes in parentheses. Every name must be that of a test
        in a source of that binary. done and better rows name at least one.
"""

import fnmatch
import re

import complaints

PAGE = "docs/parity.md"
STATES = ("done", "better", "partly", "not", "moot")
TESTED = ("done", "better")
HEADING = re.compile(r"## ([A-Z])\. .* \((\d+) rows?\)")
HEADER = "| row | behaviour | state | where | test |"
ROW = re.compile(r"\| ([A-Z])(\d+) \|")
STATE = re.compile(r"(\w+)(?: \((.+)\))?")
KEYWORDS = ("SOURCES", "DEPENDS", "LINK", "BAND", "TIMEOUT", "PROPERTIES")
SKIPPED_FOLDERS = ("build", ".git")


def without_notes(text):
    """text without what stands in parentheses, nested ones included."""
    kept, depth = [], 0
    for character in text:
        depth += character == "("
        if depth == 0:
            kept.append(character)
        depth -= character == ")"
    return "".join(kept)


class Tests:
    """The GoogleTest names of every test binary, read from CMakeLists.txt and the sources it lists."""

    def __init__(self, root):
        self.root = root
        self.binaries = {}
        calls, libraries = [], {}
        for path in sorted(root.rglob("CMakeLists.txt")):
            if path.relative_to(root).parts[0] in SKIPPED_FOLDERS:
                continue
            text = re.sub(r"#.*", "", path.read_text())
            for name, body in re.findall(r"\blockstep_\w*test\(\s*(\w+)\s+([^)]*)\)", text):
                calls.append((path.parent, name, self.arguments(body)))
            for name, body in re.findall(r"\badd_library\(\s*(\w+)\s+OBJECT\s+([^)]*)\)", text):
                libraries[name] = [path.parent / source for source in body.split()]
        for folder, name, arguments in calls:
            sources = [folder / source for source in arguments.get("SOURCES", [])]
            for library in arguments.get("LINK", []):
                sources += libraries.get(library, [])
            self.binaries[name] = {test for source in sources for test in self.names_in(source)}

    @staticmethod
    def arguments(body):
        found, keyword = {}, None
        for word in body.split():
            if word in KEYWORDS:
                keyword = word
            else:
                found.setdefault(keyword, []).append(word)
        return found

    @staticmethod
    def names_in(source):
        if not source.exists():  # a variable of the build
            return []
        pairs = re.findall(r"\bTEST(?:_[FP])?\(\s*(\w+)\s*,\s*(\w+)\s*\)", source.read_text())
        return [f"{suite}.{name}" for suite, name in pairs]


class Page:
    def __init__(self, text, tests):
        self.tests = tests
        self.complaints = []
        self.counts = dict.fromkeys(STATES, 0)
        self.section, self.expected, self.seen = None, 0, []
        self.letters = []
        for number, line in enumerate(text.splitlines(), 1):
            self.place = f"{PAGE}:{number}"
            self.read(line)
        self.close_section()

    def complain(self, text):
        self.complaints.append(f"{self.place}: {text}")

    def read(self, line):
        heading = HEADING.fullmatch(line)
        if heading:
            self.close_section()
            self.section, self.expected, self.seen = heading[1], int(heading[2]), []
            if self.section in self.letters:
                self.complain(f"section {self.section} is there twice")
            self.letters.append(self.section)
        elif line.startswith("## "):
            self.complain("a heading without its number of rows: ## A. Title (51 rows)")
        elif line.startswith("| row |") and line != HEADER:
            self.complain(f"the columns are {HEADER}")
        elif ROW.match(line):
            self.read_row(line)

    def close_section(self):
        if self.section is None:
            return
        for row in range(1, self.expected + 1):
            if row not in self.seen:
                self.complain(f"{self.section}{row} is missing")
        if self.seen != sorted(self.seen):
            self.complain(f"the rows of {self.section} are not in order")

    def read_row(self, line):
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        letter, number = re.fullmatch(r"([A-Z])(\d+)", cells[0]).groups()
        if letter != self.section or not 1 <= int(number) <= self.expected:
            self.complain(f"{cells[0]} does not belong in section {self.section} of {self.expected} rows")
        elif int(number) in self.seen:
            self.complain(f"{cells[0]} is there twice")
        else:
            self.seen.append(int(number))
        if len(cells) != 5:
            self.complain(f"{cells[0]} has {len(cells)} columns instead of 5")
            return
        self.check_row(*cells)

    def check_row(self, row, behaviour, state, where, test):
        match = STATE.fullmatch(state)
        word = match[1] if match else state
        if word not in STATES:
            self.complain(f"{row}: the state is {', '.join(STATES)}, with a note in parentheses or none; not '{state}'")
            return
        self.counts[word] += 1
        if not behaviour:
            self.complain(f"{row} does not tell its behaviour")
        if word == "partly" and not match[2]:
            self.complain(f"{row} is partly there: say which clause is missing, in parentheses after the state")
        if word in ("done", "better", "partly") and not where:
            self.complain(f"{row} does not tell where it is")
        named = self.check_tests(row, test)
        if word in TESTED and named == 0:
            self.complain(f"{row} is {word}, but names no test")

    def check_tests(self, row, cell):
        """Number of tests that the cell names and that exist; complains about every other name."""
        found = 0
        for entry in filter(None, (part.strip() for part in without_notes(cell).split(";"))):
            binary, colon, names = entry.partition(":")
            if binary not in self.tests.binaries:
                self.complain(f"{row}: there is no test binary '{binary}' (binary: Suite.Name, ...; notes in parentheses)")
                continue
            if not colon:
                self.complain(f"{row}: which tests of {binary}? (Suite.Name or Suite.*)")
                continue
            for name in (part.strip() for part in names.split(",")):
                # A test with parameters may be named with one of them: Suite.Name/Case.
                matches = fnmatch.filter(self.tests.binaries[binary], name.split("/")[0])
                if not matches:
                    self.complain(f"{row}: {binary} has no test '{name}'")
                found += len(matches)
        return found


def check(root):
    return Page((root / PAGE).read_text(), Tests(root))


def main():
    page = check(complaints.parser(__doc__).parse_args().root)
    states = ", ".join(f"{count} {state}" for state, count in page.counts.items())
    complaints.finish("parity", page.complaints,
                      f"{sum(page.counts.values())} rows ({states}), every test they name exists")


if __name__ == "__main__":
    main()
