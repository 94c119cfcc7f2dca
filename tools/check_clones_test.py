#!/usr/bin/env python3
"""Each test plants one path of the clone and expects the checker to name it."""

import sys
import tempfile
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import check_clones  # noqa: E402


class CheckClones(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.root = Path(scratch.name)
        (self.root / "build").mkdir()

    def check(self, flags="", text='#include "lockstep/a.cpp"\n'):
        source = self.root / "build/unity_0.cpp"
        source.write_text(text)
        command = f"c++ -I{self.root} -ffile-prefix-map={self.root}/= {flags} -o a.o -c {source}"
        return check_clones.check(self.root, [{"file": str(source), "command": command}])

    def test_paths_that_the_cache_makes_relative_are_fine(self):
        self.assertEqual(self.check(r"-DPLUGIN=\"../../plugin.so\" -DNDEBUG -DVERSION=1"), [])

    def test_a_definition_that_names_the_clone_is_named(self):
        self.assertEqual(self.check(rf"-DPLUGIN=\"{self.root}/plugin.so\""),
                         [f'build/unity_0.cpp: PLUGIN names the clone: "{self.root}/plugin.so"'])

    def test_a_definition_that_must_is_not(self):
        self.assertEqual(self.check(rf"-DCHAR_GPT_TEXT=\"{self.root}\""), [])

    def test_a_written_source_that_names_the_clone_is_named(self):
        self.assertEqual(self.check(text=f'#include "{self.root}/lockstep/a.cpp"\n'), ["build/unity_0.cpp: its text names the clone"])


if __name__ == "__main__":
    unittest.main()
