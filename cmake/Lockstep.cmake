# The three kinds of target. Every dependency is a declared line.

# Flags every target of ours gets; nothing here reaches a user's own targets.
function(lockstep_flags target)
  target_compile_features(${target} PUBLIC cxx_std_20)
  set_target_properties(${target} PROPERTIES
    CXX_EXTENSIONS OFF CXX_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON
    POSITION_INDEPENDENT_CODE ON)
  target_compile_options(${target} PRIVATE
    -Wall -Wextra -Wpedantic -Wshadow
    $<$<COMPILE_LANGUAGE:CXX>:-Wnon-virtual-dtor -Woverloaded-virtual>
    # A designated initialiser that leaves members to their defaults is our normal way to call.
    -Wno-missing-field-initializers
    # At -O3 g++ 12 takes "text" + std::string for an overlapping copy (GCC bug 105651).
    $<$<AND:$<CONFIG:Release>,$<CXX_COMPILER_ID:GNU>,$<VERSION_LESS:$<CXX_COMPILER_VERSION>,13>>:-Wno-restrict>
    $<$<BOOL:${LOCKSTEP_WERROR}>:-Werror>)
  # Messages and symbols name files as in the repository, wherever it was cloned to; ccache hands the compiler relative paths.
  cmake_path(RELATIVE_PATH PROJECT_SOURCE_DIR BASE_DIRECTORY "${CMAKE_BINARY_DIR}" OUTPUT_VARIABLE relative)
  target_compile_options(${target} PRIVATE -ffile-prefix-map=${PROJECT_SOURCE_DIR}/= -ffile-prefix-map=${relative}/=)
  if(LOCKSTEP_SANITIZE)
    target_compile_options(${target} PRIVATE -fsanitize=${LOCKSTEP_SANITIZE} -fno-omit-frame-pointer -g1)
    target_link_options(${target} PUBLIC -fsanitize=${LOCKSTEP_SANITIZE})
  endif()
  if(LOCKSTEP_LINKER_FLAG)
    target_link_options(${target} PRIVATE ${LOCKSTEP_LINKER_FLAG})
  endif()
  if(CMAKE_UNITY_BUILD)
    # When the whole CMakeLists.txt has been read: by then the properties of the sources are known.
    cmake_language(EVAL CODE "cmake_language(DEFER CALL lockstep_unity [[${target}]])")
  endif()
endfunction()

# Batches the C++ sources of a target as CMake's own unity build would. CMake writes absolute paths into the batches, so that
# a compiler cache never recognises them in another clone; these name sources as the repository does.
function(lockstep_unity target)
  set_target_properties(${target} PROPERTIES UNITY_BUILD OFF)
  set(size 8)
  if(DEFINED CMAKE_UNITY_BUILD_BATCH_SIZE)
    set(size ${CMAKE_UNITY_BUILD_BATCH_SIZE})
  endif()
  if(size EQUAL 0)
    set(size -1)  # all
  endif()
  get_target_property(sources ${target} SOURCES)
  set(together "")
  set(alone "")
  foreach(source IN LISTS sources)
    set(own "")
    foreach(property SKIP_UNITY_BUILD_INCLUSION COMPILE_DEFINITIONS COMPILE_OPTIONS COMPILE_FLAGS INCLUDE_DIRECTORIES)
      get_source_file_property(value "${source}" ${property})
      if(value)
        string(APPEND own "${value}")
      endif()
    endforeach()
    if(source MATCHES "\\.cpp$" AND own STREQUAL "")
      list(APPEND together "${source}")
    else()
      list(APPEND alone "${source}")
    endif()
  endforeach()
  list(LENGTH together count)
  if(count LESS 2)
    return()
  endif()
  set(number 0)
  while(together)
    list(SUBLIST together 0 ${size} batch)
    list(REMOVE_ITEM together ${batch})
    set(text "")
    foreach(source IN LISTS batch)
      cmake_path(ABSOLUTE_PATH source)
      cmake_path(RELATIVE_PATH source BASE_DIRECTORY "${PROJECT_SOURCE_DIR}")
      string(APPEND text "#include \"${source}\"\n")
    endforeach()
    set(file "${CMAKE_CURRENT_BINARY_DIR}/unity/${target}_${number}.cpp")
    file(CONFIGURE OUTPUT "${file}" CONTENT "${text}" @ONLY)  # leaves a file alone whose content stays
    list(APPEND alone "${file}")
    math(EXPR number "${number} + 1")
  endwhile()
  set_target_properties(${target} PROPERTIES SOURCES "${alone}")
endfunction()

# Everything `cmake --install` copies: tools/install.sh builds this and no more.
add_custom_target(installed)

# lockstep_library(<folder> SOURCES ... HEADERS ... DEPENDS <folders> [LINK <external>] [LINK_PUBLIC <external>])
# One target per folder, lockstep_<folder>, alias lockstep::<folder>, and a component of the installed package of that
# name. DEPENDS are the folder's arrows: tools/check_layers.py reads them here. Headers under internal/ are not installed.
# No SOURCES: headers only.
function(lockstep_library folder)
  cmake_parse_arguments(ARG "" "" "SOURCES;HEADERS;DEPENDS;LINK;LINK_PUBLIC" ${ARGN})
  set(target lockstep_${folder})
  if(ARG_SOURCES)
    set(reach PUBLIC)
    if(BUILD_SHARED_LIBS)
      # One object per folder, for programs with several libraries that use lockstep, which then share one world. Compiled
      # with everything visible, since type information and static variables must be one per process; the linker then keeps
      # inside what is not of namespace lockstep (tests/exports reads the result). Nobody may replace a function of ours.
      add_library(${target} SHARED ${ARG_SOURCES} ${ARG_HEADERS})
      lockstep_flags(${target})
      target_compile_options(${target} PRIVATE -fno-semantic-interposition)
      set_target_properties(${target} PROPERTIES CXX_VISIBILITY_PRESET default VISIBILITY_INLINES_HIDDEN OFF
        VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR}
        INSTALL_RPATH "\$ORIGIN" INSTALL_RPATH_USE_LINK_PATH ON
        LINK_DEPENDS "${PROJECT_SOURCE_DIR}/cmake/exports.map")
      target_link_options(${target} PRIVATE LINKER:--no-undefined
        "LINKER:--version-script=${PROJECT_SOURCE_DIR}/cmake/exports.map")
    else()
      add_library(${target} STATIC ${ARG_SOURCES} ${ARG_HEADERS})
      lockstep_flags(${target})
    endif()
    set_target_properties(${target} PROPERTIES LINKER_LANGUAGE CXX)
    target_link_libraries(${target} PRIVATE ${ARG_LINK})
  else()
    set(reach INTERFACE)
    add_library(${target} INTERFACE)
  endif()
  add_library(lockstep::${folder} ALIAS ${target})
  set_target_properties(${target} PROPERTIES EXPORT_NAME ${folder})
  target_include_directories(${target} ${reach}
    $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}> $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
  foreach(dep ${ARG_DEPENDS})
    target_link_libraries(${target} ${reach} lockstep::${dep})
  endforeach()
  target_link_libraries(${target} ${reach} ${ARG_LINK_PUBLIC} Threads::Threads)

  install(TARGETS ${target} EXPORT lockstep-${LOCKSTEP_BAND}-targets
    ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
  add_dependencies(installed ${target})
  set_property(GLOBAL APPEND PROPERTY LOCKSTEP_COMPONENTS_${LOCKSTEP_BAND} ${folder})
  foreach(header ${ARG_HEADERS})
    cmake_path(RELATIVE_PATH CMAKE_CURRENT_SOURCE_DIR BASE_DIRECTORY "${PROJECT_SOURCE_DIR}" OUTPUT_VARIABLE place)
    cmake_path(GET header PARENT_PATH sub)
    if(NOT sub MATCHES "^internal")
      install(FILES ${header} DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/${place}/${sub})
    endif()
  endforeach()
endfunction()

# lockstep_test(<name> SOURCES ... DEPENDS <folders> [LINK ...] [BAND comm|tensor] [TIMEOUT s] [COST s] [NOT_UNDER <sanitizer>]
#               [OPTIMISED] [FAKE_CUDA|GPU] [PROPERTIES k v ...])
# One GoogleTest program, one ctest case, labelled with its band. LOCKSTEP_TEST_SUFFIX (presets asan and tsan) tells the
# cases of several build trees apart when one ctest runs them all.
#   COST       about how many seconds it takes in the dev tree, of a slow one: the slowest start first (lockstep_cost)
#   NOT_UNDER  a sanitizer that cannot find anything here; say why beside it
#   OPTIMISED  fills and compares megabytes, which unoptimised code under a sanitizer takes longer for than a compiler takes
#              to optimise it
#   FAKE_CUDA  its libcuda.so.1 is tests/fake_cuda, on a machine with a GPU too
#   GPU        needs a real one, and is skipped where there is none; labelled gpu, listed in gpu_tests.txt of the build folder.
#              Not under sanitizers: the driver wants addresses that they keep for themselves
function(lockstep_test name)
  if(NOT LOCKSTEP_TESTS)
    return()
  endif()
  cmake_parse_arguments(ARG "OPTIMISED;FAKE_CUDA;GPU" "BAND;TIMEOUT;COST;NOT_UNDER" "SOURCES;DEPENDS;LINK;PROPERTIES" ${ARGN})
  if((ARG_NOT_UNDER AND ARG_NOT_UNDER IN_LIST LOCKSTEP_SANITIZERS) OR (ARG_GPU AND LOCKSTEP_SANITIZE))
    return()
  endif()
  if(NOT ARG_BAND)
    set(ARG_BAND comm)
  endif()
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 120)
  endif()
  add_executable(${name} ${ARG_SOURCES})
  lockstep_flags(${name})
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR})
  foreach(dep ${ARG_DEPENDS})
    target_link_libraries(${name} PRIVATE lockstep::${dep})
  endforeach()
  target_link_libraries(${name} PRIVATE ${ARG_LINK} GTest::gtest GTest::gtest_main Threads::Threads)
  if(ARG_FAKE_CUDA)
    # Needed by the program, even where it calls nothing of it: what is loaded already is what dlopen("libcuda.so.1") gives.
    target_link_libraries(${name} PRIVATE -Wl,--push-state,--no-as-needed fake_cuda -Wl,--pop-state)
  endif()
  if(ARG_GPU)
    target_link_libraries(${name} PRIVATE gpu_test_main)
    list(APPEND ARG_PROPERTIES SKIP_RETURN_CODE 77)
    list(APPEND ARG_BAND gpu)
    add_dependencies(gpu_programs ${name})
    set_property(GLOBAL APPEND PROPERTY LOCKSTEP_GPU_TESTS 
      "test $<PATH:RELATIVE_PATH,$<TARGET_FILE:${name}>,${PROJECT_BINARY_DIR}> ${ARG_TIMEOUT}")
  endif()
  # Nothing in a test is timed. Each step down halves the time to compile: -O1 by itself, -O0 where every access is
  # instrumented. The library under test keeps its own level.
  if(LOCKSTEP_SANITIZE AND NOT ARG_OPTIMISED)
    target_compile_options(${name} PRIVATE -O0)
  else()
    target_compile_options(${name} PRIVATE -O1)
  endif()
  # One ctest case per program: a program of many cases starts once (libtorch alone takes 0.3 s).
  add_test(NAME ${name}${LOCKSTEP_TEST_SUFFIX} COMMAND ${name} --gtest_brief=1)
  # The lock: a program's report (tools/test.sh) is named after it, so that two of one name do not run at a time.
  set_tests_properties(${name}${LOCKSTEP_TEST_SUFFIX} PROPERTIES
    LABELS "${ARG_BAND}" TIMEOUT ${ARG_TIMEOUT} RESOURCE_LOCK ${name} ${ARG_PROPERTIES})
  if(ARG_COST)
    lockstep_cost(${name}${LOCKSTEP_TEST_SUFFIX} ${ARG_COST})
  endif()
endfunction()

# Everything that goes to a machine with a GPU: tests, benchmarks and plug-ins (tools/pack_gpu.sh).
add_custom_target(gpu_programs)

# lockstep_gpu_program(<target> [<argument>...]): a benchmark for tools/gpu_check.sh, which runs it from the build folder with
# these arguments and shows what it prints.
function(lockstep_gpu_program target)
  list(JOIN ARGN " " arguments)
  set_property(GLOBAL APPEND PROPERTY LOCKSTEP_GPU_TESTS
    "benchmark $<PATH:RELATIVE_PATH,$<TARGET_FILE:${target}>,${PROJECT_BINARY_DIR}> 120 ${arguments}")
  add_dependencies(gpu_programs ${target})
endfunction()

# lockstep_gpu_ranks(<target> <n>...): a test each of whose ranks is a process of `lockstep run`, for tools/gpu_check.sh, which
# runs it with each of these numbers of ranks.
function(lockstep_gpu_ranks target)
  if(TARGET ${target} AND NOT LOCKSTEP_SANITIZE)
    list(JOIN ARGN " " numbers)
    set_property(GLOBAL APPEND PROPERTY LOCKSTEP_GPU_TESTS
      "tool $<PATH:RELATIVE_PATH,$<TARGET_FILE:lockstep>,${PROJECT_BINARY_DIR}> 0"
      "ranks $<PATH:RELATIVE_PATH,$<TARGET_FILE:${target}>,${PROJECT_BINARY_DIR}> 120 ${numbers}")
    add_dependencies(gpu_programs lockstep ${target})
  endif()
endfunction()

# lockstep_gpu_sanitize(<target> [<argument>...]): a test whose kernels tools/gpu_check.sh runs under compute-sanitizer, with
# these arguments: a filter, since everything takes many times as long.
function(lockstep_gpu_sanitize target)
  if(TARGET ${target})
    list(JOIN ARGN " " arguments)
    set_property(GLOBAL APPEND PROPERTY LOCKSTEP_GPU_TESTS
      "sanitize $<PATH:RELATIVE_PATH,$<TARGET_FILE:${target}>,${PROJECT_BINARY_DIR}> 120 ${arguments}")
  endif()
endfunction()

# What a machine with a GPU runs (tools/gpu_check.sh), one line each: kind, program (from the build
# folder), seconds, arguments. Called last.
function(lockstep_write_gpu_tests)
  get_property(lines GLOBAL PROPERTY LOCKSTEP_GPU_TESTS)
  list(JOIN lines "\n" text)
  file(GENERATE OUTPUT "${PROJECT_BINARY_DIR}/gpu_tests.txt" CONTENT "${text}\n")
endfunction()

# lockstep_test_path(<target> <macro> <path>): defines the macro as the path from the program's folder, for
# path_testing::from_program.
function(lockstep_test_path target macro path)
  if(TARGET ${target})
    target_compile_definitions(${target} PRIVATE ${macro}="$<PATH:RELATIVE_PATH,${path},$<TARGET_FILE_DIR:${target}>>")
  endif()
endfunction()

# lockstep_cost(<test> <seconds>): ctest starts the most expensive tests first, so that none is alone at the end. By itself it
# knows what a test costs only when it has run before in the same folder.
function(lockstep_cost test seconds)
  if("thread" IN_LIST LOCKSTEP_SANITIZERS)
    math(EXPR seconds "${seconds} * 3")
  elseif(LOCKSTEP_SANITIZE)
    math(EXPR seconds "${seconds} * 2")
  endif()
  set_tests_properties(${test} PROPERTIES COST ${seconds})
endfunction()

# lockstep_program(<name> [INSTALL] SOURCES ... DEPENDS <folders> [LINK ...])
function(lockstep_program name)
  cmake_parse_arguments(ARG "INSTALL" "" "SOURCES;DEPENDS;LINK" ${ARGN})
  add_executable(${name} ${ARG_SOURCES})
  lockstep_flags(${name})
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR})
  foreach(dep ${ARG_DEPENDS})
    target_link_libraries(${name} PRIVATE lockstep::${dep})
  endforeach()
  target_link_libraries(${name} PRIVATE ${ARG_LINK} Threads::Threads)
  if(LOCKSTEP_SANITIZE AND NOT LOCKSTEP_FUZZ)
    target_compile_options(${name} PRIVATE -O0)  # a third of the time to compile; programs do little themselves
  endif()
  if(ARG_INSTALL)
    if(BUILD_SHARED_LIBS)
      set_target_properties(${name} PROPERTIES
        INSTALL_RPATH "\$ORIGIN/../${CMAKE_INSTALL_LIBDIR}" INSTALL_RPATH_USE_LINK_PATH ON)
    endif()
    install(TARGETS ${name} RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
    add_dependencies(installed ${name})
  endif()
endfunction()

# lockstep_plugin(<engine> SOURCES ... [DEPENDS <folders>] [LINK ...])
# An engine: lockstep_<engine>.so, in the folder where lockstep looks for plug-ins. DEPENDS are folders of the comm band that
# are compiled into it, hidden: it exports one symbol (docs/design.md, "Engines").
function(lockstep_plugin engine)
  cmake_parse_arguments(ARG "" "" "SOURCES;DEPENDS;LINK" ${ARGN})
  set(target lockstep_${engine})
  add_library(${target} MODULE ${ARG_SOURCES})
  lockstep_flags(${target})
  target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR})
  list(TRANSFORM ARG_DEPENDS PREPEND lockstep::)
  target_link_libraries(${target} PRIVATE ${ARG_DEPENDS} ${ARG_LINK} Threads::Threads)
  # What static libraries define stays inside, also where their headers ask for default visibility.
  target_link_options(${target} PRIVATE LINKER:--exclude-libs,ALL)
  set_target_properties(${target} PROPERTIES PREFIX "" LIBRARY_OUTPUT_DIRECTORY "${LOCKSTEP_ENGINE_DIR}"
    BUILD_RPATH "\$ORIGIN" INSTALL_RPATH "\$ORIGIN:\$ORIGIN/../..")
  add_dependencies(installed ${target})
  add_dependencies(gpu_programs ${target})
  install(TARGETS ${target} LIBRARY DESTINATION "${LOCKSTEP_INSTALL_ENGINE_DIR}")
endfunction()

# lockstep_compiled(<name> [LONG] SOURCES ... [DEPENDS <folders>] [LINK ...])
# The objects of a program that only another preset links, compiled so that it keeps up with the headers: not optimised, without
# symbols, and cached like all objects. LONG: by the target compiled_long only, for sources that take longer than their risk is worth.
function(lockstep_compiled name)
  cmake_parse_arguments(ARG "LONG" "" "SOURCES;DEPENDS;LINK" ${ARGN})
  add_library(${name} OBJECT ${ARG_SOURCES})
  lockstep_flags(${name})
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR})
  list(TRANSFORM ARG_DEPENDS PREPEND lockstep::)
  target_link_libraries(${name} PRIVATE ${ARG_DEPENDS} ${ARG_LINK} Threads::Threads)
  target_compile_options(${name} PRIVATE -O0 -g0)
  # Stated either way: a folder that is excluded from `all` excludes its targets otherwise.
  set_target_properties(${name} PROPERTIES EXCLUDE_FROM_ALL ${ARG_LONG})
  if(ARG_LONG)
    if(NOT TARGET compiled_long)
      add_custom_target(compiled_long)
    endif()
    add_dependencies(compiled_long ${name})
  endif()
endfunction()
