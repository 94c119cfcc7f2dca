# cmake -DBUILD= -DPROJECT= -DSCRATCH= -DGENERATOR= -DCXX= -DLAUNCHER= -DLIBTORCH_ROOT= [-DREADME=] -P run.cmake
file(REMOVE_RECURSE "${SCRATCH}")

function(step)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE code OUTPUT_VARIABLE text ERROR_VARIABLE text)
  if(NOT code EQUAL 0)
    list(JOIN ARGN " " line)
    message(FATAL_ERROR "failed (${code}): ${line}\n${text}")
  endif()
endfunction()

step("${CMAKE_COMMAND}" --install "${BUILD}" --prefix "${SCRATCH}/prefix")
# Moved, so that a path of the build machine in the package file shows.
file(RENAME "${SCRATCH}/prefix" "${SCRATCH}/moved")
step("${CMAKE_COMMAND}" -S "${PROJECT}" -B "${SCRATCH}/build" -G "${GENERATOR}"
  "-DCMAKE_CXX_COMPILER=${CXX}" "-DCMAKE_CXX_COMPILER_LAUNCHER=${LAUNCHER}" "-DCMAKE_BUILD_TYPE=Debug"
  "-Dlockstep_ROOT=${SCRATCH}/moved" "-DLIBTORCH_ROOT=${LIBTORCH_ROOT}" "-DREADME=${README}")
step("${CMAKE_COMMAND}" --build "${SCRATCH}/build")
step("${SCRATCH}/build/program")
if(README)
  step("${SCRATCH}/moved/bin/lockstep" run -n 2 -- "${SCRATCH}/build/program")
endif()
