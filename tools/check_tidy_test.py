#!/usr/bin/env python3
"""The batches, flags and cache keys of the checker; and, where there is a clang-tidy, one finding."""

import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent))
import check_layers  # noqa: E402
import check_tidy  # noqa: E402

TREE = {
    ".clang-tidy": "Checks: '-*,bugprone-integer-division,clang-diagnostic-thread-safety*'\nWarningsAsErrors: '*'\n",
    "CMakeLists.txt": "add_subdirectory(lockstep/base)\n# libtorch begins above this line\nadd_subdirectory(lockstep/group)\n",
    "lockstep/base/CMakeLists.txt": "lockstep_library(base SOURCES a.cpp kernels.cpp internal/c.h HEADERS a.h DEPENDS)",
    "lockstep/base/a.h": '#include "lockstep/base/b.h"\n',
    "lockstep/base/b.h": "inline double half(int x) { return x / 2.0; }\n",
    "lockstep/base/a.cpp": '#include "lockstep/base/a.h"\n',
    "lockstep/base/kernels.cpp": "// foreach_target.h\n",
    "lockstep/group/CMakeLists.txt": "lockstep_library(group SOURCES g.cpp HEADERS DEPENDS base)",
    "lockstep/group/g.cpp": "",
    "engines/mpi/CMakeLists.txt": "add_library(lockstep_mpi MODULE\n  m.cpp half.cpp)\n",
    "engines/mpi/m.cpp": "",
    "engines/mpi/half.cpp": '__builtin_cpu_supports("f16c")',
}


class CheckTidy(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.root = Path(scratch.name).resolve() / "tree"
        for name, text in TREE.items():
            self.put(name, text)
        self.database = [
            {"command": f"g++ -Wall -DX=1 -I{self.root} -isystem /opt -O2 -std=c++20 -o lockstep/{folder}/CMakeFiles/lockstep_{folder}.dir/x.o x.cpp"}
            for folder in ("base", "group")]
        environment = mock.patch.dict("os.environ", {"XDG_CACHE_HOME": str(self.root / "cache")})
        environment.start()
        self.addCleanup(environment.stop)

    def put(self, name, text):
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def batches(self):
        return list(check_tidy.batches_of(check_layers.Tree(self.root), self.database))

    def test_sources_of_the_comm_band_are_batched_and_those_of_several_targets_are_alone(self):
        self.assertEqual([batch.sources for batch in self.batches()], [["lockstep/base/a.cpp"], ["lockstep/base/kernels.cpp"]])

    def test_a_plug_in_is_one_of_them_where_it_is_built(self):
        self.database.append({"command": self.database[0]["command"].replace("lockstep/base/", "engines/mpi/").replace("_base", "_mpi")})
        self.assertEqual([batch.sources for batch in self.batches()][2:], [["engines/mpi/m.cpp"]], "and not what clang cannot read")

    def test_only_flags_that_change_what_is_read_are_taken(self):
        self.assertEqual(self.batches()[0].flags, ["-DX=1", f"-I{self.root}", "-isystem", "/opt", "-std=c++20"])

    def test_what_one_source_is_compiled_with_is_given_to_all_of_its_folder(self):
        self.database.append({"command": self.database[0]["command"].replace("-DX=1", "-DX=1 -D Y=2")})
        self.assertEqual(self.batches()[0].flags, ["-DX=1", f"-I{self.root}", "-isystem", "/opt", "-std=c++20", "-D", "Y=2"])

    def test_a_folder_that_the_build_tree_does_not_have(self):
        del self.database[0]
        self.assertRaises(KeyError, self.batches)

    def test_a_key_changes_with_every_header_that_is_reached(self):
        key = self.batches()[0].key("14", "rules")
        self.assertEqual(key, self.batches()[0].key("14", "rules"))
        self.assertNotEqual(key, self.batches()[0].key("15", "rules"))
        self.assertNotEqual(key, self.batches()[0].key("14", "others"))
        self.put("lockstep/base/b.h", "inline double half(int x) { return x / 2; }\n")
        self.assertNotEqual(key, self.batches()[0].key("14", "rules"))

    @unittest.skipIf(check_tidy.find_tidy() is None, "no clang-tidy")
    def test_a_finding_in_a_header_is_told_until_it_is_mended(self):
        runner = check_tidy.Runner(self.root, check_tidy.find_tidy())
        self.put("lockstep/base/b.h", "inline double half(int x) { return x / 2; }\n")
        for n_run in (1, 2):
            self.assertIn("lockstep/base/b.h:1:36: error: result of integer division", runner.run(self.batches()[0]))
            self.assertEqual(runner.n_run, n_run)
        self.put("lockstep/base/b.h", TREE["lockstep/base/b.h"])
        for _ in range(2):
            self.assertEqual(runner.run(self.batches()[0]), "")
        self.assertEqual(runner.n_run, 3, "what is clean is not looked at again")

    @unittest.skipIf(check_tidy.find_tidy() is None, "no clang-tidy")
    def test_a_member_that_is_used_without_its_mutex_is_a_finding(self):
        header = "lockstep/base/detail/mutex.h"
        self.put(header, (Path(__file__).resolve().parent.parent / header).read_text())
        text = (f'#include "{header}"\n'
                "struct Jobs {\n  int count() { LOCK return n_; }\n"
                "  lockstep::base::Mutex mutex_;\n  int n_ LOCKSTEP_GUARDED_BY(mutex_) = 0;\n};\n")
        runner = check_tidy.Runner(self.root, check_tidy.find_tidy())
        self.put("lockstep/base/b.h", text.replace("LOCK ", ""))
        self.assertIn("error: reading variable 'n_' requires holding mutex 'mutex_'", runner.run(self.batches()[0]))
        self.put("lockstep/base/b.h", text.replace("LOCK ", "const lockstep::base::MutexLock lock(mutex_); "))
        self.assertEqual(runner.run(self.batches()[0]), "")


if __name__ == "__main__":
    unittest.main()
