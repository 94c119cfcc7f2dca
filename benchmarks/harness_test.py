#!/usr/bin/env python3
"""Tests of the harness itself, with contenders of a few lines."""

import os
import sys
import tempfile
import unittest
import xml.dom.minidom

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from harness import aims, plot, rounds, table  # noqa: E402
from harness.contender import Contender, ContenderError  # noqa: E402

READY = "import sys\nprint('{\"ready\":true}', flush=True)\n"


def contender(body):
    made = Contender("test", [sys.executable, "-c", READY + body], os.devnull)
    made.start()
    return made


class ContenderTest(unittest.TestCase):
    def test_answers_each_request(self):
        c = contender("for line in sys.stdin: print('{\"us\":%d}' % len(line.split()), flush=True)")
        self.addCleanup(c.stop)
        self.assertEqual(c.measure(a=1, b=2), {"us": 2})
        self.assertEqual(c.measure(a=1), {"us": 1})

    def test_an_error_ends_it_for_good(self):
        c = contender("sys.stdin.readline(); print('{\"error\":\"a wrong sum\"}', flush=True)")
        self.addCleanup(c.stop)
        for _ in range(2):
            with self.assertRaisesRegex(ContenderError, "a wrong sum"):
                c.measure(a=1)

    def test_a_silent_one_is_ended(self):
        c = contender("import time\nsys.stdin.readline(); time.sleep(1000)")
        self.addCleanup(c.stop)
        with self.assertRaisesRegex(ContenderError, "no answer"):
            c.measure(timeout_s=0.1, a=1)
        self.assertIsNotNone(c.process.wait(timeout=10))

    def test_a_dead_one_is_told_apart(self):
        c = contender("sys.exit(3)")
        self.addCleanup(c.stop)
        with self.assertRaises(ContenderError):
            c.measure(a=1)


class RoundsTest(unittest.TestCase):
    def test_each_round_begins_with_the_next_contender(self):
        order = []
        entries = {key: (lambda key=key: order.append(key) or {"us": 1.0}) for key in "abc"}
        rounds.alternate(entries, 2, lambda _: None)
        self.assertEqual("".join(order), "abcbca")

    def test_the_ratio_is_the_median_of_per_round_ratios(self):
        ours = [{"us": x} for x in (1.0, 20.0, 3.0)]
        theirs = [{"us": x} for x in (1.0, 10.0, 1.0)]
        self.assertEqual(rounds.ratio(ours, theirs), (2.0, [1.0, 3.0]))

    def test_a_failed_contender_leaves_no_numbers(self):
        calls = []

        def fails_second():
            calls.append(1)
            if len(calls) == 2:
                raise ContenderError("gone")
            return {"us": 1.0}
        answers, failures = rounds.alternate({"x": fails_second, "y": lambda: {"us": 2.0}}, 3, lambda _: None)
        self.assertEqual(answers, {"x": [], "y": [{"us": 2.0}] * 3})
        self.assertEqual(failures, {"x": "gone"})
        record = rounds.compare({}, answers["x"], {"limit": answers["y"]})
        self.assertIsNone(record["lockstep"])
        self.assertEqual(record["limit"], 2.0)
        self.assertNotIn("ratio_limit", record)


class ReportTest(unittest.TestCase):
    def records(self, ratio):
        ours, limit = [{"us": 10.0 * ratio}] * 3, [{"us": 10.0}] * 3
        shape = {"suite": "all_reduce", "ranks": 2, "bytes": 1 << 20, "unit": "us"}
        return [rounds.compare({**shape, "case": "zero_copy" + tail}, ours, {"limit": limit, "openmpi": []})
                for tail in ("", "_rotating")]

    def test_aims_are_met_missed_or_not_measured(self):
        self.assertEqual([a["met"] for a in aims.hold_against(self.records(1.5))], [True, None])
        self.assertEqual([a["met"] for a in aims.hold_against(self.records(1.6))], [False, None])

    def test_one_row_that_misses_decides(self):
        records = [self.records(1.0)[0], self.records(9.0)[1]]
        self.assertIs(aims.hold_against(records)[0]["met"], False)

    def test_the_table_shows_the_records_numbers(self):
        text = table.suite_table("all_reduce", self.records(1.5))
        self.assertIn("| 1 MiB | zero_copy ", text)
        self.assertIn("1.50 (1.50..1.50)", text)

    def test_pictures_are_well_formed(self):
        store = {"suite": "store", "case": "get", "clients": 1, "lockstep": 1.0, "torch": 2.0}
        with tempfile.TemporaryDirectory() as folder:
            made = plot.draw(self.records(1.2) + [store], folder)
            self.assertEqual([os.path.basename(p) for p in made],
                             ["all_reduce_hot.svg", "all_reduce_rotating.svg", "store.svg"])
            for path in made:
                xml.dom.minidom.parse(path)


if __name__ == "__main__":
    unittest.main()
