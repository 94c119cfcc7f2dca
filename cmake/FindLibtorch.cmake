# libtorch as two namespaced targets, libtorch_cpu and libc10, and nothing else: libtorch's own
# package file asks for a CUDA toolkit and rewrites the project's flags.
#
# Looked for, in this order:
#   LIBTORCH_ROOT            a folder with include/ and lib/ (an unpacked wheel or libtorch zip)
#   Torch_DIR                <root>/share/cmake/Torch, as users of find_package(Torch) set it
#   CMAKE_PREFIX_PATH        any prefix with lib/libtorch_cpu.so
#   the per-user cache that tools/fetch_libtorch.py fills
#
# Gives: Libtorch::cpu, Libtorch_VERSION, Libtorch_ROOT_DIR.
set(_cache "$ENV{XDG_CACHE_HOME}")
if(NOT _cache)
  set(_cache "$ENV{HOME}/.cache")
endif()
set(_hints "")
if(LIBTORCH_ROOT)
  list(APPEND _hints "${LIBTORCH_ROOT}")
endif()
if(Torch_DIR)
  list(APPEND _hints "${Torch_DIR}/../../..")
endif()
find_path(Libtorch_ROOT_DIR NAMES lib/libtorch_cpu.so
  HINTS ${_hints} PATHS "${_cache}/lockstep/libtorch-2.11.0" DOC "Folder with libtorch's include/ and lib/")
include(FindPackageHandleStandardArgs)
if(Libtorch_ROOT_DIR)
  set(_version_header "${Libtorch_ROOT_DIR}/include/torch/headeronly/version.h")
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
find_package_handle_standard_args(Libtorch REQUIRED_VARS Libtorch_ROOT_DIR VERSION_VAR Libtorch_VERSION
  REASON_FAILURE_MESSAGE "run tools/fetch_libtorch.py, or give -DLIBTORCH_ROOT=<folder with include/ and lib/>")
if(Libtorch_FOUND AND NOT TARGET Libtorch::cpu)
  add_library(Libtorch::c10 SHARED IMPORTED)
  set_target_properties(Libtorch::c10 PROPERTIES IMPORTED_LOCATION "${Libtorch_ROOT_DIR}/lib/libc10.so")
  add_library(Libtorch::cpu SHARED IMPORTED)
  set_target_properties(Libtorch::cpu PROPERTIES
    IMPORTED_LOCATION "${Libtorch_ROOT_DIR}/lib/libtorch_cpu.so"
    INTERFACE_LINK_LIBRARIES Libtorch::c10
    INTERFACE_INCLUDE_DIRECTORIES "${Libtorch_ROOT_DIR}/include;${Libtorch_ROOT_DIR}/include/torch/csrc/api/include"
    # Operators register themselves when the library loads: a linker that drops "unused" libraries breaks them.
    INTERFACE_LINK_OPTIONS "LINKER:--no-as-needed;LINKER:-rpath,${Libtorch_ROOT_DIR}/lib;LINKER:-rpath-link,${Libtorch_ROOT_DIR}/lib")
endif()
unset(_cache)
unset(_hints)
