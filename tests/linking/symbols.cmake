# cmake -DNM= -DPROGRAM= -DWITH=<regex> -DWITHOUT=<regex> -P symbols.cmake
# Fails when a symbol of PROGRAM matches WITHOUT, and when none matches WITH: then nothing could be told.
execute_process(COMMAND "${NM}" "${PROGRAM}" OUTPUT_VARIABLE symbols COMMAND_ERROR_IS_FATAL ANY)
if(NOT symbols MATCHES "${WITH}")
  message(FATAL_ERROR "${PROGRAM} has no symbol like ${WITH}: is it stripped?")
endif()
string(REGEX MATCHALL "[^\n]*(${WITHOUT})[^\n]*" unwanted "${symbols}")
if(unwanted)
  list(LENGTH unwanted n)
  list(SUBLIST unwanted 0 5 first)
  list(JOIN first "\n  " first)
  message(FATAL_ERROR "${PROGRAM} carries ${n} symbols that it must not, among them\n  ${first}")
endif()
