#!/usr/bin/env python3
"""Holds docs/api.md against the headers that the build installs, and the names of folders that share a namespace.

The list between the two marks of docs/api.md is generated: every header that a lockstep_library lists under HEADERS, but for
those in detail/, with its namespaces and the first sentence of its opening comment. So a header that is renamed or reworded
needs no more than --write.

Folders share namespaces (`lockstep` by design, `lockstep::internal` by history). Two classes of one name there are a breach
of the one-definition rule that no linker reports, and so are two functions of one signature: each type, and in private
namespaces each function, belongs to one folder.

  check_api.py            prints each complaint; exit code 1 when there is one
  check_api.py --write    also writes the list
  check_api.py --root DIR checks another tree (the tests do)
"""

import re
from collections import defaultdict

import check_layers
import complaints

PAGE = "docs/api.md"
BEGIN, END = "<!-- headers: begin -->", "<!-- headers: end -->"
ENTRY = re.compile(r"^- `<([^>]+)>`", re.M)
# "et al." and "e.g." end no sentence.
SENTENCE_END = re.compile(r"(?<=[\w)`\"']\.)(?<!\bal\.)(?<!\.g\.)\s+")
TOKEN = re.compile(r"[A-Za-z_]\w*|::|->|.", re.S)
TYPE_WORDS = ("class", "struct", "union", "enum")
NO_FUNCTION = {"static_assert", "operator", "decltype", "alignas", "requires", "noexcept", "using", "friend", "typedef", "extern"}


def opening_sentence(text):
    """The first sentence of the comment that a header begins with; None without one."""
    if text.startswith("/*"):
        text = re.sub(r"^ ?\*", "//", "//" + text[2:].split("*/")[0], flags=re.M)
    words = []
    for line in text.splitlines():
        if not line.startswith("//") or not line[2:].strip():
            break
        words.append(line[2:].strip())
    sentence = SENTENCE_END.split(" ".join(words), maxsplit=1)[0].strip()
    return sentence.rstrip(".:;,") or None


def code_of(text):
    """C++ without comments, literals and preprocessor lines."""
    text = re.sub(r'R"(\w*)\(.*?\)\1"', '""', text, flags=re.S)
    text = re.sub(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|(?<!\w)'(?:\\.|[^'\\\n])*'", " ", text, flags=re.S)
    return re.sub(r"^\s*#(?:[^\n\\]|\\.|\\\n)*", "", text, flags=re.M)


def skip_brackets(tokens):
    """The tokens outside of (), [] and template <>; of an opening ( itself, the mark remains."""
    depth = {"(": 0, "[": 0, "<": 0}
    closing = {")": "(", "]": "[", ">": "<"}
    for token in tokens:
        outside = not any(depth.values())
        if token in depth and (token != "<" or depth["("] == 0):
            depth[token] += 1
            if outside and token == "(":
                yield token
        elif token in closing and depth[closing[token]]:
            depth[closing[token]] -= 1
        elif outside:
            yield token


class Names:
    """What one file defines or declares in named namespaces: (namespace, kind, name), kind "type" or "function"."""

    def __init__(self, text):
        self.found = set()
        self.scopes = []  # the name of each open namespace; None for any other brace
        statement = []
        for token in TOKEN.findall(code_of(text)):
            if token.isspace():
                continue
            if token == "{":
                self.begin(statement)
                statement = []
            elif token == "}":
                if self.scopes:
                    self.scopes.pop()
                statement = []
            elif token == ";":
                self.note(statement, body=False)
                statement = []
            else:
                statement.append(token)

    def begin(self, statement):
        if "namespace" in statement and "using" not in statement:
            self.scopes.append("".join(statement[statement.index("namespace") + 1:]) or "(anonymous)")
        elif statement[:1] == ["extern"] and len(statement) == 1:
            self.scopes.append("(C)")
        else:
            self.note(statement, body=True)
            self.scopes.append(None)

    def note(self, statement, body):
        if None in self.scopes or "(anonymous)" in self.scopes or "(C)" in self.scopes or not self.scopes:
            return
        words = list(skip_brackets(statement))
        if words[:1] == ["template"]:
            words = words[1:]
        kind, name = self.classify(words, body)
        # A specialisation was a template elsewhere.
        if name and not (kind == "type" and (name, "<") in zip(statement, statement[1:])):
            self.found.add(("::".join(self.scopes), kind, name))

    @staticmethod
    def classify(words, body):
        if not words or "static" in words or words[0] == "friend":
            return None, None
        if words[0] in TYPE_WORDS and "(" not in words[:2]:
            head = [word for word in words[1:] if word not in TYPE_WORDS and word not in ("final", "alignas", "(")]
            head = head[:head.index(":")] if ":" in head else head
            # `struct Outer::Inner` belongs to Outer.
            return ("type", head[0]) if body and len(head) == 1 else (None, None)
        if "(" in words and not NO_FUNCTION & set(words) and "=" not in words[:words.index("(")]:
            at = words.index("(")
            named = at > 1 and re.match(r"[A-Za-z_]", words[at - 1]) and words[at - 2] not in ("::", "~", ",")
            return ("function", words[at - 1]) if named else (None, None)
        return None, None


class Api:
    def __init__(self, root):
        self.root = root
        self.tree = check_layers.Tree(root)
        self.complaints = []
        self.folders = [name for name in self.tree.order if name in self.tree.libraries]
        self.n_headers = 0

    def public(self, folder):
        """The headers of a folder that users may include, sorted."""
        library = self.tree.libraries[folder]
        for name in sorted(library.arguments.get("HEADERS", [])):
            path = library.folder / name
            if not {"detail", "internal"} & set(path.parts):
                yield path

    def entry(self, path):
        file = self.root / path
        if not file.exists():
            self.complaints.append(f"{path}: is listed under HEADERS, but is not there")
            return ""
        text = file.read_text()
        sentence = opening_sentence(text)
        if sentence is None:
            self.complaints.append(f"{path}: does not begin with a comment that says what it offers")
        # Those it reopens for users: the outermost. Private ones inside are no offer.
        namespaces = dict.fromkeys(re.findall(r"^namespace ([\w:]+) \{", text, re.M))
        outermost = [name for name in namespaces if name.startswith("lockstep") and "internal" not in name.split("::")]
        if namespaces and not outermost and all(name.startswith("lockstep") for name in namespaces):
            self.complaints.append(f"{path}: offers users no name; move it to detail/")
        where = f" ({', '.join(f'`{name}`' for name in outermost)})" if outermost else ""
        return f"- `<{path}>`{where}: {sentence}."

    def page(self):
        """The generated part: from the top of the library down, as users look for things."""
        lines = []
        for folder in reversed(self.folders):
            headers = list(self.public(folder))
            if not headers:
                continue
            self.n_headers += len(headers)
            lines.append(f"\n### `lockstep::{folder}`{' (no libtorch)' if folder in self.tree.below else ''}")
            lines += map(self.entry, headers)
        return "\n".join(lines) + "\n\n"

    def check_page(self, write):
        path = self.root / PAGE
        text = path.read_text() if path.exists() else ""
        if BEGIN not in text or END not in text:
            self.complaints.append(f"{PAGE}: has no {BEGIN} and {END}")
            return
        head, rest = text.split(BEGIN, 1)
        listed, tail = rest.split(END, 1)
        wanted = self.page()
        if listed == wanted:
            return
        if write:
            path.write_text(head + BEGIN + wanted + END + tail)
            return
        before, after = ENTRY.findall(listed), ENTRY.findall(wanted)
        self.complaints += [f"{PAGE}: <{name}> is not listed" for name in after if name not in before]
        self.complaints += [f"{PAGE}: <{name}> is listed, but not for users" for name in before if name not in after]
        self.complaints.append(f"{PAGE}: the list is not what the headers say; run tools/check_api.py --write")

    def check_names(self):
        homes = defaultdict(lambda: defaultdict(list))
        for folder in self.folders:
            library = self.tree.libraries[folder]
            for source in library.sources():
                path = self.root / library.folder / source
                if not path.exists():
                    continue
                for name in Names(path.read_text(errors="replace")).found:
                    homes[name][folder].append(str(library.folder / source))
        for (namespace, kind, name), folders in sorted(homes.items()):
            private = "internal" in namespace.split("::")
            if len(folders) > 1 and (kind == "type" or private):
                places = ", ".join(sorted(places[0] for places in folders.values()))
                self.complaints.append(f"{namespace}::{name}: a {kind} of this name in several folders ({places}); "
                                       "rename one, or give a folder its own namespace")


def main():
    parser = complaints.parser(__doc__)
    parser.add_argument("--write", action="store_true", help=f"write the list in {PAGE}")
    arguments = parser.parse_args()
    api = Api(arguments.root)
    api.check_page(arguments.write)
    api.check_names()
    complaints.finish("api", api.complaints, f"{api.n_headers} public headers, all listed; no name belongs to two folders")


if __name__ == "__main__":
    main()
