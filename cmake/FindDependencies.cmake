# Everything from Debian's packages, as imported targets of one form. Shared by the build and by the
# installed package (lockstepConfig.cmake), so both look in the same places.
find_package(Threads REQUIRED)
find_package(OpenSSL 3 REQUIRED)
find_package(fmt REQUIRED)
find_package(spdlog REQUIRED)
find_package(PkgConfig REQUIRED)
pkg_check_modules(libuv REQUIRED IMPORTED_TARGET libuv)
pkg_check_modules(hwy REQUIRED IMPORTED_TARGET libhwy)
# Components: what only our own build needs.
if("programs" IN_LIST Dependencies_FIND_COMPONENTS)
  find_package(CLI11 REQUIRED)
  find_package(nlohmann_json REQUIRED)
endif()
if("tests" IN_LIST Dependencies_FIND_COMPONENTS AND LOCKSTEP_TESTS)
  find_package(GTest REQUIRED)
endif()
set(Dependencies_FOUND TRUE)
