#!/usr/bin/env python3
"""Holds every #include against the arrows the build declares, and draws them into ARCHITECTURE.md.

The order of the folders and the torch line are read from the top CMakeLists.txt, a folder's arrows from the DEPENDS of
its lockstep_library, lockstep_test, lockstep_program and lockstep_plugin calls. There is no second table to keep in step.
A plug-in of ours may be compiled with folders of the comm band (DEPENDS of lockstep_plugin); of all others it includes the
engine ABI only.

Where a header lies says who may include it: beside its source everyone (installed), in detail/ other folders and public
templates (no promise; installed only if a public header needs it), in internal/ its own folder (not installed). So what is
installed is listed under HEADERS, includes nothing of internal/, and runs no code before main. Below the torch line libraries lock with base::Mutex, so that
clang proves what it guards.

  check_layers.py            prints each violation; exit code 1 when there is one
  check_layers.py --write    also redraws the diagram
  check_layers.py --root DIR checks another tree (the tests do)
"""

import re
from dataclasses import dataclass, field
from pathlib import Path

import complaints

TORCH_LINE = "libtorch begins above this line"
TORCH_PREFIXES = ("torch/", "ATen/", "c10/", "caffe2/")
FORMAT_PREFIXES = ("fmt/", "spdlog/")
ABI_HEADER = "lockstep/engine/engine_abi.h"
PLUGIN_HEADER = "lockstep/engine/plugin.h"  # what a C++ plug-in may include as well
MUTEX_HEADER = "lockstep/base/detail/mutex.h"  # and one of this tree, whose locks are checked
UMBRELLA = "lockstep/lockstep.h"
# Public headers that the umbrella leaves out because they are slow to compile.
APART = ("lockstep/ddp/ddp_script.h",)
SUFFIXES = {".h", ".hpp", ".c", ".cpp", ".cc", ".cu", ".cuh"}
HEADER_SUFFIXES = {".h", ".hpp", ".cuh"}
# What says nothing about what it guards.
PLAIN_LOCK = re.compile(r"\bstd::(?:\w*mutex|lock_guard|unique_lock|scoped_lock|condition_variable\w*)\b")
BEGIN, END = "<!-- layers: begin -->", "<!-- layers: end -->"
# At namespace scope: `inline const bool registered = register_it();` runs in every program that includes it.
INITIALISER = re.compile(r"^(?:inline|static)\s+(?!constexpr\b)[\w:<>,*& ]+?\s\w+\s*(?:=\s*(?!\[)[\w:]+(?:<.*>)?\(|\{[^}]*\w\()")
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')
KEYWORDS = {"SOURCES", "HEADERS", "DEPENDS", "LINK", "LINK_PUBLIC", "BAND", "TIMEOUT", "COST", "NOT_UNDER",
            "OPTIMISED", "PROPERTIES", "INSTALL"}


@dataclass
class Target:
    kind: str  # library, test, program or plugin
    name: str
    folder: Path  # of its CMakeLists.txt, relative to the root
    arguments: dict = field(default_factory=dict)

    def depends(self):
        return self.arguments.get("DEPENDS", [])

    def sources(self):
        return self.arguments.get("SOURCES", []) + self.arguments.get("HEADERS", [])


@dataclass
class Violation:
    place: str
    text: str

    def __str__(self):
        return f"{self.place}: {self.text}"


def strip_comments(text):
    return re.sub(r"#[^\n]*", "", text)


def parse_targets(text, folder):
    """The lockstep_* calls of one CMakeLists.txt."""
    targets = []
    for call in re.finditer(r"\blockstep_(library|test|program|plugin)\s*\(([^()]*)\)", strip_comments(text)):
        words = call.group(2).split()
        if not words or words[0].startswith("$"):
            continue
        target = Target(call.group(1), words[0], folder)
        current = None
        for word in words[1:]:
            if word in KEYWORDS:
                current = target.arguments.setdefault(word, [])
            elif current is not None:
                current.append(word)
        targets.append(target)
    return targets


class Tree:
    def __init__(self, root):
        self.root = root
        self.violations = []
        self.read_order()
        self.read_targets()

    def complain(self, place, text):
        self.violations.append(Violation(str(place), text))

    def read_order(self):
        """Folders of lockstep/ from the bottom up, and how many lie below the torch line."""
        self.order, self.below = [], set()
        seen_line = False
        for line in (self.root / "CMakeLists.txt").read_text().splitlines():
            if TORCH_LINE in line:
                seen_line = True
            match = re.match(r"\s*add_subdirectory\(lockstep(?:/(\w+))?\)", line)
            if match:
                name = match.group(1) or "lockstep"
                self.order.append(name)
                if not seen_line:
                    self.below.add(name)
        if not seen_line:
            self.complain("CMakeLists.txt", f'no comment "{TORCH_LINE}"')

    def read_targets(self):
        self.targets = []
        for top in ("lockstep", "launch", "engines", "examples", "bindings"):
            for path in sorted((self.root / top).rglob("CMakeLists.txt")):
                self.targets += parse_targets(path.read_text(), path.parent.relative_to(self.root))
        self.libraries = {t.name: t for t in self.targets if t.kind == "library"}
        self.needed = None  # see needed_by_public

    def closure(self, names):
        """The named folders and everything they depend on."""
        reached, todo = set(), list(names)
        while todo:
            name = todo.pop()
            if name not in reached:
                reached.add(name)
                if name in self.libraries:
                    todo += self.libraries[name].depends()
        return reached

    # ---- arrows

    def check_arrows(self):
        rank = {name: i for i, name in enumerate(self.order)}
        for target in self.targets:
            place = target.folder / "CMakeLists.txt"
            for dep in target.depends():
                if dep not in self.libraries:
                    self.complain(place, f"{target.name} depends on {dep}, which no folder declares")
                elif target.kind == "library" and target.name in rank and rank.get(dep, -1) >= rank[target.name]:
                    self.complain(place, f"upward arrow: {target.name} -> {dep}; "
                                         f"the top CMakeLists.txt lists {dep} after {target.name}")
        for name in self.libraries:
            if name not in rank and self.libraries[name].folder.parts[0] == "lockstep":
                self.complain(self.libraries[name].folder, f"{name} is not in the top CMakeLists.txt")

    # ---- includes

    def files(self, top):
        for path in sorted((self.root / top).rglob("*")):
            if path.suffix in SUFFIXES and path.is_file():
                yield path

    def includes(self, path):
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            match = INCLUDE.match(line)
            if match:
                yield f"{path.relative_to(self.root)}:{number}", match.group(2)

    def owners(self, path):
        """The targets a file belongs to: those that list it, else the library of its folder; for a header that no
        library lists and that needs GoogleTest, the tests of its folder."""
        relative = path.relative_to(self.root)
        near = [t for t in self.targets if t.folder in relative.parents and
                (t.name != "lockstep" or t.folder == relative.parent)]
        listed = [t for t in near if str(relative.relative_to(t.folder)) in t.sources()]
        if listed:
            return listed
        library = [t for t in near if t.kind == "library"]
        others = [t for t in near if t.kind != "library"]
        if "_test" in path.stem or any(name.startswith(("gtest/", "gmock/")) for _, name in self.includes(path)):
            return [t for t in others if t.kind == "test"] or library
        return library[-1:] or others

    def check_file(self, path):
        relative = path.relative_to(self.root)
        owners = self.owners(path)
        own = relative.parts[1] if relative.parts[0] == "lockstep" and len(relative.parts) > 2 else None
        tensor_test = any(t.arguments.get("BAND") == ["tensor"] for t in owners)
        torch_free = (own in self.below or relative.parts[0] == "launch") and not tensor_test
        allowed = self.closure([d for t in owners for d in t.depends()]) | ({own} if own else set())
        for place, name in self.includes(path):
            self.check_common(path, place, name, own)
            if torch_free and name.startswith(TORCH_PREFIXES):
                self.complain(place, f"<{name}>: no torch below the torch line")
            if name.startswith(FORMAT_PREFIXES) and own and own not in self.below:
                self.complain(place, f"<{name}>: fmt and spdlog clash with those of the torch wheel; "
                                     "use lockstep::base::cat from lockstep/base/detail/text.h")
            if str(relative) == UMBRELLA or not name.startswith("lockstep/"):
                continue
            folder = name.split("/")[1]
            if folder.endswith(".h"):
                folder = "lockstep"
            if folder not in allowed:
                up = own in self.order and folder in self.order and self.order.index(folder) > self.order.index(own)
                self.complain(place, f'"{name}": {"upward" if up else "undeclared"} arrow '
                                     f"{own or relative.parts[0]} -> {folder}")

    def check_common(self, path, place, name, own):
        if ".." in Path(name).parts:
            self.complain(place, f'"{name}": write the path from the root of the tree')
        if name.startswith(FORMAT_PREFIXES) and path.suffix in HEADER_SUFFIXES:
            self.complain(place, f"<{name}>: no fmt or spdlog in a header")
        match = re.match(r"lockstep/(\w+)/internal/", name)
        if match and match.group(1) != own:
            self.complain(place, f'"{name}": internal/ is private to lockstep/{match.group(1)}')

    # ---- headers

    def is_for_tests(self, path, library):
        """What no installed header and no source of the library needs: *_testing.h, contract suites and their like."""
        relative = str(path.relative_to(self.root))
        listed = {str(library.folder / name) for name in library.sources()}
        return not any(name == relative for source in listed if (self.root / source).exists()
                       for _, name in self.includes(self.root / source))

    def needed_by_public(self):
        """What the public headers include, directly or not; themselves included."""
        if self.needed is None:
            todo = [str(library.folder / name) for library in self.libraries.values()
                    for name in library.arguments.get("HEADERS", []) if not name.startswith("detail/")]
            self.needed = set()
            while todo:
                name = todo.pop()
                if name not in self.needed and (self.root / name).exists():
                    self.needed.add(name)
                    todo += [included for _, included in self.includes(self.root / name) if included.startswith("lockstep/")]
        return self.needed

    def check_header(self, path, library):
        place = path.relative_to(self.root)
        name = str(place.relative_to(library.folder))
        private, shared = "internal" in place.parts, "detail" in place.parts
        installed = name in library.arguments.get("HEADERS", [])
        needed = str(place) in self.needed_by_public()
        if private and installed:
            self.complain(place, "internal/ is not installed: list it under SOURCES")
        if shared and installed and not needed:
            self.complain(place, "is installed, but no public header needs it: list it under SOURCES")
        if shared and needed and not installed:
            self.complain(place, "is not installed, but a public header needs it: list it under HEADERS")
        if not private and not shared and not installed and not self.is_for_tests(path, library):
            self.complain(place, "is not installed (HEADERS): move it to internal/, or list it")
        if not installed:
            return
        for line, included in self.includes(path):
            if re.match(r"lockstep/.*\binternal/", included):
                self.complain(line, f'"{included}": an installed header includes nothing of internal/; use detail/')
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            if INITIALISER.match(line):
                self.complain(f"{place}:{number}", "an installed header runs no code before main")

    def check_headers(self):
        for library in self.libraries.values():
            folder = self.root / library.folder
            for path in sorted(folder.rglob("*") if library.name != "lockstep" else folder.glob("*")):
                if path.suffix in HEADER_SUFFIXES and library.folder.parts[0] == "lockstep":
                    self.check_header(path, library)

    def check_locks(self):
        for library in self.libraries.values():
            for path in (self.root / library.folder / name for name in library.sources() if library.name in self.below):
                place = path.relative_to(self.root)
                match = PLAIN_LOCK.search(path.read_text(errors="replace")) if path.exists() else None
                if match and str(place) != MUTEX_HEADER:
                    self.complain(place, f"{match.group()}: below the torch line it is base::Mutex and its like ({MUTEX_HEADER})")

    def check_plugin(self, path, own=False):
        allowed = (ABI_HEADER, PLUGIN_HEADER, *([MUTEX_HEADER] if own else []))
        folder = path.relative_to(self.root).parent
        declared = [d for t in self.targets if t.kind == "plugin" and t.folder == folder for d in t.depends()]
        inside = self.closure(declared) & self.below
        for place, name in self.includes(path):
            if re.match(r"lockstep/\w+/(?!internal/)", name) and name.split("/")[1] in inside:
                continue
            if name.startswith("lockstep/") and name not in allowed or ".." in Path(name).parts:
                self.complain(place, f'"{name}": a plug-in includes nothing of lockstep but {" and ".join(allowed)}')
            if name.startswith(TORCH_PREFIXES):
                self.complain(place, f"<{name}>: a plug-in knows pointers and bytes, not tensors")

    def check_example(self, path):
        for place, name in self.includes(path):
            if name.startswith("lockstep/") and name not in (UMBRELLA, *APART) or ".." in Path(name).parts:
                self.complain(place, f'"{name}": examples include <{UMBRELLA}> only')
            if name.startswith(FORMAT_PREFIXES):
                self.complain(place, f"<{name}>: not beside torch")

    def check_abi_header(self):
        path = self.root / ABI_HEADER
        for place, name in self.includes(path) if path.exists() else ():
            if name not in ("stddef.h", "stdint.h"):
                self.complain(place, f"<{name}>: the engine ABI needs <stddef.h> and <stdint.h> only")
        for path in filter(Path.exists, (self.root / PLUGIN_HEADER, self.root / MUTEX_HEADER)):
            for place, name in self.includes(path):
                if "/" in name and name != ABI_HEADER:
                    self.complain(place, f'"{name}": for plug-ins, which have {ABI_HEADER} and the standard library only')

    def check(self):
        self.check_arrows()
        for top in ("lockstep", "launch", "bindings"):
            for path in self.files(top):
                self.check_file(path)
        for path in self.files("engines"):
            if "_test" not in path.stem:
                self.check_plugin(path, own=True)
        for path in self.files("tests/plugins"):
            if path.suffix == ".c":
                self.check_plugin(path)
        for path in self.files("examples"):
            self.check_example(path)
        self.check_abi_header()
        self.check_headers()
        self.check_locks()

    # ---- the diagram

    def reduced(self, names):
        """Arrows without those that another arrow implies."""
        return [n for n in names if not any(n in self.closure([m]) for m in names if m != n)]

    def diagram(self):
        rows = []
        programs = [t for t in self.targets if t.kind == "program" and t.folder.parts[0] == "launch"]
        if programs:
            rows.append(("launch/", sorted({d for t in programs for d in t.depends()}, key=self.position)))
        line_drawn = False
        for name in reversed(self.order):
            if name not in self.libraries:
                continue
            if name in self.below and not line_drawn:
                rows.append(None)
                line_drawn = True
            label = "lockstep.h" if name == "lockstep" else f"  {name}/"
            rows.append((label, self.libraries[name].depends()))
        width = max((len(row[0]) for row in rows if row), default=0)
        lines = []
        for row in rows:
            if row is None:
                lines.append(f"---------- {TORCH_LINE} ----------")
            else:
                arrows = ", ".join(sorted(self.reduced(row[1]), key=self.position))
                lines.append(f"{row[0]:<{width}}  {'-> ' + arrows if arrows else ''}".rstrip())
        return "\n".join(lines)

    def position(self, name):
        return -self.order.index(name) if name in self.order else 1

    def check_diagram(self, write):
        path = self.root / "ARCHITECTURE.md"
        text = path.read_text() if path.exists() else ""
        if BEGIN not in text or END not in text:
            self.complain("ARCHITECTURE.md", f"has no {BEGIN} and {END}")
            return
        head, rest = text.split(BEGIN, 1)
        drawn, tail = rest.split(END, 1)
        wanted = f"\n```\n{self.diagram()}\n```\n"
        if drawn == wanted:
            return
        if write:
            path.write_text(head + BEGIN + wanted + END + tail)
        else:
            self.complain("ARCHITECTURE.md", "the diagram is not what the build declares; "
                                             "run tools/check_layers.py --write")


    def check_rows(self):
        """Every folder has a row in the table of ARCHITECTURE.md that says what it is."""
        path = self.root / "ARCHITECTURE.md"
        text = path.read_text() if path.exists() else ""
        for name in self.order:
            row = "| `lockstep/lockstep.h` |" if name == "lockstep" else f"| `lockstep/{name}` |"
            if row not in text:
                self.complain("ARCHITECTURE.md", f"no row of the table says what lockstep/{name} is")


def main():
    parser = complaints.parser(__doc__)
    parser.add_argument("--write", action="store_true", help="redraw the diagram in ARCHITECTURE.md")
    arguments = parser.parse_args()
    tree = Tree(arguments.root)
    tree.check()
    tree.check_diagram(arguments.write)
    tree.check_rows()
    complaints.finish("layers", tree.violations,
                      f"{len(tree.libraries)} folders, every include follows a declared arrow", "violations")


if __name__ == "__main__":
    main()
