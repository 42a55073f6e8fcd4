// How errors travel: inside the library as one exception, across the C interface as a status and a text per thread.
#pragma once

#include <exception>
#include <stdexcept>
#include <string>

#include "te_compile.h"

namespace te_compile {

struct Failure : std::runtime_error {
  Failure(te_status status, const std::string& what) : std::runtime_error(what), status(status) {}
  te_status status;
};

inline void require(bool condition, const char* what) {
  if (!condition) throw Failure(TE_INVALID_ARGUMENT, what);
}

inline void supported_if(bool condition, const char* what) {
  if (!condition) throw Failure(TE_UNSUPPORTED, what);
}

void set_last_error(const char* what) noexcept;

/// Run `body`; turn what it throws into a status.
template <typename Body>
te_status guarded(Body&& body) noexcept {
  try {
    body();
    return TE_OK;
  } catch (const Failure& failure) {
    set_last_error(failure.what());
    return failure.status;
  } catch (const std::exception& failure) {
    set_last_error(failure.what());
    return TE_INVALID_ARGUMENT;
  }
}

}  // namespace te_compile
