#!/usr/bin/env python3
"""Each test plants one mistake in a small tree and expects the checker to name it."""

import sys
import tempfile
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import check_api  # noqa: E402

TREE = {
    "CMakeLists.txt": "add_subdirectory(lockstep/base)\nadd_subdirectory(lockstep/store)\n# libtorch begins above this line\n",
    "lockstep/base/CMakeLists.txt":
        "lockstep_library(base SOURCES text.cpp internal/secret.h HEADERS text.h detail/fd.h c_abi.h DEPENDS)",
    "lockstep/base/text.h": """// Text. More about it.
#pragma once
namespace lockstep {
class Text;
enum class Kind : int { kOne };
void print(const Text& text, int n = f(1));
template <class T>
struct Holder { void close(); };
}
""",
    "lockstep/base/text.cpp": """namespace lockstep::internal {
struct State { int x; };
void close(State& state) { if (state.x) { return; } }
State::State() : x{1}, y_(2) {}
namespace { struct Hidden {}; void hide() {} }
static void local() {}
}
""",
    "lockstep/base/internal/secret.h": "// Nobody's.\n",
    "lockstep/base/detail/fd.h": "// A descriptor.\nnamespace lockstep::base { class Fd {}; }\n",
    "lockstep/base/c_abi.h": "/* A table (Lin et al. 2018, e.g. this): in C. Words.\n * More. */\n",
    "lockstep/store/CMakeLists.txt": "lockstep_library(store SOURCES store.cpp HEADERS store.h DEPENDS base)",
    "lockstep/store/store.h": """// A store, for example
//
//   Store store;
namespace lockstep {
class Store final : public Base {};
template <>
struct Holder<Store> {};
void print(const Store& store);
namespace internal {
struct State;
}
}
""",
    "lockstep/store/store.cpp": """namespace lockstep::internal {
namespace { struct Hidden {}; void hide() {} }
static void local() {}
struct Other {};
}
""",
    "docs/api.md": f"# Headers\n{check_api.BEGIN}{check_api.END}\n",
}
LIST = """
### `lockstep::store` (no libtorch)
- `<lockstep/store/store.h>` (`lockstep`): A store, for example.

### `lockstep::base` (no libtorch)
- `<lockstep/base/c_abi.h>`: A table (Lin et al. 2018, e.g. this): in C.
- `<lockstep/base/text.h>` (`lockstep`): Text.

"""


class CheckApi(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.root = Path(scratch.name)
        for name, text in TREE.items():
            self.put(name, text)
        self.check(write=True)

    def put(self, name, text):
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def change(self, name, before, after):
        text = (self.root / name).read_text()
        self.assertIn(before, text)
        self.put(name, text.replace(before, after, 1))

    def check(self, write=False):
        api = check_api.Api(self.root)
        api.check_page(write)
        api.check_names()
        return api.complaints

    def expect(self, *parts):
        found = self.check()
        self.assertEqual(len(found), len(parts), found)
        for complaint, part in zip(found, parts):
            self.assertIn(part, complaint)

    def test_the_written_list_has_every_public_header_and_no_other(self):
        self.assertEqual((self.root / "docs/api.md").read_text(), f"# Headers\n{check_api.BEGIN}{LIST}{check_api.END}\n")
        self.expect()

    def test_a_header_that_is_not_listed(self):
        self.change("docs/api.md", "- `<lockstep/base/text.h>` (`lockstep`): Text.\n", "")
        self.expect("<lockstep/base/text.h> is not listed", "run tools/check_api.py --write")

    def test_a_header_of_detail_that_is_listed(self):
        self.change("docs/api.md", "- `<lockstep/base/text.h>`", "- `<lockstep/base/detail/fd.h>`: A.\n- `<lockstep/base/text.h>`")
        self.expect("<lockstep/base/detail/fd.h> is listed, but not for users", "--write")

    def test_a_header_that_is_listed_twice(self):
        self.change("docs/api.md", "- `<lockstep/base/text.h>`", "- `<lockstep/base/text.h>`: Text.\n- `<lockstep/base/text.h>`")
        self.expect("--write")

    def test_a_header_that_says_something_else_now(self):
        self.change("lockstep/base/text.h", "// Text.", "// Texts.")
        self.expect("--write")
        self.check(write=True)
        self.expect()

    def test_a_renamed_header_needs_no_more_than_a_write(self):
        (self.root / "lockstep/base/text.h").rename(self.root / "lockstep/base/words.h")
        self.change("lockstep/base/CMakeLists.txt", "text.h", "words.h")
        self.expect("words.h> is not listed", "text.h> is listed, but not for users", "--write")
        self.check(write=True)
        self.expect()

    def test_a_header_that_does_not_say_what_it_offers(self):
        self.change("lockstep/store/store.h", "// A store, for example", "#pragma once")
        self.assertTrue(any("store.h: does not begin with a comment" in found for found in self.check()))

    def test_a_header_that_is_private_from_end_to_end(self):
        self.put("lockstep/base/text.h", "// Text.\nnamespace lockstep::internal {\n}\n")
        self.assertTrue(any("text.h: offers users no name; move it to detail/" in found for found in self.check()))

    def test_a_header_that_is_not_there(self):
        (self.root / "lockstep/store/store.h").unlink()
        self.assertTrue(any("store.h: is listed under HEADERS, but is not there" in found for found in self.check()))

    def test_a_page_without_marks(self):
        self.put("docs/api.md", "# Headers\n")
        self.expect("docs/api.md: has no")

    def test_a_type_in_two_folders(self):
        self.change("lockstep/store/store.cpp", "struct Other {};", "struct alignas(64) State final : Base { int y; };")
        self.expect("lockstep::internal::State: a type of this name in several folders (lockstep/base/text.cpp, lockstep/store/store.cpp)")
        self.change("lockstep/store/store.cpp", "struct alignas(64) State final : Base { int y; };", "struct State;")
        self.expect()

    def test_a_type_in_two_folders_of_the_public_namespace(self):
        self.change("lockstep/store/store.h", "class Store final", "enum class Kind { kTwo };\nclass Store final")
        self.expect("lockstep::Kind: a type of this name")

    def test_a_function_in_two_folders_of_a_private_namespace(self):
        self.change("lockstep/store/store.cpp", "struct Other {};", "template <class T>\nstd::vector<T> close(const T& other);")
        self.expect("lockstep::internal::close: a function of this name")

    def test_names_of_other_scopes_are_no_twins(self):
        self.change("lockstep/store/store.cpp", "struct Other {};",
                    'struct Other { struct State {}; void close(); }; struct Other::State {};  // struct State {};\n'
                    'void Other::close() { close(1); }\nconst char* text = "struct State {";\nnamespace deeper { struct State {}; }')
        self.expect()


if __name__ == "__main__":
    unittest.main()
