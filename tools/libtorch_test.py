#!/usr/bin/env python3
"""Tests of how a libtorch is chosen: the pins, the scripts that read TORCH, cmake/FindLibtorch.cmake. Nothing is fetched."""

import os
import re
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

TOOLS = Path(__file__).resolve().parent
ROOT = TOOLS.parent
sys.path.insert(0, str(TOOLS))
import fetch_libtorch  # noqa: E402
import torch_needs  # noqa: E402

FINDER = (ROOT / "cmake" / "FindLibtorch.cmake").read_text()
DEFAULT = re.search(r"LIBTORCH_DEFAULT_VERSION (\S+)\)", FINDER).group(1)
NEWEST = re.search(r"LIBTORCH_NEWEST_TESTED (\S+)\)", FINDER).group(1)
CHOICES = ("TORCH", "LIBTORCH_ROOT", "Torch_DIR", "XDG_CACHE_HOME")


def run(*command, **variables):
    environment = {k: v for k, v in os.environ.items() if k not in CHOICES} | variables
    return subprocess.run([str(word) for word in command], env=environment, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)


def number(version):
    return tuple(int(part) for part in version.split("."))


class Pins(unittest.TestCase):
    sections = fetch_libtorch.read_pins(fetch_libtorch.PINS.read_text())

    def test_each_version_has_three_wheels_with_a_hash(self):
        for version, lines in self.sections.items():
            self.assertTrue(lines[0].startswith(f"torch=={version} "))
            names = [re.fullmatch(r"([\w-]+)==\S+ --hash=sha256:[0-9a-f]{64}", line).group(1) for line in lines]
            self.assertEqual(names, ["torch", "nvidia-cuda-cupti", "nvidia-cuda-runtime"])

    def test_the_default_is_among_them_and_the_last_is_the_newest_tested(self):
        self.assertIn(DEFAULT, self.sections)
        self.assertEqual(list(self.sections), sorted(self.sections, key=number))
        self.assertEqual(number(list(self.sections)[-1])[:2], number(NEWEST))

    def test_a_version_without_pins_is_refused_with_those_that_have_some(self):
        answer = run(sys.executable, TOOLS / "fetch_libtorch.py", "2.10.0")
        self.assertEqual(answer.returncode, 1)
        self.assertIn("2.10.0", answer.stdout)
        for version in self.sections:
            self.assertIn(version, answer.stdout)


class BuildFolder(unittest.TestCase):
    def folder(self, preset, **variables):
        return run(TOOLS / "build_dir.sh", preset, **variables).stdout.strip()

    def test_every_libtorch_has_its_own(self):
        self.assertEqual(self.folder("dev"), "build/dev")
        self.assertEqual(self.folder("dev", TORCH=DEFAULT), "build/dev")
        self.assertEqual(self.folder("dev", TORCH="2.99.0"), "build/dev-torch-2.99.0")
        self.assertEqual(self.folder("release", LIBTORCH_ROOT="/somewhere"), "build/release-own-torch")

    def test_presets_without_libtorch_have_one(self):
        self.assertEqual(self.folder("tsan", TORCH="2.99.0"), "build/tsan")

    def test_two_libtorches_at_once_are_refused(self):
        answer = run(TOOLS / "bootstrap.sh", "torch", TORCH="2.99.0", LIBTORCH_ROOT="/somewhere")
        self.assertEqual(answer.returncode, 2)
        self.assertIn("name two libtorches", answer.stdout)


class Finder(unittest.TestCase):
    """A project that only looks for libtorch, and folders that look like one."""

    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.scratch = Path(scratch.name)
        (self.scratch / "CMakeLists.txt").write_text(
            "cmake_minimum_required(VERSION 3.25)\nproject(finder LANGUAGES NONE)\n"
            f'list(APPEND CMAKE_MODULE_PATH "{ROOT}/cmake")\n'
            "set_property(GLOBAL PROPERTY TARGET_SUPPORTS_SHARED_LIBS TRUE)\n"
            'find_package(Libtorch ${ASKED} REQUIRED)\nmessage(STATUS "found ${Libtorch_VERSION} ${Libtorch_ROOT_DIR}")\n')

    def libtorch(self, version):
        folder = self.scratch / "lockstep" / f"libtorch-{version}"
        (folder / "lib").mkdir(parents=True)
        (folder / "lib" / "libtorch_cpu.so").touch()
        header = folder / "include" / "torch" / "headeronly" / "version.h"
        header.parent.mkdir(parents=True)
        parts = zip(("MAJOR", "MINOR", "PATCH"), version.split("."))
        header.write_text("".join(f"#define TORCH_VERSION_{name} {value}\n" for name, value in parts))
        return folder

    def configure(self, *arguments, **variables):
        return run("cmake", "-S", self.scratch, "-B", self.scratch / "build", *arguments,
                   XDG_CACHE_HOME=str(self.scratch), **variables)

    def test_an_old_libtorch_is_refused(self):
        answer = self.configure("-DASKED=2.11", LIBTORCH_ROOT=str(self.libtorch("2.10.0")))
        self.assertNotEqual(answer.returncode, 0)
        self.assertRegex(answer.stdout, r'unsuitable version "2\.10\.0",\s+but\s+required\s+is\s+at\s+least\s+"2\.11"')
        self.assertIn("find_package(Libtorch 2.11 REQUIRED)", (ROOT / "CMakeLists.txt").read_text())

    def test_a_libtorch_newer_than_was_tested_warns(self):
        answer = self.configure("-DASKED=2.11", LIBTORCH_ROOT=str(self.libtorch("2.99.0")))
        self.assertEqual(answer.returncode, 0, answer.stdout)
        self.assertRegex(answer.stdout, r"2\.99\.0\s+is\s+newer\s+than")

    def test_another_version_in_the_same_build_tree_is_found_anew(self):
        first, second = self.libtorch(DEFAULT), self.libtorch("2.98.0")
        self.assertIn(f"found {DEFAULT} {first}", self.configure().stdout)
        self.assertIn(f"found 2.98.0 {second}", self.configure("-DLIBTORCH_VERSION=2.98.0").stdout)
        self.assertIn(f"found {DEFAULT} {first}", self.configure("-ULIBTORCH_VERSION").stdout)

    def test_what_was_built_with_a_version_looks_for_that_one(self):
        self.libtorch(DEFAULT)
        wanted = self.libtorch("2.98.0")
        self.assertIn(f"found 2.98.0 {wanted}", self.configure("-DASKED=2.98.0;EXACT").stdout)

    def test_a_missing_version_is_named_with_how_to_fetch_it(self):
        answer = self.configure("-DLIBTORCH_VERSION=2.98.0")
        self.assertNotEqual(answer.returncode, 0)
        self.assertIn("fetch_libtorch.py 2.98.0", " ".join(answer.stdout.split()))


class Needs(unittest.TestCase):
    def test_what_import_torch_does_not_load_is_left_out(self):
        metadata = ("Requires-Dist: filelock\nRequires-Dist: setuptools<82\nRequires-Dist: triton==3.6.0; os == \"x\"\n"
                    "Requires-Dist: cuda-toolkit[cudart,cusolver,nvtx]==13.2.2; platform_system == \"Linux\"\n"
                    "Requires-Dist: pyyaml; extra == \"pyyaml\"\n")
        self.assertEqual(list(torch_needs.needs(metadata)),
                         ["filelock", 'cuda-toolkit[cudart]==13.2.2 ; platform_system == "Linux"'])


if __name__ == "__main__":
    unittest.main()
