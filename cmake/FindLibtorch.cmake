# libtorch as two namespaced targets, libtorch_cpu and libc10, and nothing else: libtorch's own
# package file asks for a CUDA toolkit and rewrites the project's flags.
#
# Looked for, in this order; the first two as CMake variables or in the environment:
#   LIBTORCH_ROOT            a folder with include/ and lib/ (an unpacked wheel or libtorch zip)
#   Torch_DIR                <root>/share/cmake/Torch, as users of find_package(Torch) set it
#   CMAKE_PREFIX_PATH        any prefix with lib/libtorch_cpu.so
#   the per-user cache that tools/fetch_libtorch.py fills: LIBTORCH_VERSION, or the version that is asked for exactly, or
#   the default
#
# Gives: Libtorch::cpu, Libtorch_VERSION, Libtorch_ROOT_DIR, and where libtorch is built for CUDA Libtorch::c10_cuda (streams and
# the allocator of CUDA memory; loads without a GPU).
set(LIBTORCH_DEFAULT_VERSION 2.15.0)  # tools/torch_version.sh reads this line
set(LIBTORCH_NEWEST_TESTED 2.15)
if(LIBTORCH_VERSION)
  set(_wanted "${LIBTORCH_VERSION}")
elseif(Libtorch_FIND_VERSION_EXACT)
  set(_wanted "${Libtorch_FIND_VERSION}")
else()
  set(_wanted "${LIBTORCH_DEFAULT_VERSION}")
endif()

set(_cache "$ENV{XDG_CACHE_HOME}")
if(NOT _cache)
  set(_cache "$ENV{HOME}/.cache")
endif()
set(_cached "${_cache}/lockstep/libtorch-${_wanted}")
set(_given "")
foreach(_root "${LIBTORCH_ROOT}" "$ENV{LIBTORCH_ROOT}")
  if(_root)
    list(APPEND _given "${_root}")
  endif()
endforeach()
foreach(_dir "${Torch_DIR}" "$ENV{Torch_DIR}")
  if(_dir)
    cmake_path(SET _root NORMALIZE "${_dir}/../../..")
    list(APPEND _given "${_root}")
  endif()
endforeach()
cmake_path(IS_PREFIX _cache "${Libtorch_ROOT_DIR}" _was_cached)
if(_given OR (_was_cached AND NOT Libtorch_ROOT_DIR STREQUAL _cached))
  # A folder that is given, or another version, wins over what an earlier configure run found.
  unset(Libtorch_ROOT_DIR CACHE)
endif()
find_path(Libtorch_ROOT_DIR NAMES lib/libtorch_cpu.so
  HINTS ${_given} PATHS "${_cached}" DOC "Folder with libtorch's include/ and lib/")

if(Libtorch_ROOT_DIR)
  set(_version_header "${Libtorch_ROOT_DIR}/include/torch/headeronly/version.h")
  if(NOT EXISTS "${_version_header}")
    set(_version_header "${Libtorch_ROOT_DIR}/include/torch/csrc/api/include/torch/version.h")  # before 2.9
  endif()
  if(EXISTS "${_version_header}")
    set(_parts "")
    foreach(_part MAJOR MINOR PATCH)
      file(STRINGS "${_version_header}" _line REGEX "#define TORCH_VERSION_${_part} ")
      string(REGEX MATCH "[0-9]+" _number "${_line}")
      list(APPEND _parts "${_number}")
    endforeach()
    list(JOIN _parts "." Libtorch_VERSION)
  endif()
endif()
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(Libtorch REQUIRED_VARS Libtorch_ROOT_DIR VERSION_VAR Libtorch_VERSION
  REASON_FAILURE_MESSAGE "run tools/fetch_libtorch.py ${_wanted} of lockstep, or give -DLIBTORCH_ROOT=<folder with include/ and lib/>")

if(Libtorch_FOUND AND NOT TARGET Libtorch::cpu)
  string(REGEX MATCH "^[0-9]+\\.[0-9]+" _release "${Libtorch_VERSION}")
  if(_release VERSION_GREATER LIBTORCH_NEWEST_TESTED)
    message(WARNING "libtorch ${Libtorch_VERSION} is newer than ${LIBTORCH_NEWEST_TESTED}, the newest that lockstep is tested with")
  endif()
  add_library(Libtorch::c10 SHARED IMPORTED)
  set_target_properties(Libtorch::c10 PROPERTIES IMPORTED_LOCATION "${Libtorch_ROOT_DIR}/lib/libc10.so")
  add_library(Libtorch::cpu SHARED IMPORTED)
  set_target_properties(Libtorch::cpu PROPERTIES
    IMPORTED_LOCATION "${Libtorch_ROOT_DIR}/lib/libtorch_cpu.so"
    INTERFACE_LINK_LIBRARIES Libtorch::c10
    INTERFACE_INCLUDE_DIRECTORIES "${Libtorch_ROOT_DIR}/include;${Libtorch_ROOT_DIR}/include/torch/csrc/api/include"
    # Operators register themselves when the library loads: a linker that drops "unused" libraries breaks them.
    INTERFACE_LINK_OPTIONS "LINKER:--no-as-needed;LINKER:-rpath,${Libtorch_ROOT_DIR}/lib;LINKER:-rpath-link,${Libtorch_ROOT_DIR}/lib")
  if(EXISTS "${Libtorch_ROOT_DIR}/lib/libc10_cuda.so")
    add_library(Libtorch::c10_cuda SHARED IMPORTED)
    set_target_properties(Libtorch::c10_cuda PROPERTIES
      IMPORTED_LOCATION "${Libtorch_ROOT_DIR}/lib/libc10_cuda.so" INTERFACE_LINK_LIBRARIES Libtorch::cpu)
  endif()
endif()
unset(_cache)
unset(_cached)
unset(_given)
unset(_wanted)
