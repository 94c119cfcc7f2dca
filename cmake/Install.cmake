# find_package(lockstep CONFIG [COMPONENTS store group ddp ...]); tests/package is the outside project that proves it.
include(CMakePackageConfigHelpers)
