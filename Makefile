# The commands of the README. Each installs what it needs (tools/bootstrap.sh), says what it does, and builds
# nothing when nothing changed. TORCH=<version> takes another libtorch (tools/libtorch.txt), in a build folder of its own.
# The build itself is CMake's; see CMakePresets.json.
.DEFAULT_GOAL := help
.PHONY: run test test-long examples install bench parity timeline check format clean help

run:  ## train the example on every core of this machine
	@tools/bootstrap.sh build torch
	@tools/build.sh dev lockstep char_gpt
	@tools/run_example.sh

test:  ## build everything and run all tests
	@tools/bootstrap.sh build torch
	@tools/test.sh dev

test-long:  ## the same with every world size and the long schedules
	@tools/bootstrap.sh build torch
	@LOCKSTEP_TEST_LONG=1 tools/test.sh dev

examples:  ## build the examples and print how to run each
	@tools/bootstrap.sh build torch
	@tools/examples.sh

install:  ## build and install libraries, headers, launcher and plug-ins: make install PREFIX=/opt/lockstep
	@tools/bootstrap.sh build torch
	@tools/install.sh "$(PREFIX)"

bench:  ## measure lockstep beside its peers; writes build/bench/results.json
	@tools/bootstrap.sh build torch bench
	@tools/bench.sh

parity:  ## train the same with python torch and with lockstep, and compare every tensor
	@tools/bootstrap.sh build torch parity
	@tools/parity.sh

timeline:  ## draw a training step; DATA=<folder> draws logging_data of your own, one rank<N>.json per rank
	@$(if $(DATA),,tools/bootstrap.sh build torch)
	@tools/timeline.sh $(if $(DATA),--data "$(DATA)")

check:  ## layers, documents and format, no build
	@tools/bootstrap.sh format
	@python3 tools/check_layers.py
	@python3 tools/check_api.py
	@python3 tools/check_parity.py
	@python3 tools/check_docs.py
	@tools/format.sh --check

format:  ## format the sources, redraw the diagram in ARCHITECTURE.md and the list in docs/api.md
	@tools/bootstrap.sh format
	@tools/format.sh
	@python3 tools/check_layers.py --write
	@python3 tools/check_api.py --write

clean:  ## remove build/ (libtorch stays in the per-user cache)
	rm -rf build

help:
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
