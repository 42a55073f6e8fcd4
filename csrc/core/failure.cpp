#include "failure.hpp"

namespace te_compile {
namespace {
thread_local std::string last_error;
}

void set_last_error(const char* what) noexcept {
  try {
    last_error = what;
  } catch (...) {
    last_error.clear();  // out of memory while reporting: an empty text is all there is to say
  }
}

}  // namespace te_compile

extern "C" const char* te_last_error(void) { return te_compile::last_error.c_str(); }
