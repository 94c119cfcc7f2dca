#!/usr/bin/env python3
"""Each test writes reports as GoogleTest does and expects the checker to let skips pass, or to name them."""

import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import check_skips  # noqa: E402

RAN = '<testcase name="Sets" status="run" result="completed" classname="Store" />'
SKIPPED = ('<testcase name="{name}" status="run" result="skipped" classname="{suite}">'
           '<skipped message="store_test.cpp:12&#x0A;{why}"><![CDATA[store_test.cpp:12]]></skipped></testcase>')
DISABLED = '<testcase name="DISABLED_Sets" status="notrun" result="suppressed" classname="Store" />'


def skipped(name="Chowns/2", suite="Files/Store", why="needs root, for chown"):
    return SKIPPED.format(name=name, suite=suite, why=why)


class CheckSkips(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.folder = Path(scratch.name)

    def report(self, *cases, name="store_test"):
        text = "".join(cases)
        (self.folder / f"{name}.xml").write_text(
            f'<?xml version="1.0"?><testsuites><testsuite name="Store">{text}</testsuite></testsuites>')

    def check(self, *lines):
        return check_skips.check(self.folder, [check_skips.Allowed(line, "skips.txt:1") for line in lines])

    def test_a_run_without_skips_is_clean(self):
        self.report(RAN)
        self.assertEqual(self.check(), ([], 0))

    def test_an_unexpected_skip_is_named_with_its_reason(self):
        self.report(RAN, skipped())
        complaints, expected = self.check("other_test Store.Chowns always needs root")
        self.assertEqual(complaints, ["store_test: Store.Chowns was skipped: needs root, for chown"])
        self.assertEqual(expected, 0)

    def test_an_expected_skip_is_counted(self):
        self.report(skipped())
        self.report(skipped(), name="store_test_1")  # the same program of another tree
        self.assertEqual(self.check("store_test Store.Ch* always needs root"), ([], 2))

    def test_another_case_or_reason_is_not_expected(self):
        self.report(skipped())
        self.assertEqual(self.check("store_test Store.Sets always needs root")[1], 0)
        self.assertEqual(self.check("store_test Store.Chowns always no such engine")[1], 0)

    def test_a_condition_that_does_not_hold_expects_nothing(self):
        self.report(skipped())
        for holds, expected in ((True, 1), (False, 0)):
            check_skips.CONDITIONS["unless-root"] = lambda holds=holds: holds
            self.assertEqual(self.check("store_test * unless-root needs root")[1], expected)

    def test_every_condition_can_be_asked(self):
        for condition in check_skips.CONDITIONS.values():
            self.assertIn(condition(), (True, False))

    def test_a_disabled_case_is_a_skip(self):
        self.report(DISABLED)
        self.assertEqual(self.check()[0], ["store_test: Store.DISABLED_Sets was skipped: disabled"])

    def test_no_reports_at_all_is_a_complaint(self):
        self.assertIn("no reports", self.check()[0][0])

    def test_the_list_in_the_tree_can_be_read(self):
        self.assertTrue(check_skips.read_allowed(check_skips.ALLOWED))

    def test_a_plug_in_that_was_not_built_is_a_complaint(self):
        self.report(RAN)
        command = [sys.executable, check_skips.__file__, self.folder, "--plugins", self.folder]
        missing = subprocess.run(command, capture_output=True, text=True)
        self.assertNotEqual(missing.returncode, 0)
        self.assertIn("lockstep_gloo.so was not built", missing.stdout)
        engines = self.folder / "lib/lockstep/engines"
        engines.mkdir(parents=True)
        for plugin in check_skips.PLUGINS:
            (engines / plugin).touch()
        self.assertEqual(subprocess.run(command, capture_output=True).returncode, 0)


if __name__ == "__main__":
    unittest.main()
