# cmake -DNM= -DPATCHELF= -DFROM=<libgloo.so> -DTO=<copy> -P rename_symbols.cmake
# Copies a libgloo and moves everything of namespace gloo in its dynamic symbol table to namespace lockstep_gloo.
# Mangled names spell a name as its length and letters, so that 4gloo becomes 13lockstep_gloo.
file(REAL_PATH "${FROM}" from)
execute_process(COMMAND "${NM}" --dynamic --format=posix "${from}" OUTPUT_VARIABLE symbols COMMAND_ERROR_IS_FATAL ANY)
string(REGEX MATCHALL "[^\n]+" lines "${symbols}")
set(map "")
foreach(line IN LISTS lines)
  string(REGEX MATCH "^[^ @]+" name "${line}")
  # Not a digit before: 14gloo_something would be another name.
  string(REGEX REPLACE "([^0-9])4gloo" "\\113lockstep_gloo" renamed "${name}")
  if(NOT renamed STREQUAL name)
    list(APPEND map "${name} ${renamed}")
  endif()
endforeach()
list(REMOVE_DUPLICATES map)
list(LENGTH map count)
if(count EQUAL 0)
  message(FATAL_ERROR "${FROM} has no symbols of namespace gloo")
endif()
list(JOIN map "\n" text)
file(WRITE "${TO}.map" "${text}\n")
get_filename_component(name "${TO}" NAME)
file(COPY_FILE "${from}" "${TO}.new")
execute_process(COMMAND "${PATCHELF}" --set-soname "${name}" --rename-dynamic-symbols "${TO}.map" "${TO}.new"
  COMMAND_ERROR_IS_FATAL ANY)
file(RENAME "${TO}.new" "${TO}")
file(REMOVE "${TO}.map")
