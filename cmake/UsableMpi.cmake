# find_package(MPI) believes what a compiler wrapper prints; of a package that was half removed, or installed without the
# other half, it may name folders that are not there, and every target that links it then breaks the configuration.
# lockstep_usable_mpi(<variable>): TRUE when MPI for C was found and all that it names exists.
function(lockstep_usable_mpi variable)
  set(usable FALSE)
  if(MPI_C_FOUND)
    set(usable TRUE)
    foreach(path IN LISTS MPI_C_INCLUDE_DIRS MPI_C_LIBRARIES)
      if(IS_ABSOLUTE "${path}" AND NOT EXISTS "${path}")
        message(STATUS "MPI is half installed: ${path} is not there")
        set(usable FALSE)
      endif()
    endforeach()
  endif()
  set(${variable} ${usable} PARENT_SCOPE)
endfunction()
