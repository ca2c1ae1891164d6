# One target a folder: stoker_library(NAME SOURCES ... DEPS ... TESTS ... TEST_DEPS ...)
# makes stoker_NAME (alias stoker::NAME) and, where tests are built, the gtest program stoker_NAME_test.
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
  # Half of such a build is spent on the tests' own sources, which need not run fast: -O0 halves that.
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

function(stoker_library name)
  cmake_parse_arguments(A "" "" "SOURCES;DEPS;TESTS;TEST_DEPS" ${ARGN})
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
  endif()
  if(STOKER_TESTS AND A_TESTS)
    stoker_test(${name}_test SOURCES ${A_TESTS} DEPS stoker::${name} ${A_TEST_DEPS})
  endif()
endfunction()

# stoker_test(NAME SOURCES ... DEPS ...): a gtest program registered with ctest, one ctest entry a program.
function(stoker_test name)
  cmake_parse_arguments(A "" "" "SOURCES;DEPS" ${ARGN})
  add_executable(stoker_${name} ${A_SOURCES})
  target_compile_options(stoker_${name} PRIVATE ${STOKER_WARNINGS} ${STOKER_FLAGS} ${STOKER_TEST_FLAGS})
  target_link_libraries(stoker_${name} PRIVATE ${A_DEPS} GTest::gtest GTest::gmock GTest::gtest_main)
  add_test(NAME ${name} COMMAND stoker_${name})
endfunction()
