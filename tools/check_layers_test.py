#!/usr/bin/env python3
"""Each test plants one violation in a small tree and expects the checker to name it."""

import sys
import tempfile
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import check_layers  # noqa: E402

CLEAN = {
    "CMakeLists.txt": """
add_subdirectory(lockstep/base)
add_subdirectory(lockstep/store)
add_subdirectory(lockstep/engine)
# ---- libtorch begins above this line ----
add_subdirectory(lockstep/group)
add_subdirectory(lockstep)
add_subdirectory(launch)
""",
    "lockstep/CMakeLists.txt": "lockstep_library(lockstep HEADERS lockstep.h DEPENDS group)",
    "lockstep/base/CMakeLists.txt": "lockstep_library(base SOURCES base.cpp detail/mutex.h HEADERS base.h DEPENDS)",
    "lockstep/store/CMakeLists.txt": """
lockstep_library(store  # the stores
  SOURCES store.cpp HEADERS store.h DEPENDS base)
lockstep_test(store_test SOURCES store_test.cpp DEPENDS store)
lockstep_test(wire_test SOURCES wire_test.cpp DEPENDS store BAND tensor)
""",
    "lockstep/engine/CMakeLists.txt": "lockstep_library(engine SOURCES engine.cpp HEADERS engine_abi.h plugin.h DEPENDS base)",
    "lockstep/group/CMakeLists.txt": "lockstep_library(group SOURCES group.cpp HEADERS group.h DEPENDS store engine)",
    "launch/CMakeLists.txt": "lockstep_program(lockstep SOURCES main.cpp DEPENDS store)",
    "lockstep/lockstep.h": '#include "lockstep/group/group.h"',
    "lockstep/base/base.h": "#include <string>",
    "lockstep/base/detail/mutex.h": "#include <mutex>",
    "lockstep/base/base.cpp": '#include "lockstep/base/base.h"\n#include <fmt/format.h>',
    "lockstep/store/store.h": '#include "lockstep/base/base.h"',
    "lockstep/store/store.cpp": '#include "lockstep/store/internal/table.h"',
    "lockstep/store/internal/table.h": "#include <map>",
    "lockstep/store/store_test.cpp": '#include <gtest/gtest.h>\n#include "lockstep/store/internal/table.h"',
    "lockstep/store/wire_test.cpp": "#include <torch/csrc/distributed/c10d/TCPStore.hpp>",
    "lockstep/engine/engine_abi.h": "#include <stdint.h>",
    "lockstep/engine/plugin.h": '#include <string>\n#include "lockstep/engine/engine_abi.h"',
    "lockstep/group/group.h": '#include <ATen/core/Tensor.h>\n#include "lockstep/base/base.h"',
    "launch/main.cpp": '#include "lockstep/store/store.h"\n#include <spdlog/spdlog.h>',
    "engines/mpi/mpi.c": '#include <mpi.h>\n#include "lockstep/engine/engine_abi.h"',
    "engines/mpi/wait.cpp": '#include "lockstep/base/detail/mutex.h"',
    "tests/plugins/tiny.c": '#include "lockstep/engine/engine_abi.h"',
    "examples/train.cpp": "#include <lockstep/lockstep.h>\n#include <torch/torch.h>",
}


class CheckLayers(unittest.TestCase):
    def tree(self, **changes):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        root = Path(scratch.name)
        marks = f"{check_layers.BEGIN}\n{check_layers.END}\n"
        for name, text in {**CLEAN, "ARCHITECTURE.md": marks, **changes.get("files", {})}.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        tree = check_layers.Tree(root)
        tree.check()
        return tree

    def expect(self, name, text, complaint):
        violations = [str(v) for v in self.tree(files={name: text}).violations]
        self.assertEqual(len(violations), 1, violations)
        self.assertIn(name, violations[0])
        self.assertIn(complaint, violations[0])

    def test_a_clean_tree_has_no_violations(self):
        self.assertEqual([str(v) for v in self.tree().violations], [])

    def test_torch_below_the_torch_line(self):
        for header in ("torch/torch.h", "ATen/core/Tensor.h", "c10/util/Half.h"):
            self.expect("lockstep/store/store.cpp", f"#include <{header}>", "no torch below the torch line")

    def test_torch_in_the_command(self):
        self.expect("launch/main.cpp", "#include <torch/torch.h>", "no torch below the torch line")

    def test_torch_in_a_test_of_the_comm_band(self):
        self.expect("lockstep/store/store_test.cpp", "#include <torch/torch.h>", "no torch below the torch line")

    def test_an_upward_include(self):
        self.expect("lockstep/store/store.cpp", '#include "lockstep/group/group.h"', "upward arrow store -> group")

    def test_an_undeclared_include(self):
        self.expect("lockstep/engine/engine.cpp", '#include "lockstep/store/store.h"', "undeclared arrow engine -> store")

    def test_an_undeclared_include_of_the_command(self):
        self.expect("launch/main.cpp", '#include "lockstep/engine/engine_abi.h"', "undeclared arrow launch -> engine")

    def test_an_upward_arrow_in_the_build(self):
        self.expect("lockstep/store/CMakeLists.txt",
                    "lockstep_library(store SOURCES store.cpp HEADERS store.h DEPENDS base engine)\n"
                    "lockstep_test(store_test SOURCES store_test.cpp)\n"
                    "lockstep_test(wire_test SOURCES wire_test.cpp BAND tensor)", "upward arrow: store -> engine")

    def test_an_arrow_to_a_folder_that_does_not_exist(self):
        self.expect("lockstep/group/CMakeLists.txt",
                    "lockstep_library(group SOURCES group.cpp DEPENDS store engine mesh)", "mesh, which no folder declares")

    def test_the_umbrella_header_from_inside(self):
        self.expect("lockstep/group/group.cpp", '#include "lockstep/lockstep.h"', "upward arrow group -> lockstep")

    def test_another_folders_internal_header(self):
        self.expect("lockstep/group/group.cpp", '#include "lockstep/store/internal/table.h"', "internal/ is private")

    def texts(self, files):
        return [str(v) for v in self.tree(files=files).violations]

    def test_an_installed_header_that_includes_an_internal_one(self):
        self.expect("lockstep/store/store.h", '#include "lockstep/store/internal/table.h"', "nothing of internal/")

    def test_an_internal_header_that_is_installed(self):
        text = "lockstep_library(store SOURCES store.cpp HEADERS store.h internal/table.h DEPENDS base)"
        found = self.texts({"lockstep/store/CMakeLists.txt": text})
        self.assertIn("lockstep/store/internal/table.h: internal/ is not installed: list it under SOURCES", found)

    def test_a_header_beside_its_source_that_is_not_installed(self):
        found = self.texts({"lockstep/store/table.h": "", "lockstep/store/store.cpp": '#include "lockstep/store/table.h"'})
        self.assertEqual(found, ["lockstep/store/table.h: is not installed (HEADERS): move it to internal/, or list it"])

    def test_a_header_of_detail_is_installed_where_a_public_one_needs_it(self):
        files = {"lockstep/base/base.h": '#include "lockstep/base/detail/mutex.h"'}
        found = list(map(str, self.tree(files=files).violations))
        self.assertEqual(found, ["lockstep/base/detail/mutex.h: is not installed, but a public header needs it: "
                                 "list it under HEADERS"])
        files["lockstep/base/CMakeLists.txt"] = "lockstep_library(base SOURCES base.cpp HEADERS base.h detail/mutex.h DEPENDS)"
        self.assertEqual(self.tree(files=files).violations, [])

    def test_a_header_of_detail_that_no_public_one_needs_is_not_installed(self):
        text = "lockstep_library(base SOURCES base.cpp HEADERS base.h detail/mutex.h DEPENDS)"
        found = list(map(str, self.tree(files={"lockstep/base/CMakeLists.txt": text}).violations))
        self.assertEqual(found, ["lockstep/base/detail/mutex.h: is installed, but no public header needs it: "
                                 "list it under SOURCES"])

    def test_a_header_for_tests_need_not_be_installed(self):
        self.assertEqual(self.texts({
            "lockstep/store/store_testing.h": "",
            "lockstep/store/store_test.cpp": '#include "lockstep/store/store_testing.h"'}), [])

    def test_an_installed_header_that_runs_code_before_main(self):
        for line in ("inline const bool registered = register_it(make);", "static std::string name = make_name();"):
            self.expect("lockstep/base/base.h", line, "runs no code before main")
        for line in ("inline constexpr int kSize = size_of();", "inline int size() { return count(); }",
                     "inline constexpr int kSizes[] = {1, 2};", "static int count(int n);",
                     "inline std::string name(int n = size()) {"):
            self.assertEqual(self.texts({"lockstep/base/base.h": line}), [], line)

    def test_fmt_in_a_header(self):
        self.expect("lockstep/base/base.h", "#include <fmt/format.h>", "no fmt or spdlog in a header")

    def test_fmt_in_the_tensor_band(self):
        self.expect("lockstep/group/group.cpp", "#include <fmt/format.h>", "clash")

    def test_a_relative_path(self):
        self.expect("lockstep/base/base.cpp", '#include "../store/store.h"', "path from the root")

    def test_a_plug_in_that_includes_more_than_the_abi(self):
        for name in ("engines/mpi/mpi.c", "tests/plugins/tiny.c"):
            self.expect(name, '#include "lockstep/base/base.h"', "a plug-in includes nothing of lockstep")
        self.expect("tests/plugins/tiny.c", '#include "lockstep/base/detail/mutex.h"', "a plug-in includes nothing of lockstep")

    def test_a_plug_in_header_that_plug_ins_cannot_compile(self):
        for name in ("engine/plugin.h", "base/detail/mutex.h"):
            self.expect(f"lockstep/{name}", '#include "lockstep/base/base.h"', "for plug-ins")

    def test_a_lock_that_clang_cannot_check(self):
        for lock in ("std::mutex m;", "std::lock_guard l(m);", "std::condition_variable c;"):
            self.expect("lockstep/store/store.cpp", lock, "base::Mutex")
        self.assertEqual(self.tree(files={"lockstep/store/store_test.cpp": "std::mutex m;",
                                          "lockstep/base/detail/mutex.h": "std::mutex m;"}).violations, [])

    def test_a_plug_in_that_knows_tensors(self):
        self.expect("engines/mpi/mpi.c", "#include <ATen/core/Tensor.h>", "not tensors")

    def test_an_abi_header_that_needs_cpp(self):
        self.expect("lockstep/engine/engine_abi.h", "#include <string>", "needs <stddef.h> and <stdint.h> only")

    def test_an_example_that_looks_inside(self):
        self.expect("examples/train.cpp", '#include "lockstep/group/group.h"', "examples include")

    def test_a_missing_torch_line(self):
        text = CLEAN["CMakeLists.txt"].replace(check_layers.TORCH_LINE, "")
        violations = [str(v) for v in self.tree(files={"CMakeLists.txt": text}).violations]
        self.assertIn("no comment", violations[0])

    def test_a_folder_without_a_row_is_named(self):
        tree = self.tree()
        names = ["base", "store", "engine", "lockstep.h", "launch"]
        (tree.root / "ARCHITECTURE.md").write_text("".join(f"| `lockstep/{name}` | it |\n" for name in names))
        tree.check_rows()
        self.assertEqual(len(tree.violations), 1, [str(v) for v in tree.violations])
        self.assertIn("lockstep/group", str(tree.violations[0]))

    def test_a_stale_diagram_is_a_violation_until_written(self):
        tree = self.tree()
        tree.check_diagram(write=False)
        self.assertIn("diagram", str(tree.violations.pop()))
        tree.check_diagram(write=True)
        tree.check_diagram(write=False)
        self.assertEqual(tree.violations, [])
        drawn = (tree.root / "ARCHITECTURE.md").read_text()
        self.assertIn("launch/     -> store\n", drawn)
        self.assertIn("  group/    -> engine, store\n----------", drawn)
        self.assertNotIn("engine, store, base", drawn)  # implied by the other two


if __name__ == "__main__":
    unittest.main()
