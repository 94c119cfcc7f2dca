#!/usr/bin/env python3
"""Each test plants one mistake in a small page and expects the checker to name it."""

import sys
import tempfile
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import check_parity  # noqa: E402

PAGE = """# Parity

## A. Stores (4 rows)
| row | behaviour | state | where | test |
|---|---|---|---|---|
| A1 | set | done | store.cpp | store_test: Store.Sets, Store.G* (all of them); contract_test: Contract.* |
| A2 | get | better (waits (a while)) | store.cpp | store_test: Store.Gets/Empty |
| A3 | watch | partly (no callback) | store.cpp | |
| A4 | multicast | not | | |

## B. Groups (1 row)
| row | behaviour | state | where | test |
|---|---|---|---|---|
| B1 | a rule | moot (for users) | | |
"""
TREE = {
    "lockstep/store/CMakeLists.txt": """
lockstep_library(store SOURCES store.cpp)
add_library(contract OBJECT contract.cpp)
lockstep_test(store_test  # the stores
  SOURCES store_test.cpp ${generated} DEPENDS store)
lockstep_gloo_test(contract_test SOURCES instance.cpp LINK contract TIMEOUT 3)
""",
    "lockstep/store/store_test.cpp": "TEST(Store, Sets) {}\nTEST_F(Store, Gets) {}\n",
    "lockstep/store/instance.cpp": "INSTANTIATE_TEST_SUITE_P(Store, Contract, Values(1));",
    "lockstep/store/contract.cpp": "TEST_P(Contract,\n       Holds) {}\n",
    "build/dev/CMakeLists.txt": "lockstep_test(stale_test SOURCES ../../lockstep/store/store_test.cpp)",
}


class CheckParity(unittest.TestCase):
    def page(self, text):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        root = Path(scratch.name)
        for name, content in {**TREE, "docs/parity.md": text}.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        return check_parity.check(root)

    def expect(self, before, after, *complaints):
        self.assertIn(before, PAGE)
        found = self.page(PAGE.replace(before, after)).complaints
        self.assertEqual(len(found), len(complaints), found)
        for complaint, text in zip(found, complaints):
            self.assertIn(text, complaint)

    def test_a_clean_page_has_no_complaints(self):
        page = self.page(PAGE)
        self.assertEqual(page.complaints, [])
        self.assertEqual(page.counts, {"done": 1, "better": 1, "partly": 1, "not": 1, "moot": 1})

    def test_a_row_that_is_missing(self):
        self.expect("| A4 | multicast | not | | |\n", "", "A4 is missing")

    def test_a_row_that_is_there_twice(self):
        self.expect("| A4 ", "| A3 ", "A3 is there twice", "A4 is missing")

    def test_a_row_beyond_the_section(self):
        self.expect("| B1 |", "| B2 |", "B2 does not belong", "B1 is missing")

    def test_a_row_in_another_section(self):
        self.expect("| B1 |", "| A1 |", "A1 does not belong in section B", "B1 is missing")

    def test_rows_out_of_order(self):
        self.expect("| A3 | watch | partly (no callback) | store.cpp | |\n| A4 | multicast | not | | |",
                    "| A4 | multicast | not | | |\n| A3 | watch | partly (no callback) | store.cpp | |", "not in order")

    def test_a_heading_without_its_number_of_rows(self):
        self.expect("## B. Groups (1 row)", "## B. Groups", "without its number", "B1 does not belong")

    def test_a_section_that_is_there_twice(self):
        self.expect("## B. Groups (1 row)", "## A. Groups (1 row)", "section A is there twice", "B1 does not belong",
                    "A1 is missing")

    def test_a_column_too_few(self):
        self.expect("| A4 | multicast | not | | |", "| A4 | multicast | not | |", "4 columns")

    def test_other_columns(self):
        self.expect("## B. Groups (1 row)\n| row | behaviour |", "## B. Groups (1 row)\n| row | words |", "columns are")

    def test_a_state_that_is_none(self):
        self.expect("| not |", "| nearly |", "the state is")
        self.expect("moot (for users)", "moot, for users", "the state is")

    def test_a_behaviour_that_is_not_told(self):
        self.expect("| multicast |", "| |", "A4 does not tell its behaviour")

    def test_a_partly_row_that_does_not_say_what_is_missing(self):
        self.expect("partly (no callback)", "partly", "A3 is partly there")

    def test_a_done_row_that_is_nowhere(self):
        self.expect("| store.cpp | store_test: Store.Gets/Empty", "| | store_test: Store.Gets/Empty", "where it is")

    def test_a_done_row_without_a_test(self):
        self.expect("store_test: Store.Gets/Empty", "", "A2 is better, but names no test")
        self.expect("store_test: Store.Gets/Empty", "(by eye)", "A2 is better, but names no test")

    def test_a_test_that_does_not_exist(self):
        self.expect("Store.Sets,", "Store.Sits,", "store_test has no test 'Store.Sits'")
        self.expect("Store.G*", "Store.X*", "store_test has no test 'Store.X*'")
        self.expect("| A3 | watch | partly (no callback) | store.cpp | |",
                    "| A3 | watch | partly (no callback) | store.cpp | store_test: Store.Watches |", "no test 'Store.Watches'")

    def test_a_test_of_another_binary(self):
        self.expect("contract_test: Contract.*", "store_test: Contract.*", "store_test has no test 'Contract.*'")

    def test_a_binary_that_does_not_exist(self):
        self.expect("contract_test:", "wire_test:", "no test binary 'wire_test'")
        self.expect("contract_test:", "stale_test:", "no test binary 'stale_test'")

    def test_a_binary_without_names(self):
        self.expect("contract_test: Contract.*", "contract_test", "which tests of contract_test?")


if __name__ == "__main__":
    unittest.main()
