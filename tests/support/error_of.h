// The text of the error that a call throws.
#pragma once

#include <lockstep/error.h>

#include <functional>
#include <string>

namespace lockstep::test {

inline std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

}  // namespace lockstep::test
