# Writes LIST, which adds a test for each suite of the GoogleTest program PROGRAM.
execute_process(COMMAND ${PROGRAM} --gtest_list_tests OUTPUT_VARIABLE output RESULT_VARIABLE code)
if(NOT code EQUAL 0)
  message(FATAL_ERROR "${PROGRAM} --gtest_list_tests ended with ${code}")
endif()
string(REGEX MATCHALL "(^|\n)[A-Za-z0-9_/]+\\." suites "${output}")
set(lines "")
foreach(suite ${suites})
  string(REGEX REPLACE "[\n.]" "" suite "${suite}")
  string(APPEND lines "add_test([==[${LABEL}.${suite}]==] \"${PROGRAM}\" [==[--gtest_filter=${suite}.*]==])\n"
         "set_tests_properties([==[${LABEL}.${suite}]==] PROPERTIES ${PROPERTIES})\n")
endforeach()
file(WRITE ${LIST} "${lines}")
