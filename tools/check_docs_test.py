#!/usr/bin/env python3
"""Each test plants one dead pointer in a small tree of pages and expects the checker to name it."""

import sys
import tempfile
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import check_docs  # noqa: E402

PAGE = """# Title
[page](docs/a.md), [part](docs/a.md#two-words-and-more), [here](#title), [away](https://example.org/x), `[&](x)`
Run `make run` or `tools/run.sh`.
```
make run     trains
launch/x -- examples/train
```
"""


class CheckDocs(unittest.TestCase):
    def complaints(self, page):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        root = Path(scratch.name)
        for name, text in {"README.md": page, "docs/a.md": "## Two words, and `more`\n```\n# Comment\n```\n",
                           "Makefile": "run:  ## train\n\ttrain\n", "tools/run.sh": "", "examples/train.cpp": ""}.items():
            (root / name).parent.mkdir(exist_ok=True)
            (root / name).write_text(text)
        return check_docs.Pages(root).complaints

    def expect(self, before, after, complaint):
        self.assertIn(before, PAGE)
        found = self.complaints(PAGE.replace(before, after, 1))
        self.assertEqual(len(found), 1, found)
        self.assertIn(complaint, found[0])

    def test_pages_without_dead_pointers_are_clean(self):
        self.assertEqual(self.complaints(PAGE), [])

    def test_a_link_to_nothing(self):
        self.expect("(docs/a.md)", "(docs/b.md)", "README.md:2: (docs/b.md) points to nothing")

    def test_an_anchor_that_no_heading_has(self):
        self.expect("#two-words-and-more", "#two", "no such heading")
        self.expect("#two-words-and-more", "#comment", "no such heading")
        self.expect("(#title)", "(#titel)", "no such heading")

    def test_a_make_target_that_does_not_exist(self):
        self.expect("make run     trains", "make runs    trains", "README.md:5: `make runs`")
        self.expect("`make run`", "`make test`", "README.md:3: `make test`")

    def test_a_path_that_does_not_exist(self):
        self.expect("`tools/run.sh`", "`tools/walk.sh`", "`tools/walk.sh` does not exist")
        self.expect("examples/train", "examples/test", "`examples/test` does not exist")


if __name__ == "__main__":
    unittest.main()
