# cmake -DBUILD= -DPROJECT= -DSCRATCH= -DGENERATOR= -DCXX= -DLAUNCHER= -DLIBTORCH_ROOT= [-DREADME=]
#       [-DSHARED_VERSION=<major.minor>] [-DSHARED_SOURCE=<folder>] [-DTORCH=ON] -P run.cmake
# SHARED_VERSION: what is installed are shared libraries of this version. SHARED_SOURCE: they are built first, from there.
# TORCH: both bands.
file(REMOVE_RECURSE "${SCRATCH}")
# As cmake/Tools.cmake: another clone finds what this one compiled.
get_filename_component(root "${CMAKE_CURRENT_LIST_DIR}/../.." ABSOLUTE)
set(ENV{CCACHE_BASEDIR} "${root}")
set(ENV{CCACHE_NOHASHDIR} 1)

function(step)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE code OUTPUT_VARIABLE text ERROR_VARIABLE text)
  if(NOT code EQUAL 0)
    list(JOIN ARGN " " line)
    message(FATAL_ERROR "failed (${code}): ${line}\n${text}")
  endif()
endfunction()

if(SHARED_SOURCE)
  # Kept between runs. Not optimised: this is about symbols.
  set(BUILD "${BUILD}/shared")
  set(LOCKSTEP_TORCH OFF)
  if(TORCH)
    set(BUILD "${BUILD}_torch")
    set(LOCKSTEP_TORCH ON)
  endif()
  execute_process(COMMAND "${SHARED_SOURCE}/tools/jobs.sh" OUTPUT_VARIABLE jobs OUTPUT_STRIP_TRAILING_WHITESPACE)
  step("${CMAKE_COMMAND}" -S "${SHARED_SOURCE}" -B "${BUILD}" -G "${GENERATOR}" "-DCMAKE_CXX_COMPILER=${CXX}"
    -DCMAKE_BUILD_TYPE=RelWithDebInfo "-DCMAKE_CXX_FLAGS_RELWITHDEBINFO=-O0 -DNDEBUG" -DCMAKE_UNITY_BUILD=ON
    -DBUILD_SHARED_LIBS=ON "-DLOCKSTEP_TORCH=${LOCKSTEP_TORCH}" "-DLIBTORCH_ROOT=${LIBTORCH_ROOT}"
    -DLOCKSTEP_TESTS=OFF -DLOCKSTEP_EXAMPLES=OFF)
  step("${CMAKE_COMMAND}" --build "${BUILD}" --target installed -j "${jobs}")
endif()
step("${CMAKE_COMMAND}" --install "${BUILD}" --prefix "${SCRATCH}/prefix")
# Moved, so that a path of the build machine in the package file shows.
file(RENAME "${SCRATCH}/prefix" "${SCRATCH}/moved")
if(SHARED_VERSION)
  file(GLOB libraries "${SCRATCH}/moved/lib*/liblockstep_*.so" "${SCRATCH}/moved/lib/*/liblockstep_*.so")
  step("${CMAKE_COMMAND}" "-DLIBRARIES=${libraries}" "-DVERSION=${SHARED_VERSION}"
    -P "${CMAKE_CURRENT_LIST_DIR}/exports.cmake")
endif()
step("${CMAKE_COMMAND}" -S "${PROJECT}" -B "${SCRATCH}/build" -G "${GENERATOR}"
  "-DCMAKE_CXX_COMPILER=${CXX}" "-DCMAKE_CXX_COMPILER_LAUNCHER=${LAUNCHER}" "-DCMAKE_BUILD_TYPE=Debug"
  "-Dlockstep_ROOT=${SCRATCH}/moved" "-DLIBTORCH_ROOT=${LIBTORCH_ROOT}" "-DREADME=${README}")
step("${CMAKE_COMMAND}" --build "${SCRATCH}/build")
step("${SCRATCH}/build/program")
step("${SCRATCH}/moved/bin/lockstep" run -n 2 -- "${SCRATCH}/build/program")
