# One target a folder: stoker_library(NAME [APART] SOURCES ... DEPS ... TESTS ...)
# makes stoker_NAME (alias stoker::NAME) and, where tests are built, the gtest program stoker_NAME_test.
# APART: its sources are never compiled as one (below).
set(STOKER_WARNINGS -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wno-sign-conversion
  $<$<CXX_COMPILER_ID:GNU>:-Wno-restrict> # g++ 12 reports std::string concatenation falsely
  -Werror)
# Results must not depend on the compiler's mood: no contraction of a*b+c unless written as fma.
set(STOKER_FLAGS -ffp-contract=off)

if(STOKER_SANITIZE)
  # g++ 12 tells of values that cannot be read, once it instruments a std::variant.
  list(APPEND STOKER_WARNINGS $<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized>)
  add_compile_options(-fsanitize=${STOKER_SANITIZE} -fno-omit-frame-pointer)
  add_link_options(-fsanitize=${STOKER_SANITIZE})
  # Such a build takes as long as its tests run. So several sources are compiled as one
  # (stoker_together), and the tests' own, which need not run fast, without optimization.
  list(APPEND STOKER_WARNINGS $<$<CXX_COMPILER_ID:GNU>:-Wno-subobject-linkage> -Wno-shadow) # of neighbours
  set(STOKER_TEST_FLAGS -O0)
  if(STOKER_SANITIZE MATCHES "undefined")
    add_compile_options(-fno-sanitize-recover=all)
  endif()
endif()

if(STOKER_FUZZ)
  # Whatever is built here tells the fuzzers which branches an input takes.
  add_compile_options(-fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=all)
  add_link_options(-fsanitize=address,undefined)
endif()

# Under sanitizers several sources of the target are compiled as one.
function(stoker_together target)
  if(STOKER_SANITIZE)
    set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 6)
  endif()
endfunction()

function(stoker_library name)
  cmake_parse_arguments(A "APART" "" "SOURCES;DEPS;TESTS" ${ARGN})
  if(A_SOURCES)
    add_library(stoker_${name} STATIC ${A_SOURCES})
    set(scope PUBLIC)
  else()
    add_library(stoker_${name} INTERFACE)
    set(scope INTERFACE)
  endif()
  add_library(stoker::${name} ALIAS stoker_${name})
  target_include_directories(stoker_${name} ${scope} ${PROJECT_SOURCE_DIR}/src)
  target_link_libraries(stoker_${name} ${scope} ${A_DEPS} Threads::Threads)
  if(A_SOURCES)
    target_compile_options(stoker_${name} PRIVATE ${STOKER_WARNINGS} ${STOKER_FLAGS})
    if(NOT A_APART)
      stoker_together(stoker_${name})
    endif()
  endif()
  if(STOKER_TESTS AND A_TESTS)
    stoker_test(${name}_test SOURCES ${A_TESTS} DEPS stoker::${name})
    if(A_APART)
      set_target_properties(stoker_${name}_test PROPERTIES UNITY_BUILD OFF)
    endif()
  endif()
endfunction()

# stoker_test(NAME SOURCES ... DEPS ...): a gtest program registered with ctest, one ctest entry a program.
function(stoker_test name)
  cmake_parse_arguments(A "" "" "SOURCES;DEPS" ${ARGN})
  add_executable(stoker_${name} ${A_SOURCES})
  target_compile_options(stoker_${name} PRIVATE ${STOKER_WARNINGS} ${STOKER_FLAGS} ${STOKER_TEST_FLAGS})
  stoker_together(stoker_${name})
  target_link_libraries(stoker_${name} PRIVATE ${A_DEPS} GTest::gtest GTest::gmock GTest::gtest_main)
  add_test(NAME ${name} COMMAND stoker_${name})
endfunction()
