#!/usr/bin/env python3
"""Tests of the harness itself, with contenders of a few lines."""

import os
import sys
import tempfile
import types
import unittest
import unittest.mock
import xml.dom.minidom

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import compare  # noqa: E402
from harness import aims, plot, rounds, table, timeline, two_hosts  # noqa: E402
from harness.contender import Contender, ContenderError  # noqa: E402
from harness.suites import SUITES, default_ranks  # noqa: E402

READY = "import sys\nprint('{\"ready\":true}', flush=True)\n"


def contender(body):
    made = Contender("test", [sys.executable, "-c", READY + body], os.devnull)
    made.start()
    return made


class CompareTest(unittest.TestCase):
    def test_ratios_are_of_the_same_turn(self):
        # A machine that slows down from turn to turn slows down both.
        before, after, ratio, low, high = compare.summary([1, 2, 4, 8], [2, 4, 8, 16])
        self.assertEqual((before, after, ratio, low, high), (3, 6, 2, 2, 2))


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


class AimsTest(unittest.TestCase):
    def held(self, words, records, cores=2):
        """The one aim whose text has these words."""
        found = [a for a in aims.hold_against(records, cores) if words in a["aim"]]
        self.assertEqual(len(found), 1, words)
        return found[0]["met"]

    def test_an_aim_is_met_missed_or_not_measured(self):
        self.assertIs(self.held("of the limit", all_reduce_records(1.2)), True)
        self.assertIs(self.held("of the limit", all_reduce_records(1.3)), False)
        self.assertIsNone(self.held("Open MPI", all_reduce_records(1.2)))

    def test_one_row_that_misses_decides(self):
        self.assertIs(self.held("of the limit", [all_reduce_records(1.0)[0], all_reduce_records(9.0)[1]]), False)

    def test_one_row_without_a_number_leaves_the_aim_open(self):
        good, other = all_reduce_records(1.0)
        del other["ratio_limit"]
        self.assertIsNone(self.held("of the limit", [good, other]))

    def test_aims_about_two_cores_are_held_only_there(self):
        slow = [{"suite": "barrier", "kind": "barrier", "case": "engine", "ranks": 8, "bytes": 0, "lockstep": 21.0}]
        self.assertIs(self.held("8 ranks", slow, cores=2), False)
        self.assertEqual(aims.hold_against(slow, 16), [])

    def test_each_collective_must_beat_open_mpi(self):
        shape = {"suite": "collectives", "case": "staged", "ranks": 2, "bytes": 25 << 20}
        records = [{**shape, "kind": kind, "ratio_openmpi": 0.4} for kind in ("broadcast", "all_gather")]
        self.assertIs(self.held("staged broadcast", records), True)
        self.assertIs(self.held("staged broadcast", records + [{**shape, "kind": "exchange", "ratio_openmpi": 0.6}]), False)
        # Not one of those that the aim is about.
        self.assertIs(self.held("staged broadcast", records + [{**shape, "kind": "gather", "ratio_openmpi": 0.6}]), True)

    def test_a_rate_has_a_lower_bound(self):
        add = {"suite": "store", "case": "add", "clients": 4}
        self.assertIs(self.held("250,000", [{**add, "lockstep_per_s": 250_000}]), True)
        self.assertIs(self.held("250,000", [{**add, "lockstep_per_s": 249_999}]), False)

    def test_zero_must_be_quicker_and_halve_the_state(self):
        zero = {"suite": "ddp_step", "case": "1024x8_zero_adam", "ranks": 2, "ratio_adam": 0.9, "state_share": 0.5}
        self.assertIs(self.held("faster than plain", [zero]), True)
        self.assertIs(self.held("faster than plain", [{**zero, "ratio_adam": 1.1}]), False)
        self.assertIs(self.held("half the optimizer's state", [zero]), True)
        self.assertIs(self.held("half the optimizer's state", [{**zero, "state_share": 0.6}]), False)

    def test_views_cost_no_memory_and_copies_one_copy(self):
        rows = [{"suite": "ddp_step", "case": f"1024x8_{mode}", "ranks": 2, "extra_gradients": extra}
                for mode, extra in (("views", 0.0), ("copies", 1.0))]
        self.assertIs(self.held("with bucket views: none", rows), True)
        self.assertIs(self.held("without bucket views", rows), True)
        rows[0]["extra_gradients"] = rows[1]["extra_gradients"] = 1.1
        self.assertIs(self.held("with bucket views: none", rows), False)
        self.assertIs(self.held("without bucket views", rows), False)

    def test_calls_and_remote_backward_have_aims(self):
        shape = {"suite": "rpc", "ranks": 2}
        self.assertIs(self.held("1 MiB both ways", [{**shape, "case": "sync", "bytes": 1 << 20, "lockstep": 200}]), True)
        self.assertIs(self.held("16 MiB both ways", [{**shape, "case": "sync", "bytes": 16 << 20, "lockstep": 8001}]), False)
        # Over TCP the same call has an aim of its own.
        self.assertIs(self.held("loopback TCP", [{**shape, "case": "sync_tcp", "bytes": 4, "lockstep": 60}]), True)
        self.assertIsNone(self.held("4 B both ways, 2 cores", [{**shape, "case": "sync_tcp", "bytes": 4, "lockstep": 60}]))
        self.assertIs(self.held("150,000", [{**shape, "case": "async", "bytes": 4, "lockstep_per_s": 149_999}]), False)
        modes = [{**shape, "case": f"backward_{mode}", "bytes": 4, "lockstep": us} for mode, us in (("smart", 151), ("fast", 9))]
        self.assertIs(self.held("remote Linear", modes), False)

    def test_every_suite_has_an_aim_and_a_table(self):
        self.assertEqual({aim.where["suite"] for aim in aims.AIMS}, set(SUITES))
        self.assertEqual(set(table.SUITES), set(SUITES))


def all_reduce_records(ratio):
    ours, limit = [{"us": 10.0 * ratio}] * 3, [{"us": 10.0}] * 3
    shape = {"suite": "all_reduce", "kind": "all_reduce", "ranks": 2, "bytes": 1 << 20, "unit": "us"}
    return [rounds.compare({**shape, "case": "zero_copy" + tail}, ours, {"limit": limit, "openmpi": []})
            for tail in ("", "_rotating")]


def other_records():
    """One or two records of every suite but all_reduce."""
    shape = {"ranks": 4, "bytes": 25 << 20, "lockstep": 3.0, "openmpi": 9.0, "torch": 99.0}
    return [
        {**shape, "suite": "collectives", "kind": "gather", "case": "zero_copy"},
        {**shape, "suite": "collectives", "kind": "gather", "case": "staged", "lockstep": 5.0},
        {**shape, "suite": "barrier", "kind": "barrier", "case": "engine", "bytes": 0},
        {**shape, "suite": "barrier", "kind": "barrier", "case": "call", "bytes": 0, "lockstep": 5.0},
        {**shape, "suite": "two_hosts", "kind": "all_reduce", "case": "hierarchical", "probe": 2.0},
        {"suite": "store", "case": "get", "clients": 1, "lockstep": 1.0, "torch": 2.0},
        {**shape, "suite": "ddp_step", "case": "1024x8_views", "local": 2.0, "ranks": 2, "extra_bytes": 0},
        {**shape, "suite": "rpc", "case": "sync"},
        {**shape, "suite": "dtensor", "case": "P -> R", "kind": "shared", "bare": 2.0, "fresh": 4.0},
    ]


class ReportTest(unittest.TestCase):
    def test_the_table_shows_the_records_numbers(self):
        text = table.suite_table("all_reduce", all_reduce_records(1.5))
        self.assertIn("| 2     | 1 MiB | zero_copy ", text)
        self.assertIn("1.50 (1.50..1.50)", text)
        self.assertNotIn("openmpi", text)  # nobody measured it

    def test_small_ratios_keep_two_digits(self):
        record = rounds.compare({"case": "sync", "bytes": 4}, [{"us": 1.3}], {"torch": [{"us": 100.0}]})
        self.assertIn("0.013 (0.013..0.013)", table.suite_table("rpc", [record]))

    def test_every_suite_has_its_rows_in_a_table(self):
        for record in other_records():
            line = table.suite_table(record["suite"], [record]).splitlines()[2]
            self.assertIn(f" {record['lockstep']:g} ", line)

    def test_pictures_are_well_formed(self):
        with tempfile.TemporaryDirectory() as folder:
            made = plot.draw(all_reduce_records(1.2) + other_records(), folder)
            self.assertEqual(sorted(os.path.basename(p) for p in made),
                             ["all_reduce_hot.svg", "all_reduce_rotating.svg", "barrier.svg", "collectives_4.svg",
                              "ddp_step.svg", "dtensor.svg", "rpc.svg", "store.svg", "two_hosts.svg"])
            for path in made:
                xml.dom.minidom.parse(path)

    def test_a_picture_shows_both_our_cases_beside_the_others(self):
        groups = plot.joined(other_records()[:2], lambda r: r["kind"], {"zero_copy": "zero_copy", "staged": "staged"})
        self.assertEqual([(label, group["zero_copy"], group["staged"], group["openmpi"]) for label, group in groups],
                         [("gather", 3.0, 5.0, 9.0)])


class TimelineTest(unittest.TestCase):
    def picture(self, data):
        with tempfile.TemporaryDirectory() as folder:
            timeline.draw([data], f"{folder}/step.svg", "a step")
            return xml.dom.minidom.parse(f"{folder}/step.svg").documentElement

    def bars(self, picture, colour):
        """(x, width) of each, without the one in the legend."""
        found = [bar for bar in picture.getElementsByTagName("rect") if bar.getAttribute("fill") == colour]
        return [(float(bar.getAttribute("x")), float(bar.getAttribute("width"))) for bar in found][1:]

    def test_a_bucket_is_split_where_backward_stops_computing(self):
        milli = 1_000_000
        data = {"rank": 0, "forward_compute_time_start": 0, "forward_compute_time_end": 10 * milli,
                "backward_compute_time_start": 10 * milli, "backward_compute_time_end": 30 * milli,
                "backward_time_end": 40 * milli, "parameter_ready_time": [5 * milli, 20 * milli, -1],
                "bucket_ready_time": [5 * milli, 16 * milli, 20 * milli], "bucket_started_time": [5 * milli, 16 * milli, -1],
                "bucket_done_time": [10 * milli, 24 * milli, -1], "bucket_sizes": [4, 4, 4], "rebuilt_bucket_sizes": [],
                "backward_comm_time": 13 * milli, "backward_compute_comm_overlap_time": 9 * milli}
        picture = self.picture(data)
        (first, first_width), (second, second_width) = self.bars(picture, timeline.HIDDEN)
        [(exposed, exposed_width)] = self.bars(picture, timeline.REDUCING)
        self.assertAlmostEqual(second - first, 11 / 5 * first_width, delta=0.5)
        self.assertAlmostEqual(second_width / first_width, 4 / 5, delta=0.02)
        self.assertAlmostEqual(exposed, second + second_width, delta=0.2)
        self.assertAlmostEqual(exposed_width, second_width, delta=0.2)
        words = [node.firstChild.data for node in picture.getElementsByTagName("text")]
        self.assertIn("left out", words)
        self.assertIn("69 % hidden", words)


class SuiteTest(unittest.TestCase):
    def options(self, folder, **more):
        return types.SimpleNamespace(out=folder, contenders=folder, quick=False, rounds=2, budget_ms=10,
                                     python_torch=None, ranks=default_ranks(2), **more)

    def test_ranks_follow_the_cores(self):
        self.assertEqual(default_ranks(2), {"all_reduce": [2, 4], "collectives": [2, 4], "barrier": [2, 4, 8],
                                            "ddp_step": [2, 4], "growth": [2, 8, 32, 64, 128]})
        self.assertEqual(default_ranks(16)["collectives"], [2, 4, 8, 16])

    def test_contenders_are_started_with_their_ranks_and_those_not_built_are_named(self):
        with tempfile.TemporaryDirectory() as folder:
            program = os.path.join(folder, "collective_limit")
            with open(program, "w", encoding="utf-8") as out:
                out.write(f"#!{sys.executable}\n{READY}for line in sys.stdin: print('{{\"us\":%s}}' % "
                          "sys.argv[1].split('=')[1], flush=True)\n")
            os.chmod(program, 0o755)
            suite = SUITES["barrier"](self.options(folder))
            self.addCleanup(suite.stop)
            suite.start(8)
            self.assertEqual(list(suite.contenders), ["limit"])
            self.assertEqual(suite.contenders["limit"].measure(a=1), {"us": 8})
            self.assertIn("was not built", suite.missing["lockstep 8"])

    def test_steps_count_every_case_of_every_part(self):
        suite = SUITES["barrier"](self.options("/nowhere"))
        self.assertEqual(suite.n_steps(), 3)
        suite = SUITES["collectives"](self.options("/nowhere"))
        self.assertEqual(suite.n_steps(), 9 * (4 + 2))

    def test_a_ddp_step_is_held_against_its_local_step_and_pytorchs(self):
        suite = SUITES["ddp_step"](self.options("/nowhere"))
        us = {"lockstep": {"local": 10.0, "views": 11.0, "copies": 12.0}, "torch": {"local": 12.0, "views": 24.0, "copies": 30.0}}

        def answering(name):
            return types.SimpleNamespace(measure=lambda **request: {
                "us": us[name][request["mode"]], "gradient_bytes": 8, "extra_bytes": 8 * (request["mode"] == "copies")})
        suite.contenders = {name: answering(name) for name in us}
        with unittest.mock.patch.object(suite, "cases", lambda _: ["1024x8"]):
            views, copies = suite.run(2, unittest.mock.Mock())
        self.assertEqual((views["ratio_local"], views["ratio_torch"], views["torch_slowdown"]), (1.1, 0.4583, 2.0))
        self.assertEqual((views["extra_gradients"], copies["extra_gradients"]), (0.0, 1.0))
        text = table.suite_table("ddp_step", [views, copies])
        self.assertIn("| torch/torch_local | extra memory |", text)
        self.assertNotIn("adam", text)

    def test_calls_between_workers_are_held_against_pytorchs(self):
        suite = SUITES["rpc"](self.options("/nowhere"))
        us = {"lockstep": {"sync": 10.0, "async": 4.0, "smart": 30.0, "fast": 20.0},
              "torch": {"sync": 100.0, "async": 100.0, "backward": 300.0}}

        def answering(name):
            def measure(**request):
                found = us[name][request.get("mode", request["kind"])]
                return {"us": found, "per_s": 1e6 / found, "local_us": 50.0, "whole_us": found + 50.0}
            return types.SimpleNamespace(measure=measure)
        suite.contenders = {name: answering(name) for name in us}
        by_row = {(r["case"], r["bytes"]): r for part in suite.parts() for r in suite.run(part, unittest.mock.Mock())}
        self.assertEqual(list(by_row), [("sync", 4), ("sync", 1 << 20), ("sync", 16 << 20), ("async", 4),
                                        ("backward_smart", 1 << 15), ("backward_fast", 1 << 15), ("sync_tcp", 4)])
        self.assertEqual(by_row["sync_tcp", 4]["ratio_torch"], 0.1)
        self.assertEqual(by_row["async", 4]["lockstep_per_s"], 250_000)
        smart, fast = (by_row[f"backward_{mode}", 1 << 15] for mode in ("smart", "fast"))
        self.assertEqual((smart["ratio_torch"], fast["lockstep"], fast["lockstep_local"]), (0.1, 20.0, 50.0))
        text = table.suite_table("rpc", list(by_row.values()))
        self.assertIn("| 80 - 50 ", text)
        self.assertIn("| 250,000 ", text)
        self.assertTrue(all(a["met"] for a in aims.hold_against(by_row.values(), 2)))

    def test_dtensors_are_held_against_what_was_measured_in_the_same_request(self):
        suite = SUITES["dtensor"](self.options("/nowhere"))
        ours = {"add": {"us": 2.0, "plain_us": 1.4}, "mul_": {"us": 3.0, "plain_us": 1.5},
                "mlp": {"us": 10.5, "hand_us": 10.0}, "move": {"us": 10.0, "bare_us": 10.0, "fresh_us": 20.0, "copied_us": 16.0}}
        suite.contenders = {
            "lockstep": types.SimpleNamespace(measure=lambda **request: ours[request["kind"]]),
            "torch": types.SimpleNamespace(measure=lambda **request: {"us": 20.0, "plain_us": 4.0})}
        records = list(suite.run("", unittest.mock.Mock()))
        self.assertEqual(len(records), 3 + 2 * 6)
        add, _, mlp, gathered = records[:4]
        self.assertEqual((add["over_plain"], add["torch_over_plain"], add["ratio_torch"]), (0.6, 16.0, 0.1))
        self.assertEqual((mlp["ratio_hand"], mlp["ratio_torch"]), (1.05, 0.525))
        self.assertEqual((gathered["case"], gathered["kind"], gathered["ratio_fresh"]), ("S(0) -> R", "shared", 0.5))
        self.assertTrue(all(a["met"] for a in aims.hold_against(records)))
        self.assertIn("| shared memory ", table.suite_table("dtensor", records))
        self.assertIs(aims.hold_against([{**add, "over_plain": 0.8}])[0]["met"], False)

    def test_two_hosts_are_left_out_with_a_reason_where_there_can_be_none(self):
        suite = SUITES["two_hosts"](self.options("/nowhere"))
        with unittest.mock.patch.object(two_hosts, "why_not", lambda: "only root may"):
            suite.start(4)
        suite.stop()
        self.assertEqual(suite.missing, {"all of it": "only root may"})
        self.assertEqual(list(suite.run(4, unittest.mock.Mock())), [])


if __name__ == "__main__":
    unittest.main()
