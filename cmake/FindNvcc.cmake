# The CUDA compiler, and a function that compiles kernels with it. There is no CUDA language in this project: kernels are
# compiled to a fatbin, which is embedded in the plug-in and loaded through the driver at run time.
#
# Looked for, in this order: LOCKSTEP_NVCC, PATH, CUDA_HOME, /usr/local/cuda, the per-user cache that tools/fetch_cuda.py fills.
#
# Gives: Nvcc_FOUND, LOCKSTEP_NVCC, Nvcc_VERSION, and
#
#   lockstep_fatbin(<target> <symbol> <kernels.cu> [HEADERS ...] [OPTIONS ...])
#
# which compiles the file for sm_80 and sm_90 and to PTX for everything from Turing on, and links it into the target as
#
#   extern "C" const unsigned char <symbol>[];   // for cuModuleLoadData
#
# HEADERS: what the file includes of this project. OPTIONS: for nvcc.
set(_cache "$ENV{XDG_CACHE_HOME}")
if(NOT _cache)
  set(_cache "$ENV{HOME}/.cache")
endif()
file(STRINGS "${PROJECT_SOURCE_DIR}/tools/cuda.txt" _pin REGEX "^nvidia-cuda-nvcc==")
string(REGEX MATCH "[0-9.]+" _wanted "${_pin}")
find_program(LOCKSTEP_NVCC nvcc HINTS "$ENV{CUDA_HOME}/bin" PATHS /usr/local/cuda/bin "${_cache}/lockstep/cuda-${_wanted}/bin"
  DOC "The CUDA compiler")
if(LOCKSTEP_NVCC AND NOT EXISTS "${LOCKSTEP_NVCC}")
  unset(LOCKSTEP_NVCC CACHE)  # a toolkit that has gone since
endif()
if(LOCKSTEP_NVCC)
  execute_process(COMMAND "${LOCKSTEP_NVCC}" --version OUTPUT_VARIABLE _text ERROR_QUIET)
  string(REGEX MATCH "release [0-9.]+" Nvcc_VERSION "${_text}")
  string(REPLACE "release " "" Nvcc_VERSION "${Nvcc_VERSION}")
endif()
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(Nvcc REQUIRED_VARS LOCKSTEP_NVCC Nvcc_VERSION VERSION_VAR Nvcc_VERSION
  REASON_FAILURE_MESSAGE "tools/bootstrap.sh build, or a CUDA toolkit in CUDA_HOME")

function(lockstep_fatbin target symbol source)
  cmake_parse_arguments(ARG "" "" "HEADERS;OPTIONS" ${ARGN})
  cmake_path(ABSOLUTE_PATH source)
  list(TRANSFORM ARG_HEADERS PREPEND "${PROJECT_SOURCE_DIR}/")
  set(image "${CMAKE_CURRENT_BINARY_DIR}/${symbol}.fatbin")
  if(LOCKSTEP_SANITIZE)
    # Not for a GPU (lockstep_test), and the fake driver looks no further than this.
    file(CONFIGURE OUTPUT "${image}" CONTENT "// a sanitizer's tree has no kernels")
  else()
    # -fmad=false: a product and a sum are rounded separately, as on the host, so that engines agree bit by bit.
    add_custom_command(OUTPUT "${image}"
      COMMAND "${LOCKSTEP_NVCC}" -std=c++17 -O3 -fmad=false "-I${PROJECT_SOURCE_DIR}" -ccbin "${CMAKE_CXX_COMPILER}"
              -Wno-deprecated-gpu-targets ${ARG_OPTIONS} --fatbin -gencode arch=compute_75,code=compute_75
              -gencode arch=compute_80,code=sm_80 -gencode arch=compute_90,code=sm_90 -o "${image}" "${source}"
      DEPENDS "${source}" ${ARG_HEADERS} COMMENT "Compiling kernels: ${symbol}" VERBATIM)
  endif()
  # The assembler copies the file into the object; it looks for it where headers are. ccache knows not to cache that.
  set(embedding "${CMAKE_CURRENT_BINARY_DIR}/${symbol}.cpp")
  file(CONFIGURE OUTPUT "${embedding}" @ONLY CONTENT [[
asm(".pushsection .rodata\n"
    ".global @symbol@\n"
    ".hidden @symbol@\n"
    ".balign 64\n"
    "@symbol@:\n"
    ".incbin \"@symbol@.fatbin\"\n"
    ".balign 8\n"
    ".popsection\n");
]])
  set_source_files_properties("${embedding}" PROPERTIES OBJECT_DEPENDS "${image}"
    INCLUDE_DIRECTORIES "${CMAKE_CURRENT_BINARY_DIR}" SKIP_UNITY_BUILD_INCLUSION ON)
  target_sources(${target} PRIVATE "${embedding}")
endfunction()
