#!/usr/bin/env python3
"""What the Makefile's commands promise and no build is needed to see."""

import json
import os
import re
import subprocess
import sys
import tempfile
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TIMELINE = os.path.join(ROOT, "benchmarks/timeline.py")

# Logging data of one step with one bucket, in nanoseconds.
STEP = {"rank": 0, "forward_compute_time_start": 0, "forward_compute_time_end": 2000000,
        "backward_compute_time_start": 2000000, "backward_compute_time_end": 6000000, "backward_time_end": 7000000,
        "parameter_ready_time": [1000000, -1], "bucket_ready_time": [1000000], "bucket_started_time": [1500000],
        "bucket_done_time": [4500000], "bucket_sizes": [4096], "rebuilt_bucket_sizes": [],
        "backward_comm_time": 3000000, "backward_compute_comm_overlap_time": 2500000}


def run(*words):
    return subprocess.run(words, capture_output=True, text=True, timeout=60)


class Timeline(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)

    def write(self, rank, data):
        with open(os.path.join(self.folder.name, f"rank{rank}.json"), "w", encoding="utf-8") as file:
            json.dump(data, file)

    def test_draws_a_users_own_step(self):
        self.write(0, STEP)
        self.write(1, {**STEP, "rank": 1})
        done = run(sys.executable, TIMELINE, "--data", self.folder.name)
        self.assertEqual(done.returncode, 0, done.stderr)
        with open(os.path.join(self.folder.name, "timeline.svg"), encoding="utf-8") as picture:
            text = picture.read()
        for words in ("rank 0", "rank 1", "One step, 2 ranks", "bucket 0, 4"):
            self.assertIn(words, text)

    def test_names_the_file_that_is_not_there(self):
        done = run(sys.executable, TIMELINE, "--data", self.folder.name)
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("rank0.json", done.stderr)

    def test_says_what_the_data_lacks(self):
        self.write(0, {key: value for key, value in STEP.items() if key != "bucket_done_time"})
        done = run(sys.executable, TIMELINE, "--data", self.folder.name)
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("bucket_done_time", done.stderr)


class TimelineBuild(unittest.TestCase):
    """`make timeline` in a tree that has no benchmarks; CTest tells which."""

    def test_the_program_that_is_drawn_can_be_built(self):
        tree = os.environ.get("LOCKSTEP_BUILD_DIR")
        if not tree:
            self.skipTest("no build folder is given")
        with open(os.path.join(ROOT, "tools/timeline.sh"), encoding="utf-8") as script:
            target = re.search(r"tools/build\.sh \S+ (\w+)", script.read()).group(1)
        known = run("ninja", "-C", tree, "-t", "targets", "all").stdout
        self.assertRegex(known, rf"(?m)^{target}:")


class HalfInstalledMpi(unittest.TestCase):
    def usable(self, folder):
        script = (f'set(MPI_C_FOUND TRUE)\nset(MPI_C_INCLUDE_DIRS "{folder}")\nset(MPI_C_LIBRARIES mpi)\n'
                  f'include("{ROOT}/cmake/UsableMpi.cmake")\nlockstep_usable_mpi(usable)\nmessage("usable: ${{usable}}")\n')
        with tempfile.NamedTemporaryFile("w", suffix=".cmake") as file:
            file.write(script)
            file.flush()
            return run("cmake", "-P", file.name).stderr

    def test_is_not_used(self):
        self.assertIn("usable: FALSE", self.usable("/no/such/folder"))

    def test_a_whole_one_is(self):
        self.assertIn("usable: TRUE", self.usable(ROOT))


class Examples(unittest.TestCase):
    def test_the_readme_gives_every_one_its_program_and_ranks(self):
        with open(os.path.join(ROOT, "README.md"), encoding="utf-8") as readme:
            rows = re.findall(r"^\| \[(\w+)\]\(examples/[^)]*\) \| `-n (\d) -- ([\w/]+)` \|", readme.read(), re.M)
        told = {name: (int(ranks), program) for name, ranks, program in rows}
        known = {}
        with open(os.path.join(ROOT, "examples/CMakeLists.txt"), encoding="utf-8") as lists:
            for name, ranks in re.findall(r"^lockstep_example\((\w+)(?: RANKS (\d))?\)", lists.read(), re.M):
                known[name] = (int(ranks or 2), f"examples/{name}")
        for name in ("char_gpt", "torchscript"):
            known[name] = (2, f"examples/{name}/{name}")
        self.assertEqual(told, known)


if __name__ == "__main__":
    unittest.main()
