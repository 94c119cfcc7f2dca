# find_package(lockstep CONFIG [COMPONENTS store group ddp ...]); tests/package is the outside project that proves it.
# Two sets of targets, so that the comm band can be used on a machine without libtorch.
include(CMakePackageConfigHelpers)
set(_package "${CMAKE_INSTALL_LIBDIR}/cmake/lockstep")

foreach(_band comm tensor)
  get_property(_components GLOBAL PROPERTY LOCKSTEP_COMPONENTS_${_band})
  set(LOCKSTEP_COMPONENTS_${_band} "${_components}")
  if(_components)
    install(EXPORT lockstep-${_band}-targets NAMESPACE lockstep:: DESTINATION "${_package}")
  endif()
endforeach()

configure_package_config_file(cmake/lockstepConfig.cmake.in "${PROJECT_BINARY_DIR}/lockstepConfig.cmake"
  INSTALL_DESTINATION "${_package}" NO_SET_AND_CHECK_MACRO)
# Before 1.0 a minor version may change the API.
write_basic_package_version_file("${PROJECT_BINARY_DIR}/lockstepConfigVersion.cmake" COMPATIBILITY SameMinorVersion)
install(FILES
  "${PROJECT_BINARY_DIR}/lockstepConfig.cmake" "${PROJECT_BINARY_DIR}/lockstepConfigVersion.cmake"
  cmake/FindDependencies.cmake cmake/FindLibtorch.cmake
  DESTINATION "${_package}")
install(FILES LICENSE README.md DESTINATION "${CMAKE_INSTALL_DOCDIR}")
