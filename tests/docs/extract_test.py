#!/usr/bin/env python3
"""Small pages in, C++ out."""

import sys
import tempfile
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import extract  # noqa: E402

MAIN = "int main() { return lockstep::run_main(train); }"
PROGRAM = f"```cpp\n#include <lockstep/lockstep.h>\n{MAIN}\n```\n"


class Extract(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.root = Path(scratch.name)
        (self.root / "docs").mkdir()
        (self.root / "tests/docs/context").mkdir(parents=True)
        self.out = self.root / "out"
        self.out.mkdir()

    def extract(self, readme="", **pages):
        (self.root / "README.md").write_text(readme)
        for name, text in pages.items():
            (self.root / "docs" / f"{name}.md").write_text(text)
        self.counts = extract.extract(self.root, self.out)
        return (self.out / "fragments.cpp").read_text()

    def programs(self):
        return (self.out / "programs.txt").read_text()

    def test_a_fragment_becomes_a_function_in_its_pages_namespace(self):
        text = self.extract(ddp="# DDP\n\n```cpp\nstep();\n```\n")
        self.assertIn('namespace page_ddp {\n\nvoid fragment_1() {\n#line 4 "docs/ddp.md"\nstep();\n}\n}', text)

    def test_declarations_stand_in_the_namespace(self):
        text = self.extract(nn="<!-- cpp: declarations -->\n```cpp\nvoid f();\n```\n")
        self.assertIn("void f();", text)
        self.assertNotIn("fragment_1", text)

    def test_includes_and_registrations_move_up_and_keep_their_lines(self):
        text = self.extract(rpc="```cpp\n#include <a.h>\nLOCKSTEP_RPC_FUNCTION(f);\ncall();\n```\n")
        order = [text.index(part) for part in
                 ("#include <a.h>", "namespace page_rpc", '#line 3 "docs/rpc.md"\nLOCKSTEP_RPC', "void fragment_1", "call();")]
        self.assertEqual(order, sorted(order))
        self.assertIn('#line 2 "docs/rpc.md"\n\n\ncall();', text)

    def test_a_page_may_have_a_context(self):
        (self.root / "tests/docs/context/ddp.h").write_text("extern int net;")
        self.assertIn('namespace page_ddp {\n#include "tests/docs/context/ddp.h"', self.extract(ddp="```cpp\nnet;\n```\n"))

    def test_a_context_that_no_fragment_uses_is_a_mistake(self):
        (self.root / "tests/docs/context/ddp.h").write_text("extern int net;")
        with self.assertRaisesRegex(extract.Mistake, "no fragments"):
            self.extract(ddp="# DDP\n")

    def test_a_program_is_a_file_of_its_own_as_it_stands(self):
        text = self.extract(PROGRAM)
        self.assertNotIn("main", text)
        self.assertEqual((self.out / "readme_1.cpp").read_text(),
                         f'#line 2 "README.md"\n#include <lockstep/lockstep.h>\n{MAIN}\n')
        self.assertEqual(self.programs(), "readme_1=\n")

    def test_a_program_that_dies_of_an_exception_by_sigabrt_is_a_mistake(self):
        with self.assertRaisesRegex(extract.Mistake, "docs/a.md:2: .*run_main"):
            self.extract(a="```cpp\nint main() { init_process_group(); }\n```\n")

    def test_a_program_may_be_run(self):
        self.extract("<!-- cpp: run -n 3 -->\n" + PROGRAM)
        self.assertEqual(self.programs(), "readme_1=3\n")

    def test_a_block_may_be_left_out_with_a_reason(self):
        self.assertNotIn("...", self.extract(ddp="<!-- cpp: skip, a signature -->\n```cpp\nf(...)\n```\n"))
        self.assertEqual(self.counts["skip"], 1)

    def test_a_mark_that_does_not_fit_is_a_mistake(self):
        for mark, block in (("skip", "x;"), ("run -n 2", "x;"), ("declarations", "int main() {}"), ("runs", "int main() {}")):
            with self.assertRaisesRegex(extract.Mistake, "docs/a.md:3: .* does not fit"):
                self.extract(a=f"<!-- cpp: {mark} -->\n```cpp\n{block}\n```\n")

    def test_a_mark_before_no_block_is_a_mistake(self):
        with self.assertRaisesRegex(extract.Mistake, "docs/a.md:2: .* before no"):
            self.extract(a="<!-- cpp: declarations -->\ntext\n```cpp\nx;\n```\n")

    def test_other_languages_are_left_alone(self):
        self.extract(a="```c\nint x;\n```\n```\nmake run\n```\n")
        self.assertEqual(sum(self.counts.values()), 0)

    def test_a_block_without_an_end_is_a_mistake(self):
        with self.assertRaisesRegex(extract.Mistake, "no end"):
            self.extract(a="```cpp\nx;\n")

    def test_files_that_did_not_change_are_not_written(self):
        self.extract(PROGRAM)
        before = (self.out / "readme_1.cpp").stat().st_mtime_ns
        self.extract(PROGRAM)
        self.assertEqual((self.out / "readme_1.cpp").stat().st_mtime_ns, before)


if __name__ == "__main__":
    unittest.main()
